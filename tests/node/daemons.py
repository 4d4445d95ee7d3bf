"""Daemons in separate processes, observed by their terminal output or their status."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from farandole.node.base.control import call
from farandole.node.status.status import NodeStatus
from farandole.protocol.run.invite import Invite, encode_invite

from ..patience import PATIENCE

# Least time of an inner step, so that a test's nodes leave processor time to each other, as on separate machines.
PACE = ("--step-seconds", "0.05")
POLL_INTERVAL = 0.05


class Daemon:
    """A ``farandole join``, or ``relay``, in its own process."""

    def __init__(self, process: trio.Process, home: Path) -> None:
        self.home = home
        self.process = process
        self.said: list[str] = []
        self._text = ""

    @property
    def name(self) -> str:
        """Return the node's name at other nodes: the end of its peer id."""
        return next(line for line in self.said if "this node is" in line)[-8:]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses where it listens."""
        return tuple(line.partition("listening on ")[2] for line in self.said if "listening on" in line)

    def invite(self, run_id: bytes) -> str:
        """Return an invite to a run, with the node's listen addresses."""
        return encode_invite(Invite(run_id, self.addresses))

    async def says(self, *words: str) -> str:
        """Return the next line with all these words; fail if the process ends without printing it."""
        assert self.process.stdout is not None
        with trio.move_on_after(PATIENCE):
            while True:
                line, separator, rest = self._text.partition("\n")
                if separator:
                    self._text = rest
                    self.said.append(line)
                    if all(word in line for word in words):
                        return line
                    continue
                data = await self.process.stdout.receive_some()
                assert data, f"ended without saying {words}: {self.said}"
                self._text += data.decode()
        lines = "\n".join(self.said)
        raise AssertionError(f"did not say {words} within {PATIENCE} s, but:\n{lines}")

    async def ask(self, deed: str, **params: Any) -> Any:
        """Return the answer of the node's control API."""
        return await trio.to_thread.run_sync(lambda: call(self.home, deed, timeout=PATIENCE, **params))

    async def status(self) -> NodeStatus:
        """Return the status that `farandole status` shows."""
        return msgspec.convert(await self.ask("status"), NodeStatus)

    async def until(self, condition: Callable[[NodeStatus], bool]) -> NodeStatus:
        """Return the first status for which the condition is true."""
        with trio.fail_after(PATIENCE):
            while True:
                status = await self.status()
                if condition(status):
                    return status
                await trio.sleep(POLL_INTERVAL)

    async def hears_of_a_round(self, name: str) -> None:
        """Wait for a heartbeat of the node with this name that reports a round: before it, the run seems to begin."""
        with trio.fail_after(PATIENCE):
            while True:
                peers = (await self.ask("status"))["members"]
                if any(row["peer_id"].endswith(name) and row["round"] > 0 for row in peers):
                    return
                await trio.sleep(POLL_INTERVAL)

    async def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; return the exit code."""
        self.process.send_signal(number)
        with trio.fail_after(PATIENCE):
            return await self.process.wait()


def joined(home: Path, *arguments: str) -> AbstractAsyncContextManager[Daemon]:
    """Run a node that trains, until the context ends."""
    return started(home, "join", *PACE, *arguments, "--heartbeat-seconds", "1", "--validate-every", "0")


@asynccontextmanager
async def started(home: Path, *arguments: str) -> AsyncIterator[Daemon]:
    """Run a daemon until the context ends."""
    process = await trio.lowlevel.open_process(
        [
            *(sys.executable, "-m", "farandole.node", *arguments),
            *("--home", str(home), "--listen", "/ip4/127.0.0.1/tcp/0"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield Daemon(process, home)
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()

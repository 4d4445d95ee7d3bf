"""Nodes, loops of users and commands in separate processes, observed by their terminal output or their status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import trio

from farandole.node.base.control import call
from farandole.node.join.invites import own_invite
from farandole.node.own_loop.child_node import run_of_node
from farandole.node.status.status import NodeStatus
from farandole.protocol.run.invite import Invite, encode_invite

from ..next_release import sitecustomize
from ..patience import PATIENCE

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
NOTHING: Mapping[str, str] = {}
# Least time of an inner step, so that a test's nodes leave processor time to each other, as on separate machines.
PACE = ("--step-seconds", "0.05")
POLL_INTERVAL = 0.05


class Node:
    """A node that runs in this data directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.said: list[str] = []

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

    async def own_invite(self, **seats: int) -> str:
        """Return an invite that the node makes, as its run demands."""
        return await trio.to_thread.run_sync(partial(own_invite, self.home, self.addresses, **seats))

    async def ask(self, deed: str, **params: Any) -> Any:
        """Return the answer of the node's control API."""
        return await trio.to_thread.run_sync(lambda: call(self.home, deed, timeout=PATIENCE, **params))

    async def status(self) -> NodeStatus:
        """Return the status that `farandole status` shows."""
        return msgspec.convert(await self.ask("status"), NodeStatus)

    async def until(self, condition: Callable[[NodeStatus], bool]) -> NodeStatus:
        """Return the first status for which the condition is true."""
        with trio.fail_after(PATIENCE):
            while not condition(status := await self.status()):  # noqa: ASYNC110 - another process tells no event
                await trio.sleep(POLL_INTERVAL)
        return status


class Daemon(Node):
    """A ``farandole join`` or ``relay``, or a program with a loop, in its own process."""

    def __init__(self, process: trio.Process, home: Path) -> None:
        super().__init__(home)
        self.process = process
        self._text = ""

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

    async def ends(self) -> int:
        """Wait for the end; return the exit code."""
        with trio.fail_after(PATIENCE):
            return await self.process.wait()

    async def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; return the exit code."""
        self.process.send_signal(number)
        return await self.ends()


def joined(home: Path, *arguments: str, env: Mapping[str, str] = NOTHING) -> AbstractAsyncContextManager[Daemon]:
    """Run a node that trains, until the context ends."""
    return started(home, "join", *PACE, *arguments, "--heartbeat-seconds", "1", "--validate-every", "0", env=env)


def started(home: Path, *arguments: str, env: Mapping[str, str] = NOTHING) -> AbstractAsyncContextManager[Daemon]:
    """Run a daemon until the context ends."""
    command = [sys.executable, "-m", "farandole.node", *arguments, "--home", str(home), "--listen", LOOPBACK]
    return running(home, command, env)


@asynccontextmanager
async def running(home: Path, command: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[Daemon]:
    """Run a command until the context ends."""
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.DEVNULL, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield Daemon(process, home)
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@asynccontextmanager
async def two_that_average(
    folder: Path, run_id: bytes, *data: str, bobs: Mapping[str, str] = NOTHING
) -> AsyncIterator[tuple[Daemon, Daemon]]:
    """Run Alice, who has the manifest, and Bob, who has her invite, and yield them once they have averaged."""
    async with joined(folder / "alice", str(folder / "run.manifest"), *data) as alice:
        await alice.says("listening on")
        async with joined(folder / "bob", alice.invite(run_id), *data, env=bobs) as bob:
            await bob.says("averaged with", alice.name)
            yield alice, bob


def other_source(name: str) -> dict[str, str]:
    """Return the environment of a process whose source has these edits (`tests.next_release.sitecustomize`)."""
    folders = filter(None, (str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(folders), "OTHER_SOURCE": name}


class Answer(NamedTuple):
    """What a command has printed, the errors without line breaks."""

    code: int
    out: str
    err: str


async def farandole(home: Path, *words: str) -> Answer:
    """Run a command with this data directory."""
    env = {"FARANDOLE_HOME": str(home), "FARANDOLE_LISTEN": LOOPBACK, "FARANDOLE_MDNS": "false", "COLUMNS": "200"}
    with trio.fail_after(PATIENCE):
        done = await trio.run_process(
            [sys.executable, "-m", "farandole.node", *words],
            check=False,
            capture_stdout=True,
            capture_stderr=True,
            env={**os.environ, **env},
        )
    assert done.returncode is not None
    return Answer(done.returncode, done.stdout.decode().strip(), " ".join(done.stderr.decode().split()))


@asynccontextmanager
async def loop(home: Path, *arguments: str, program: Sequence[str] = (str(EXAMPLE),)) -> AsyncIterator[Daemon]:
    """Run a program with a loop in its own process; ``home`` is its node's, if a node is running there."""
    env = {
        "FARANDOLE_HOME": str(home),
        "FARANDOLE_LISTEN": LOOPBACK,
        "FARANDOLE_STEP_SECONDS": PACE[1],
        "FARANDOLE_HEARTBEAT_SECONDS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see training.ranks.restarts_meet_the_dead
    }
    async with running(home, [sys.executable, "-W", "always", *program, *arguments], env) as running_loop:
        try:
            yield running_loop
        finally:
            process = running_loop.process
            if process.returncode is None and program[0] != str(EXAMPLE):
                process.terminate()  # torchrun then ends its ranks
                with trio.CancelScope(shield=True), trio.move_on_after(PATIENCE):
                    await process.wait()


@asynccontextmanager
async def node_of_a_loop(home: Path) -> AsyncIterator[Node]:
    """Yield the node that a loop has started in this folder; end it, whatever happens to the loop."""
    pid = None
    try:
        node = Node(home)
        pid = (await node.status()).pid
        yield node
    finally:
        if pid is not None and run_of_node(home):
            os.kill(pid, signal.SIGKILL)


def ranks_of(torchrun: int) -> list[int]:
    """Return the processes started by torchrun, the first rank first."""
    return [int(pid) for pid in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()]

"""A daemon in a home of the NAT lab: started, asked for its status, killed, started again."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import trio

from farandole.node.join.invites import choose_bootstrap_addresses
from farandole.node.status.status import NodeStatus
from farandole.protocol.run.invite import Invite, encode_invite

from ..natlab.groups import Leash
from ..natlab.home import Home
from ..natlab.namespace import held
from ..play.process import NODE_COMMAND, ask_daemon
from .process import BenchError

POLL_INTERVAL: Final = 0.25


class NatDaemon:
    """A ``farandole join``, or ``relay``, in a home of its own."""

    def __init__(self, name: str, home: Home, folder: Path, leash: Leash) -> None:
        """Create the daemon, not started; its ``--home`` and its output are in ``folder``."""
        self.name = name
        self.home = home
        self._folder = folder / name
        self._output = folder / f"{name}.log"
        self._leash = leash
        self._process: subprocess.Popen[bytes] | None = None
        self._life = contextlib.ExitStack()

    def start(self, *arguments: str, port: int = 0) -> None:
        """Run ``farandole`` with these arguments; it listens on this TCP port, or any (0)."""
        options = ("--home", str(self._folder), "--listen", f"/ip4/0.0.0.0/tcp/{port}")
        command = [*self.home.host.enter, *NODE_COMMAND, *arguments, *options]
        output = self._life.enter_context(self._output.open("ab"))
        self._process = self._life.enter_context(held(command, self._leash, stdout=output, stderr=output))

    def kill(self) -> None:
        """Kill the daemon and its trainer with SIGKILL, as if the machine were gone."""
        self._life.close()
        self._process = None

    async def status(self) -> NodeStatus | None:
        """Return the daemon's status, or None while it does not answer. Raises `BenchError` if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise BenchError(f"{self.name} has ended; see {self._output}")
        told = await ask_daemon(self._folder, "status")
        return None if told is None else msgspec.convert(told, NodeStatus)

    async def until(self, condition: Callable[[NodeStatus], bool]) -> NodeStatus:
        """Wait for a status that fulfils the condition."""
        while True:
            status = await self.status()
            if status is not None and condition(status):
                return status
            await trio.sleep(POLL_INTERVAL)

    async def make_invite(self) -> str:
        """Return an invite as ``farandole run invite`` makes it."""
        status = await self.until(lambda status: bool(status.run.run_id))
        return encode_invite(Invite(bytes.fromhex(status.run.run_id), tuple(choose_bootstrap_addresses(status))))

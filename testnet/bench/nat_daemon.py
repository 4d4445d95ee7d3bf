"""A daemon in a home of the NAT lab: started, asked for its status, killed, started again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from farandole.node.base.control import ControlError, NoNodeError, call
from farandole.node.join.invite_addresses import choose_bootstrap_addresses
from farandole.node.status.status import NodeStatus
from farandole.protocol.invite import Invite, encode_invite

from ..groups import kill_group
from ..leash import Leash
from ..natlab.home import Home
from .process import BenchError

# Of a daemon on a busy machine.
STATUS_TIMEOUT: Final = 5.0
POLL_INTERVAL: Final = 0.25
_COMMAND: Final = (sys.executable, "-m", "farandole.node")
_ANY: Final = "/ip4/0.0.0.0/tcp/{port}"


class NatDaemon:
    """A ``farandole join``, or ``relay``, in a home of its own."""

    def __init__(self, name: str, home: Home, folder: Path, leash: Leash) -> None:
        """``folder``: its ``--home`` is in there, and what it says."""
        self.name = name
        self.home = home
        self._folder = folder / name
        self._output = folder / f"{name}.log"
        self._leash = leash
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str, port: int = 0) -> None:
        """Run ``farandole`` with these arguments; it listens on this TCP port, or any (0)."""
        place = self.home.host
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [*place.enter, *_COMMAND, *arguments, "--home", str(self._folder), "--listen", _ANY.format(port=port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._leash.hold(self._process.pid)

    def kill(self) -> None:
        """SIGKILL, to its trainer too: the machine is gone."""
        process, self._process = self._process, None
        if process is not None:
            kill_group(process.pid)
            process.wait()
            self._leash.release(process.pid)

    async def status(self) -> NodeStatus | None:
        """What it tells of itself; None while there is no answer. Raises `BenchError` if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise BenchError(f"{self.name} has ended; see {self._output}")
        try:
            told = await trio.to_thread.run_sync(
                partial(call, self._folder, "status", timeout=STATUS_TIMEOUT),
                abandon_on_cancel=True,  # type: ignore[call-arg]  # newer than the stubs that libp2p brings
            )
        except (NoNodeError, ControlError):
            return None
        return msgspec.convert(told, NodeStatus)

    async def until(self, condition: Callable[[NodeStatus], bool]) -> NodeStatus:
        """Wait for a status of which it holds."""
        while True:
            status = await self.status()
            if status is not None and condition(status):
                return status
            await trio.sleep(POLL_INTERVAL)

    async def make_invite(self) -> str:
        """As ``farandole run invite`` makes it."""
        status = await self.until(lambda status: bool(status.run.run_id))
        return encode_invite(Invite(bytes.fromhex(status.run.run_id), tuple(choose_bootstrap_addresses(status))))

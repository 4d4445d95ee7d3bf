"""One testnet node as a process, with a folder, port and key; it is started, watched and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from farandole.node.base.control import ControlError, NoNodeError, call
from farandole.node.base.settings import NodeSettings
from farandole.node.status.status import NodeStatus
from farandole.node.store.folder import CheckpointFolder

from ..natlab.groups import OF_ITS_OWN, Leash, kill_group, limit_files
from .record import NodeRecord
from .report import NodeReport

if TYPE_CHECKING:
    from trio_typing import TaskStatus

NODE_COMMAND: Final = (sys.executable, "-m", "farandole.node")
POLL_INTERVAL: Final = 1.0
STATUS_TIMEOUT: Final = 5.0
# A daemon that is asked to end finishes its inner step, saves and says farewell; on a loaded machine that takes a
# while.
STOP_TIMEOUT: Final = 20.0
# A starved node is stopped and continued in turns of this length in seconds, the period of the kernel's own bandwidth
# control (cgroups' cpu.cfs_period_us).
TURN: Final = 0.1


async def ask_daemon(home: Path, method: str) -> Any | None:
    """Return a daemon's answer; None if it gives none because it is starting, frozen, or ending."""
    try:
        return await trio.to_thread.run_sync(
            partial(call, home, method, timeout=STATUS_TIMEOUT),
            abandon_on_cancel=True,  # type: ignore[call-arg]  # newer than the stubs that libp2p brings
        )
    except (NoNodeError, ControlError):
        return None


@dataclass
class NodeProcess:
    """A node's daemon; ``options`` are for ``farandole join``, without the invite; ``say`` is called with events."""

    record: NodeRecord
    home: Path
    options: Sequence[str]
    leash: Leash
    say: Callable[[str], None]
    command: Sequence[str] = NODE_COMMAND
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the launcher's."""
    is_running: bool = False
    is_frozen: bool = False
    is_expected_to_end: bool = False
    is_up: trio.Event = field(default_factory=trio.Event)
    """Set when the node has answered once, so it can be dialled; or ended before that."""
    joined: trio.Event = field(default_factory=trio.Event)
    """Set when the node has been started at least once."""
    _process: trio.Process | None = None
    """The daemon's process, if it runs."""
    _ended: trio.Event = field(default_factory=trio.Event)
    """Set when it has ended."""

    @property
    def report(self) -> NodeReport:
        """Return the report of the node until now."""
        return self.record.report

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return f"node {self.report.index}"

    @property
    def is_starting(self) -> bool:
        """Return whether the node runs, and has neither begun to train nor been found wedged."""
        phase = "starting" if self.record.status is None else self.record.status.phase
        return self.is_running and not self.report.wedged and phase in ("starting", "joining", "preparing")

    @property
    def checkpoint(self) -> Path | None:
        """Return the newest saved replica of the stage that the node last reported."""
        status = self.record.status
        stage = 0 if status is None else status.stage
        return next(iter(CheckpointFolder(NodeSettings(home=self.home).checkpoints, stage).files()), None)

    async def run(self, source: str | None, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the daemon and watch over it until it ends.

        ``source`` is the invite or manifest for ``join``; None for a node that was here before.
        """
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Without settings that the user has for a node of their own.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FARANDOLE_")}
        with (self.home / "output").open("ab") as output:
            process = await trio.lowlevel.open_process(
                [*self.command, "join", *([source] if source else []), "--home", str(self.home), *self.options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**kept, "PYTHONUNBUFFERED": "1", "COLUMNS": "120", **self.environment},
                **OF_ITS_OWN,
            )
        # Between starting and holding there is no checkpoint: a cancellation cannot come between.
        self.leash.hold(process.pid)
        self._process, self._ended = process, trio.Event()
        self.record.ledger.enter("returning" if self.joined.is_set() else "starting", trio.current_time())
        self.is_running, self.is_expected_to_end = True, False
        self.joined.set()
        self.record.excuse(trio.current_time())
        task_status.started()

        async def poll() -> None:
            while True:
                if not self.is_frozen and (told := await ask_daemon(self.home, "status")) is not None:
                    self.is_up.set()
                    self.record.observe(msgspec.convert(told, NodeStatus), trio.current_time())
                await trio.sleep(POLL_INTERVAL)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(poll)
                await process.wait()
                nursery.cancel_scope.cancel()
        finally:
            kill_group(process.pid)  # its trainer, if it is left
            if process.returncode is not None:  # else cancelled: the leash, or the end of the testnet, kills it
                self.leash.release(process.pid)
                self.is_running = self.is_frozen = False
                self._process = None
                self.record.ledger.enter("absent", trio.current_time())
                if not self.is_expected_to_end:
                    self.report.died = True
                    self.say(f"{self.name} died (exit code {process.returncode}): see {self.home / 'output'}")
                self.is_up.set()
                self._ended.set()

    def kill(self) -> None:
        """Send SIGKILL to daemon and trainer, as if the machine were gone."""
        if process := self._process:
            self.is_expected_to_end = True
            kill_group(process.pid)

    def freeze(self) -> None:
        """Stop the daemon and its trainer: the node keeps its connections and answers nothing."""
        if process := self._process:
            self.is_frozen = True
            self.record.ledger.enter("frozen", trio.current_time())
            kill_group(process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue a frozen node."""
        if process := self._process:
            kill_group(process.pid, signal.SIGCONT)
            if self.is_frozen:
                self.record.ledger.enter("returning", trio.current_time())
            self.is_frozen = False
            self.record.excuse(trio.current_time())

    async def starve(self, share: float, seconds: float) -> None:
        """Give daemon and trainer together ``share`` of one processor's time, in turns, for ``seconds``."""
        process = self._process
        if process is None:
            return
        self.record.ledger.enter("starved", trio.current_time())
        try:
            with trio.move_on_after(seconds):
                while self._process is process:
                    kill_group(process.pid, signal.SIGSTOP)
                    await trio.sleep(TURN * (1 - share))
                    kill_group(process.pid, signal.SIGCONT)
                    await trio.sleep(TURN * share)
        finally:
            if self._process is process:
                kill_group(process.pid, signal.SIGCONT)
                self.record.ledger.enter("working", trio.current_time())

    def limit_files(self, most: int | None) -> None:
        """Let neither daemon nor trainer write a file beyond ``most`` bytes; None: as before. Linux only.

        This has the effect of a full disk, without root and without a disk: overwriting in place still succeeds, other
        writes fail. The error is EFBIG and not ENOSPC; both are an `OSError` like any other.
        """
        if process := self._process:
            limit_files(process.pid, most)

    async def have(self, method: str) -> None:
        """Make the node pause (it stops training, and stays in the mesh) or resume; ask until it answers."""
        while self.is_running:
            if await ask_daemon(self.home, method) is not None:
                return
            await trio.sleep(POLL_INTERVAL)

    async def leave(self) -> None:
        """Ask the node to leave the run, and wait until it has; after `STOP_TIMEOUT` it is killed."""
        process = self._process
        if process is None:
            return
        self.is_expected_to_end = True
        self.thaw()
        process.terminate()
        with trio.move_on_after(STOP_TIMEOUT):
            await self.wait_ended()
            return
        self.say(f"{self.name} did not leave within {STOP_TIMEOUT:g} s and was killed")
        kill_group(process.pid)

    async def wait_ended(self) -> None:
        """Wait until the daemon is gone."""
        if self._process is not None:
            await self._ended.wait()

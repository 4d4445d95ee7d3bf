"""Rests while others use the machine, for a node that trains "only when idle".

`IdleWatch` is a pure decision on a series of observations; `IdleService` makes them, off the event loop. A
rest costs the trainer a restart, and training during use costs the owner the machine. So both ends have a threshold in
time: a reason must have been there for `BEGIN_SECONDS` before the node rests, and all must have been gone for
`CALM_SECONDS` before it trains again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import psutil
import trio

from ..status.journal import Journal
from ..trainer.script import ScriptDoor

# Observes the machine: other programs on its GPU, its power source.
#
# For the GPU it runs ``nvidia-smi pmon``, which comes with every NVIDIA driver and distinguishes compute from graphics.
# A desktop is always on the GPU, so graphics counts from `GRAPHICS_PERCENT` on, and compute always: it holds memory
# there.

# More than a desktop, a browser or a film uses: a game.
GRAPHICS_PERCENT: Final = 25
# It samples for a second, and takes another to start; a hanging driver never answers.
GPU_TIMEOUT: Final = 10.0
# For the killed process to end.
KILL_TIMEOUT: Final = 1.0
# The number of GPU processes that a message names.
MAX_NAMED: Final = 3
MAX_NAME_CHARS: Final = 40
_GPU_COMMAND: Final = ("nvidia-smi", "pmon", "-c", "1", "-s", "u")
_NO_ANSWER: Final = f"nvidia-smi gives no answer within {GPU_TIMEOUT:g} s"
_COLUMNS: Final = frozenset({"pid", "type", "sm", "command"})


_Result = TypeVar("_Result")


class ProbeError(Exception):
    """It cannot be told, for this reason."""


def users_in(text: str, own: Collection[int]) -> tuple[str, ...]:
    """Describe the other programs' processes in the table of ``nvidia-smi pmon``, as far as they count, for display.

    Its columns differ by driver: the first line names them. Raises `ProbeError` if it is no such table. In a container
    the driver gives process numbers of the host. Such a number means nothing here, so it is skipped; it may as well be
    our own trainer.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    names = next((line[1:] for line in lines if line[0] == "#" and "pid" in line), None)
    if names is None or not _COLUMNS.issubset(names):
        raise ProbeError("nvidia-smi pmon says nothing that is understood here")
    found: dict[int, str] = {}
    for line in lines:
        row = dict(zip(names, line, strict=False))
        if line[0].startswith("#") or not _COLUMNS.issubset(row) or not row["pid"].isdigit():
            continue
        pid, percent = int(row["pid"]), int(row["sm"]) if row["sm"].isdigit() else 0
        counts = row["type"] == "C" or percent >= GRAPHICS_PERCENT
        if counts and pid not in own and psutil.pid_exists(pid):
            found[pid] = f"{row['command'][:MAX_NAME_CHARS]} (process {pid})"
    return tuple(found.values())[:MAX_NAMED]


async def gpu_users(own: Collection[int], limiter: trio.CapacityLimiter) -> tuple[str, ...]:
    """Return other programs' processes on this machine's GPUs. Raises `ProbeError`.

    It asks in a thread that may be abandoned: a process that hangs in the driver cannot even be killed. ``limiter`` is
    for one such thread.
    """

    def ask() -> tuple[str, ...]:
        try:
            done = subprocess.run(_GPU_COMMAND, stdin=subprocess.DEVNULL, capture_output=True, timeout=GPU_TIMEOUT)
        except OSError as error:
            raise ProbeError(f"nvidia-smi cannot be run: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise ProbeError(_NO_ANSWER) from error
        if done.returncode:
            said = (done.stdout or done.stderr).decode(errors="replace").strip().splitlines()
            raise ProbeError(f"nvidia-smi says {said[0]!r}" if said else f"nvidia-smi ended with {done.returncode}")
        return users_in(done.stdout.decode(errors="replace"), {rank for pid in own for rank in ranks_of(pid)})

    if shutil.which(_GPU_COMMAND[0]) is None:
        raise ProbeError("there is no nvidia-smi here")
    if not limiter.available_tokens:
        raise ProbeError("nvidia-smi has not ended yet")
    with trio.move_on_after(GPU_TIMEOUT + KILL_TIMEOUT):
        return await in_a_thread_left_alone(ask, limiter)
    raise ProbeError(_NO_ANSWER)


async def in_a_thread_left_alone(work: Callable[[], _Result], limiter: trio.CapacityLimiter | None = None) -> _Result:
    """Run blocking work in a thread; a cancelled caller does not wait for its end."""
    # `abandon_on_cancel` is newer than the stubs of trio that libp2p brings.
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)  # type: ignore[call-arg]


def ranks_of(pid: int) -> set[int]:
    """Return a process, and the ones that its parent has started with the same command line, as torchrun does."""
    found = {pid}
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        words = process.cmdline()
        for other in (process.parent() or process).children():
            with contextlib.suppress(psutil.Error):  # one may be gone, or another user's
                found |= {other.pid} if other.cmdline() == words else set()
    return found


def is_on_battery() -> bool | None:
    """Return whether the machine runs on its battery; None if it has none, or this is unknown."""
    battery = psutil.sensors_battery()
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


# For how long a reason must have been seen. An owner who pulls the plug means it; a program that only asks the driver
# which GPU there is is gone by the next look.
BEGIN_SECONDS: Final = {"battery": 0.0, "GPU": 8.0}
CALM_SECONDS: Final = 60.0


@dataclass(eq=False)
class IdleWatch:
    """Judges looks, in order."""

    _since: dict[str, float] | None = None
    _words: str = ""
    _calm_since: float | None = None  # while it rests

    def look(self, on_battery: bool | None, gpu_users: Sequence[str], now: float) -> str:
        """Return why the node must rest, for display; empty if it may train.

        ``gpu_users``: other programs' processes on the GPU, for display. What is unknown (None, and no users) is no
        reason. ``now``: seconds, never decreasing.
        """
        found: dict[str, str] = {}  # the plainest first
        if on_battery:
            found["battery"] = "this machine runs on its battery"
        if gpu_users:
            found["GPU"] = f"the GPU is used by {', '.join(gpu_users)}"
        before = self._since
        self._since = {reason: (before or {}).get(reason, now) for reason in found}
        is_due = any(now - since >= BEGIN_SECONDS[reason] for reason, since in self._since.items())
        is_due = is_due or before is None  # at the first look, before a trainer has begun, a rest costs nothing
        if found and (self._words or is_due):
            self._calm_since = None
            words = next(iter(found.values()))
            self._words = f"{words}; trains again a minute after that ends, or at once without --only-when-idle"
        elif self._words:
            self._calm_since = now if self._calm_since is None else self._calm_since
            if now - self._calm_since >= CALM_SECONDS:
                self._words = ""
        return self._words


# For a kernel file that does not answer because a driver hangs.
READ_TIMEOUT: Final = 5.0


@dataclass(eq=False)
class IdleService:
    """Looks at the machine whether others use it.

    ``door``: where a loop of the owner's waits, also with the GPU's memory. ``clock`` gives seconds.
    """

    journal: Journal
    door: ScriptDoor | None = None
    looks_at_gpu: bool = True
    clock: Callable[[], float] = trio.current_time
    _watch: IdleWatch = field(default_factory=IdleWatch)
    _gpu: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))
    _has_warned: bool = False

    async def look(self) -> str:
        """Return why the node must rest, for display; empty if it may train."""
        pids = (os.getpid(), self.journal.state.trainer_pid, None if self.door is None else self.door.pid)
        own = {pid for pid in pids if pid}
        users: Sequence[str] = ()
        if self.looks_at_gpu:
            try:
                users = await gpu_users(own, self._gpu)
            except ProbeError as error:
                if not self._has_warned:
                    self.journal.warn(f"who else uses the GPU is not seen: {error}; --only-when-idle looks at the rest")
                self._has_warned = True
        on_battery = None
        with trio.move_on_after(READ_TIMEOUT):
            on_battery = await in_a_thread_left_alone(is_on_battery)
        return self._watch.look(on_battery, users, self.clock())

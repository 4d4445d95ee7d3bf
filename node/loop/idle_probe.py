"""Observes the machine: other programs on its GPU, its power source.

For the GPU it runs ``nvidia-smi pmon``, which comes with every NVIDIA driver and distinguishes compute from graphics. A
desktop is always on the GPU, so graphics counts from `GRAPHICS_PERCENT` on, and compute always: it holds memory there.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import psutil
import trio

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


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU."""

    pid: int
    name: str
    computes: bool
    """Whether it has a compute context, and no other."""
    percent: int
    """Its recent share of the GPU's time."""

    @property
    def is_in_earnest(self) -> bool:
        """Return whether the process makes real use of the GPU."""
        return self.computes or self.percent >= GRAPHICS_PERCENT


def parse_gpu_processes(text: str) -> list[GpuProcess]:
    """Parse the table of ``nvidia-smi pmon``, whose columns differ by driver: its first line names them.

    Raises `ProbeError` if it is no such table.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    names = next((line[1:] for line in lines if line[0] == "#" and "pid" in line), None)
    if names is None or not _COLUMNS.issubset(names):
        raise ProbeError("nvidia-smi pmon says nothing that is understood here")
    found: dict[int, GpuProcess] = {}
    for line in lines:
        row = dict(zip(names, line, strict=False))
        if line[0].startswith("#") or not _COLUMNS.issubset(row) or not row["pid"].isdigit():
            continue
        percent = int(row["sm"]) if row["sm"].isdigit() else 0
        pid, name = int(row["pid"]), row["command"][:MAX_NAME_CHARS]
        found[pid] = GpuProcess(pid, name, row["type"] == "C", percent)
    return list(found.values())


def gpu_users(processes: Collection[GpuProcess], own: Collection[int]) -> tuple[str, ...]:
    """Describe the other programs' processes that count, for display.

    In a container the driver gives process numbers of the host. Such a number means nothing here, so it is skipped; it
    may as well be our own trainer.
    """
    users = [p for p in processes if p.pid not in own and p.is_in_earnest and psutil.pid_exists(p.pid)]
    return tuple(f"{process.name} (process {process.pid})" for process in users[:MAX_NAMED])


class GpuProbe:
    """Runs its queries in a thread that may be abandoned: a process that hangs in the driver cannot even be killed."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def users(self, own: Collection[int]) -> tuple[str, ...]:
        """Return other programs' processes on this machine's GPUs. Raises `ProbeError`."""
        if shutil.which(_GPU_COMMAND[0]) is None:
            raise ProbeError("there is no nvidia-smi here")
        if not self._limiter.available_tokens:
            raise ProbeError("nvidia-smi has not ended yet")
        with trio.move_on_after(GPU_TIMEOUT + KILL_TIMEOUT):
            return await in_a_thread_left_alone(partial(_ask_nvidia, own), self._limiter)
        raise ProbeError(_NO_ANSWER)


async def in_a_thread_left_alone(work: Callable[[], _Result], limiter: trio.CapacityLimiter | None = None) -> _Result:
    """Run blocking work in a thread; a cancelled caller does not wait for its end."""
    # `abandon_on_cancel` is newer than the stubs of trio that libp2p brings.
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)  # type: ignore[call-arg]


def _ask_nvidia(own: Collection[int]) -> tuple[str, ...]:
    try:
        done = subprocess.run(_GPU_COMMAND, stdin=subprocess.DEVNULL, capture_output=True, timeout=GPU_TIMEOUT)
    except OSError as error:
        raise ProbeError(f"nvidia-smi cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ProbeError(_NO_ANSWER) from error
    if done.returncode:
        said = (done.stdout or done.stderr).decode(errors="replace").strip().splitlines()
        raise ProbeError(f"nvidia-smi says {said[0]!r}" if said else f"nvidia-smi ended with {done.returncode}")
    return gpu_users(parse_gpu_processes(done.stdout.decode(errors="replace")), own)


def is_on_battery() -> bool | None:
    """Return whether the machine runs on its battery; None if it has none, or this is unknown."""
    battery = psutil.sensors_battery()
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged

"""Processes: what the system reports about them, and children with a socket to their parent.

psutil where it can, /proc (proc(5)) for what only Linux has.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil
import trio

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what service managers send."""
_PROC: Final = Path("/proc")
# Linux's driver makes the first; in WSL2, Windows' driver brings the second, and there is no device of that name.
_NVIDIA_PLACES: Final = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))


def read_proc(name: str) -> str | None:
    """Return the text of a file in /proc; None if it does not exist, or its process is gone."""
    if sys.platform != "linux":
        return None
    try:
        return (_PROC / name).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def resident_bytes(pid: int) -> int | None:
    """Return a process's resident bytes; None if it is gone, or another user's where the system keeps that secret."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def count_oom_kills() -> int | None:
    """Count the processes that the kernel killed since boot because memory, or a cgroup's memory, was used up.

    None where the system does not count them (all but Linux). In a container the count is the whole machine's.
    """
    lines = read_proc("vmstat")
    return next((int(line.split()[1]) for line in (lines or "").splitlines() if line.startswith("oom_kill ")), None)


def has_nvidia_driver() -> bool:
    """Return whether the driver of an NVIDIA GPU is here, without asking it, which takes a second."""
    return any(place.exists() for place in _NVIDIA_PLACES)


async def start_child(
    module: str, arguments: Sequence[str], inherited: Sequence[int], environment: Mapping[str, str]
) -> tuple[trio.Process, trio.SocketStream]:
    """Run ``python -m module DESCRIPTOR *arguments``; return the process, and our end of the connection with it.

    The descriptor is the other end. ``inherited``: descriptors that stay open in it. Its output is this process's.
    Raises `OSError`. The caller ends the process.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=(theirs.fileno(), *inherited),
            )
    except BaseException:  # cancelled, too
        ours.close()
        raise
    return process, trio.SocketStream(trio.socket.from_stdlib_socket(ours))


def ask_where(process: trio.Process) -> None:
    """Ask a child that has called `tell_where` to print its tracebacks; it may not answer."""
    process.send_signal(signal.SIGUSR1)


def tell_where(descriptor: int) -> None:
    """Write all threads' stacks to ``descriptor`` when the parent asks (`ask_where`), on a crash the crashed one's."""
    faulthandler.enable(descriptor, all_threads=False)  # another one that runs on meanwhile would end the dump
    faulthandler.register(signal.SIGUSR1, descriptor)


def ignore_stop_signals() -> None:
    """Ignore signals to the whole process group: they are for the parent, which ends this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def signal_name(number: int) -> str:
    """Return a signal's usual name."""
    return next((known.name for known in signal.Signals if known == number), "one without a name")

"""A process and its children as a group: start it, stop it for a while, end it.

Where there are process groups (not on Windows) these are used. Elsewhere no process can be stopped for a while, so
faults that need it are refused; and a process is killed without its children: a trainer ends when its daemon does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import trio

from farandole.protocol.wire.errors import FarandoleError

OF_ITS_OWN: Final[dict[str, Any]] = {}
"""What `subprocess` is told when it starts the first of a group."""
if sys.platform == "win32":
    OF_ITS_OWN["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP
else:
    OF_ITS_OWN["start_new_session"] = True


class GroupError(FarandoleError):
    """This system cannot do that to processes."""


def kill_group(group: int) -> None:
    """Kill the group at once; do nothing if it is gone."""
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            os.kill(group, signal.SIGTERM)  # on Windows no process can postpone it
        else:
            os.killpg(group, signal.SIGKILL)


def freeze(pid: int, *, whole_group: bool = True) -> None:
    """Stop the process, and its group, until `thaw`; do nothing if it is gone."""
    if sys.platform == "win32":
        raise GroupError("this system cannot stop processes for a while: play a scenario without such faults")
    _send(pid, signal.SIGSTOP, whole_group)


def thaw(pid: int, *, whole_group: bool = True) -> None:
    """Continue the process, and its group; do nothing if it is gone."""
    if sys.platform != "win32":
        _send(pid, signal.SIGCONT, whole_group)


def _send(pid: int, number: signal.Signals, whole_group: bool) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform != "win32" and whole_group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def ask_to_end(process: trio.Process) -> None:
    """Ask a process, which must be the first of a group, to end in order."""
    if sys.platform == "win32":
        process.send_signal(signal.CTRL_BREAK_EVENT)
    else:
        process.terminate()


def limit_files(group: int, most: int | None) -> None:
    """Let no process of a group write a file beyond ``most`` bytes; None: as before. Linux only."""
    if sys.platform != "linux":
        raise GroupError("files are limited on Linux alone: play a scenario without full disks")
    import resource

    for pid in _processes_of(group):
        with contextlib.suppress(ProcessLookupError):
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if most is None else most, hard))


def _processes_of(group: int) -> Iterator[int]:
    if sys.platform == "linux":
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it has ended since
                    if os.getpgid(int(entry.name)) == group:
                        yield int(entry.name)

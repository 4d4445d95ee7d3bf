"""A process and its children as a group: start it, stop it for a while, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from farandole.protocol.wire.errors import FarandoleError

OF_ITS_OWN: Final[dict[str, Any]] = {"start_new_session": True}
"""What `subprocess` is told when it starts the first of a group."""


class GroupError(FarandoleError):
    """This system cannot do that to processes."""


def kill_group(group: int) -> None:
    """Kill the group at once; do nothing if it is gone."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)


def freeze(pid: int, *, whole_group: bool = True) -> None:
    """Stop the process, and its group, until `thaw`; do nothing if it is gone."""
    _send(pid, signal.SIGSTOP, whole_group)


def thaw(pid: int, *, whole_group: bool = True) -> None:
    """Continue the process, and its group; do nothing if it is gone."""
    _send(pid, signal.SIGCONT, whole_group)


def _send(pid: int, number: signal.Signals, whole_group: bool) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if whole_group else os.kill)(pid, number)


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

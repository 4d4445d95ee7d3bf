"""A process and its children as a group: start it, stop it for a while, end it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any, Final

import psutil

OF_ITS_OWN: Final[dict[str, Any]] = {"start_new_session": True}
"""What `subprocess` is told when it starts the first of a group."""


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """Send the group a signal, by default the one that kills it at once; do nothing if it is gone."""
    with contextlib.suppress(OSError):
        os.killpg(group, number)


def limit_files(group: int, most: int | None) -> None:
    """Let no process of a group write a file beyond ``most`` bytes; None: as before. Linux only."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            if os.getpgid(pid) == group:
                hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if most is None else most, hard))


# A guard against leftover processes, even if the launcher is killed with SIGKILL in the middle.
#
# A small watching process holds the other end of a pipe. The launcher writes to it each process group that it starts
# and ends; when the pipe closes, for whatever reason, it kills the remaining groups. A death signal (PR_SET_PDEATHSIG)
# was tried and rejected: it is Linux only, follows the thread that forked rather than the process, and does not reach
# trainers whose daemon is frozen.


class Leash:
    """The launcher's end of the pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe

    def hold(self, group: int) -> None:
        """Kill this process group when the launcher ends, but not if it ends between the start and this call."""
        self._pipe.write(f"+{group}\n".encode())

    def release(self, group: int) -> None:
        """Release a group whose leader has ended: another group may get its number soon."""
        self._pipe.write(f"-{group}\n".encode())


@contextlib.contextmanager
def open_leash() -> Iterator[Leash]:
    """Start the watching process; at the end it kills the groups still held, and exits."""
    command = [sys.executable, "-m", "farandole.testnet.natlab.groups"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, **OF_ITS_OWN) as process:
        assert process.stdin is not None
        yield Leash(process.stdin)


def main() -> None:
    """Entry point of the watching process: ``+GROUP`` and ``-GROUP`` lines until the end of the input."""
    held: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        (held.add if line.startswith("+") else held.discard)(group)
    for group in held:
        kill_group(group)


if __name__ == "__main__":
    main()

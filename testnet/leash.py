"""A guard against leftover processes, even if the launcher is killed with SIGKILL in the middle.

A small watching process holds the other end of a pipe. The launcher writes to it each process group that it starts and
ends; when the pipe closes, for whatever reason, it kills the remaining groups. A death signal (PR_SET_PDEATHSIG) was
tried and rejected: it is Linux only, follows the thread that forked rather than the process, and does not reach
trainers whose daemon is frozen.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

from .groups import OF_ITS_OWN, kill_group


class Leash:
    """The launcher's end of the pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe

    def hold(self, group: int) -> None:
        """Kill this process group when the launcher ends."""
        self._pipe.write(f"+{group}\n".encode())

    def release(self, group: int) -> None:
        """Release a group whose leader has ended: another group may get its number soon."""
        self._pipe.write(f"-{group}\n".encode())


@contextlib.contextmanager
def open_leash() -> Iterator[Leash]:
    """Start the watching process; at the end it kills the groups still held, and exits."""
    command = [sys.executable, "-m", "farandole.testnet.leash"]
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

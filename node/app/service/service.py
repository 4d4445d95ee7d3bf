"""What a service manager is told of a node, and what is asked of a manager, whichever it is.

A manager only knows texts and commands: `farandole.node.app.commands.service` writes and runs them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from farandole.protocol.errors import FarandoleError

# Leaving in good order takes the round's rest, a save and a farewell: `farandole leave` waits 250 s for them at most.
STOP_SECONDS: Final = 260
# A crash that comes again at once shall not keep the machine busy.
RESTART_SECONDS: Final = 5
# So many ends in so long are no accident: somebody has to look.
MAX_RESTARTS: Final = 5
RESTARTS_WITHIN_SECONDS: Final = 900
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")

Command = Sequence[str]


class ServiceError(FarandoleError):
    """The machine's service manager does not do what it was asked for, or there is none; the message says why."""


@dataclass(frozen=True)
class Service:
    """A daemon to be kept running."""

    name: str
    """Among this user's services."""
    command: Command
    """Program and arguments; the program and the paths absolute."""
    home: Path
    """The node's folder, absolute; there the daemon works."""
    memory_gb: float = 0.0
    """GiB above which it is slowed down; 0: no bound."""
    cpu_cores: float = 0.0
    """Cores that it takes at most; 0: no bound."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ServiceError(f"{self.name!r} is no name for a service: letters, digits, - and _")


class Manager(Protocol):
    """A service manager: where it reads of a service and what, and the commands that it is driven by."""

    def path(self, name: str) -> Path:
        """Where it looks for the service of this name."""

    def text(self, service: Service) -> str:
        """What it reads there."""

    def reload(self) -> Sequence[Command]:
        """After such a file was written or removed."""

    def start(self, name: str) -> Sequence[Command]:
        """Begin now, and whenever the machine or the user does."""

    def stop(self, name: str) -> Sequence[Command]:
        """End in good order, and begin no more; they fail if it is not there."""

    def status(self, name: str) -> Command:
        """Prints how it is; its exit code is 0 while the service runs."""

    def logs(self, name: str, home: Path, num_lines: int, *, is_followed: bool) -> Command:
        """Prints its last lines, and what comes after them if ``is_followed``."""

    def hint(self, user: str) -> str:
        """What is left for people to do; nothing if nothing is."""

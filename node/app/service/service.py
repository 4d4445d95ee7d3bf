"""The description of a node as a service, and the interface of service managers.

A manager only returns texts and commands: `farandole.node.app.commands.service` writes and runs them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from farandole.protocol.wire.errors import FarandoleError

# A clean stop takes the rest of the round, a save and a farewell: `farandole leave` waits at most 250 s for them.
STOP_SECONDS: Final = 260
# A crash that repeats at once must not keep the machine busy.
RESTART_SECONDS: Final = 5
# Restarts within the time below after which the manager gives up: a person has to look.
MAX_RESTARTS: Final = 5
RESTARTS_WITHIN_SECONDS: Final = 900
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")

Command = Sequence[str]


class ServiceError(FarandoleError):
    """The machine's service manager does not do what it was asked for, or there is none; the message says why."""


@dataclass(frozen=True)
class Service:
    """A daemon that a service manager keeps running."""

    name: str
    """Among this user's services."""
    command: Command
    """Program and arguments; the program and the paths absolute."""
    home: Path
    """The node's folder, absolute; the daemon's working directory."""
    memory_gb: float = 0.0
    """GiB of memory above which it is slowed down; 0: no bound."""
    cpu_cores: float = 0.0
    """Most cores that it may use; 0: no bound."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ServiceError(f"{self.name!r} is no name for a service: letters, digits, - and _")


class Manager(Protocol):
    """A service manager: path and text of its service files, and the commands that control it."""

    def path(self, name: str) -> Path:
        """Return the path of the service file of this name."""

    def text(self, service: Service) -> str:
        """Return the text of the service file."""

    def reload(self) -> Sequence[Command]:
        """Return the commands to run after a service file was written or removed."""

    def start(self, name: str) -> Sequence[Command]:
        """Return the commands that start it now, and with each boot or login."""

    def stop(self, name: str) -> Sequence[Command]:
        """Return the commands that stop it cleanly and for good; they fail if it does not exist."""

    def status(self, name: str) -> Command:
        """Return the command that prints its state; its exit code is 0 while the service runs."""

    def logs(self, name: str, home: Path, num_lines: int, *, is_followed: bool) -> Command:
        """Return the command that prints its last lines, and the following ones if ``is_followed``."""

    def hint(self, user: str) -> str:
        """Return what the user still has to do; empty if nothing."""

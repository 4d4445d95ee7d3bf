"""A node as a service of systemd for one user, or of launchd on macOS: the service file, and the manager's commands.

`farandole.node.app.commands.service` writes the file and runs the commands.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from farandole.protocol.wire.errors import FarandoleError

from ..base.exits import Exit

# A clean stop takes the rest of the round, a save and a farewell: `farandole leave` waits at most 250 s for them.
STOP_SECONDS: Final = 260
# A crash that repeats at once must not keep the machine busy; after 5 restarts in 15 minutes a person has to look.
RESTART_SECONDS: Final = 5
MAX_RESTARTS: Final = 5
RESTARTS_WITHIN_SECONDS: Final = 900
# Exit codes that no restart fixes.
_FINAL: Final = (Exit.USAGE, Exit.BAD_INPUT, Exit.TRAINER_FAILED)
_LINGERING: Final = Path("/var/lib/systemd/linger")
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

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ServiceError(f"{self.name!r} is no name for a service: letters, digits, - and _")


class Manager(Protocol):
    """A service manager."""

    def path(self, name: str) -> Path:
        """Return the path of the service file of this name."""

    def text(self, service: Service) -> str:
        """Return the text of the service file."""

    def start(self, name: str) -> Sequence[Command]:
        """Return the commands that start it from its file now, and with each boot or login."""

    def stop(self, name: str) -> Sequence[Command]:
        """Return the commands that stop it cleanly and for good; they fail if it does not exist."""

    def hint(self, name: str, user: str) -> str:
        """Return how to watch it, and what the user still has to do."""


def manager_here() -> Manager:
    """Return the service manager of this kind of machine."""
    return Launchd() if sys.platform == "darwin" else Systemd()


class Systemd:
    """systemd, for one user: ``~/.config/systemd/user/NAME.service``. It needs no rights but the user's own."""

    def path(self, name: str) -> Path:
        """Return the path of a user's own unit, as in `systemd.unit(5)`."""
        folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(folder) / "systemd" / "user" / f"{name}.service"

    def text(self, service: Service) -> str:
        """Return the unit.

        SIGTERM goes to the daemon alone, which ends its trainer after the last save. The daemon also restarts a trainer
        that ran out of memory, so systemd must not end both.
        """
        home = _literal(str(service.home))
        return f"""\
[Unit]
Description=farandole: a node in {home}
StartLimitIntervalSec={RESTARTS_WITHIN_SECONDS}
StartLimitBurst={MAX_RESTARTS}

[Service]
Type=exec
ExecStart={" ".join(map(_quoted, service.command))}
WorkingDirectory={home}
Environment=PYTHONUNBUFFERED=1
Restart=on-failure
RestartSec={RESTART_SECONDS}
RestartPreventExitStatus={" ".join(str(code.value) for code in _FINAL)}
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={STOP_SECONDS}
OOMPolicy=continue
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""

    def start(self, name: str) -> Sequence[Command]:
        """Start now, and with the user's first login, or with the machine if the user lingers."""
        return [_systemctl("daemon-reload"), _systemctl("enable", "--now", f"{name}.service")]

    def stop(self, name: str) -> Sequence[Command]:
        """Stop by SIGTERM, and reset past failures, so that they do not refuse a new start."""
        return [_systemctl("disable", "--now", f"{name}.service"), _systemctl("reset-failed", f"{name}.service")]

    def hint(self, name: str, user: str) -> str:
        """Explain lingering: a user's services end with the last session, unless an administrator enables lingering."""
        told = f"systemctl --user status {name} shows its state, journalctl --user --unit {name} --follow its output"
        if (_LINGERING / user).exists():
            return told
        return (
            f"{told}\n"
            f"it ends when you log out; to keep it, and to start it with the machine: loginctl enable-linger {user}"
        )


def _systemctl(*arguments: str) -> Command:
    return ["systemctl", "--user", *arguments]


def _literal(text: str) -> str:
    """Escape specifiers: `systemd.unit(5)`."""
    return text.replace("%", "%%")


def _quoted(argument: str) -> str:
    """Quote one argument of a command line: `systemd.service(5)`."""
    escaped = _literal(argument).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"' if any(character.isspace() or character in "\"'\\;" for character in escaped) else escaped


class Launchd:
    """launchd, for one user of macOS: ``~/Library/LaunchAgents/org.farandole.NAME.plist``."""

    def path(self, name: str) -> Path:
        """Return the path of a user's own agent, as in `launchd.plist(5)`."""
        return Path.home() / "Library" / "LaunchAgents" / f"org.farandole.{name}.plist"

    def text(self, service: Service) -> str:
        """Return a property list. launchd does not bound the number of restarts."""
        import plistlib  # its import takes half as long as all of ``--help``

        content: dict[str, Any] = {
            "Label": f"org.farandole.{service.name}",
            "ProgramArguments": list(service.command),
            "WorkingDirectory": str(service.home),
            "EnvironmentVariables": {"PYTHONUNBUFFERED": "1"},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_SECONDS,
            "ExitTimeOut": STOP_SECONDS,
            "StandardOutPath": os.devnull,  # the node's own log has it all, and is bounded
            "StandardErrorPath": str(service.home / "service.log"),
        }
        return plistlib.dumps(content, sort_keys=False).decode()

    def start(self, name: str) -> Sequence[Command]:
        """Start now, and with each login."""
        return [["launchctl", "bootstrap", f"gui/{os.getuid()}", str(self.path(name))]]

    def stop(self, name: str) -> Sequence[Command]:
        """Stop by SIGTERM."""
        return [["launchctl", "bootout", f"gui/{os.getuid()}/org.farandole.{name}"]]

    def hint(self, name: str, user: str) -> str:
        """Explain that an agent runs as long as its user is logged in."""
        return "it runs while you are logged in; its log is in the node's folder"

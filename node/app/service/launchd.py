"""launchd, for one user of macOS: ``~/Library/LaunchAgents/org.farandole.NAME.plist``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .service import RESTART_SECONDS, STOP_SECONDS, Command, Service


class Launchd:
    """`farandole.node.app.service.service.Manager` by ``launchctl``."""

    def path(self, name: str) -> Path:
        """Return the path of a user's own agent, as in `launchd.plist(5)`."""
        return Path.home() / "Library" / "LaunchAgents" / f"{_label(name)}.plist"

    def text(self, service: Service) -> str:
        """Return a property list. launchd bounds neither memory nor cores nor the number of restarts."""
        import plistlib  # its import takes half as long as all of ``--help``

        content: dict[str, Any] = {
            "Label": _label(service.name),
            "ProgramArguments": list(service.command),
            "WorkingDirectory": str(service.home),
            "EnvironmentVariables": {"PYTHONUNBUFFERED": "1"},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_SECONDS,
            "ExitTimeOut": STOP_SECONDS,
            "StandardOutPath": os.devnull,  # the node's own log has it all, and is bounded
            "StandardErrorPath": str(_errors(service.home)),
        }
        return plistlib.dumps(content, sort_keys=False).decode()

    def reload(self) -> Sequence[Command]:
        """Return no command: launchd reads the file at each start."""
        return []

    def start(self, name: str) -> Sequence[Command]:
        """Start now, and with each login."""
        return [["launchctl", "bootstrap", _domain(), str(self.path(name))]]

    def stop(self, name: str) -> Sequence[Command]:
        """Stop by SIGTERM."""
        return [["launchctl", "bootout", f"{_domain()}/{_label(name)}"]]

    def status(self, name: str) -> Command:
        """Print state, process, last exit."""
        return ["launchctl", "print", f"{_domain()}/{_label(name)}"]

    def logs(self, name: str, home: Path, num_lines: int, *, is_followed: bool) -> Command:
        """Print lines of the node's log, and of the file that has the error it ended with."""
        return ["tail", "-n", str(num_lines), *(["-F"] if is_followed else []), str(home / "log"), str(_errors(home))]

    def hint(self, user: str) -> str:
        """Explain that an agent runs as long as its user is logged in."""
        return "it runs while you are logged in"


def _label(name: str) -> str:
    return f"org.farandole.{name}"


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _errors(home: Path) -> Path:
    return home / "service.log"

"""systemd, for one user: ``~/.config/systemd/user/NAME.service``. It needs no rights but the user's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ...base.exits import Exit
from .service import MAX_RESTARTS, RESTART_SECONDS, RESTARTS_WITHIN_SECONDS, STOP_SECONDS, Command, Service

# Exit codes that no restart fixes.
_FINAL: Final = (Exit.USAGE, Exit.BAD_INPUT, Exit.TRAINER_FAILED)
_LINGERING: Final = Path("/var/lib/systemd/linger")


class Systemd:
    """`farandole.node.app.service.service.Manager` by ``systemctl --user``."""

    def path(self, name: str) -> Path:
        """Return the path of a user's own unit, as in `systemd.unit(5)`."""
        folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(folder) / "systemd" / "user" / f"{name}.service"

    def text(self, service: Service) -> str:
        """Return the unit.

        SIGTERM goes to the daemon alone, which ends its trainer after the last save. The daemon also restarts a trainer
        that ran out of memory, so systemd must not end both.
        """
        lines = [
            "[Unit]",
            f"Description=farandole: a node in {_literal(str(service.home))}",
            f"StartLimitIntervalSec={RESTARTS_WITHIN_SECONDS}",
            f"StartLimitBurst={MAX_RESTARTS}",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join(map(_quoted, service.command))}",
            f"WorkingDirectory={_literal(str(service.home))}",
            "Environment=PYTHONUNBUFFERED=1",
            "Restart=on-failure",
            f"RestartSec={RESTART_SECONDS}",
            f"RestartPreventExitStatus={' '.join(str(code.value) for code in _FINAL)}",
            "KillMode=mixed",
            "KillSignal=SIGTERM",
            f"TimeoutStopSec={STOP_SECONDS}",
            "OOMPolicy=continue",
            "NoNewPrivileges=yes",
        ]
        if service.memory_gb:
            lines.append(f"MemoryHigh={round(service.memory_gb * 1024)}M")
        if service.cpu_cores:
            lines.append(f"CPUQuota={round(service.cpu_cores * 100)}%")
        return "\n".join([*lines, "", "[Install]", "WantedBy=default.target", ""])

    def reload(self) -> Sequence[Command]:
        """Return the command that reads all units again."""
        return [_systemctl("daemon-reload")]

    def start(self, name: str) -> Sequence[Command]:
        """Start now, and with the user's first login, or with the machine if the user lingers."""
        return [_systemctl("enable", "--now", f"{name}.service")]

    def stop(self, name: str) -> Sequence[Command]:
        """Stop by SIGTERM, and reset past failures, so that they do not refuse a new start."""
        return [_systemctl("disable", "--now", f"{name}.service"), _systemctl("reset-failed", f"{name}.service")]

    def status(self, name: str) -> Command:
        """Print state, processes, memory, last lines."""
        return _systemctl("--no-pager", "status", f"{name}.service")

    def logs(self, name: str, home: Path, num_lines: int, *, is_followed: bool) -> Command:
        """Print lines of the journal."""
        follow = ["--follow"] if is_followed else []
        return ["journalctl", "--user", "--no-pager", f"--unit={name}.service", f"--lines={num_lines}", *follow]

    def hint(self, user: str) -> str:
        """Explain lingering: a user's services end with the last session, unless an administrator enables lingering."""
        if (_LINGERING / user).exists():
            return ""
        return f"it ends when you log out; to keep it, and to start it with the machine: loginctl enable-linger {user}"


def _systemctl(*arguments: str) -> Command:
    return ["systemctl", "--user", *arguments]


def _literal(text: str) -> str:
    """Escape specifiers: `systemd.unit(5)`."""
    return text.replace("%", "%%")


def _quoted(argument: str) -> str:
    """Quote one argument of a command line: `systemd.service(5)`."""
    escaped = _literal(argument).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"' if any(character.isspace() or character in "\"'\\;" for character in escaped) else escaped

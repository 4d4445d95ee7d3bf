"""``farandole service``: a unit of systemd for a node that starts with the machine and is restarted when it fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from farandole.protocol.wire.errors import FarandoleError

from ...base.config.file import CONFIG_NAME
from ...base.exits import Exit
from .options import ConfigFile, Home
from .output import split_source

# A clean stop takes the rest of the round, a save and a farewell: `farandole leave` waits at most 250 s for them.
STOP_SECONDS: Final = 260
# A crash that repeats at once must not keep the machine busy; after 5 restarts in 15 minutes a person has to look.
RESTART_SECONDS: Final = 5
MAX_RESTARTS: Final = 5
RESTARTS_WITHIN_SECONDS: Final = 900
# Exit codes that no restart fixes.
_FINAL: Final = (Exit.USAGE, Exit.BAD_INPUT, Exit.TRAINER_FAILED)


def service(
    home: Home,
    config: ConfigFile = None,  # type: ignore[assignment]  # its callback returns the path
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="INVITE|MANIFEST", help="As for join; none: the run that this folder knows."),
    ] = None,
    as_relay: Annotated[bool, typer.Option("--as-relay", help="Run farandole relay, not farandole join.")] = False,
) -> None:
    """Print a unit of systemd: it starts the node at each login, and when it fails, and stops it cleanly.

    The service sees neither flags nor variables of this terminal: put settings into the settings file.

    Example: [cyan]farandole service farandole1... > ~/.config/systemd/user/farandole.service[/cyan], then
    [cyan]systemctl --user enable --now farandole[/cyan]
    """
    if sys.platform == "darwin":
        raise FarandoleError("services are for systemd; macOS has launchd: docs/install.md#macos says how")
    home = home.absolute()
    command = [sys.executable, "-m", "farandole.node", "relay" if as_relay else "join", *_sources(sources, as_relay)]
    command += ["--home", str(home)]
    if config.absolute() != home / CONFIG_NAME:
        command += ["--config", str(config.absolute())]
    typer.echo(unit_text(command, home), nl=False)


def unit_text(command: Sequence[str], home: Path) -> str:
    """Return the unit (`systemd.unit(5)`) that keeps ``command`` running; all its paths are absolute.

    SIGTERM goes to the daemon alone, which ends its trainer after the last save. The daemon also restarts a trainer
    that ran out of memory, so systemd must not end both.
    """
    folder = _literal(str(home))
    return f"""\
[Unit]
Description=farandole: a node in {folder}
StartLimitIntervalSec={RESTARTS_WITHIN_SECONDS}
StartLimitBurst={MAX_RESTARTS}

[Service]
Type=exec
ExecStart={" ".join(map(_quoted, command))}
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


def _literal(text: str) -> str:
    """Escape specifiers: `systemd.unit(5)`."""
    return text.replace("%", "%%")


def _quoted(argument: str) -> str:
    """Quote one argument of a command line: `systemd.service(5)`."""
    escaped = _literal(argument).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"' if any(character.isspace() or character in "\"'\\;" for character in escaped) else escaped


def _sources(sources: Sequence[str] | None, as_relay: bool) -> list[str]:
    """Return invites, and a manifest as its absolute path; checked here, where a user sees the error."""
    checked = [split_source(source) for source in sources or []]
    if len(checked) > 1 and not as_relay:
        raise FarandoleError("a node joins one run; a service of another --home joins another")
    if as_relay and any(manifest for _, manifest in checked):
        raise FarandoleError("a relay takes invites; farandole run invite makes one")
    return [invite or str(Path(str(manifest)).absolute()) for invite, manifest in checked]

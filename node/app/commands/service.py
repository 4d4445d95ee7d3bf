"""``farandole service``: a node that starts with the machine and is restarted when it fails, as a unit of systemd.

The unit is the user's own (``~/.config/systemd/user/NAME.service``), and needs no other rights.
"""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from farandole.protocol.wire.errors import FarandoleError

from ...base.config.file import CONFIG_NAME, read_config
from ...base.exits import Exit
from ...base.settings import NodeSettings
from .options import ConfigFile, Home
from .output import split_source

service_app = typer.Typer(help="Run a node as a service of systemd.", no_args_is_help=True)

# A clean stop takes the rest of the round, a save and a farewell: `farandole leave` waits at most 250 s for them.
STOP_SECONDS: Final = 260
# Timeout of a command of systemd; stopping waits until the node has left properly.
_TIMEOUT: Final = STOP_SECONDS + 30.0
# A crash that repeats at once must not keep the machine busy; after 5 restarts in 15 minutes a person has to look.
RESTART_SECONDS: Final = 5
MAX_RESTARTS: Final = 5
RESTARTS_WITHIN_SECONDS: Final = 900
# Exit codes that no restart fixes.
_FINAL: Final = (Exit.USAGE, Exit.BAD_INPUT, Exit.TRAINER_FAILED)
_LINGERING: Final = Path("/var/lib/systemd/linger")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_BUS: Final = (
    "Log in as this user itself (on the desktop or by ssh, not by su or sudo) and try again; where there is no "
    "systemd, as in a container, use farandole join"
)

Name = Annotated[str, typer.Option("--name", help="Name of the service; needed if several nodes run on one machine.")]


class ServiceError(FarandoleError):
    """systemd does not do what it was asked for, or there is none; the message says why."""


@service_app.command("install")
def install_service(
    home: Home,
    config: ConfigFile = None,  # type: ignore[assignment]  # its callback returns the path
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="INVITE|MANIFEST", help="As for join; none: the run that this folder knows."),
    ] = None,
    as_relay: Annotated[bool, typer.Option("--as-relay", help="Run farandole relay, not farandole join.")] = False,
    name: Name = "farandole",
    only_print: Annotated[bool, typer.Option("--print", help="Show what would be written, and do nothing.")] = False,
) -> None:
    """Install a service of systemd: it starts the node now and at each login, and when it fails.

    The service sees neither flags nor variables of this terminal: put settings into the settings file.

    Examples: [cyan]farandole service install farandole1...[/cyan]; [cyan]farandole service install --print[/cyan];
    [cyan]farandole service install --as-relay farandole1... --name relay[/cyan]
    """
    home, path = home.absolute(), unit_path(name)
    command = [sys.executable, "-m", "farandole.node", "relay" if as_relay else "join", *_sources(sources, as_relay)]
    command += ["--home", str(home)]
    if config.absolute() != home / CONFIG_NAME:
        command += ["--config", str(config.absolute())]
    text = unit_text(command, home)
    if only_print:
        typer.echo(f"# {path}", err=True)
        typer.echo(text, nl=False)
        return
    from ...base.identity import make_home

    if not sources:
        _check_run_known(NodeSettings(home=home), config, as_relay)
    make_home(home)
    is_new = not path.exists()
    if not is_new and not is_unit_of(home, path):
        raise ServiceError(f"the service {name} is a node of another folder, see {path}: give this one another --name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror}") from error
    try:
        stop_unit(name)
        _systemctl("daemon-reload")
        _systemctl("enable", "--now", f"{name}.service")
    except ServiceError:
        if is_new:
            path.unlink()
        raise
    typer.echo(
        f"{path} is written, and the node started; systemctl --user status {name} shows its state, "
        f"journalctl --user --unit {name} --follow its output"
    )
    user = getpass.getuser()
    if not (_LINGERING / user).exists():  # a user's services end with the last session, unless the user lingers
        typer.echo(
            f"it ends when you log out; to keep it, and to start it with the machine: loginctl enable-linger {user}"
        )


@service_app.command("uninstall")
def uninstall_service(name: Name = "farandole") -> None:
    """Stop the service cleanly, and remove it; the node's folder stays.

    Example: [cyan]farandole service uninstall[/cyan]
    """
    path = unit_path(name)
    if not path.exists():
        raise ServiceError(f"there is no service {name}: {path} is not there")
    stop_unit(name)
    path.unlink()
    typer.echo(f"{path} is removed")


def units_of(home: Path) -> dict[str, Path]:
    """Return name -> unit of the services that run a node in this folder."""
    units = sorted(_folder().glob("*.service")) if _folder().is_dir() else []
    return {path.stem: path for path in units if is_unit_of(home.absolute(), path)}


def is_unit_of(home: Path, path: Path) -> bool:
    """Return whether a unit runs a node in this folder."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return "farandole.node" in text and f"WorkingDirectory={_literal(str(home))}\n" in text


def unit_path(name: str) -> Path:
    """Return the path of a user's own unit, as in `systemd.unit(5)`. Raises `ServiceError` if it can have none."""
    if sys.platform == "darwin":
        raise ServiceError("services are for systemd; macOS has launchd: docs/install.md#macos says how")
    if not _NAME.fullmatch(name):
        raise ServiceError(f"{name!r} is no name for a service: letters, digits, - and _")
    return _folder() / f"{name}.service"


def _folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def unit_text(command: Sequence[str], home: Path) -> str:
    """Return the unit that keeps ``command`` running in the node's folder; program and paths are absolute.

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
WorkingDirectory={folder}
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


def _check_run_known(settings: NodeSettings, config: Path, as_relay: bool) -> None:
    """Raise `ServiceError` if the node, started without an invite, would not know its run."""
    from ...relay_node import RUNS_FACT
    from ...state.store import MANIFEST_FACT, read_fact

    if config.exists() and {"invite", "manifest"} & read_config(config).keys():
        return
    if not read_fact(settings.store, RUNS_FACT if as_relay else MANIFEST_FACT):
        raise ServiceError(f"which run? {settings.home} knows none: farandole service install farandole1...")


def _sources(sources: Sequence[str] | None, as_relay: bool) -> list[str]:
    """Return invites, and a manifest as its absolute path; checked here, where a user sees the error."""
    checked = [split_source(source) for source in sources or []]
    if len(checked) > 1 and not as_relay:
        raise ServiceError("a node joins one run; a service of another --home joins another")
    if as_relay and any(manifest for _, manifest in checked):
        raise ServiceError("a relay takes invites; farandole run invite makes one")
    return [invite or str(Path(str(manifest)).absolute()) for invite, manifest in checked]


def stop_unit(name: str) -> None:
    """Stop a unit, if there is one, by SIGTERM, and forget its failures, so that they do not refuse a new start."""
    _systemctl("disable", "--now", f"{name}.service", must_succeed=False)
    _systemctl("reset-failed", f"{name}.service", must_succeed=False)


def _systemctl(*arguments: str, must_succeed: bool = True) -> None:
    """Run a command of systemd. Raises `ServiceError` if it cannot run, or fails and ``must_succeed``."""
    command = ["systemctl", "--user", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceError(f"{command[0]}: {error}") from error
    if done.returncode and must_succeed:
        why = done.stderr.strip() or f"exit code {done.returncode}"
        if "connect to bus" in why:
            why += f". {_NO_BUS}"
        raise ServiceError(f"{' '.join(command)}: {why}")

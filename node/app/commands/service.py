"""``farandole service``: a node that starts with the machine and is restarted when it fails."""

from __future__ import annotations

import getpass
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from ...base.config.file import CONFIG_NAME, read_config
from ...base.settings import NodeSettings
from ..service import STOP_SECONDS, Command, Service, ServiceError, manager_here
from .options import ConfigFile, Home
from .output import split_source

service_app = typer.Typer(help="Run a node as a service of systemd, or of launchd on macOS.", no_args_is_help=True)

# Timeout of a manager's command; stopping waits until the node has left properly.
_TIMEOUT: Final = STOP_SECONDS + 30.0

_NO_BUS: Final = (
    "Log in as this user itself (on the desktop or by ssh, not by su or sudo) and try again; where there is no "
    "systemd, as in a container, use farandole join"
)

Name = Annotated[str, typer.Option("--name", help="Name of the service; needed if several nodes run on one machine.")]


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
    """Install a service of systemd (launchd on macOS): it starts the node now and at each login, and when it fails.

    The service sees neither flags nor variables of this terminal: put settings into the settings file.

    Examples: [cyan]farandole service install farandole1...[/cyan]; [cyan]farandole service install --print[/cyan];
    [cyan]farandole service install --as-relay farandole1... --name relay[/cyan]
    """
    home, manager = home.absolute(), manager_here()
    command = [sys.executable, "-m", "farandole.node", "relay" if as_relay else "join", *_sources(sources, as_relay)]
    command += ["--home", str(home)]
    if config.absolute() != home / CONFIG_NAME:
        command += ["--config", str(config.absolute())]
    service = Service(name, command, home)
    path = manager.path(name)
    if only_print:
        typer.echo(f"# {path}", err=True)
        typer.echo(manager.text(service), nl=False)
        return
    from ...base.identity import make_home

    if not sources:
        _check_run_known(NodeSettings(home=home), config, as_relay)
    make_home(home)
    is_new = not path.exists()
    folder = str(home)
    if not is_new and folder in manager.text(service) and folder not in path.read_text(encoding="utf-8"):
        raise ServiceError(f"the service {name} is a node of another folder, see {path}: give this one another --name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(manager.text(service), encoding="utf-8")
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror}") from error
    try:
        run_commands(manager.stop(name), must_succeed=False)
        run_commands(manager.start(name))
    except ServiceError:
        if is_new:
            path.unlink()
        raise
    typer.echo(f"{path} is written, and the node started; {manager.hint(name, getpass.getuser())}")


@service_app.command("uninstall")
def uninstall_service(name: Name = "farandole") -> None:
    """Stop the service cleanly, and remove it; the node's folder stays.

    Example: [cyan]farandole service uninstall[/cyan]
    """
    manager = manager_here()
    path = manager.path(name)
    if not path.exists():
        raise ServiceError(f"there is no service {name}: {path} is not there")
    run_commands(manager.stop(name), must_succeed=False)
    path.unlink()
    typer.echo(f"{path} is removed")


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


def run_commands(commands: Sequence[Command], *, must_succeed: bool = True) -> None:
    """Run a service manager's commands. Raises `ServiceError` if one cannot run, or fails and ``must_succeed``."""
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServiceError(f"{command[0]}: {error}") from error
        if done.returncode and must_succeed:
            why = done.stderr.strip() or f"exit code {done.returncode}"
            if "connect to bus" in why:
                why += f". {_NO_BUS}"
            raise ServiceError(f"{' '.join(command)}: {why}")

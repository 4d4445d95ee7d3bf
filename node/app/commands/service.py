"""``farandole service``: a node that starts with the machine and is restarted when it fails."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from ...base.config.file import CONFIG_NAME, read_config
from ...base.exits import Exit
from ...base.interrupts import interruptible
from ...base.settings import NodeSettings
from ..service.launchd import Launchd
from ..service.service import STOP_SECONDS, Command, Manager, Service, ServiceError
from ..service.systemd import Systemd
from .options import Home, takes_settings
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
@takes_settings("memory_gb", "cpu_cores")
def install_service(
    settings: NodeSettings,
    config: Path,
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
    home, manager = settings.home.absolute(), manager_here()
    command = [sys.executable, "-m", "farandole.node", "relay" if as_relay else "join", *_sources(sources, as_relay)]
    command += ["--home", str(home)]
    if config.absolute() != home / CONFIG_NAME:
        command += ["--config", str(config.absolute())]
    service = Service(name, command, home, settings.memory_gb, settings.cpu_cores)
    path = manager.path(name)
    if only_print:
        typer.echo(f"# {path}", err=True)
        typer.echo(manager.text(service), nl=False)
        return
    from ...base.identity import make_home

    if not sources:
        _check_run_known(settings, config, as_relay)
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
        _restart(manager, name)
    except ServiceError:
        if is_new:
            path.unlink()
        raise
    typer.echo(f"{path} is written, and the node started; farandole service logs shows what it says")
    if hint := manager.hint(getpass.getuser()):
        typer.echo(hint)


@service_app.command("uninstall")
def uninstall_service(name: Name = "farandole") -> None:
    """Stop the service cleanly, and remove it; the node's folder stays.

    Example: [cyan]farandole service uninstall[/cyan]
    """
    manager = manager_here()
    path = _installed(manager, name)
    run_commands(manager.stop(name), must_succeed=False)
    path.unlink()
    run_commands(manager.reload())
    typer.echo(f"{path} is removed")


@service_app.command("restart")
def restart_service(name: Name = "farandole") -> None:
    """Stop the service cleanly if it runs, and start it again as it was installed.

    To upgrade, run farandole leave, install the new version, then this.

    Example: [cyan]farandole service restart[/cyan]
    """
    manager = manager_here()
    _installed(manager, name)
    _restart(manager, name)
    typer.echo("the node has started; farandole service logs shows what it says")


@service_app.command("status")
def service_status(name: Name = "farandole") -> None:
    """Show the service's state, from the service manager; exit code 4 if it does not run.

    Example: [cyan]farandole service status[/cyan]
    """
    if not _show(manager_here().status(name)):
        raise typer.Exit(Exit.OK)
    if sys.platform == "linux" and not os.environ.get("XDG_RUNTIME_DIR"):  # systemctl finds the user's manager there
        typer.echo(_NO_BUS, err=True)
    raise typer.Exit(Exit.NO_NODE)


@service_app.command("logs")
def service_logs(
    home: Home,
    name: Name = "farandole",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Number of lines to print.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")] = False,
) -> None:
    """Print the log of the service's node.

    Example: [cyan]farandole service logs --follow[/cyan]
    """
    with interruptible():
        _show(manager_here().logs(name, home.absolute(), lines, is_followed=follow))


def _check_run_known(settings: NodeSettings, config: Path, as_relay: bool) -> None:
    """Raise `ServiceError` if the node, started without an invite, would not know its run."""
    from ...relay_node import RUNS_FACT
    from ...state.store import MANIFEST_FACT, read_fact

    if config.exists() and {"invite", "manifest"} & read_config(config).keys():
        return
    if not read_fact(settings.store, RUNS_FACT if as_relay else MANIFEST_FACT):
        raise ServiceError(f"which run? {settings.home} knows none: farandole service install farandole1...")


def _installed(manager: Manager, name: str) -> Path:
    """Return the path of the service file. Raises `ServiceError` if it does not exist."""
    path = manager.path(name)
    if not path.exists():
        raise ServiceError(f"there is no service {name}: {path} is not there")
    return path


def _restart(manager: Manager, name: str) -> None:
    """Stop the service if it runs, and start it from its file. Raises `ServiceError` if it does not start."""
    run_commands(manager.stop(name), must_succeed=False)
    run_commands([*manager.reload(), *manager.start(name)])


def manager_here() -> Manager:
    """Return the service manager of this kind of machine. Raises `ServiceError` if farandole knows none."""
    if sys.platform == "darwin":
        return Launchd()
    if sys.platform == "linux":
        return Systemd()
    raise ServiceError("no service manager is known for this machine: run farandole join from one of your own")


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


def _show(command: Command) -> int:
    """Run a command with its output on the terminal; return its exit code."""
    try:
        return subprocess.call(command)
    except OSError as error:
        raise ServiceError(f"{command[0]}: {error.strerror}") from error

"""``farandole uninstall``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from farandole.protocol.wire.errors import FarandoleError

from ...base.exits import Exit
from ..service import manager_here
from .options import Home
from .service import run_commands

INSTALL_MARK: Final = "farandole-install"
"""The file by which `make install` marks an environment that it made."""


def uninstall(
    home: Home,
    keep_identity: Annotated[
        bool, typer.Option("--keep-identity", help="Keep the key and the settings: a later node is the same member.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove what farandole has left on this machine: the node's data, logs, cached text, and its services.

    It lists them and asks first, and refuses while a node runs. Files that no node made stay, also in the node's
    folder. The program itself stays: the last line says how to remove it.

    Examples: [cyan]farandole uninstall[/cyan]; [cyan]farandole uninstall --keep-identity --yes[/cyan]
    """
    from ...base.identity import IdentityInUseError, locked
    from ..belongings import IDENTITY, PATTERNS, belongings_of, homes_in

    homes, services = homes_in(home), _services_of(home)
    kinds = [what for what in PATTERNS if not (keep_identity and what in IDENTITY)]
    if not homes and not services:
        typer.echo(f"{home} has no node's data, and no service of it is installed")
        typer.echo(_how_to_remove_the_program())
        return
    try:
        with contextlib.ExitStack() as held:
            for each in homes:
                held.enter_context(locked(each / "lock"))
            found = [belongings_of(each) for each in homes]
            for belongings in found:
                typer.echo(f"{belongings.home}:")
                for what in belongings.files:
                    size = f"{belongings.num_bytes(what) / 1e6:,.1f} MB"
                    typer.echo(f"  {what:<24}{size:>12}{'' if what in kinds else '  (stays)'}")
                for path in belongings.others:
                    typer.echo(f"  {path}: not made by a node; stays")
            for path in services.values():
                typer.echo(f"service: {path}")
            if not yes:
                question = "Remove these? The key cannot be made again" if "identity" in kinds else "Remove these?"
                _confirm(question)
            _remove_services(services)
            try:
                for belongings in found:
                    belongings.remove(kinds)
                with contextlib.suppress(OSError):
                    (home / "runs").rmdir()
                    home.rmdir()
            except OSError as error:
                raise FarandoleError(f"cannot remove {error.filename}: {error.strerror}") from error
    except IdentityInUseError as error:
        typer.secho(f"error: {error}; a service's node: farandole service uninstall", fg=typer.colors.RED, err=True)
        raise typer.Exit(Exit.HOME_IN_USE) from error
    typer.echo("removed" if not keep_identity else f"removed; the key and the settings are in {home}")
    typer.echo(_how_to_remove_the_program())


def _confirm(question: str) -> None:
    """Ask at the terminal. Raises `typer.Exit` if the answer is no, or if there is no answer."""
    with contextlib.suppress(typer.Abort):
        if typer.confirm(question):
            return
    typer.echo("nothing is removed")
    raise typer.Exit(Exit.INTERRUPTED)


def _services_of(home: Path) -> dict[str, Path]:
    """Return name -> file of the services that `farandole service install` wrote for this folder."""
    manager, found = manager_here(), {}
    pattern = manager.path("*")
    for path in sorted(pattern.parent.glob(pattern.name)) if pattern.parent.is_dir() else ():
        name = path.name.removeprefix(pattern.name.partition("*")[0]).removesuffix(pattern.suffix)
        if _is_ours(path, home.absolute()):
            found[name] = path
    return found


def _is_ours(path: Path, home: Path) -> bool:
    """Return whether a service file runs a node in this folder."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    directory = str(home)
    named = (f"WorkingDirectory={directory.replace('%', '%%')}\n", f"<string>{directory}</string>")
    return "farandole.node" in text and any(line in text for line in named)


def _remove_services(services: dict[str, Path]) -> None:
    manager = manager_here()
    for name, path in services.items():
        run_commands(manager.stop(name), must_succeed=False)
        path.unlink(missing_ok=True)


def _how_to_remove_the_program() -> str:
    """Return the command that removes this program, by the way in which it was installed."""
    prefix = Path(sys.prefix)
    if (prefix / INSTALL_MARK).is_file():
        return f"to remove the program: rm -r {prefix}"
    for receipt, installer in (("uv-receipt.toml", "uv tool"), ("pipx_metadata.json", "pipx")):
        if (prefix / receipt).is_file():
            return f"to remove the program: {installer} uninstall farandole"
    return f"to remove the program: {sys.executable} -m pip uninstall farandole"

"""``farandole uninstall``: the files that nodes leave on a machine, by name, and their removal.

The names are patterns, and not the whole folder, since a user may point ``--home`` at a folder with other files, or put
files of their own into a node's. A link is never followed, and never counts as made by a node.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from farandole.protocol.wire.errors import FarandoleError

from ...base.exits import Exit
from .options import Home

INSTALL_MARK: Final = "farandole-install"
"""The file by which `make install` marks an environment that it made."""
# What -> patterns below a node's folder. The lock is the last: it is held during the removal.
PATTERNS: Final[dict[str, Sequence[str]]] = {
    "checkpoints": (
        *("checkpoints/stage-*", "checkpoints/.stage-*", "checkpoints/copy-*", "checkpoints/replays"),
        *("fetched*.safetensors*", "start/*.safetensors*", "start/checkpoint.index"),
        *("start/manifest", "start/epochs.json"),
    ),
    "tokenised text (cache)": ("tokens/*.tokens", "tokens/.*.tokens.*.tmp"),
    "logs": (
        *("log", "log.*", "rounds.jsonl", "rounds.jsonl.*", "service.log", "output"),
        *("reports/*.json", "reports/*.lock", "reports/.*.json.*.tmp"),
    ),
    "run state": ("store.sqlite", "store.sqlite-*", "store.sqlite.*", "dashboard.json", "clock", "started-by-loop"),
    "sockets": ("control.sock", "trainer.sock", "programs.sock"),
    "settings": ("config.toml",),
    "identity": ("key", "key.*.new"),
    "lock": ("lock",),
}
IDENTITY: Final = ("identity", "settings")
"""What ``--keep-identity`` keeps: with both, a later installation is the same member with the same limits."""
_FOLDERS: Final = ("checkpoints", "tokens", "start", "reports")


def uninstall(
    home: Home,
    keep_identity: Annotated[
        bool, typer.Option("--keep-identity", help="Keep the key and the settings: a later node is the same member.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove what farandole has left on this machine: the node's data, logs and cached text.

    It lists them and asks first, and refuses while a node runs. Files that no node made stay, also in the node's
    folder. The program itself stays: the last line says how to remove it.

    Examples: [cyan]farandole uninstall[/cyan]; [cyan]farandole uninstall --keep-identity --yes[/cyan]
    """
    from ...base.identity import IdentityInUseError, locked

    homes = homes_in(home)
    kinds = [what for what in PATTERNS if not (keep_identity and what in IDENTITY)]
    if not homes:
        typer.echo(f"{home} has no node's data")
        typer.echo(_how_to_remove_the_program())
        return
    try:
        with contextlib.ExitStack() as held:
            for each in homes:
                held.enter_context(locked(each / "lock"))
            found = {each: made_in(each) for each in homes}
            for each, made in found.items():
                typer.echo(f"{each}:")
                for what, paths in made.items():
                    size = f"{sum(map(_num_bytes, paths)) / 1e6:,.1f} MB"
                    typer.echo(f"  {what:<24}{size:>12}{'' if what in kinds else '  (stays)'}")
                for path in foreign_in(each):
                    typer.echo(f"  {path}: not made by a node; stays")
            if not yes:
                question = "Remove these? The key cannot be made again" if "identity" in kinds else "Remove these?"
                is_wanted = False
                with contextlib.suppress(typer.Abort):  # there is no answer
                    is_wanted = typer.confirm(question)
                if not is_wanted:
                    typer.echo("nothing is removed")
                    raise typer.Exit(Exit.INTERRUPTED)
            try:
                for each, made in found.items():
                    for path in (path for what in kinds for path in made.get(what, ())):
                        if path.is_dir():
                            shutil.rmtree(path)
                        else:
                            path.unlink(missing_ok=True)
                    for folder in (*(each / name for name in _FOLDERS), each):
                        with contextlib.suppress(OSError):  # not there, or not empty: then that is not a node's
                            folder.rmdir()
                with contextlib.suppress(OSError):
                    (home / "runs").rmdir()
                    home.rmdir()
            except OSError as error:
                raise FarandoleError(f"cannot remove {error.filename}: {error.strerror}") from error
    except IdentityInUseError as error:
        typer.secho(
            f"error: {error}; a service's: systemctl --user disable --now farandole", fg=typer.colors.RED, err=True
        )
        raise typer.Exit(Exit.HOME_IN_USE) from error
    typer.echo("removed" if not keep_identity else f"removed; the key and the settings are in {home}")
    typer.echo(_how_to_remove_the_program())


def _how_to_remove_the_program() -> str:
    """Return the command that removes this program, by the way in which it was installed."""
    prefix = Path(sys.prefix)
    if (prefix / INSTALL_MARK).is_file():
        return f"to remove the program: rm -r {prefix}"
    for receipt, installer in (("uv-receipt.toml", "uv tool"), ("pipx_metadata.json", "pipx")):
        if (prefix / receipt).is_file():
            return f"to remove the program: {installer} uninstall farandole"
    return f"to remove the program: {sys.executable} -m pip uninstall farandole"


def made_in(home: Path) -> dict[str, list[Path]]:
    """Return what (a key of `PATTERNS`) -> files and folders that a node made; without what it does not have."""
    from ...base.system.sockets import socket_path

    made = {}
    for what, patterns in PATTERNS.items():
        found = {path for each in patterns if not (home / each).parent.is_symlink() for path in home.glob(each)}
        if what == "sockets":  # they are elsewhere if this folder's path is too long for one
            found |= {path for name in patterns if (path := socket_path(home / name)).exists()}
        if paths := sorted(path for path in found if not path.is_symlink()):
            made[what] = paths
    return made


def foreign_in(home: Path) -> list[Path]:
    """Return the files that no node made; they stay."""
    made = {path for paths in made_in(home).values() for path in paths}
    folders = (folder for folder in (home, *(home / name for name in _FOLDERS)) if folder.is_dir())
    inside = [path for folder in folders for path in sorted(folder.iterdir())]
    return [path for path in inside if path not in made and path.name not in (*_FOLDERS, "runs")]


def _num_bytes(path: Path) -> int:
    """Return the size of a file, or of a folder's files; those that vanish count 0."""
    total = 0
    for each in path.rglob("*") if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            total += 0 if each.is_dir() else each.lstat().st_size
    return total


def homes_in(home: Path) -> list[Path]:
    """Return the node's folders at ``home``: those that a loop of one's own has made in it (``runs/``), and itself.

    A folder without a node's store or key is none, whatever its name.
    """
    inner = sorted((home / "runs").iterdir()) if (home / "runs").is_dir() else []
    return [
        each
        for each in (*inner, home)
        if not each.is_symlink() and any((each / name).is_file() for name in ("store.sqlite", "key"))
    ]

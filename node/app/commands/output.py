"""Common parts of commands: JSON output, a node's status, a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from farandole.protocol.wire.errors import ManifestError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from farandole.protocol.run.manifest import Manifest, SignedManifest

    from ...status.status import NodeStatus
    from ...transfers.receiver import FetchProgress


def print_json(value: object) -> None:
    """Print readable JSON on standard output; values without a JSON type, such as paths, become strings."""
    typer.echo(json.dumps(value, indent=2, default=str))


def say_chosen(written: Manifest, completed: Manifest, given: Collection[str]) -> None:
    """Print, on standard error, what was chosen for settings that the run file leaves open, and why."""
    from farandole.protocol.planning.planning import choices

    from ...base.requirements import settings_with_reasons

    if chosen := choices(written, completed, given):
        typer.echo("note: the run file leaves these open; chosen by measurements, for lines of 20 Mbit/s:", err=True)
        for line in settings_with_reasons(chosen):
            typer.echo(f"  {line}", err=True)


def say_warnings(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, so that scripts do not read them as results."""
    for warning in warnings:
        typer.secho(f"warning: {warning}", fg=typer.colors.YELLOW, err=True)


def print_answer(as_json: bool, value: object, text: str) -> None:
    """Print ``value`` as JSON, for scripts, or ``text``, for users."""
    print_json(value) if as_json else typer.echo(text)


def call_node(home: Path, method: str, **parameters: Any) -> Any:
    """Call `farandole.node.base.control.call`, whose imports ``--help`` does not need."""
    from ...base.control import call

    return call(home, method, **parameters)


def node_status(home: Path) -> NodeStatus:
    """Return the status of the node that runs in this home folder; raise `NoNodeError` if none does."""
    import msgspec

    from ...status.status import NodeStatus

    return msgspec.convert(call_node(home, "status"), NodeStatus)


def read_manifest(path: Path) -> tuple[Manifest, SignedManifest]:
    """Read and check a manifest file; raise `ManifestError` if it cannot be read or is not valid."""
    from farandole.protocol.run.manifest import decode_manifest

    if path.suffix == ".toml":
        raise ManifestError(f"{path} is a run file, not a manifest: sign it first, with `farandole run create {path}`")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path} is no invite, and no manifest that can be read: {error.strerror}") from error
    return decode_manifest(raw)


def write_manifest(
    path: Path,
    signed: SignedManifest,
    home: Path,
    as_json: bool,
    *,
    start: Path | None = None,
    is_started: bool = False,
) -> None:
    """Write a manifest file; print it, how the run's first node starts unless it ``is_started`` now, and warnings.

    ``home``: whose key has signed it; ``start``: the folder of the weights that the run starts from. Raises
    `ManifestError`.
    """
    from farandole.protocol.run.manifest import decode_body, decode_manifest
    from farandole.protocol.run.own_model import ADAPTERS

    from ...base.requirements import doubtful_settings, unusual_needs
    from ...base.settings import NodeSettings, default_home
    from ...state.store import MANIFEST_FACT, read_fact

    manifest = decode_body(signed.body)
    warnings = [*unusual_needs(manifest), *doubtful_settings(manifest)]
    if known := read_fact(NodeSettings(home=home).store, MANIFEST_FACT):
        warnings.append(
            f"{home} belongs to run {decode_manifest(known)[1].run_id.hex()[:16]}, so its node cannot join "
            "this one: sign it with a new data directory, --home NEW, and join with the same"
        )
    say_warnings(warnings)
    try:
        path.write_bytes(signed.encode())
    except OSError as error:
        raise ManifestError(f"cannot write {path}: {error.strerror}") from error
    options = "" if start is None else f" --start {start}"
    if manifest.model.external:
        options += " --trainer external"
    else:
        if (own := manifest.model.own) is not None:
            options += " --base FOLDER" if own.function == ADAPTERS else f" --allow-model {own.function}"
        options += " --data PATH" if manifest.data.source == "text" else ""
        options += " --tokenizer FILE" if manifest.tokenizer.sha256 and " --base" not in options else ""
    options += "" if home == default_home() else f" --home {home}"
    run_id = signed.run_id.hex()
    made: dict[str, object] = {"run_id": run_id, "manifest": str(path), "warnings": warnings}
    made |= {} if start is None else {"start": str(start)}
    text = f"run {run_id}\nmanifest in {path}"
    text += "" if is_started else f"; start its first node with: farandole join {path}{options}"
    print_answer(as_json, made, text)


def unquoted(text: str) -> str:
    """Return a pasted line without the quotes or brackets around it."""
    return text.strip().strip("\"'`<>()[]“”‘’«»‹›").strip()


def split_source(source: str | None) -> tuple[str | None, Path | None]:
    """Return the argument of ``join`` as an invite or a manifest file, checked here so that a mistake shows at once."""
    from farandole.protocol.run.invite import decode_invite, is_invite

    if not (source := unquoted(source or "")):  # compose.yaml passes an empty one
        return None, None
    if is_invite(source) and not os.path.exists(source):
        decode_invite(source)
        return source, None
    path = Path(source)
    read_manifest(path)
    return None, path


@contextmanager
def open_progress() -> Iterator[tuple[Callable[[str], None], Callable[[str, FetchProgress], None]]]:
    """Yield two functions for standard error, to use in the block: print a line, show a named download's progress."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[how]}"))
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as progress:

        def show(name: str, fetch: FetchProgress) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, how="")
            progress.update(bars[name], total=fetch.total or None, completed=fetch.num_bytes, how=str(fetch))

        yield lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False), show

"""What several commands do for a caller: JSON, a node's status, a manifest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from farandole.protocol.errors import ManifestError

if TYPE_CHECKING:
    from farandole.protocol.manifest import Manifest, SignedManifest

    from ...status.status import NodeStatus


def print_json(value: object) -> None:
    """Readable JSON on standard output."""
    typer.echo(json.dumps(value, indent=2))


def node_status(home: Path) -> NodeStatus:
    """What the node that runs in this home folder says of itself; `NoNodeError` if none does."""
    import msgspec

    from ...base.control import call
    from ...status.status import NodeStatus

    return msgspec.convert(call(home, "status"), NodeStatus)


def read_manifest(path: Path) -> tuple[Manifest, SignedManifest]:
    """A manifest file, checked; `ManifestError` if it cannot be read or is not valid."""
    from farandole.protocol.manifest import decode_manifest

    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path} is no invite, and no manifest that can be read: {error.strerror}") from error
    return decode_manifest(raw)


def split_source(source: str | None) -> tuple[str | None, Path | None]:
    """What was given to ``join``: an invite, checked here so that a slip is told at once, or a manifest file."""
    from farandole.protocol.invite import decode_invite, is_invite

    if source is None:
        return None, None
    if is_invite(source) and not os.path.exists(source):
        decode_invite(source)
        return source, None
    path = Path(source)
    read_manifest(path)
    return None, path

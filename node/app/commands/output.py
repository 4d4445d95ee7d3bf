"""What several commands do for a caller: JSON, a node's status, an invite, a manifest."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from farandole.protocol.errors import ManifestError

if TYPE_CHECKING:
    from farandole.protocol.manifest import Manifest, SignedManifest

    from ...status.status import NodeStatus


# An invite to a run of invited members is good for a week if nothing else is said.
INVITE_SECONDS = 7 * 86_400.0


def print_json(value: object) -> None:
    """Readable JSON on standard output; what JSON has no type for, such as a path, as a string."""
    typer.echo(json.dumps(value, indent=2, default=str))


def print_answer(as_json: bool, value: object, text: str) -> None:
    """Print ``value`` as JSON, for scripts, or ``text``, for people."""
    print_json(value) if as_json else typer.echo(text)


def node_status(home: Path) -> NodeStatus:
    """What the node that runs in this home folder says of itself; `NoNodeError` if none does."""
    import msgspec

    from ...base.control import call
    from ...status.status import NodeStatus

    return msgspec.convert(call(home, "status"), NodeStatus)


def own_invite(
    home: Path,
    addresses: Sequence[str] | None = None,
    *,
    uses: int = 1,
    seconds: float = INVITE_SECONDS,
    quota: int = 0,
) -> str:
    """An invite to the run of the node that runs here, by its own addresses if none are given.

    If the run is for invited members, it is for ``uses`` of them, who have ``seconds`` to join, and each of whom may
    invite ``quota`` others. Raises `NoNodeError` if no node runs, `ControlError` if it may not invite, and
    `ManifestError` while it has not found its run.
    """
    from ...base.control import call

    node = _running_node(home)
    secret = bytes.fromhex(call(home, "invite", uses=uses, expires_at=time.time() + seconds, quota=quota))
    return _encode_invite(home, node, addresses, secret)


def visit_invite(home: Path) -> str:
    """An invite for a command of this machine, to the run of the node that runs here: it admits no other.

    The home's key signs for the command (`farandole.protocol.invitations.VisitorPass`). Raises as `own_invite`.
    """
    return _encode_invite(home, _running_node(home), None, b"")


def _running_node(home: Path) -> NodeStatus:
    status = node_status(home)
    if not status.run.run_id:
        raise ManifestError("the node has not found its run yet; `farandole status` says what it waits for")
    return status


def _encode_invite(home: Path, node: NodeStatus, addresses: Sequence[str] | None, secret: bytes) -> str:
    from farandole.protocol.invite import Invite, encode_invite

    from ...base.control import call
    from ...join.invite_addresses import choose_bootstrap_addresses

    run_id, network_key = bytes.fromhex(node.run.run_id), bytes.fromhex(call(home, "network_key"))
    return encode_invite(Invite(run_id, tuple(addresses or choose_bootstrap_addresses(node)), secret, network_key))


def read_manifest(path: Path) -> tuple[Manifest, SignedManifest]:
    """A manifest file, checked; `ManifestError` if it cannot be read or is not valid."""
    from farandole.protocol.manifest import decode_manifest

    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path} is no invite, and no manifest that can be read: {error.strerror}") from error
    return decode_manifest(raw)


def write_manifest(path: Path, signed: SignedManifest) -> None:
    """Write a manifest file; `ManifestError` if that cannot be done."""
    try:
        path.write_bytes(signed.encode())
    except OSError as error:
        raise ManifestError(f"cannot write {path}: {error.strerror}") from error


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

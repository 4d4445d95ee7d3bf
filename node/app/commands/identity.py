"""``farandole id``."""

from __future__ import annotations

from .options import AsJson, Home
from .output import print_answer


def show_id(home: Home, as_json: AsJson = False) -> None:
    """Print this node's peer id; its key is made on first use.

    Example: [cyan]farandole id[/cyan]
    """
    from farandole.protocol.wire.identity import peer_id_of, public_bytes

    from ...base.identity import load_or_create_key

    public_key = public_bytes(load_or_create_key(home / "key"))
    peer_id = peer_id_of(public_key)
    print_answer(as_json, {"peer_id": peer_id, "public_key": public_key.hex(), "home": str(home)}, peer_id)

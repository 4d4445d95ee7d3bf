"""Peers by the library's names, and back."""

from __future__ import annotations

from libp2p.peer.id import ID

from farandole.protocol.identity import peer_id_bytes, public_key_of_bytes


def id_of(peer: bytes) -> ID:
    """The library's name for a peer."""
    return ID(peer_id_bytes(peer))


def peer_of(peer_id: ID) -> bytes:
    """A peer by the library's name; `RemoteProtocolError` if its key is not Ed25519."""
    return public_key_of_bytes(peer_id.to_bytes())

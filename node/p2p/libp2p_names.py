"""Peers by the library's names, and back."""

from __future__ import annotations

from libp2p.peer.id import ID

from farandole.protocol.identity import peer_id_of, public_key_of


def id_of(peer: bytes) -> ID:
    """The library's name for a peer."""
    return ID.from_base58(peer_id_of(peer))


def peer_of(peer_id: ID) -> bytes:
    """A peer by the library's name; `RemoteProtocolError` if its key is not Ed25519."""
    return public_key_of(peer_id.to_base58())

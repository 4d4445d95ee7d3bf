"""Peers that dial this node while it dials them (`farandole.node.mesh.reach.punching`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Rendezvous:
    """The peers that we expect, and their IP addresses."""

    def __init__(self) -> None:
        self._expected: dict[bytes, frozenset[str]] = {}

    @contextmanager
    def expecting(self, peer: bytes, ips: Iterable[str]) -> Iterator[None]:
        """Expect a simultaneous dial of a peer; begin the handshake for it if it comes from these IPs and waits."""
        self._expected[peer] = frozenset(ips)
        try:
            yield
        finally:
            del self._expected[peer]

    def expected_at(self, remote: tuple[str, int] | None) -> bytes | None:
        """Return the peer that meets us from an address; for it we act as the end that dialled."""
        if remote is None:
            return None
        return next((peer for peer, ips in self._expected.items() if remote[0] in ips), None)

    def is_met(self, peer: bytes) -> bool:
        """Return whether we and a peer are dialling each other at once."""
        return peer in self._expected

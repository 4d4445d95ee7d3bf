"""Peers that this node and they dial at the same time (`farandole.node.mesh.reach.punching`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Rendezvous:
    """Whom we expect, and from where."""

    def __init__(self) -> None:
        self._expected: dict[bytes, frozenset[str]] = {}

    @contextmanager
    def expecting(self, peer: bytes, ips: Iterable[str]) -> Iterator[None]:
        """We and a peer dial each other at once; we begin for who comes from these IP addresses and does not."""
        self._expected[peer] = frozenset(ips)
        try:
            yield
        finally:
            del self._expected[peer]

    def expected_at(self, remote: tuple[str, int] | None) -> bytes | None:
        """The peer that meets us from an address, for which we are then the end that dialled."""
        if remote is None:
            return None
        return next((peer for peer, ips in self._expected.items() if remote[0] in ips), None)

    def is_met(self, peer: bytes) -> bool:
        """Whether we and a peer are dialling each other at once."""
        return peer in self._expected

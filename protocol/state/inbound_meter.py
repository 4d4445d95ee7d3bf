"""Limits on the valid gossip that a peer may send: more than any honest peer sends is a fault.

An honest peer's worst case sets the bounds. In a run of 1,000 it forwards 33 heartbeats and up to 50 other entries a
second, in two messages of items and two of ids; a link that stalls holds up a minute of that, which then arrives at
once. Whatever floods in, it forwards at most `farandole.protocol.state.push.MAX_ITEMS_A_TICK` a tick, so a flood from
others never makes an honest peer a flooder.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..wire.errors import FloodError
from ..wire.token_bucket import PeerMeters


@dataclass(frozen=True, slots=True)
class InboundLimit:
    """A limit on what one peer may send at once (``burst``) and per second (``rate``)."""

    what: str
    burst: float
    rate: float


MESSAGES = InboundLimit("messages", burst=512, rate=20)
"""An honest peer sends a batch and ids a tick, four messages a second, or 14 if its entries have the largest size; a
stall of a minute holds up 240 of them. A message costs 50 us before its entries are looked at."""
BYTES = InboundLimit("bytes", burst=4 * 1024 * 1024, rate=256 * 1024)
"""The burst is what an honest peer queues for another (`farandole.node.state.messenger`). The rate is more than
`MAX_ITEMS_A_TICK` of the longest entries."""
ITEMS = InboundLimit("entries", burst=6_000, rate=400)
"""A stall of a minute, 80 a second; and half more than `MAX_ITEMS_A_TICK` allows an honest peer. An entry costs 0.1 ms
if it is new, so a peer costs 4 % of a core in the long run."""


class InboundMeter:
    """Counts what each peer sends without being asked. ``now``: monotonic seconds."""

    def __init__(self) -> None:
        self._meters = {limit: PeerMeters(limit.burst, limit.rate) for limit in (MESSAGES, BYTES, ITEMS)}

    def count_bytes(self, peer: bytes, num_bytes: int, now: float, num_messages: int = 1) -> None:
        """Count bytes before they are parsed. Raises `FloodError` if they are more than an honest peer sends."""
        self._count(MESSAGES, peer, num_messages, now)
        self._count(BYTES, peer, num_bytes, now)

    def count_items(self, peer: bytes, num_items: int, now: float) -> None:
        """Count items before they are verified. Raises `FloodError` as `count_bytes` does."""
        self._count(ITEMS, peer, num_items, now)

    def _count(self, limit: InboundLimit, peer: bytes, count: int, now: float) -> None:
        if not self._meters[limit].of(peer, now).take(now, count):
            raise FloodError(f"more than {limit.burst:,.0f} {limit.what} at once, or {limit.rate:,.0f} a second")

"""The valid gossip that a peer may send: more than honest peers send, less than a flood."""

from __future__ import annotations

import pytest

from farandole.protocol.state.gossip import INBOUND_LIMITS, InboundMeter
from farandole.protocol.state.push import MAX_ITEMS_A_TICK, TICK_SECONDS
from farandole.protocol.wire.errors import FloodError

PEER, OTHER = b"p" * 32, b"o" * 32
HEARTBEAT_BYTES = 130


def test_an_honest_peer_never_reaches_the_limits() -> None:
    """The most that a peer forwards, at the pace of its fastest ticks, for an hour; then a minute's worth at once."""
    meter, now = InboundMeter(), 0.0
    for _ in range(3_600):
        now += 0.75 * TICK_SECONDS
        meter.count(PEER, now, messages=2, bytes=MAX_ITEMS_A_TICK * HEARTBEAT_BYTES, entries=MAX_ITEMS_A_TICK)
    now += 60.0
    for _ in range(120):
        meter.count(PEER, now, messages=1, bytes=40 * HEARTBEAT_BYTES, entries=40)


@pytest.mark.parametrize("num_items", [0, 1, 20])
def test_a_flood_is_noticed_within_a_second_whatever_is_in_it(num_items: int) -> None:
    meter, now = InboundMeter(), 0.0
    with pytest.raises(FloodError):
        while now < 1.0:
            now += 1e-4
            meter.count(PEER, now, messages=1, bytes=20 + num_items * HEARTBEAT_BYTES, entries=num_items)
    meter.count(OTHER, now, messages=1, bytes=1_000, entries=8)


def test_large_messages_are_a_flood_too() -> None:
    meter = InboundMeter()
    with pytest.raises(FloodError, match="bytes"):
        for _ in range(int(INBOUND_LIMITS["messages"][0])):
            meter.count(PEER, 0.0, messages=1, bytes=16_000)
    with pytest.raises(FloodError, match="entries"):
        for _ in range(int(INBOUND_LIMITS["entries"][0])):
            meter.count(PEER, 0.0, entries=100)

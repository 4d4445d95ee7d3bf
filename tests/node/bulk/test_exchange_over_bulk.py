"""Exchanges whose contributions go over a bulk channel, which may break."""

from __future__ import annotations

import itertools

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.bulk.exchange_service import ROUTE_UNTIL, SILENT_FOR
from farandole.node.bulk.pipe import SILENT_CHECKS, Outgoing
from farandole.protocol.exchange.pipe import BULK_FROM, Transfer

from ..parties import ALICE, BOB, PATIENCE, SIZE, MemoryChannel, assert_committed
from .conftest import BulkPair


@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_a_node_without_bulk_channels_is_served_over_the_stream(
    pair: BulkPair, who: bytes, clock: MockClock
) -> None:
    pair.party(who).service.channels = None
    if who == BOB:
        pair.way(ALICE).num_allowed = 0
    await pair.meet()
    assert_committed(pair.alice, pair.bob)
    assert pair.alice.result.path == "stream"


async def test_a_channel_that_takes_too_long_costs_its_share_of_the_deadline(pair: BulkPair, clock: MockClock) -> None:
    pair.way(ALICE).is_frozen = True
    await pair.meet()
    assert_committed(pair.alice, pair.bob)
    assert trio.current_time() == pytest.approx(ROUTE_UNTIL * PATIENCE)


@pytest.mark.parametrize("fault", ["cut_at", "freeze_at"])
@pytest.mark.parametrize("at", [0, BULK_FROM // 2, BULK_FROM])
@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_a_channel_that_breaks_or_falls_silent_is_replaced(
    pair: BulkPair, who: bytes, at: int, fault: str, clock: MockClock
) -> None:
    setattr(pair.way(who).faults, fault, at)
    await pair.meet()
    pair.assert_committed("bulk", num_channels=2)
    for party in (pair.alice, pair.bob):
        assert party.result.bytes_received < BULK_FROM + 1_000, "nothing comes again that has arrived"
    assert len(pair.way(who).discarded) == 1
    silence = trio.current_time() / (SILENT_FOR * PATIENCE)
    assert silence < 0.1 if fault == "cut_at" else 1 <= silence <= 1 + 2 / SILENT_CHECKS


async def test_a_channel_is_not_silent_where_bytes_come_that_do_not_count_yet(
    pair: BulkPair, monkeypatch: pytest.MonkeyPatch, clock: MockClock
) -> None:
    async def receive(channel: MemoryChannel, incoming: Transfer) -> None:
        whole = b""
        while len(whole) < len(incoming.rest):
            await trio.sleep(0.9 * SILENT_FOR * PATIENCE)
            piece = await channel._stream.receive_some(len(incoming.rest) // 3 + 1)
            channel.num_received += len(piece)
            whole += piece
        incoming.write(memoryview(whole))

    monkeypatch.setattr(MemoryChannel, "receive", receive)
    await pair.meet()
    pair.assert_committed("bulk", num_channels=1)
    assert trio.current_time() > 2 * SILENT_FOR * PATIENCE


# Contributions that are sent while they are encoded, and decoded while they arrive

LARGE = BULK_FROM + 1


@pytest.fixture(params=[SIZE, LARGE], ids=["stream", "channel"])
async def either(nursery: trio.Nursery, request: pytest.FixtureRequest) -> BulkPair:
    """Return a pair that exchanges over a stream, or over a channel."""
    return BulkPair(nursery, request.param)


@pytest.mark.parametrize("slow", [[ALICE], [BOB], [ALICE, BOB]])
async def test_an_encoder_that_is_slower_than_the_link_is_waited_for(
    either: BulkPair, slow: list[bytes], clock: MockClock
) -> None:
    for author in slow:
        either.both(author)[0].encode_slowly(either.size // 4, seconds=1)
    await either.meet()
    assert_committed(either.alice, either.bob)
    assert trio.current_time() == pytest.approx(5, abs=0.5)
    for author in slow:
        taken_in = either.both(author)[1].taken_in
        assert any(0 < position < either.size for position in taken_in), "it moved as it was encoded"
        assert all(before <= after for before, after in itertools.pairwise(taken_in))


@pytest.mark.parametrize("slow", [ALICE, BOB])
async def test_who_goes_while_it_encodes_ends_it_for_both(either: BulkPair, slow: bytes, clock: MockClock) -> None:
    """Its trainer died, which cancels the exchange."""
    encoding, other = either.both(slow)
    encoding.encode_slowly(either.size // 4, seconds=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.exchange, slow)
        with trio.move_on_after(2.5):
            await encoding.exchange(other.host.author)
    assert 0 < max(other.taken_in) < either.size
    assert not encoding.results
    assert not other.result.committed
    assert other.result.reason == "the partner closed the stream"
    assert trio.current_time() < 5
    assert not any(way.kept for way in either.ways)


async def test_an_encoder_that_stops_costs_the_deadline(either: BulkPair, clock: MockClock) -> None:
    either.bob.outgoing = Outgoing(memoryview(either.bob.contribution), None, lambda: either.size // 2)
    await either.meet()
    for party in (either.alice, either.bob):
        assert not party.result.committed
    assert trio.current_time() <= PATIENCE


@pytest.mark.parametrize("liar", [ALICE, BOB])
async def test_a_wrong_hash_is_nobodys_gain(either: BulkPair, liar: bytes, clock: MockClock) -> None:
    lying, honest = either.both(liar)
    lying.encode_slowly(either.size // 4, seconds=1, digest=bytes(32))
    await either.meet()
    assert honest.result.reason.endswith("the hash of a transfer is not what its sender says")
    assert not honest.result.committed
    assert not lying.result.committed
    assert trio.current_time() < 10


async def test_an_encoder_may_pause_longer_than_a_channel_may_be_silent(either: BulkPair, clock: MockClock) -> None:
    either.alice.encode_slowly(either.size // 2, seconds=1.1 * SILENT_FOR * PATIENCE)
    await either.meet()
    assert_committed(either.alice, either.bob)

"""Contributions that are sent while they are encoded, and decoded while they arrive."""

from __future__ import annotations

import itertools

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.bulk.exchange_service import SILENT_FOR
from farandole.node.bulk.pipe import Outgoing
from farandole.protocol.exchange.pipe import BULK_FROM

from ..parties import ALICE, BOB, PATIENCE, SIZE, assert_committed
from .bulk_pair import BulkPair

LARGE = BULK_FROM + 1
SECOND_BYTES = LARGE // 4  # a slow encoder's bytes per second, so that it takes five


@pytest.fixture(params=[SIZE, LARGE], ids=["stream", "channel"])
async def pair(nursery: trio.Nursery, request: pytest.FixtureRequest) -> BulkPair:
    return BulkPair(nursery, request.param)


@pytest.mark.parametrize("slow", [[ALICE], [BOB], [ALICE, BOB]])
async def test_an_encoder_that_is_slower_than_the_link_is_waited_for(
    pair: BulkPair, slow: list[bytes], clock: MockClock
) -> None:
    for author in slow:
        pair.both(author)[0].encode_slowly(pair.size // 4, seconds=1)
    await pair.meet()
    assert_committed(pair.alice, pair.bob)
    assert trio.current_time() == pytest.approx(5, abs=0.5)
    for author in slow:
        taken_in = pair.both(author)[1].taken_in
        assert any(0 < position < pair.size for position in taken_in), "it moved as it was encoded"
        assert all(before <= after for before, after in itertools.pairwise(taken_in))


@pytest.mark.parametrize("slow", [ALICE, BOB])
async def test_who_goes_while_it_encodes_ends_it_for_both(pair: BulkPair, slow: bytes, clock: MockClock) -> None:
    """Its trainer died, which cancels the exchange."""
    encoding, other = pair.both(slow)
    encoding.encode_slowly(pair.size // 4, seconds=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.exchange, slow)
        with trio.move_on_after(2.5):
            await encoding.exchange(other.host.author)
    assert 0 < max(other.taken_in) < pair.size
    assert not encoding.results
    assert not other.result.committed
    assert other.result.reason == "the partner closed the stream"
    assert trio.current_time() < 5
    assert not any(way.kept for way in pair.ways)


async def test_an_encoder_that_stops_costs_the_deadline(pair: BulkPair, clock: MockClock) -> None:
    pair.bob.outgoing = Outgoing(memoryview(pair.bob.contribution), None, lambda: pair.size // 2)
    await pair.meet()
    for party in (pair.alice, pair.bob):
        assert not party.result.committed
    assert trio.current_time() <= PATIENCE


@pytest.mark.parametrize("liar", [ALICE, BOB])
async def test_a_wrong_hash_is_nobodys_gain(pair: BulkPair, liar: bytes, clock: MockClock) -> None:
    lying, honest = pair.both(liar)
    lying.encode_slowly(pair.size // 4, seconds=1, digest=bytes(32))
    await pair.meet()
    assert honest.result.reason.endswith("the hash of a transfer is not what its sender says")
    assert not honest.result.committed
    assert not lying.result.committed
    assert trio.current_time() < 10


async def test_an_encoder_may_pause_longer_than_a_channel_may_be_silent(pair: BulkPair, clock: MockClock) -> None:
    pair.alice.encode_slowly(pair.size // 2, seconds=1.1 * SILENT_FOR * PATIENCE)
    await pair.meet()
    assert_committed(pair.alice, pair.bob)


@pytest.mark.parametrize("slow", [ALICE, BOB])
@pytest.mark.parametrize("fault", ["cut_at", "freeze_at"])
async def test_a_channel_that_is_lost_while_encoding_goes_on_is_replaced(
    nursery: trio.Nursery, slow: bytes, fault: str, clock: MockClock
) -> None:
    pair = BulkPair(nursery, LARGE)
    pair.party(slow).encode_slowly(SECOND_BYTES, seconds=1)
    setattr(pair.way(slow).faults, fault, SECOND_BYTES + 1)
    await pair.meet()
    pair.assert_committed("bulk", num_channels=2)
    for party in (pair.alice, pair.bob):
        assert party.result.bytes_received < LARGE + 1_000, "nothing comes again that has arrived"
        assert all(before <= after for before, after in itertools.pairwise(party.taken_in))

"""Exchanges whose contributions go over a bulk channel, which may break."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.figures import size
from farandole.node.bulk.exchange_service import ROUTE_UNTIL, SILENT_FOR
from farandole.node.bulk.pipe import SILENT_CHECKS
from farandole.protocol.exchange.pipe import BULK_FROM, Transfer

from ..parties import ALICE, BOB, PATIENCE, MemoryChannel, assert_committed
from .bulk_pair import BulkPair


async def test_large_contributions_move_over_a_channel_that_is_kept(pair: BulkPair, clock: MockClock) -> None:
    for _ in range(3):
        await pair.meet()
        assert_committed(pair.alice, pair.bob)
        assert pair.alice.result.path == "bulk"
        assert pair.alice.result.bytes_sent == pair.bob.result.bytes_received > BULK_FROM
        for party in (pair.alice, pair.bob):
            party.results.clear()
            party.incoming[:] = bytes(len(party.incoming))
    assert pair.way(ALICE).num_acquired == 1


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


@pytest.mark.parametrize("closed", [ALICE, BOB])
@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_where_no_other_channel_opens_the_stream_takes_the_rest(
    pair: BulkPair, who: bytes, closed: bytes, clock: MockClock
) -> None:
    pair.way(who).faults.cut_at = 1_000
    pair.way(closed).num_allowed = 1
    await pair.meet()
    assert_committed(pair.alice, pair.bob)
    assert pair.alice.result.path == "stream"


async def test_a_cancelled_exchange_gives_its_channel_up(pair: BulkPair, clock: MockClock) -> None:
    pair.way(BOB).faults.freeze_at = 1_000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.bob.exchange, ALICE)
        with trio.move_on_after(3):
            await pair.alice.exchange(BOB)
        assert pair.way(ALICE).discarded
    assert not pair.bob.result.committed


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


async def test_a_channel_that_is_too_slow_says_so_with_figures(
    pair: BulkPair, monkeypatch: pytest.MonkeyPatch, clock: MockClock
) -> None:
    send, piece = MemoryChannel.send, pair.size // 200

    async def drip(channel: MemoryChannel, data: memoryview) -> None:
        for start in range(0, len(data), piece):
            await trio.sleep(PATIENCE / 100)
            await send(channel, data[start : start + piece])

    monkeypatch.setattr(MemoryChannel, "send", drip)
    await pair.meet()
    pair.assert_aborted()
    for party in (pair.alice, pair.bob):
        assert party.result.path == "bulk"
        assert party.result.reason.startswith(f"{size(pair.size)} did not fit into ")

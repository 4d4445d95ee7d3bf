"""If one side gives up, freezes or is cut off at any time, both agree by the deadline on whether they committed."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.streams import Stream
from farandole.node.bulk.exchange_service import RESOLVE_PROTOCOL
from farandole.protocol.exchange.exchange import Exchange
from farandole.protocol.exchange.pipe import BULK_FROM, CHUNK_BYTES, HEADER_BYTES, MAX_ROUTES, Sealed

from ..parties import ALICE, BOB, PATIENCE, SIZE, MemoryHost, Party, assert_committed, meet
from .conftest import BulkPair


@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_who_gives_up_tells_its_partner(alice: Party, bob: Party, who: bytes, clock: MockClock) -> None:
    leaver, other = (alice, bob) if who == ALICE else (bob, alice)
    leaver.encode_slowly(SIZE // 10, 1.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meet, alice, bob)
        await trio.sleep(3.5)
        leaver.service.give_up("it leaves")
    assert (leaver.result.committed, leaver.result.reason) == (False, "it leaves")
    assert (other.result.committed, other.result.reason) == (False, "the partner aborted: it leaves")
    assert other.result.is_broken
    assert trio.current_time() < 5


@pytest.mark.parametrize("who", [ALICE, BOB])
@pytest.mark.parametrize("moment", [0.1 * tenth for tenth in range(1, 36, 2)])
async def test_whenever_one_gives_up_both_believe_the_same(
    alice: Party, bob: Party, who: bytes, moment: float, clock: MockClock
) -> None:
    for party in (alice, bob):
        party.host.faults.delay = 0.2
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meet, alice, bob)
        await trio.sleep(moment)
        (alice if who == ALICE else bob).service.give_up("it leaves")
    assert alice.result.committed is bob.result.committed
    assert trio.current_time() <= PATIENCE


async def test_who_waits_for_a_stream_may_give_up(bob: Party, clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.exchange, ALICE)
        await trio.sleep(1)
        bob.service.give_up("it leaves")
    assert not bob.result.committed
    assert trio.current_time() < 2


# Boundaries of what a side sends: nothing, half an offer, offer, first chunk, all but the last byte, and so on.
_STEPS = [0, 60, 200, 1_000, CHUNK_BYTES, SIZE, SIZE + 150, SIZE + 200, SIZE + 210, SIZE + 220, SIZE + 230, SIZE + 240]


# The same beside a channel: the offer, the route, the verdicts.
_STEPS_BESIDE = [0, 60, *range(150, 241, 10)]


@pytest.mark.parametrize("fault", ["cut_at", "freeze_at"])
@pytest.mark.parametrize("who", [ALICE, BOB])
@pytest.mark.parametrize(
    ("size", "at"), [*itertools.product([SIZE], _STEPS), *itertools.product([BULK_FROM + 1], _STEPS_BESIDE)]
)
async def test_a_stream_that_breaks_or_freezes_anywhere_leaves_both_believing_the_same(
    nursery: trio.Nursery, size: int, at: int, who: bytes, fault: str, clock: MockClock
) -> None:
    pair = BulkPair(nursery, size)
    setattr(pair.party(who).host.faults, fault, at)
    await pair.meet()
    assert_agreed(pair)


def assert_agreed(pair: BulkPair) -> None:
    assert pair.alice.result.committed is pair.bob.result.committed, (pair.alice.result, pair.bob.result)
    if pair.alice.result.committed:
        assert_committed(pair.alice, pair.bob)
    assert trio.current_time() <= PATIENCE


async def test_a_responder_in_doubt_asks_and_learns_of_the_commit(alice: Party, bob: Party, clock: MockClock) -> None:
    asked: list[bytes] = []
    serve = alice.host.handlers[RESOLVE_PROTOCOL]

    async def count_and_serve(stream: Stream) -> None:
        asked.append(stream.peer)
        await serve(stream)

    alice.host.handlers[RESOLVE_PROTOCOL] = count_and_serve
    alice.host.faults.cut_at = await _bytes_up_to_commit(alice)
    await meet(alice, bob)
    assert_committed(alice, bob)
    assert asked == [BOB]


async def _bytes_up_to_commit(alice: Party) -> int:
    """Return the number of bytes that Alice sends before her Commit."""
    await trio.lowlevel.checkpoint()
    exchange = Exchange(True, alice.offer, memoryview(bytearray(SIZE)))
    partner = Exchange(False, alice.offer, memoryview(bytearray(SIZE)))
    offer = exchange.send(msgspec.structs.replace(alice.offer, seconds_left=PATIENCE))
    partner.receive(offer[HEADER_BYTES:])
    sent = len(offer)
    exchange.receive(partner.send(alice.offer)[HEADER_BYTES:])
    assert alice.outgoing.digest is not None
    sent += len(exchange.pipe.send(Sealed(alice.outgoing.digest)))
    for offset in range(0, SIZE, CHUNK_BYTES):
        sent += len(exchange.pipe.send_chunk(memoryview(alice.contribution)[offset : offset + CHUNK_BYTES]))
    return sent


async def test_a_responder_in_doubt_whose_initiator_is_dead_goes_on_at_its_deadline(
    alice: Party, bob: Party, network: dict[bytes, MemoryHost], clock: MockClock
) -> None:
    alice.host.faults.cut_at = await _bytes_up_to_commit(alice)
    tries = []

    async def never(stream: Stream) -> None:
        tries.append(trio.current_time())
        await stream.aclose()

    alice.host.handlers[RESOLVE_PROTOCOL] = never
    await meet(alice, bob)
    assert not bob.result.committed
    assert len(tries) > 2
    assert trio.current_time() == pytest.approx(PATIENCE)


@pytest.mark.parametrize("seed", range(60))
async def test_whatever_befalls_streams_and_channels_both_believe_the_same(
    pair: BulkPair, seed: int, clock: MockClock
) -> None:
    rng = random.Random(seed)
    for author in (ALICE, BOB):
        way, stream = pair.way(author), pair.party(author).host.faults
        way.num_allowed = rng.randrange(MAX_ROUTES + 1)
        way.faults.num_channels = rng.randrange(MAX_ROUTES)
        setattr(way.faults, rng.choice(["cut_at", "freeze_at"]), rng.randrange(BULK_FROM + 1))
        if rng.random() < 0.3:
            setattr(
                stream, rng.choice(["cut_at", "freeze_at"]), rng.choice([rng.randrange(400), rng.randrange(BULK_FROM)])
            )
    await pair.meet()
    assert_agreed(pair)

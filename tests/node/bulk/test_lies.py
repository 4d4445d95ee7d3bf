"""Attacks on an exchange cost its deadline alone, and both sides agree whether they committed, however it breaks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import trio
import trio.testing
from blake3 import blake3
from trio.testing import MockClock

from farandole.node.base.streams import Stream
from farandole.node.bulk.exchange_service import EXCHANGE_PROTOCOL, FAREWELL_TIMEOUT, RESOLVE_PROTOCOL, TOO_LONG
from farandole.protocol.exchange.exchange import Aborted, Accepted, Commit, Control, Exchange, Offer
from farandole.protocol.exchange.pipe import (
    BULK_FROM,
    CHUNK_BYTES,
    HEADER_BYTES,
    MAX_ROUTES,
    Route,
    Sealed,
    TransferReceived,
)

from ..parties import ALICE, BOB, PATIENCE, SIZE, MemoryChannel, MemoryHost, Party, assert_committed, meet, offer_of
from .conftest import BulkPair


class Liar:
    """A partner that speaks the protocol by hand."""

    def __init__(self, stream: Stream, offer: Offer, contribution: bytes) -> None:
        self.stream = stream
        self.exchange = Exchange(True, offer, memoryview(bytearray(offer.size)))
        self.contribution = memoryview(contribution)
        self.digest = blake3(contribution).digest()

    async def send(self, message: Control | Route | Sealed | memoryview) -> None:
        if isinstance(message, memoryview):
            await self.stream.send_all(self.exchange.pipe.send_chunk(message))
        elif isinstance(message, Route | Sealed):
            await self.stream.send_all(self.exchange.pipe.send(message))
        else:
            await self.stream.send_all(self.exchange.send(message))

    async def send_contribution(self) -> None:
        await self.send(Sealed(self.digest))
        for offset in range(0, self.exchange.offer.size, CHUNK_BYTES):
            await self.send(self.contribution[offset : offset + CHUNK_BYTES])

    async def expect(self, kind: type[object]) -> None:
        """Wait for the next event of the honest side, of this kind; its hash, which comes at any time, is skipped."""
        pipe = self.exchange.pipe
        while (event := pipe.next_event()) is None or isinstance(event, Sealed):
            if event is not None:
                continue
            data = await self.stream.receive_some(65_536)
            assert data
            pipe.receive_data(bytes(data))
        assert isinstance(self.exchange.receive(event) if isinstance(event, bytes) else event, kind)


async def meet_liar(bob: Party, script: Callable[[Liar], Awaitable[None]], contribution: bytes = bytes(SIZE)) -> None:
    """Let Bob exchange with an Alice who follows the script."""
    offer = msgspec.structs.replace(offer_of(contribution), seconds_left=PATIENCE)
    host = MemoryHost(ALICE, bob.host.nursery, bob.host.network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.exchange, ALICE)
        await trio.testing.wait_all_tasks_blocked()
        stream = await host.open_stream(BOB, EXCHANGE_PROTOCOL)
        await script(Liar(stream, offer, contribution))


@pytest.mark.parametrize("lie", [{"run_id": b"x" * 32}, {"size": 2**44}])
async def test_an_offer_that_does_not_fit_is_refused_before_any_data(
    bob: Party, lie: dict[str, object], clock: MockClock
) -> None:
    async def script(liar: Liar) -> None:
        await liar.stream.send_all(liar.exchange.send(msgspec.structs.replace(liar.exchange.offer, **lie)))

    await meet_liar(bob, script)
    assert not bob.result.committed
    assert "the partner broke the protocol: the partner's offer is of another" in bob.result.reason
    assert trio.current_time() <= FAREWELL_TIMEOUT


async def test_bytes_behind_the_decision_change_nothing(bob: Party, clock: MockClock) -> None:
    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(liar.send_contribution)
            await liar.expect(TransferReceived)
        await liar.expect(Accepted)
        await liar.stream.send_all(liar.exchange.send(Commit()) + b"rubbish")

    await meet_liar(bob, script)
    assert bob.result.committed
    assert bob.incoming == bytes(SIZE)


async def test_a_stranger_cannot_take_the_partners_place(alice: Party, bob: Party, clock: MockClock) -> None:
    mallory = MemoryHost(b"m" * 32, alice.host.nursery, alice.host.network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.exchange, ALICE)
        await trio.testing.wait_all_tasks_blocked()
        stream = await mallory.open_stream(BOB, EXCHANGE_PROTOCOL)
        liar = Exchange(True, alice.offer, memoryview(bytearray(SIZE)))
        await stream.send_all(liar.send(alice.offer))
        assert await stream.receive_some(1) == b""
        nursery.start_soon(alice.exchange, BOB)
    assert_committed(alice, bob)


@pytest.mark.parametrize("reason", ["out of memory", TOO_LONG])
async def test_an_abort_in_the_middle_ends_it_at_once_and_is_the_partners_word(
    bob: Party, reason: str, clock: MockClock
) -> None:
    """If who says at once that it took too long were believed, this node's owner would read that the line is slow."""

    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        await liar.send(liar.contribution[:CHUNK_BYTES])
        await liar.send(Aborted(reason))

    await meet_liar(bob, script)
    assert bob.result.reason == f"the partner aborted: {reason}"
    assert trio.current_time() <= FAREWELL_TIMEOUT


async def test_an_abort_with_the_offer_ends_the_exchange_and_not_the_node(bob: Party, clock: MockClock) -> None:
    """Who reads both at once has the offer in hand when it hears that there is nothing to answer."""

    async def script(liar: Liar) -> None:
        offer = liar.exchange.send(liar.exchange.offer)
        await liar.stream.send_all(offer + liar.exchange.send(Aborted("out of memory")))

    await meet_liar(bob, script)
    assert bob.result.reason == "the partner aborted: out of memory"
    assert trio.current_time() <= FAREWELL_TIMEOUT


async def agree_on_channel(liar: Liar, pair: BulkPair) -> MemoryChannel:
    """Begin honestly, up to the agreement on a channel."""
    await liar.send(liar.exchange.offer)
    await liar.expect(Offer)
    channel = await pair.way(ALICE).acquire(BOB)
    assert channel is not None
    await liar.send(Route(channel.session, 0))
    await liar.expect(Route)
    return channel


async def test_an_abort_ends_what_moves_over_the_channel(pair: BulkPair, clock: MockClock) -> None:
    pair.way(ALICE).faults.freeze_at = 1_000

    async def script(liar: Liar) -> None:
        await agree_on_channel(liar, pair)
        await liar.send(Aborted("out of memory"))

    await meet_liar(pair.bob, script, pair.alice.contribution)
    assert pair.bob.result.reason == "the partner aborted: out of memory"
    assert pair.way(BOB).discarded
    assert trio.current_time() <= FAREWELL_TIMEOUT


async def test_all_of_a_contribution_and_no_hash_is_worth_nothing(pair: BulkPair, clock: MockClock) -> None:
    async def script(liar: Liar) -> None:
        channel = await agree_on_channel(liar, pair)
        await channel.send(liar.contribution)
        await trio.testing.wait_all_tasks_blocked()
        await liar.send(Route(None, 0))

    await meet_liar(pair.bob, script, pair.alice.contribution)
    assert pair.bob.incoming == pair.alice.contribution
    assert pair.bob.result.reason == "the partner broke the protocol: all of the transfer, and no hash"
    assert trio.current_time() <= FAREWELL_TIMEOUT


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

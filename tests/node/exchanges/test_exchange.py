from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import trio
import trio.testing
from blake3 import blake3

from farandole.node.exchanges.contributions import Outgoing
from farandole.node.exchanges.conversation import FAREWELL_TIMEOUT, ROUTE_UNTIL, SILENT_FOR
from farandole.node.exchanges.exchange import (
    CLAIM_TIMEOUT,
    EXCHANGE_PROTOCOL,
    MAX_UNCLAIMED,
    MAX_UNCLAIMED_PER_PEER,
    RESOLVE_PROTOCOL,
)
from farandole.node.shaping import Shaper, Shaping
from farandole.node.streams import Stream
from farandole.protocol.exchange import (
    ASK_FROM,
    BULK_FROM,
    DATA_UNTIL,
    MAX_ROUTES,
    ContributionReceived,
    Event,
    Exchange,
)
from farandole.protocol.exchange_messages import (
    CHUNK_BYTES,
    Aborted,
    Accepted,
    Chunk,
    Commit,
    Control,
    Offer,
    Route,
    Sealed,
)
from farandole.protocol.incoming import Incoming

from ..parties import (
    ALICE,
    BOB,
    PATIENCE,
    SESSION,
    SIZE,
    Faults,
    MemoryChannel,
    MemoryChannels,
    MemoryHost,
    Party,
    assert_committed,
    meet,
    offer_of,
)


@pytest.fixture
def network() -> dict[bytes, MemoryHost]:
    return {}


@pytest.fixture
async def alice(nursery: trio.Nursery, network: dict[bytes, MemoryHost]) -> Party:
    return Party(MemoryHost(ALICE, nursery, network), seed=1)


@pytest.fixture
async def bob(nursery: trio.Nursery, network: dict[bytes, MemoryHost]) -> Party:
    return Party(MemoryHost(BOB, nursery, network), seed=2)


async def test_both_have_the_others_exact_bytes(
    alice: Party, bob: Party, autojump_clock: trio.testing.MockClock
) -> None:
    await meet(alice, bob)
    assert_committed(alice, bob)
    assert alice.result.reason == ""
    assert (alice.result.partner, alice.result.partner_round, alice.result.partner_tokens) == (BOB, 2, 200)
    assert (bob.result.partner, bob.result.partner_round, bob.result.partner_tokens) == (ALICE, 1, 100)
    assert bob.result.partner_size == SIZE
    assert alice.result.bytes_sent == bob.result.bytes_received > SIZE


async def test_contributions_wait_for_the_caps(
    alice: Party, bob: Party, autojump_clock: trio.testing.MockClock
) -> None:
    up, down = (Shaper(SIZE / seconds, trio.current_time) for seconds in (5, 10))
    alice.service._shaping = Shaping(up, down)
    began = trio.current_time()
    await meet(alice, bob)
    assert_committed(alice, bob)
    assert trio.current_time() - began >= (SIZE - down.burst) / down.rate


async def test_a_verdict_overtakes_a_contribution_that_waits_for_its_cap(
    alice: Party, bob: Party, autojump_clock: trio.testing.MockClock
) -> None:
    up = Shaper(SIZE / 5, trio.current_time)
    up.charge(2 * SIZE)
    alice.service._shaping = Shaping(up, Shaper())
    alice.refuses = "not this one"
    await meet(alice, bob)
    assert bob.result.reason == "the partner aborted: refused: not this one"
    assert not bob.result.is_broken
    assert up.reserve(0) > 0  # the contribution would still wait


async def test_one_byte_at_a_time(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    network: dict[bytes, MemoryHost] = {}
    alice = Party(MemoryHost(ALICE, nursery, network, Faults(piece=1)), seed=1, size=500)
    bob = Party(MemoryHost(BOB, nursery, network, Faults(piece=1)), seed=2, size=500)
    await meet(alice, bob)
    assert_committed(alice, bob)


@pytest.mark.parametrize("refuser", [ALICE, BOB])
async def test_what_one_refuses_neither_uses(
    alice: Party, bob: Party, refuser: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    refusing, other = (alice, bob) if refuser == ALICE else (bob, alice)
    refusing.refuses = "not finite"
    await meet(alice, bob)
    assert not alice.result.committed
    assert not bob.result.committed
    assert refusing.result.reason == "refused: not finite"
    assert other.result.reason == "the partner aborted: refused: not finite"
    assert not refusing.result.is_broken
    assert not other.result.is_broken
    assert trio.current_time() < 1


@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_who_gives_up_tells_its_partner(
    alice: Party, bob: Party, who: bytes, autojump_clock: trio.testing.MockClock
) -> None:
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
    alice: Party, bob: Party, who: bytes, moment: float, autojump_clock: trio.testing.MockClock
) -> None:
    for party in (alice, bob):
        party.host.faults.delay = 0.2
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meet, alice, bob)
        await trio.sleep(moment)
        (alice if who == ALICE else bob).service.give_up("it leaves")
    assert alice.result.committed is bob.result.committed
    assert trio.current_time() <= PATIENCE


async def test_who_waits_for_a_stream_may_give_up(bob: Party, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.exchange, ALICE)
        await trio.sleep(1)
        bob.service.give_up("it leaves")
    assert not bob.result.committed
    assert trio.current_time() < 2


# Every boundary of what a side sends: nothing, half an offer, offer, first chunk, all but the last byte, and so on.
_STEPS = [0, 60, 200, 1_000, CHUNK_BYTES, SIZE, SIZE + 150, SIZE + 200, SIZE + 210, SIZE + 220, SIZE + 230, SIZE + 240]


@pytest.mark.parametrize("at", _STEPS)
@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_a_connection_that_breaks_anywhere_leaves_both_believing_the_same(
    alice: Party, bob: Party, who: bytes, at: int, autojump_clock: trio.testing.MockClock
) -> None:
    (alice if who == ALICE else bob).host.faults.cut_at = at
    await meet(alice, bob)
    assert alice.result.committed is bob.result.committed
    if alice.result.committed:
        assert_committed(alice, bob)
    assert trio.current_time() <= PATIENCE


@pytest.mark.parametrize("at", _STEPS)
@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_a_frozen_partner_costs_the_deadline_at_most(
    alice: Party, bob: Party, who: bytes, at: int, autojump_clock: trio.testing.MockClock
) -> None:
    (alice if who == ALICE else bob).host.faults.freeze_at = at
    await meet(alice, bob)
    assert alice.result.committed is bob.result.committed
    assert trio.current_time() <= PATIENCE


async def test_a_partner_that_never_comes_costs_a_share_of_the_deadline(
    bob: Party, autojump_clock: trio.testing.MockClock
) -> None:
    await bob.exchange(ALICE)
    assert bob.result.reason == "the partner opened no stream"
    assert trio.current_time() == pytest.approx(DATA_UNTIL * PATIENCE)


async def test_a_partner_that_is_gone_is_known_at_once(alice: Party, autojump_clock: trio.testing.MockClock) -> None:
    await alice.exchange(BOB)
    assert alice.result.reason == "nobody there"
    assert alice.result.is_broken
    assert trio.current_time() < 1


async def test_the_shorter_deadline_holds_for_both(
    alice: Party, bob: Party, autojump_clock: trio.testing.MockClock
) -> None:
    bob.host.faults.freeze_at = CHUNK_BYTES
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alice.exchange, BOB, 100.0)
        nursery.start_soon(bob.exchange, ALICE, 10.0)
    assert not alice.result.committed
    assert trio.current_time() <= 10.0


async def test_a_responder_in_doubt_asks_and_learns_of_the_commit(
    alice: Party, bob: Party, autojump_clock: trio.testing.MockClock
) -> None:
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
    """What Alice sends before her Commit."""
    await trio.lowlevel.checkpoint()
    exchange = Exchange(True, alice.offer, memoryview(bytearray(SIZE)))
    partner = Exchange(False, alice.offer, memoryview(bytearray(SIZE)))
    offer = exchange.send(msgspec.structs.replace(alice.offer, seconds_left=PATIENCE))
    partner.receive_data(offer)
    partner.next_event()
    sent = len(offer)
    exchange.receive_data(partner.send(alice.offer))
    exchange.next_event()
    assert alice.outgoing.digest is not None
    messages: list[Control | Chunk] = [Sealed(alice.outgoing.digest)]
    for offset in range(0, SIZE, CHUNK_BYTES):
        messages += [Chunk(offset, memoryview(alice.contribution)[offset : offset + CHUNK_BYTES])]
    for message in messages:
        sent += len(exchange.send(message))
        exchange.receive_data(partner.send(message))
        exchange.next_event()
    return sent


async def test_a_responder_in_doubt_whose_initiator_is_dead_goes_on_at_its_deadline(
    alice: Party, bob: Party, network: dict[bytes, MemoryHost], autojump_clock: trio.testing.MockClock
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


class Liar:
    """A partner that speaks the protocol by hand."""

    def __init__(self, stream: Stream, offer: Offer, contribution: bytes) -> None:
        self.stream = stream
        self.exchange = Exchange(True, offer, memoryview(bytearray(offer.size)))
        self.contribution = memoryview(contribution)
        self.digest = blake3(contribution).digest()

    async def send(self, message: Control | Chunk) -> None:
        await self.stream.send_all(self.exchange.send(message))

    async def send_contribution(self) -> None:
        await self.send(Sealed(self.digest))
        for offset in range(0, self.exchange.offer.size, CHUNK_BYTES):
            await self.send(Chunk(offset, self.contribution[offset : offset + CHUNK_BYTES]))

    async def expect(self, kind: type[Event]) -> None:
        """The next event that is not the honest one's hash, which comes when it comes."""
        while (event := self.exchange.next_event()) is None or isinstance(event, Sealed):
            if event is not None:
                continue
            data = await self.stream.receive_some(65_536)
            assert data
            self.exchange.receive_data(bytes(data))
        assert isinstance(event, kind)


async def _lie(bob: Party, script: Callable[[Liar], Awaitable[None]], offer: Offer, contribution: bytes) -> None:
    host = MemoryHost(ALICE, bob.host.nursery, bob.host.network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.exchange, ALICE)
        await trio.testing.wait_all_tasks_blocked()
        stream = await host.open_stream(BOB, EXCHANGE_PROTOCOL)
        await script(Liar(stream, offer, contribution))


async def test_a_wrong_hash_is_refused(bob: Party, autojump_clock: trio.testing.MockClock) -> None:
    contribution = bytes(SIZE)

    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        liar.digest = bytes(32)
        await liar.send_contribution()

    await _lie(bob, script, msgspec.structs.replace(offer_of(contribution), seconds_left=30.0), contribution)
    assert not bob.result.committed
    assert "hash" in bob.result.reason


@pytest.mark.parametrize(
    "lie",
    [
        {"run_id": b"x" * 32},
        {"stage": 1},
        {"layout": b"x" * 32},
        {"codec": "int8"},
        {"size": SIZE + 1},
        {"size": 2**44},
        {"version": 1},
    ],
)
async def test_an_offer_that_does_not_fit_is_refused_before_any_data(
    bob: Party, lie: dict[str, object], autojump_clock: trio.testing.MockClock
) -> None:
    honest = msgspec.structs.replace(offer_of(bytes(SIZE)), seconds_left=30.0)

    async def script(liar: Liar) -> None:
        await liar.stream.send_all(liar.exchange.send(msgspec.structs.replace(honest, **lie)))

    await _lie(bob, script, honest, bytes(SIZE))
    assert not bob.result.committed
    assert "the partner broke the protocol: the partner's offer is of another" in bob.result.reason
    assert trio.current_time() <= FAREWELL_TIMEOUT


async def test_bytes_behind_the_decision_change_nothing(bob: Party, autojump_clock: trio.testing.MockClock) -> None:
    contribution = bytes(SIZE)

    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(liar.send_contribution)
            await liar.expect(ContributionReceived)
        await liar.expect(Accepted)
        await liar.stream.send_all(liar.exchange.send(Commit()) + b"rubbish")

    await _lie(bob, script, msgspec.structs.replace(offer_of(contribution), seconds_left=30.0), contribution)
    assert bob.result.committed
    assert bob.incoming == contribution


async def test_a_stranger_cannot_take_the_partners_place(
    alice: Party, bob: Party, autojump_clock: trio.testing.MockClock
) -> None:
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


async def test_a_stream_that_comes_before_its_session_is_expected_waits_for_it(
    alice: Party, bob: Party, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alice.exchange, BOB)
        await trio.sleep(CLAIM_TIMEOUT / 2)
        nursery.start_soon(bob.exchange, ALICE)
    assert_committed(alice, bob)


async def test_streams_that_nobody_expects_are_few_and_short(
    bob: Party, autojump_clock: trio.testing.MockClock
) -> None:
    streams = []
    for i in range(MAX_UNCLAIMED + 5):
        mallory = MemoryHost(bytes([i]) * 32, bob.host.nursery, bob.host.network)
        streams.append(await mallory.open_stream(BOB, EXCHANGE_PROTOCOL))
    await trio.testing.wait_all_tasks_blocked()
    for stream in streams[MAX_UNCLAIMED:]:
        assert await stream.receive_some(1) == b""
    assert trio.current_time() == 0
    for stream in streams[:MAX_UNCLAIMED]:
        assert await stream.receive_some(1) == b""
    assert trio.current_time() == pytest.approx(CLAIM_TIMEOUT)


async def test_a_peer_that_opens_many_streams_keeps_no_partner_away(
    alice: Party, bob: Party, autojump_clock: trio.testing.MockClock
) -> None:
    mallory = MemoryHost(b"m" * 32, bob.host.nursery, bob.host.network)
    streams = [await mallory.open_stream(BOB, EXCHANGE_PROTOCOL) for _ in range(MAX_UNCLAIMED)]
    await trio.testing.wait_all_tasks_blocked()
    for stream in streams[MAX_UNCLAIMED_PER_PEER:]:
        assert await stream.receive_some(1) == b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.exchange, ALICE)
        nursery.start_soon(alice.exchange, BOB)
    assert_committed(alice, bob)


async def test_a_cancelled_exchange_ends_at_once_and_is_aborted(
    alice: Party, bob: Party, autojump_clock: trio.testing.MockClock
) -> None:
    bob.host.faults.freeze_at = CHUNK_BYTES
    with trio.move_on_after(3):
        await alice.exchange(BOB)
    assert not alice.results
    assert alice.service._outcomes.answer(SESSION, BOB) == "aborted"


async def test_a_slow_screening_is_cut_off(
    alice: Party, bob: Party, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleepy(size: int) -> str | None:
        await trio.sleep_forever()
        return None

    monkeypatch.setattr(bob, "refusal", sleepy)
    await meet(alice, bob)
    assert not alice.result.committed
    assert not bob.result.committed
    assert trio.current_time() <= ASK_FROM * PATIENCE


async def test_an_abort_in_the_middle_ends_it_at_once(bob: Party, autojump_clock: trio.testing.MockClock) -> None:
    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        await liar.send(Chunk(0, liar.contribution[:CHUNK_BYTES]))
        await liar.send(Aborted("out of memory"))

    await _lie(bob, script, msgspec.structs.replace(offer_of(bytes(SIZE)), seconds_left=30.0), bytes(SIZE))
    assert bob.result.reason == "the partner aborted: out of memory"
    assert trio.current_time() <= FAREWELL_TIMEOUT


# Over a bulk channel


class BulkPair:
    """Alice and Bob with contributions that go over a channel."""

    def __init__(self, nursery: trio.Nursery) -> None:
        hosts: dict[bytes, MemoryHost] = {}
        channels: dict[bytes, MemoryChannels] = {}
        self.ways = [MemoryChannels(author, channels) for author in (ALICE, BOB)]
        self.alice, self.bob = (
            Party(MemoryHost(way.author, nursery, hosts), seed, BULK_FROM + 1, way)
            for seed, way in enumerate(self.ways, 1)
        )

    def way(self, author: bytes) -> MemoryChannels:
        return self.ways[author == BOB]

    def party(self, author: bytes) -> Party:
        return self.bob if author == BOB else self.alice

    async def meet(self) -> None:
        await meet(self.alice, self.bob)

    def assert_committed(self, path: str, num_channels: int) -> None:
        """Over so many channels."""
        assert_committed(self.alice, self.bob)
        assert self.alice.result.path == path
        assert self.way(ALICE).num_acquired == num_channels
        assert trio.current_time() <= PATIENCE

    def assert_aborted(self) -> None:
        """Neither commits, and no channel is kept on which something may still come."""
        assert not self.alice.result.committed
        assert not self.bob.result.committed
        assert not any(way.kept for way in self.ways)
        assert trio.current_time() <= PATIENCE


@pytest.fixture
async def pair(nursery: trio.Nursery) -> BulkPair:
    return BulkPair(nursery)


async def test_large_contributions_move_over_a_channel_that_is_kept(
    pair: BulkPair, autojump_clock: trio.testing.MockClock
) -> None:
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
async def test_where_no_channel_opens_the_stream_serves(
    pair: BulkPair, who: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    pair.way(who).num_allowed = 0
    await pair.meet()
    assert_committed(pair.alice, pair.bob)
    assert pair.alice.result.path == "stream"


@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_a_node_without_bulk_channels_is_served_over_the_stream(
    pair: BulkPair, who: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    pair.party(who).service.channels = None
    if who == BOB:
        pair.way(ALICE).num_allowed = 0
    await pair.meet()
    assert_committed(pair.alice, pair.bob)
    assert pair.alice.result.path == "stream"


async def test_a_channel_that_takes_too_long_costs_its_share_of_the_deadline(
    pair: BulkPair, autojump_clock: trio.testing.MockClock
) -> None:
    pair.way(ALICE).is_frozen = True
    await pair.meet()
    assert_committed(pair.alice, pair.bob)
    assert trio.current_time() == pytest.approx(ROUTE_UNTIL * PATIENCE)


@pytest.mark.parametrize("at", [0, 1, BULK_FROM // 2, BULK_FROM])
@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_a_channel_that_breaks_is_replaced(
    pair: BulkPair, who: bytes, at: int, autojump_clock: trio.testing.MockClock
) -> None:
    pair.way(who).faults.cut_at = at
    await pair.meet()
    pair.assert_committed("bulk", num_channels=2)
    for party in (pair.alice, pair.bob):
        assert party.result.bytes_received < BULK_FROM + 1_000, "nothing comes again that has arrived"
    assert len(pair.way(who).discarded) == 1
    assert trio.current_time() < 1


@pytest.mark.parametrize("at", [0, 1, BULK_FROM // 2, BULK_FROM])
@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_a_channel_that_falls_silent_is_replaced(
    pair: BulkPair, who: bytes, at: int, autojump_clock: trio.testing.MockClock
) -> None:
    pair.way(who).faults.freeze_at = at
    await pair.meet()
    pair.assert_committed("bulk", num_channels=2)
    assert SILENT_FOR * PATIENCE <= trio.current_time() <= 2 * SILENT_FOR * PATIENCE + 0.1


async def test_a_channel_is_not_silent_where_bytes_come_that_do_not_count_yet(
    pair: BulkPair, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async def receive(channel: MemoryChannel, incoming: Incoming) -> None:
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


@pytest.mark.parametrize("fault", ["cut_at", "freeze_at"])
@pytest.mark.parametrize(("by_alice", "by_bob"), [(0, 0), (1_000, 700_000), (700_000, 1_000), (BULK_FROM, BULK_FROM)])
async def test_a_channel_that_is_lost_in_both_directions_is_replaced(
    pair: BulkPair, by_alice: int, by_bob: int, fault: str, autojump_clock: trio.testing.MockClock
) -> None:
    setattr(pair.way(ALICE).faults, fault, by_alice)
    setattr(pair.way(BOB).faults, fault, by_bob)
    await pair.meet()
    pair.assert_committed("bulk", num_channels=2)
    for party in (pair.alice, pair.bob):
        assert party.result.bytes_received < BULK_FROM + 1_000


@pytest.mark.parametrize("fault", ["cut_at", "freeze_at"])
@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_when_every_channel_breaks_the_stream_takes_the_rest(
    pair: BulkPair, who: bytes, fault: str, autojump_clock: trio.testing.MockClock
) -> None:
    faults = pair.way(who).faults
    setattr(faults, fault, 300_000)
    faults.num_channels = 100
    await pair.meet()
    pair.assert_committed("stream", num_channels=MAX_ROUTES - 1)
    for party in (pair.alice, pair.bob):
        assert party.result.bytes_received < BULK_FROM + 1_000
    assert not any(way.kept for way in pair.ways)


@pytest.mark.parametrize("closed", [ALICE, BOB])
@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_where_no_other_channel_opens_the_stream_takes_the_rest(
    pair: BulkPair, who: bytes, closed: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    pair.way(who).faults.cut_at = 1_000
    pair.way(closed).num_allowed = 1
    await pair.meet()
    assert_committed(pair.alice, pair.bob)
    assert pair.alice.result.path == "stream"


@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_a_partner_that_freezes_altogether_costs_the_deadline(
    pair: BulkPair, who: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    pair.way(who).faults.freeze_at = 1_000
    pair.way(who).faults.num_channels = 100
    pair.party(who).host.faults.freeze_at = 180  # after its first Route
    await pair.meet()
    assert not pair.alice.result.committed
    assert not pair.bob.result.committed
    assert trio.current_time() <= PATIENCE


# Every boundary of what a side sends on the stream: nothing, half an offer, the offer, the route, the verdicts.
@pytest.mark.parametrize("fault", ["cut_at", "freeze_at"])
@pytest.mark.parametrize("at", [0, 60, 150, 160, 170, 180, 190, 200, 210, 220, 230, 240])
@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_a_stream_that_ends_beside_the_channel_leaves_both_believing_the_same(
    pair: BulkPair, who: bytes, at: int, fault: str, autojump_clock: trio.testing.MockClock
) -> None:
    setattr(pair.party(who).host.faults, fault, at)
    await pair.meet()
    assert pair.alice.result.committed is pair.bob.result.committed
    if pair.alice.result.committed:
        assert_committed(pair.alice, pair.bob)
    assert trio.current_time() <= PATIENCE


@pytest.mark.parametrize("refuser", [ALICE, BOB])
async def test_what_one_refuses_after_the_channel_neither_uses(
    pair: BulkPair, refuser: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    pair.party(refuser).refuses = "not finite"
    await pair.meet()
    pair.assert_aborted()
    assert pair.party(refuser).result.reason == "refused: not finite"


@pytest.mark.parametrize("liar", [ALICE, BOB])
async def test_a_wrong_hash_over_the_channel_is_refused(
    pair: BulkPair, liar: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    party = pair.party(liar)
    party.outgoing = Outgoing.whole(memoryview(party.contribution), bytes(32))
    await pair.meet()
    pair.assert_aborted()
    assert "hash" in pair.party(BOB if liar == ALICE else ALICE).result.reason


async def test_an_abort_ends_what_moves_over_the_channel(
    pair: BulkPair, autojump_clock: trio.testing.MockClock
) -> None:
    pair.way(ALICE).faults.freeze_at = 1_000

    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        channel = await pair.way(ALICE).acquire(BOB)
        assert channel is not None
        await liar.send(Route(channel.session, 0))
        await liar.expect(Route)
        await liar.send(Aborted("out of memory"))

    offer = msgspec.structs.replace(pair.alice.offer, seconds_left=30.0)
    await _lie(pair.bob, script, offer, pair.alice.contribution)
    assert pair.bob.result.reason == "the partner aborted: out of memory"
    assert pair.way(BOB).discarded
    assert trio.current_time() <= FAREWELL_TIMEOUT


async def test_all_of_a_contribution_and_no_hash_is_worth_nothing(
    pair: BulkPair, autojump_clock: trio.testing.MockClock
) -> None:
    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        channel = await pair.way(ALICE).acquire(BOB)
        assert channel is not None
        await liar.send(Route(channel.session, 0))
        await liar.expect(Route)
        await channel.send(liar.contribution)
        await trio.testing.wait_all_tasks_blocked()
        await liar.send(Route(None, 0))

    await _lie(pair.bob, script, msgspec.structs.replace(pair.alice.offer, seconds_left=30.0), pair.alice.contribution)
    assert pair.bob.incoming == pair.alice.contribution
    assert pair.bob.result.reason == "the partner broke the protocol: all of the contribution, and no hash"
    assert trio.current_time() <= FAREWELL_TIMEOUT


async def test_a_channel_that_is_not_there_is_not_used(pair: BulkPair, autojump_clock: trio.testing.MockClock) -> None:
    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        await liar.send(Route(b"x" * 16, 0))
        await liar.expect(Route)
        assert liar.exchange.channel is None
        await liar.send(Aborted("never mind"))

    await _lie(pair.bob, script, msgspec.structs.replace(pair.alice.offer, seconds_left=30.0), pair.alice.contribution)
    assert pair.bob.result.path == "stream"


async def test_a_cancelled_exchange_gives_its_channel_up(
    pair: BulkPair, autojump_clock: trio.testing.MockClock
) -> None:
    pair.way(BOB).faults.freeze_at = 1_000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.bob.exchange, ALICE)
        with trio.move_on_after(3):
            await pair.alice.exchange(BOB)
        assert pair.way(ALICE).discarded
    assert not pair.bob.result.committed


@pytest.mark.parametrize("seed", range(60))
async def test_whatever_befalls_streams_and_channels_both_believe_the_same(
    pair: BulkPair, seed: int, autojump_clock: trio.testing.MockClock
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
    assert pair.alice.result.committed is pair.bob.result.committed, (pair.alice.result, pair.bob.result)
    if pair.alice.result.committed:
        assert_committed(pair.alice, pair.bob)
    assert trio.current_time() <= PATIENCE


async def test_nobody_hashes_a_contribution_while_a_thread_receives_it(
    pair: BulkPair, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async def receive(channel: MemoryChannel, incoming: Incoming) -> None:
        while incoming.rest:
            piece = await channel._stream.receive_some(len(incoming.rest))
            incoming.rest[: len(piece)] = piece
            incoming.position += len(piece)
        if channel._faults is pair.way(BOB).faults:
            await trio.testing.wait_all_tasks_blocked()  # meanwhile Alice says that she has everything
            assert incoming._num_hashed == 0

    monkeypatch.setattr(MemoryChannel, "receive", receive)
    await pair.meet()
    pair.assert_committed("bulk", num_channels=1)

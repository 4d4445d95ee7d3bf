"""Channels with a strand over each line of either end, through real proxies on loopback."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from farandole.node.base.streams import Stream, close_stream
from farandole.node.bulk import negotiation
from farandole.node.bulk import strands as strands_module
from farandole.node.bulk.bundle import Bundle
from farandole.node.bulk.channel import BulkChannel, ChannelError
from farandole.node.bulk.lines import reachable
from farandole.node.bulk.strands import STRANDS_PROTOCOL
from farandole.protocol.exchange.strands import HEADER, PIECE_BYTES, Bound, Lines
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.incoming import Incoming
from farandole.protocol.wire.messagepack import encode
from farandole.testnet.socks_proxy import Proxy, open_proxy

from ...parties import ALICE, BOB, assert_committed
from ...parties import Party as Partner
from ...parties import meet as exchange
from .parties import Party, two_parties
from .test_negotiation import cancelled_at

MEGABYTE = 1 << 20


@dataclass
class Ends:
    """Both ends of a channel, and what data moves over it."""

    near: BulkChannel | Bundle
    far: BulkChannel | Bundle

    async def move(self, size: int, *, calls: int = 1) -> None:
        """Move as many bytes both ways at once, each sent in some calls, and compare them."""
        async with trio.open_nursery() as nursery:
            for sender, receiver in ((self.near, self.far), (self.far, self.near)):
                data = random.Random(size).randbytes(size)
                nursery.start_soon(self._send, sender, data, calls)
                nursery.start_soon(self._receive, receiver, data)

    async def _send(self, sender: BulkChannel | Bundle, data: bytes, calls: int) -> None:
        step = -(-len(data) // calls)
        for start in range(0, len(data), step):
            await sender.send(memoryview(data)[start : start + step])

    async def _receive(self, receiver: BulkChannel | Bundle, data: bytes) -> None:
        positions: list[int] = []
        incoming = Incoming(memoryview(bytearray(len(data))), positions.append)
        await receiver.receive(incoming)
        assert bytes(incoming.memory) == data
        assert positions == sorted(positions)
        assert incoming.position == len(data)


class Meeting:
    """Alice, who asks for channels, and Bob, each with some lines."""

    def __init__(self, alice: Party, bob: Party, of_alice: list[Proxy], of_bob: list[Proxy]) -> None:
        self.alice, self.bob = alice, bob
        self.of_alice, self.of_bob = of_alice, of_bob
        self._met: list[BulkChannel | Bundle] = []

    async def meet(self) -> Ends:
        with self.bob.service.expecting(ALICE):
            near = await self.alice.service.acquire(BOB, all_lines=True)
        assert near is not None
        far = self.bob.service.take(ALICE, near.session)
        assert far is not None
        self._met += [near, far]
        return Ends(near, far)

    def close(self) -> None:
        for channel in self._met:
            channel.close()

    def keep(self, ends: Ends) -> None:
        self.alice.service.release(ends.near)
        self.bob.service.release(ends.far)


@pytest.fixture(autouse=True)
def _on_the_internet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loopback addresses count as the internet's."""
    monkeypatch.setattr(negotiation, "reachable", list)


@pytest.fixture
async def meeting(request: pytest.FixtureRequest) -> AsyncIterator[Meeting]:
    num_of_alice, num_of_bob = getattr(request, "param", (1, 0))
    async with AsyncExitStack() as stack:
        of_alice = [await stack.enter_async_context(open_proxy()) for _ in range(num_of_alice)]
        of_bob = [await stack.enter_async_context(open_proxy()) for _ in range(num_of_bob)]
        lines = [proxy.url for proxy in of_alice], [proxy.url for proxy in of_bob]
        alice, bob = await stack.enter_async_context(two_parties(lines=lines))
        meeting = Meeting(alice, bob, of_alice, of_bob)
        yield meeting
        meeting.close()


@pytest.mark.parametrize("meeting", [(1, 0), (0, 1), (2, 1)], indirect=True)
async def test_a_channel_moves_data_over_all_lines_of_both_ends(meeting: Meeting) -> None:
    ends = await meeting.meet()
    proxies = meeting.of_alice + meeting.of_bob
    for end in (ends.near, ends.far):
        assert isinstance(end, Bundle)
        assert end.num_strands == 1 + len(proxies)
    for size, calls in ((4 * MEGABYTE, 1), (1, 1), (3 * MEGABYTE + 5, 7)):
        await ends.move(size, calls=calls)
    assert all(proxy.num_bytes > MEGABYTE // 4 for proxy in proxies)


async def test_a_slow_line_takes_fewer_pieces_and_delays_little(meeting: Meeting) -> None:
    ends = await meeting.meet()
    meeting.of_alice[0].seconds_per_read = 0.02
    await ends.move(32 * MEGABYTE)
    assert meeting.of_alice[0].num_bytes < 2 * 32 * MEGABYTE / 4


async def test_a_channel_with_strands_is_kept_for_other_exchanges_alone(meeting: Meeting) -> None:
    """Microbatches and blocks of checkpoints would wait for the slowest line."""
    ends = await meeting.meet()
    await ends.move(MEGABYTE)
    meeting.keep(ends)
    with meeting.bob.service.expecting(ALICE):
        other = await meeting.alice.service.acquire(BOB)
    assert isinstance(other, BulkChannel)
    other.close()
    again = await meeting.meet()
    assert again.near is ends.near
    assert again.far is ends.far
    await again.move(MEGABYTE)


async def test_a_kept_channel_gets_strands_when_an_exchange_takes_it(meeting: Meeting) -> None:
    with meeting.bob.service.expecting(ALICE):
        plain = await meeting.alice.service.acquire(BOB)
    assert isinstance(plain, BulkChannel)
    meeting.alice.service.release(plain)
    ends = await meeting.meet()
    assert isinstance(ends.near, Bundle)
    assert ends.near.session == plain.session
    await ends.move(MEGABYTE)


@pytest.mark.parametrize("meeting", [(0, 0)], indirect=True)
async def test_ends_without_other_lines_ask_each_other_once_for_a_channel(meeting: Meeting) -> None:
    ends = await meeting.meet()
    assert isinstance(ends.near, BulkChannel)
    await ends.move(MEGABYTE)
    meeting.keep(ends)
    num_streams = meeting.alice.host.streams_opened
    await (await meeting.meet()).move(MEGABYTE)
    assert meeting.alice.host.streams_opened == num_streams


@pytest.mark.parametrize("meeting", [(1, 1)], indirect=True)
async def test_a_dead_proxy_costs_its_strand_and_is_left_alone(meeting: Meeting) -> None:
    meeting.of_alice[0].is_dead = True
    ends = await meeting.meet()
    assert isinstance(ends.near, Bundle)
    assert ends.near.num_strands == 2
    await ends.move(MEGABYTE)
    meeting.of_alice[0].is_dead = False
    [line] = meeting.alice.service._strands._lines
    assert not line.is_due(BOB)
    again = await meeting.meet()
    assert isinstance(again.near, Bundle)
    assert again.near.num_strands == 2


async def test_a_strand_that_breaks_ends_the_channel_at_both_ends(meeting: Meeting) -> None:
    ends = await meeting.meet()
    meeting.of_alice[0].seconds_per_read = 0.05
    failures: list[str] = []

    async def send(sender: BulkChannel | Bundle) -> None:
        try:
            await sender.send(memoryview(bytes(8 * MEGABYTE)))
        except ChannelError:
            failures.append("send")

    async def receive(receiver: BulkChannel | Bundle) -> None:
        try:
            await receiver.receive(Incoming(memoryview(bytearray(8 * MEGABYTE))))
        except ChannelError:
            failures.append("receive")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, ends.near)
        nursery.start_soon(receive, ends.far)
        while meeting.of_alice[0].num_bytes < 100_000:
            await trio.lowlevel.checkpoint()
        await meeting.of_alice[0].break_off()
    assert "receive" in failures
    assert not ends.far.is_fit


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("meeting", [(1, 1)], indirect=True)
async def test_an_exchange_moves_over_all_lines_and_survives_one_that_breaks(meeting: Meeting, breaks: bool) -> None:
    parties = meeting.alice, meeting.bob
    alice, bob = (Partner(party.host, seed, 16 * MEGABYTE, party.service) for seed, party in enumerate(parties, 1))
    meeting.of_bob[0].seconds_per_read = 0.01 if breaks else 0.0

    async def break_one() -> None:
        while meeting.of_bob[0].num_bytes < MEGABYTE // 2:
            await trio.lowlevel.checkpoint()
        await meeting.of_bob[0].break_off()

    async with trio.open_nursery() as nursery:
        if breaks:
            nursery.start_soon(break_one)
        await exchange(alice, bob)
    assert_committed(alice, bob)
    assert alice.result.path == "bulk"
    assert all(proxy.num_bytes > MEGABYTE // 2 for proxy in meeting.of_alice + meeting.of_bob)


async def test_a_peer_of_an_earlier_release_has_a_plain_channel(meeting: Meeting) -> None:
    del meeting.bob.host.handlers[STRANDS_PROTOCOL]
    ends = await meeting.meet()
    assert isinstance(ends.near, BulkChannel)
    await ends.move(MEGABYTE)


@pytest.mark.parametrize(
    "headers",
    [
        [(0, 1 << 20)],
        [(1 << 60, 10)],
        [(5, 0)],
        [(0, 0)],
        [(2, 0), (2, 0)],
        [(4, 0)],
    ],
)
async def test_a_peer_that_sends_a_piece_or_an_end_without_a_place_loses_the_channel(
    meeting: Meeting, headers: list[tuple[int, int]]
) -> None:
    """The last one ends all strands without the bytes."""
    ends = await meeting.meet()
    assert isinstance(ends.near, Bundle)
    async with trio.open_nursery() as nursery:
        for strand in ends.near._strands:
            nursery.start_soon(strand.send, memoryview(b"".join(HEADER.pack(*header) for header in headers)))
        with pytest.raises(ChannelError):
            await ends.far.receive(Incoming(memoryview(bytearray(4))))


async def test_a_strand_that_falls_silent_is_noticed_although_others_move(meeting: Meeting) -> None:
    """The pipe watches a number that grows while every strand is heard."""
    ends = await meeting.meet()
    assert isinstance(ends.near, Bundle)
    assert isinstance(ends.far, Bundle)
    senders, receivers = ends.near._strands, ends.far._strands

    async def hear_more(sender: BulkChannel, receiver: BulkChannel, data: bytes) -> None:
        before = receiver.num_received
        await sender.send(memoryview(data))
        while receiver.num_received < before + len(data):
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.far.receive, Incoming(memoryview(bytearray(4 * MEGABYTE))))
        await trio.testing.wait_all_tasks_blocked()
        before = ends.far.num_received
        for index, strand in enumerate(senders):
            await hear_more(strand, receivers[index], HEADER.pack(index * PIECE_BYTES, PIECE_BYTES))
        assert (heard := ends.far.num_received) > before
        for _ in range(3):
            await hear_more(senders[0], receivers[0], bytes(PIECE_BYTES // 4))
            assert ends.far.num_received == heard
        await hear_more(senders[1], receivers[1], bytes(PIECE_BYTES // 4))
        assert ends.far.num_received > heard
        nursery.cancel_scope.cancel()


async def test_without_time_the_channel_stays_as_it_is(meeting: Meeting) -> None:
    """An exchange has a part of its deadline for a channel: a line that hangs must not cost it the channel."""
    meeting.of_alice[0].is_silent = True
    with meeting.bob.service.expecting(ALICE), trio.move_on_after(1.0) as scope:
        near = await meeting.alice.service.acquire(BOB, all_lines=True)
    assert not scope.cancelled_caught
    assert isinstance(near, BulkChannel)
    near.close()


def test_a_proxy_dials_nothing_in_a_network_of_its_own() -> None:
    private = [("192.168.1.1", 8_080), ("127.0.0.1", 4_000), ("10.0.0.1", 4_000), ("fe80::1", 4_000), ("name", 4_000)]
    assert reachable([*private, ("5.1.1.1", 4_000)]) == [("5.1.1.1", 4_000)]


async def test_strands_are_for_peers_that_are_expected(meeting: Meeting) -> None:
    stream = await meeting.alice.host.open_stream(BOB, STRANDS_PROTOCOL)
    assert await stream.receive_some(1) == b""


@pytest.mark.parametrize(
    "answers",
    [
        [Bound([])],
        [Lines(b"x" * 16, 1), Lines(b"x" * 16, 1)],
        [Lines(b"x" * 16, 1), Bound([3])],
        [Lines(b"x" * 16, 0), Bound([1, 1])],
        [],
    ],
)
async def test_whatever_an_answerer_says_its_asker_has_a_channel_or_none(
    meeting: Meeting, answers: list[Lines | Bound], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lie costs the liar its strands or its channel."""
    monkeypatch.setattr(strands_module, "OPEN_TIMEOUT", 0.2)
    monkeypatch.setattr(strands_module, "AGREE_TIMEOUT", 0.2)

    async def lie(stream: Stream) -> None:
        for answer in answers:
            await stream.receive_some(1_000)
            await stream.send_all(frame(encode(answer), 1_000))
        await close_stream(stream)

    meeting.bob.host.set_handler(STRANDS_PROTOCOL, lie)
    with meeting.bob.service.expecting(ALICE):
        near = await meeting.alice.service.acquire(BOB, all_lines=True)
    assert near is None or isinstance(near, BulkChannel)
    if near is not None:
        near.close()


async def test_an_asker_that_names_strands_that_are_not_there_gets_none_of_them(meeting: Meeting) -> None:
    with meeting.bob.service.expecting(ALICE):
        near = await meeting.alice.service.acquire(BOB)
        assert near is not None
        stream = await meeting.alice.host.open_stream(BOB, STRANDS_PROTOCOL)
        await stream.send_all(frame(encode(Lines(near.session, 7)), 64))
        await stream.receive_some(1_000)
        await stream.send_all(frame(encode(Bound([1, 2, 2, 7])), 64))
        assert (await stream.receive_some(1_000))[4:] == encode(Bound([]))
        assert await stream.receive_some(1) == b""
    far = meeting.bob.service.take(ALICE, near.session)
    assert isinstance(far, BulkChannel)
    assert not meeting.bob.service._strands.places
    await Ends(near, far).move(MEGABYTE)
    near.close()
    far.close()


async def test_strands_for_anothers_channel_are_refused(meeting: Meeting) -> None:
    with meeting.bob.service.expecting(ALICE):
        stream = await meeting.alice.host.open_stream(BOB, STRANDS_PROTOCOL)
        await stream.send_all(frame(encode(Lines(b"x" * 16, 7)), 64))
        assert await stream.receive_some(1) == b""
    assert not meeting.bob.service._strands.places


async def test_wherever_an_attempt_is_cancelled_no_socket_is_left_open() -> None:
    for step in itertools.count(1):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            async with open_proxy() as proxy, two_parties(lines=([proxy.url], [])) as (alice, bob):
                channel = None
                with bob.service.expecting(ALICE), cancelled_at(step) as instrument:
                    channel = await alice.service.acquire(BOB, all_lines=True)
                if channel is not None:
                    channel.close()
        assert not [str(each.message) for each in warned], f"cancelled at step {step}"
        if instrument.steps_left > 0:
            break
    assert step > 10

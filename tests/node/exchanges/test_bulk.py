"""Bulk channels over loopback TCP: negotiation, authentication, moving, breaking, closing."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import trio
import trio.testing
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from farandole.node.errors import PeerUnreachableError
from farandole.node.exchanges import bulk
from farandole.node.exchanges.bulk import (
    BULK_PROTOCOL,
    FIRST_RETRY_AFTER,
    MAX_IDLE,
    MAX_UNPROVEN_PER_ADDRESS,
    BulkService,
    open_bulk,
)
from farandole.node.exchanges.bulk_channel import BulkChannel, ChannelError, open_channel
from farandole.node.shaping import Shaping
from farandole.node.streams import Stream
from farandole.protocol.bulk import Proposal, Secrets, decode_proposal, encode_proposal, greeting
from farandole.protocol.framing import frame
from farandole.protocol.incoming import Incoming
from farandole.protocol.record_layer import HEADER_BYTES, OVERHEAD_BYTES, RECORD_BYTES, Sealer

ALICE, BOB = b"a" * 32, b"b" * 32  # Alice always asks
PATIENCE = 20.0
SIZES = [1, 1_001, RECORD_BYTES, RECORD_BYTES + 1, 3_000_001]

Handler = Callable[[Stream], Awaitable[None]]


class MemoryStream:
    """One end of a libp2p stream; ``change`` alters the proposals that go through it."""

    is_bulk = False

    def __init__(self, stream: trio.abc.Stream, peer: bytes, host: MemoryHost) -> None:
        self.peer = peer
        self._stream = stream
        self._host = host

    async def send_all(self, data: bytes) -> None:
        if self._host.is_frozen:
            await trio.sleep_forever()
        if self._host.change is not None:
            proposal = self._host.change(decode_proposal(data[4:]))
            data = frame(msgspec.msgpack.encode(proposal), 4_096)
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


@dataclass
class MemoryHost:
    """A host at loopback whose libp2p streams are memory."""

    author: bytes
    nursery: trio.Nursery
    network: dict[bytes, MemoryHost]
    addresses: list[str] = field(default_factory=lambda: ["/ip4/127.0.0.1/tcp/4001/p2p/x"])
    bulk_ports: set[int] = field(default_factory=set)
    mapped: dict[int, tuple[str, int]] = field(default_factory=dict)
    handlers: dict[str, Handler] = field(default_factory=dict)
    change: Callable[[Proposal], Proposal] | None = None
    is_frozen: bool = False
    streams_opened: int = 0
    remote_port: int = 4_001
    unreachable: set[bytes] = field(default_factory=set)
    observed: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network[self.author] = self

    @property
    def observed_ips(self) -> list[str]:
        return []

    def is_out_of_reach(self, peer: bytes) -> bool:
        return peer in self.unreachable

    def observe_port(self, port: int) -> contextlib.AbstractAsyncContextManager[list[tuple[str, int]]]:
        return contextlib.nullcontext(self.observed)

    def remote_addresses(self, peer: bytes) -> list[str]:
        return [f"/ip4/127.0.0.1/tcp/{self.remote_port}"]

    def set_handler(self, protocol: str, handler: Handler) -> None:
        self.handlers[protocol] = handler

    async def open_stream(self, peer: bytes, protocol: str, timeout: float = 8.0) -> MemoryStream:
        self.streams_opened += 1
        remote = self.network.get(peer)
        if remote is None or protocol not in remote.handlers:
            raise PeerUnreachableError("nobody there")
        near, far = trio.testing.memory_stream_pair()
        self.nursery.start_soon(remote.handlers[protocol], MemoryStream(far, self.author, remote))
        return MemoryStream(near, peer, self)


@dataclass
class Party:
    """A node with its bulk service."""

    host: MemoryHost
    service: BulkService

    @property
    def port(self) -> int:
        return int(self.service._listeners[socket.AF_INET].getsockname()[1])


@asynccontextmanager
async def two_parties() -> AsyncIterator[tuple[Party, Party]]:
    network: dict[bytes, MemoryHost] = {}
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            hosts = [MemoryHost(author, nursery, network) for author in (ALICE, BOB)]
            async with open_bulk(hosts[0]) as first, open_bulk(hosts[1]) as second:
                yield Party(hosts[0], first), Party(hosts[1], second)
            nursery.cancel_scope.cancel()


@pytest.fixture
async def parties() -> AsyncIterator[tuple[Party, Party]]:
    async with two_parties() as both:
        yield both


@pytest.fixture
def alice(parties: tuple[Party, Party]) -> Party:
    return parties[0]


@pytest.fixture
def bob(parties: tuple[Party, Party]) -> Party:
    return parties[1]


async def meet(alice: Party, bob: Party) -> tuple[BulkChannel, BulkChannel]:
    """Both ends of a channel."""
    with bob.service.expecting(ALICE):
        near = await alice.service.acquire(BOB)
    assert near is not None
    far = bob.service.take(ALICE, near.session)
    assert far is not None
    return near, far


async def assert_no_channel(alice: Party, bob: Party) -> None:
    """When the negotiation is over at both ends."""
    for service in (alice.service, bob.service):
        while service._races:
            await trio.lowlevel.checkpoint()
        assert not any(channel.is_fit for channel in service._idle.values())


async def move(sender: BulkChannel, receiver: BulkChannel, data: bytes) -> None:
    """Send and compare, the hash too."""
    memory, so_far = bytearray(len(data)), sender.num_sent
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.send, memoryview(data))
        digest = await receiver.receive_into(memoryview(memory))
    assert memory == data
    assert digest == blake3(data).digest()
    assert sender.num_sent - so_far == len(data)


@pytest.mark.parametrize("size", SIZES)
async def test_both_ways_at_once_the_bytes_are_exact(alice: Party, bob: Party, size: int) -> None:
    near, far = await meet(alice, bob)
    first, second = random.Random(1).randbytes(size), random.Random(2).randbytes(size)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(move, near, far, first)
        nursery.start_soon(move, far, near, second)
    assert near.is_fit
    assert far.is_fit
    near.close()
    far.close()


async def test_nothing_at_all_can_be_moved(alice: Party, bob: Party) -> None:
    near, far = await meet(alice, bob)
    await move(near, far, b"")
    near.close()
    far.close()


async def test_a_kept_channel_is_used_again(alice: Party, bob: Party) -> None:
    near, far = await meet(alice, bob)
    await move(near, far, b"first")
    alice.service.release(near)
    bob.service.release(far)
    again, far_again = await meet(alice, bob)
    assert (again, far_again) == (near, far)
    assert alice.host.streams_opened == 1
    await move(again, far_again, b"second")
    again.close()
    far_again.close()


async def test_a_kept_channel_that_the_peer_has_closed_is_replaced(alice: Party, bob: Party) -> None:
    near, far = await meet(alice, bob)
    alice.service.release(near)
    bob.service.discard(far)
    again, far_again = await meet(alice, bob)
    assert again is not near
    await move(again, far_again, b"data")
    again.close()
    far_again.close()


async def test_a_channel_is_called_for_by_its_peer_alone(alice: Party, bob: Party) -> None:
    near, far = await meet(alice, bob)
    bob.service.release(far)
    assert bob.service.take(b"m" * 32, near.session) is None
    assert bob.service.take(ALICE, b"x" * 16) is None
    assert bob.service.take(ALICE, near.session) is far
    assert bob.service.take(ALICE, near.session) is None
    near.close()
    far.close()


async def test_only_so_many_channels_are_kept(alice: Party, bob: Party) -> None:
    pairs = [await meet(alice, bob) for _ in range(MAX_IDLE + 1)]
    for near, far in pairs:
        alice.service.release(near)
        bob.service.release(far)
    assert len(alice.service._idle) == len(bob.service._idle) == MAX_IDLE
    assert not pairs[0][0].is_fit
    assert pairs[-1][0].is_fit


async def test_nobody_is_answered_who_is_not_expected(alice: Party, bob: Party) -> None:
    assert await alice.service.acquire(BOB) is None
    await assert_no_channel(alice, bob)


async def test_who_could_not_be_reached_is_not_tried_at_once_again(
    alice: Party, bob: Party, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", bulk.__name__)
    assert await alice.service.acquire(BOB) is None
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(BOB) is None
    assert alice.host.streams_opened == 1
    (message,) = caplog.messages
    assert "for the first time" in message
    assert "for 10 s no channel is tried" in message


async def test_what_the_router_sends_on_is_offered_first_and_what_others_observe(alice: Party, bob: Party) -> None:
    bob.host.mapped[bob.port] = ("5.1.1.1", 5_002)
    bob.host.observed = [("5.1.1.1", 5_003)]
    offered: list[Proposal] = []

    def note(proposal: Proposal) -> Proposal:
        offered.append(proposal)
        return proposal

    bob.host.change = note
    assert bob.host.bulk_ports == {bob.port}
    for channel in await meet(alice, bob):
        channel.close()
    assert offered[0].addresses == [("5.1.1.1", 5_002), ("5.1.1.1", 5_003), ("127.0.0.1", bob.port)]


async def test_who_is_out_of_reach_costs_no_wait(alice: Party, bob: Party) -> None:
    alice.host.unreachable.add(BOB)
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(BOB) is None
    assert alice.host.streams_opened == 0
    alice.host.unreachable.clear()
    for channel in await meet(alice, bob):
        channel.close()


async def test_who_could_not_be_reached_is_tried_again_over_another_connection(alice: Party, bob: Party) -> None:
    assert await alice.service.acquire(BOB) is None
    alice.host.remote_port += 1
    near, far = await meet(alice, bob)
    near.close()
    far.close()


async def test_who_could_not_be_reached_is_tried_again_soon_and_then_later(
    alice: Party, bob: Party, caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    caplog.set_level("INFO", bulk.__name__)
    assert await alice.service.acquire(BOB) is None
    await trio.sleep(FIRST_RETRY_AFTER)
    assert await alice.service.acquire(BOB) is None
    assert alice.host.streams_opened == 2
    assert "2 times in a row" in caplog.messages[-1]
    assert "for 20 s no channel is tried" in caplog.messages[-1]


async def test_a_negotiation_for_which_the_exchange_has_no_more_time_counts_as_failed(alice: Party, bob: Party) -> None:
    bob.host.is_frozen = True
    with bob.service.expecting(ALICE), trio.move_on_after(0.1):
        await alice.service.acquire(BOB)
    bob.host.is_frozen = False
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(BOB) is None
    assert alice.host.streams_opened == 1


@pytest.mark.parametrize("liar", [ALICE, BOB])
async def test_another_key_than_the_proposed_one_is_refused(alice: Party, bob: Party, liar: bytes) -> None:
    other = X25519PrivateKey.generate().public_key().public_bytes_raw()
    host = alice.host if liar == ALICE else bob.host
    host.change = lambda proposal: msgspec.structs.replace(proposal, key=other)
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(BOB) is None
    await assert_no_channel(alice, bob)


@pytest.mark.parametrize("lie", [{"key": bytes(32)}, {"key": b""}, {"session": b"x" * 16}])
async def test_a_proposal_that_lies_brings_no_channel(alice: Party, bob: Party, lie: dict[str, object]) -> None:
    bob.host.change = lambda proposal: msgspec.structs.replace(proposal, **lie)
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(BOB) is None
    await assert_no_channel(alice, bob)


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "OPEN_TIMEOUT", 0.3)
    monkeypatch.setattr(bulk, "GREETING_TIMEOUT", 0.3)


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("liar", [ALICE, BOB])
async def test_a_wrong_token_lets_nobody_in(alice: Party, bob: Party, liar: bytes) -> None:
    host = alice.host if liar == ALICE else bob.host
    host.change = lambda proposal: msgspec.structs.replace(proposal, token=bytes(32))
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(BOB) is None
    assert alice.service._idle == {}


@pytest.mark.usefixtures("short_timeouts")
async def test_without_a_way_there_is_no_channel(alice: Party, bob: Party) -> None:
    for host in (alice.host, bob.host):
        host.change = lambda proposal: msgspec.structs.replace(proposal, addresses=[])
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(BOB) is None


@pytest.mark.parametrize("hidden", [ALICE, BOB])
async def test_one_listener_within_reach_is_enough(alice: Party, bob: Party, hidden: bytes) -> None:
    host = alice.host if hidden == ALICE else bob.host
    host.change = lambda proposal: msgspec.structs.replace(proposal, addresses=[])
    near, far = await meet(alice, bob)
    await move(near, far, b"data")
    near.close()
    far.close()


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_a_peer_that_freezes_in_the_negotiation_costs_its_timeout(alice: Party, bob: Party, who: bytes) -> None:
    (alice if who == ALICE else bob).host.is_frozen = True
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(BOB) is None


async def _closed_by_peer(connection: trio.SocketStream) -> bool:
    try:
        return await connection.receive_some(1) == b""
    except trio.BrokenResourceError:
        return True


async def test_a_stranger_is_cut_off_while_nothing_is_negotiated(bob: Party) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", bob.port) as stranger:
        assert await _closed_by_peer(stranger)


@pytest.mark.usefixtures("short_timeouts")
async def test_strangers_get_in_neither_silent_nor_talking_and_do_not_hinder(
    alice: Party, bob: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "OPEN_TIMEOUT", PATIENCE)
    token = b"t" * 32
    with bob.service._race(Proposal(session=b"s" * 16, token=token, key=b"k" * 32, addresses=[]), b"m" * 32):
        rubbish = [await trio.open_tcp_stream("127.0.0.1", bob.port) for _ in range(3)]
        await rubbish[0].send_all(greeting(b"s" * 16, b"u" * 32))
        await rubbish[1].send_all(greeting(b"x" * 16, token))
        await rubbish[2].send_all(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n")
        for stranger in rubbish:
            assert await _closed_by_peer(stranger)
            await stranger.aclose()
        silent = [await trio.open_tcp_stream("127.0.0.1", bob.port) for _ in range(MAX_UNPROVEN_PER_ADDRESS + 3)]
        await trio.testing.wait_all_tasks_blocked()
        near, far = await meet(alice, bob)  # by the reverse dial
        for stranger in silent:
            assert await _closed_by_peer(stranger)
            await stranger.aclose()
    await move(near, far, b"data")
    near.close()
    far.close()


@pytest.mark.parametrize("sends", [True, False])
async def test_a_peer_that_dies_in_the_middle_is_an_error(alice: Party, bob: Party, sends: bool) -> None:
    near, far = await meet(alice, bob)
    memory = memoryview(bytearray(20_000_000))
    errors: list[ChannelError] = []

    async def move_all() -> None:
        with pytest.raises(ChannelError) as caught:
            await (near.send(memory) if sends else near.receive_into(memory))
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(move_all)
        await (far.receive_into(memory[:1_000]) if sends else far.send(memory[:1_000]))
        far.close()
    assert len(errors) == 1
    near.close()


@pytest.mark.parametrize("sends", [True, False])
async def test_cancellation_ends_the_thread_and_the_channel(alice: Party, bob: Party, sends: bool) -> None:
    near, far = await meet(alice, bob)
    memory = memoryview(bytearray(20_000_000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.send if sends else near.receive_into, memory)
        await (far.receive_into(memory[:1_000]) if sends else far.send(memory[:1_000]))
        nursery.cancel_scope.cancel()
    assert near._threads.borrowed_tokens == 0
    assert not near.is_fit
    assert not far.is_fit or sends  # what was sent before is still to be read
    near.close()
    far.close()
    with pytest.raises(ChannelError):
        await near.send(memory)


async def test_a_cancelled_negotiation_leaves_nothing_behind(alice: Party, bob: Party) -> None:
    bob.host.is_frozen = True
    with bob.service.expecting(ALICE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(alice.service.acquire, BOB)
            await trio.testing.wait_all_tasks_blocked()
            assert alice.service._races
            nursery.cancel_scope.cancel()
    assert not alice.service._races


async def test_closing_the_service_closes_kept_channels(nursery: trio.Nursery) -> None:
    async with two_parties() as (alice, bob):
        near, far = await meet(alice, bob)
        alice.service.release(near)
        port = bob.port
    assert not near.is_fit
    with pytest.raises(OSError, match=r"refused|failed"):
        await trio.open_tcp_stream("127.0.0.1", port)
    far.close()


async def test_idle_channels_close_in_time(
    alice: Party, bob: Party, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    near, far = await meet(alice, bob)
    alice.service.release(near)
    monkeypatch.setattr(bulk, "IDLE_TIMEOUT", 0.0)
    nursery.start_soon(alice.service.close_idle)
    while alice.service._idle:
        await trio.lowlevel.checkpoint()
    assert not near.is_fit
    far.close()
    nursery.cancel_scope.cancel()


async def test_no_two_negotiations_with_one_peer(alice: Party, bob: Party) -> None:
    proposal = alice.service._propose(b"1" * 16, X25519PrivateKey.generate(), [])
    with bob.service.expecting(ALICE), bob.service._race(proposal, ALICE):
        stream = await alice.host.open_stream(BOB, BULK_PROTOCOL)
        await stream.send_all(frame(encode_proposal(msgspec.structs.replace(proposal, session=b"2" * 16)), 4_096))
        assert await stream.receive_some(1) == b""


async def test_each_negotiation_has_keys_of_its_own(alice: Party, bob: Party) -> None:
    proposed: list[Proposal] = []

    def note(proposal: Proposal) -> Proposal:
        proposed.append(proposal)
        return proposal

    for party in (alice, bob):
        party.host.change = note
    for _ in range(2):
        for end in await meet(alice, bob):
            end.close()
    assert len({proposal.key for proposal in proposed}) == len(proposed) == 4


async def test_who_passes_anothers_proposals_on_gets_between_nobody(alice: Party, bob: Party) -> None:
    """Mallory, in the middle of two libp2p streams of her own: Alice means her, and Bob does."""
    mallory = b"m" * 32
    alice.host.network[mallory] = bob.host  # Alice's stream to Mallory ends at Bob, unchanged
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(mallory) is None
    await assert_no_channel(alice, bob)


# How sends and receives are cut


@pytest.mark.parametrize("seed", range(8))
async def test_ends_need_not_cut_alike(alice: Party, bob: Party, seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(1_500_000)
    memory = bytearray(len(data))

    def cuts() -> list[int]:
        places = {rng.choice([rng.randrange(len(data)), rng.randrange(100)]) for _ in range(rng.randrange(12))}
        return [0, *sorted(places), len(data)]

    sends, receives = cuts(), cuts()
    near, far = await meet(alice, bob)

    async def send() -> None:
        for start, end in itertools.pairwise(sends):
            await near.send(memoryview(data)[start:end])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        for start, end in itertools.pairwise(receives):
            assert await far.receive_into(memoryview(memory)[start:end]) == blake3(data[start:end]).digest()
    assert memory == data
    assert near.is_fit
    assert far.is_fit
    near.close()
    far.close()


@pytest.mark.parametrize("size", [10, 3 * RECORD_BYTES])
async def test_a_channel_with_a_rest_that_nobody_asked_for_is_not_used_again(
    alice: Party, bob: Party, size: int
) -> None:
    near, far = await meet(alice, bob)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.send, memoryview(bytes(size)))
        await far.receive_into(memoryview(bytearray(size - 1)))
    assert not far.is_fit
    bob.service.release(far)
    assert bob.service.take(ALICE, far.session) is None
    near.close()


async def test_small_sends_are_one_write_each(alice: Party, bob: Party) -> None:
    near, far = await meet(alice, bob)
    written: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(connection, name)

        def sendall(self, data: memoryview) -> None:
            written.append(data.nbytes)
            connection.sendall(data)

    connection, near._connection = near._connection, Counting()  # type: ignore[assignment]  # forwards all
    for _ in range(3):
        await move(near, far, b"x" * 100)
    assert written == [100 + OVERHEAD_BYTES] * 3
    near.close()
    far.close()


# Somebody on the path


class Meddler:
    """Between two ends of a channel: passes on what Alice's sends, record by record, as ``change`` makes it."""

    def __init__(self, change: Callable[[list[bytes]], list[bytes]]) -> None:
        self._change = change

    async def run(self, from_alice: trio.SocketStream, to_bob: trio.SocketStream, num_records: int) -> None:
        records = [await self._read_record(from_alice) for _ in range(num_records)]
        with contextlib.suppress(trio.BrokenResourceError):
            for record in self._change(records):
                await to_bob.send_all(record)
            await to_bob.send_eof()

    async def _read_record(self, stream: trio.SocketStream) -> bytes:
        header = await self._read_exactly(stream, HEADER_BYTES)
        return header + await self._read_exactly(stream, int.from_bytes(header, "big"))

    async def _read_exactly(self, stream: trio.SocketStream, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += await stream.receive_some(size - len(data))
        return data


def flipped(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


MEDDLING: dict[str, tuple[int, Callable[[list[bytes]], list[bytes]]]] = {
    "nothing": (4, lambda r: r),
    "flips the length": (1, lambda r: [r[0], flipped(r[1], 3), *r[2:]]),
    "makes it long": (1, lambda r: [r[0], b"\xff" + r[1][1:], *r[2:]]),
    "flips a byte": (1, lambda r: [r[0], flipped(r[1], 100), *r[2:]]),
    "flips the tag": (2, lambda r: [*r[:2], flipped(r[2], len(r[2]) - 1), r[3]]),
    "drops": (1, lambda r: [r[0], *r[2:]]),
    "drops the last": (3, lambda r: r[:3]),
    "swaps": (1, lambda r: [r[0], r[2], r[1], r[3]]),
    "repeats": (2, lambda r: [*r[:2], *r[1:]]),
    "truncates": (3, lambda r: [*r[:3], r[3][:-1]]),
    "truncates the length": (3, lambda r: [*r[:3], r[3][:2]]),
    "inserts": (1, lambda r: [r[0], random.Random(1).randbytes(5_000), *r[1:]]),
}


@pytest.mark.parametrize("meddling", MEDDLING)
async def test_who_meddles_on_the_path_breaks_the_channel_and_nothing_counts(
    meddling: str, nursery: trio.Nursery
) -> None:
    num_good, change = MEDDLING[meddling]
    data = random.Random(2).randbytes(3 * RECORD_BYTES + 1_000)
    memory = bytearray(len(data))
    incoming = Incoming(memoryview(memory))
    with trio.fail_after(PATIENCE):
        async with open_meddled(Meddler(change), 4) as (near, far):
            async with trio.open_nursery() as moving:
                moving.start_soon(near.send, memoryview(data))
                if num_good == 4:
                    await far.receive(incoming)
                else:
                    with pytest.raises(ChannelError):
                        await far.receive(incoming)
            received = data[: num_good * RECORD_BYTES]
            assert incoming.position == len(received)
            assert memory[: len(received)] == received
            assert incoming.digest() == blake3(received).digest()
            assert not far.is_fit
            if num_good < 4:
                for _ in range(2):
                    with pytest.raises(ChannelError):
                        await far.receive(incoming)
                assert incoming.position == len(received)


@asynccontextmanager
async def open_meddled(meddler: Meddler, num_records: int) -> AsyncIterator[tuple[BulkChannel, BulkChannel]]:
    """Both ends of a channel that leads through somebody else once it is open."""
    (alices, from_alice), (to_bob, bobs) = tcp_pair(), tcp_pair()
    near = BulkChannel(BOB, b"s" * 16, alices, SECRETS, Shaping())
    far = BulkChannel(ALICE, b"s" * 16, bobs, Secrets(SECRETS.opening, SECRETS.sealing), Shaping())
    middle = []
    for plain in (from_alice, to_bob):
        plain.setblocking(False)
        middle.append(trio.SocketStream(trio.socket.from_stdlib_socket(plain)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meddler.run, *middle, num_records)
        yield near, far
    for end in (near, far):
        end.close()
    for stream in middle:
        await stream.aclose()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        return dialled, listener.accept()[0]


SECRETS = Secrets(b"n" * 32, b"f" * 32)


@pytest.mark.parametrize(
    ("answerers", "num_opened"),
    [
        (Secrets(SECRETS.opening, SECRETS.sealing), 2),
        (SECRETS, 0),  # as who hears himself has
        (Secrets(SECRETS.opening, b"x" * 32), 0),  # the answerer hears nothing that it can open, and says nothing
        (Secrets(b"x" * 32, SECRETS.sealing), 1),  # and here the asker
    ],
)
async def test_ends_with_different_keys_open_no_channel(answerers: Secrets, num_opened: int) -> None:
    opened: list[BulkChannel] = []

    async def open_one(connection: socket.socket, own: Secrets, is_asker: bool) -> None:
        with contextlib.suppress(ChannelError):
            channel = await open_channel(b"p" * 32, b"s" * 16, connection, own, is_asker, Shaping())
            opened.append(channel)
            if not is_asker:
                channel.announce()

    with trio.fail_after(PATIENCE):
        dialled, accepted = tcp_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_one, dialled, SECRETS, True)
            nursery.start_soon(open_one, accepted, answerers, False)
    assert len(opened) == num_opened
    if num_opened < 2:
        assert dialled.fileno() == -1
    assert {channel.is_fit for channel in opened} <= {num_opened == 2}
    for channel in opened:
        channel.close()


async def test_whose_first_record_says_something_else_is_refused() -> None:
    dialled, accepted = tcp_pair()
    with accepted, trio.fail_after(PATIENCE):
        accepted.sendall(Sealer(SECRETS.opening).seal(memoryview(b"hello")))
        with pytest.raises(ChannelError, match="ready"):
            await open_channel(b"p" * 32, b"s" * 16, dialled, SECRETS, True, Shaping())
    assert dialled.fileno() == -1

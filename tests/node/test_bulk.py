"""Bulk channels over loopback TCP: negotiation, authentication, moving, breaking, closing."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from blake3 import blake3

from farandole.node import bulk
from farandole.node.bulk import (
    BULK_PROTOCOL,
    FIRST_RETRY_AFTER,
    MAX_IDLE,
    MAX_UNPROVEN_PER_ADDRESS,
    BulkService,
    open_bulk,
)
from farandole.node.bulk_channel import BulkChannel, ChannelError, Credentials
from farandole.node.errors import PeerUnreachableError
from farandole.node.streams import Stream
from farandole.protocol.bulk import Proposal, decode_proposal, encode_proposal, greeting
from farandole.protocol.framing import frame

ALICE, BOB = b"a" * 32, b"b" * 32  # Alice always asks
PATIENCE = 20.0
SIZES = [1, 1_001, 16_384, 262_145, 3_000_001]

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
    handlers: dict[str, Handler] = field(default_factory=dict)
    change: Callable[[Proposal], Proposal] | None = None
    is_frozen: bool = False
    streams_opened: int = 0
    remote_port: int = 4_001

    def __post_init__(self) -> None:
        self.network[self.author] = self

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
async def test_another_certificate_is_refused(alice: Party, bob: Party, liar: bytes) -> None:
    other = Credentials().certificate
    host = alice.host if liar == ALICE else bob.host
    host.change = lambda proposal: msgspec.structs.replace(proposal, certificate=other)
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(BOB) is None
    await assert_no_channel(alice, bob)


@pytest.mark.parametrize("lie", [{"certificate": b"rubbish"}, {"certificate": b""}, {"session": b"x" * 16}])
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
    with bob.service._race(Proposal(session=b"s" * 16, token=token, certificate=b"c", addresses=[]), b"m" * 32):
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
    proposal = alice.service._propose(b"1" * 16)
    with bob.service.expecting(ALICE), bob.service._race(proposal, ALICE):
        stream = await alice.host.open_stream(BOB, BULK_PROTOCOL)
        await stream.send_all(frame(encode_proposal(msgspec.structs.replace(proposal, session=b"2" * 16)), 4_096))
        assert await stream.receive_some(1) == b""


def test_the_key_is_not_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Credentials().context(True, Credentials().certificate)
    assert list(tmp_path.iterdir()) == []

"""Nodes that exchange in memory: hosts, streams, bulk channels, and their faults."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio
import trio.testing
from blake3 import blake3

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.base.streams import Stream
from farandole.node.bulk.channel import ChannelError
from farandole.node.bulk.exchange_service import EXCHANGE_PROTOCOL, ExchangeService
from farandole.node.bulk.negotiation import open_bulk
from farandole.node.bulk.pipe import Outgoing
from farandole.node.mesh.addresses import OwnAddresses
from farandole.node.mesh.host import Host
from farandole.protocol.exchange.exchange import Offer
from farandole.protocol.exchange.pipe import CHUNK_BYTES, Transfer
from farandole.protocol.rounds.pairing_events import ExchangeEnded, StartExchange
from farandole.protocol.wire.errors import RemoteProtocolError

ALICE, BOB, CAROL = b"a" * 32, b"b" * 32, b"c" * 32  # the one with the smaller key initiates
SESSION = b"s" * 16
RUN_ID = b"r" * 32
SIZE = 3 * CHUNK_BYTES + 1_000
PATIENCE = 30.0

Handler = Callable[[Stream], Awaitable[None]]


class AlwaysWaits:
    """A stream that takes nothing without a wait."""

    room = 0

    def send_now(self, data: bytes) -> None:
        raise AssertionError("there is no room")


class MemoryStream(AlwaysWaits):
    """One end of a stream between two hosts: it cuts, freezes or drips if the test says so."""

    is_bulk = False
    handshake_hash = b"h" * 32

    def __init__(self, stream: trio.abc.Stream, peer: bytes, faults: Faults) -> None:
        self.peer = peer
        self._stream = stream
        self._faults = faults
        self._sent = 0

    async def send_all(self, data: bytes) -> None:
        cut_at, freeze_at = self._faults.cut_at, self._faults.freeze_at
        end = self._sent + len(data)
        if freeze_at is not None and end > freeze_at:
            await self._stream.send_all(data[: max(freeze_at - self._sent, 0)])
            await trio.sleep_forever()
        if cut_at is not None and end > cut_at:
            await self._stream.send_all(data[: max(cut_at - self._sent, 0)])
            await trio.aclose_forcefully(self._stream)
            raise trio.BrokenResourceError("cut")
        self._sent = end
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._stream.receive_some(max_bytes)
        await trio.sleep(self._faults.delay)
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()


@dataclass
class Faults:
    """The faults of one host's side of its exchange streams."""

    cut_at: int | None = None
    """Bytes after which its connection breaks."""
    freeze_at: int | None = None
    """Bytes after which it sends nothing more."""
    delay: float = 0.0
    """Additional delay of received data, in seconds."""
    num_channels: int = 1
    """Number of bulk channels with these faults, from the first on."""


@dataclass
class MemoryHost:
    """A host on loopback that reaches the others of its network through memory streams."""

    author: bytes
    nursery: trio.Nursery
    network: dict[bytes, MemoryHost]
    faults: Faults = field(default_factory=Faults)
    handlers: dict[str, Handler] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=lambda: ["/ip4/127.0.0.1/tcp/4001/p2p/x"])
    own: OwnAddresses = field(default_factory=lambda: OwnAddresses("x"))

    def __post_init__(self) -> None:
        self.network[self.author] = self
        self.own.listening.append(("127.0.0.1", 4_001))

    @property
    def connections(self) -> MemoryHost:
        return self

    def remote_addresses(self, peer: bytes) -> list[str]:
        return ["/ip4/127.0.0.1/tcp/4001"]

    def set_handler(self, protocol: str, handler: Handler) -> None:
        self.handlers[protocol] = handler

    async def open_stream(self, peer: bytes, protocol: str, timeout: float = 8.0) -> Any:
        await trio.lowlevel.checkpoint()
        remote = self.network.get(peer)
        if remote is None or protocol not in remote.handlers:
            raise PeerUnreachableError("nobody there")
        near, far = trio.testing.memory_stream_pair()
        self.nursery.start_soon(serve, remote.handlers[protocol], remote.end_of(far, self.author, protocol))
        return self.end_of(near, peer, protocol)

    def end_of(self, stream: trio.abc.Stream, peer: bytes, protocol: str) -> Any:
        """Return this host's end of a stream, with its faults."""
        return MemoryStream(stream, peer, self.faults if protocol == EXCHANGE_PROTOCOL else Faults())


async def serve(handler: Handler, stream: MemoryStream) -> None:
    """Run a handler as a host does: the stream closes when it returns, and a fault of the peer ends it alone."""
    try:
        await handler(stream)
    except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError):
        pass
    finally:
        await stream.aclose()


class MemoryChannel:
    """One end of a bulk channel between two hosts."""

    def __init__(self, session: bytes, stream: trio.StapledStream, faults: Faults) -> None:
        self.session = session
        self.num_sent = 0
        self.num_received = 0
        self.seconds_held_up = 0.0
        self.is_moving = 0
        self.is_closed = False
        self._stream = stream
        self._faults = faults

    async def send(self, data: memoryview) -> None:
        faults = [at for at in (self._faults.cut_at, self._faults.freeze_at) if at is not None]
        left = min(faults) - self.num_sent if faults else data.nbytes + 1
        piece = data[: max(left, 0)]
        with self._moving():
            await self._stream.send_all(bytes(piece))
            self.num_sent += piece.nbytes
            if piece.nbytes < left:
                return
            if self._faults.freeze_at is not None:
                await trio.sleep_forever()
            self.close()
            raise ChannelError("cut")

    async def receive(self, incoming: Transfer) -> None:
        with self._moving():
            while incoming.rest:
                piece = await self._stream.receive_some(min(65_536, len(incoming.rest)))
                if not piece:
                    raise ChannelError("the peer closed the channel")
                self.num_received += len(piece)
                incoming.write(memoryview(piece))

    def close(self) -> None:
        self.is_closed = True
        for half in (self._stream.send_stream, self._stream.receive_stream):
            assert isinstance(half, trio.testing.MemorySendStream | trio.testing.MemoryReceiveStream)
            half.close()

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        self.is_moving += 1
        try:
            yield
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ChannelError(str(error)) from error
        finally:
            self.is_moving -= 1


class MemoryChannels:
    """The bulk channels of a host whose partner supports them too."""

    def __init__(self, author: bytes, network: dict[bytes, MemoryChannels]) -> None:
        self.author = author
        self.faults = Faults()
        self.num_allowed = 100
        self.is_frozen = False
        self.kept: dict[bytes, MemoryChannel] = {}
        self._made: list[MemoryChannel] = []
        self.expected: list[bytes] = []
        self.num_acquired = 0
        self._network = network
        network[author] = self

    @contextlib.contextmanager
    def expecting(self, peer: bytes) -> Iterator[None]:
        self.expected.append(peer)
        try:
            yield
        finally:
            self.expected.remove(peer)

    async def acquire(self, peer: bytes) -> MemoryChannel | None:
        await trio.lowlevel.checkpoint()
        if self.is_frozen:
            await trio.sleep_forever()
        if self.kept:
            return self.kept.popitem()[1]
        remote = self._network[peer]
        if self.num_acquired >= self.num_allowed or self.author not in remote.expected:
            return None
        self.num_acquired += 1
        session = bytes([self.num_acquired]) * 16
        near, far = trio.testing.memory_stream_pair()
        if self.num_acquired <= remote.num_allowed:
            remote.kept[session] = remote.make(self.num_acquired, session, far)
        return self.make(self.num_acquired, session, near)

    def make(self, number: int, session: bytes, stream: trio.StapledStream) -> MemoryChannel:
        faults = self.faults if number <= self.faults.num_channels else Faults()
        self._made.append(MemoryChannel(session, stream, faults))
        return self._made[-1]

    @property
    def discarded(self) -> list[MemoryChannel]:
        return [channel for channel in self._made if channel.is_closed]

    def take(self, peer: bytes, session: bytes) -> MemoryChannel | None:
        return self.kept.pop(session, None)

    def release(self, channel: MemoryChannel) -> None:
        assert not channel.is_moving
        self.kept[channel.session] = channel


class Party:
    """A node with its own contribution."""

    def __init__(self, host: Any, seed: int, size: int = SIZE, channels: Any = None) -> None:
        """``host``: a `MemoryHost`, or a real one."""
        self.host = host
        self.service = ExchangeService(host, channels)
        self.refuses: str | None = None
        self.hold(random.Random(seed).randbytes(size), round=seed, tokens=100 * seed)

    def hold(self, contribution: bytes, **offered: Any) -> None:
        """Take this contribution, offered with these fields, for the next exchange."""
        self.contribution = contribution
        self.incoming = bytearray(len(contribution))
        self.outgoing = Outgoing(memoryview(contribution), blake3(contribution).digest())
        self.taken_in: list[int] = []
        self.results: list[ExchangeEnded] = []
        self.offer = offer_of(contribution, **offered)

    async def refusal(self, size: int, tokens: int) -> str | None:
        await trio.lowlevel.checkpoint()
        assert size == len(self.incoming)
        return self.refuses

    def encode_slowly(self, size: int, seconds: float, digest: bytes | None = None) -> None:
        """Encode ``size`` bytes after each pause from now on; memory that is not encoded yet holds garbage."""
        encoded, memory, num_ready = self.contribution, bytearray(len(self.contribution)), 0
        self.outgoing = outgoing = Outgoing(memoryview(memory), None, lambda: num_ready)

        async def encode() -> None:
            nonlocal num_ready
            for end in range(size, len(encoded) + size, size):
                await trio.sleep(seconds)
                memory[:end] = encoded[:end]
                num_ready = min(end, len(encoded))
            outgoing.seal(digest or blake3(encoded).digest())

        self.host.nursery.start_soon(encode)

    async def exchange(self, partner: bytes, deadline: float = PATIENCE, offer_within: float = math.inf) -> None:
        is_initiator, now = self.host.author < partner, trio.current_time()
        session, deadline = self.offer.session, now + deadline
        start = StartExchange(session, partner, self.offer.round, is_initiator, deadline, now + offer_within)
        result = await self.service.run(
            start, self.offer, self.outgoing, memoryview(self.incoming), self.refusal, self.taken_in.append
        )
        self.results.append(result)

    @property
    def result(self) -> ExchangeEnded:
        (result,) = self.results
        return result


def offer_of(contribution: bytes, **fields: Any) -> Offer:
    offer = Offer(
        run_id=RUN_ID,
        session=SESSION,
        stage=0,
        layout=b"l" * 32,
        codec="fp32",
        size=len(contribution),
        round=1,
        tokens=1,
    )
    return msgspec.structs.replace(offer, **fields)


@contextlib.asynccontextmanager
async def real_parties(alice: Host, bob: Host) -> AsyncIterator[tuple[Party, Party]]:
    """Yield two nodes that exchange over real hosts, which are connected, and over channels between them."""
    async with open_bulk(alice, RUN_ID) as ones, open_bulk(bob, RUN_ID) as others:
        yield Party(alice, 1, channels=ones), Party(bob, 2, channels=others)


async def meet(alice: Party, bob: Party, deadline: float = PATIENCE) -> None:
    """Let both exchange; neither may take longer than the deadline."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alice.exchange, bob.host.author, deadline)
        nursery.start_soon(bob.exchange, alice.host.author, deadline)


def assert_committed(alice: Party, bob: Party) -> None:
    assert alice.result.committed
    assert bob.result.committed
    assert alice.incoming == bob.contribution
    assert bob.incoming == alice.contribution
    assert alice.result.path == bob.result.path

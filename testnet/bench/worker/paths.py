"""The paths between two processes that the benchmark of exchanges compares, each between two ends on loopback.

Each `open_...` is one end: without an address it listens, announces its address, and waits for the other end.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.bulk.channel import BulkChannel
from farandole.node.bulk.negotiation import BulkService, open_bulk
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.mesh.yamux import PIECE_BYTES
from farandole.protocol.wire.identity import public_key_of
from farandole.protocol.wire.messagepack import SESSION_BYTES

from .server import Server, UsageMeter, map_payload

LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"
PROTOCOL: Final = "/farandole/bench/1"
# Size of writes and reads where a stream does not specify a better one.
STREAM_PIECE_BYTES: Final = 65_536
_READY: Final = b"r"

Announce = Callable[[str], Awaitable[None]]


class PathEnd(Protocol):
    """One end of a path."""

    async def send(self, data: memoryview) -> object:
        """Send all data."""

    async def receive_into(self, memory: memoryview) -> object:
        """Fill the memory."""


# Plain sockets


class RawEnd:
    """A blocking TCP socket: the upper bound of the machine."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def send(self, data: memoryview) -> None:
        """Send all data."""
        self._connection.sendall(data)

    async def receive_into(self, memory: memoryview) -> None:
        """Fill the memory."""
        received = 0
        while received < memory.nbytes:
            got = self._connection.recv_into(memory[received:])
            if not got:
                raise ConnectionError("the other end is gone")
            received += got


@contextlib.asynccontextmanager
async def open_raw(address: str | None, announce: Announce) -> AsyncIterator[PathEnd]:
    """Open a plain TCP connection."""
    with await _connect(address, announce) as connection:
        yield RawEnd(connection)


class StreamEnd:
    """A stream, given by its two functions; received data is copied into the memory."""

    def __init__(
        self,
        send_all: Callable[[Any], Awaitable[Any]],
        receive_some: Callable[[int], Awaitable[bytes | bytearray]],
        piece_bytes: int = STREAM_PIECE_BYTES,
    ) -> None:
        self._send_all = send_all
        self._receive_some = receive_some
        self._piece_bytes = piece_bytes

    async def send(self, data: memoryview) -> None:
        """Send all data."""
        for start in range(0, data.nbytes, self._piece_bytes):
            await self._send_all(data[start : start + self._piece_bytes])

    async def receive_into(self, memory: memoryview) -> None:
        """Fill the memory."""
        received = 0
        while received < memory.nbytes:
            piece = await self._receive_some(min(self._piece_bytes, memory.nbytes - received))
            if not piece:
                raise ConnectionError("the other end is gone")
            memory[received : received + len(piece)] = piece
            received += len(piece)


async def _connect(address: str | None, announce: Announce) -> socket.socket:
    """Return a connected, blocking socket."""
    if address is not None:
        host, _, port = address.partition(":")
        return socket.create_connection((host, int(port)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await announce("{}:{}".format(*listener.getsockname()))
        connection, _ = await trio.to_thread.run_sync(listener.accept)
        return connection


# libp2p


@contextlib.asynccontextmanager
async def open_stock(address: str | None, announce: Announce) -> AsyncIterator[PathEnd]:
    """Open a stream of unmodified py-libp2p: Noise and its own yamux, nothing of farandole."""
    from libp2p import create_yamux_muxer_option, new_host
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
    from libp2p.custom_types import TProtocol
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from libp2p.security.noise.transport import PROTOCOL_ID, Transport
    from multiaddr import Multiaddr

    key_pair = create_new_key_pair()
    noise = Transport(key_pair, noise_privkey=create_new_x25519_key_pair().private_key)
    host = new_host(key_pair=key_pair, sec_opt={PROTOCOL_ID: noise}, muxer_opt=create_yamux_muxer_option())
    opened, coming = trio.open_memory_channel[Any](1)

    async def serve(stream: Any) -> None:
        await opened.send(stream)
        await trio.sleep_forever()

    async with host.run(listen_addrs=[Multiaddr(LOOPBACK)]):
        if address is None:
            host.set_stream_handler(TProtocol(PROTOCOL), serve)
            await announce(str(host.get_addrs()[0]))
            stream = await coming.receive()
        else:
            peer = info_from_p2p_addr(Multiaddr(address))
            await host.connect(peer)
            stream = await host.new_stream(peer.peer_id, [TProtocol(PROTOCOL)])
        yield StreamEnd(lambda piece: stream.write(bytes(piece)), stream.read)


# farandole


@contextlib.asynccontextmanager
async def open_libp2p(address: str | None, announce: Announce) -> AsyncIterator[PathEnd]:
    """Open a stream of farandole's host: libp2p with Noise and our yamux."""
    async with open_host(Ed25519PrivateKey.generate(), [LOOPBACK]) as host, _meet(host, address, announce) as stream:
        yield StreamEnd(stream.send_all, stream.receive_some, PIECE_BYTES)


@contextlib.asynccontextmanager
async def open_bulk_channel(address: str | None, announce: Announce) -> AsyncIterator[PathEnd]:
    """Open a bulk channel of farandole's, negotiated between hosts; the receiver hashes the data."""
    async with open_node(address, announce) as (_, _, channel, _):
        yield channel


@contextlib.asynccontextmanager
async def open_node(
    address: str | None, announce: Announce
) -> AsyncIterator[tuple[Host, BulkService, BulkChannel, bytes]]:
    """Open a host and its bulk channels; yield both, an open channel, and the peer."""
    async with open_host(Ed25519PrivateKey.generate(), [LOOPBACK]) as host, open_bulk(host, bytes(32)) as channels:
        async with _meet(host, address, announce) as stream:
            peer = stream.peer
            channel = await _negotiate(channels, stream, is_asker=address is not None)
        try:
            yield host, channels, channel, peer
        finally:
            channels.discard(channel)


@contextlib.asynccontextmanager
async def _meet(host: Host, address: str | None, announce: Announce) -> AsyncIterator[Libp2pStream]:
    """Open a stream to the other host, which stays open until the block ends."""
    if address is not None:
        peer = public_key_of(address.rpartition("/p2p/")[2])
        await host.connect(peer, [address])
        async with await host.open_stream(peer, PROTOCOL) as stream:
            yield stream
        return
    opened, coming = trio.open_memory_channel[Libp2pStream](1)
    is_over = trio.Event()

    async def serve(stream: Libp2pStream) -> None:
        await opened.send(stream)
        await is_over.wait()

    host.set_handler(PROTOCOL, serve)
    await announce(host.addresses[0])
    try:
        yield await coming.receive()
    finally:
        is_over.set()


async def _negotiate(channels: BulkService, stream: Libp2pStream, is_asker: bool) -> BulkChannel:
    """Return this end of a new bulk channel, negotiated over a stream."""
    if is_asker:
        await stream.receive_some(len(_READY))
        channel = await channels.acquire(stream.peer)
        if channel is not None:
            await stream.send_all(channel.session)
            await stream.receive_some(len(_READY))
    else:
        with channels.expecting(stream.peer):
            await stream.send_all(_READY)
            channel = channels.take(stream.peer, await stream.receive_some(SESSION_BYTES))
        await stream.send_all(_READY)
    if not isinstance(channel, BulkChannel):
        raise ConnectionError("no bulk channel opened")
    return channel


PATHS: Final[dict[str, Callable[[str | None, Announce], contextlib.AbstractAsyncContextManager[PathEnd]]]] = {
    "raw": open_raw,
    "stock": open_stock,
    "libp2p": open_libp2p,
    "bulk": open_bulk_channel,
}


class Mover:
    """A process that moves payloads of any size over one path."""

    def __init__(self, server: Server, outgoing: int, incoming: int) -> None:
        self._server = server
        self._outgoing, self._incoming = map_payload(outgoing), map_payload(incoming)
        self._end: PathEnd

    async def open(self, path: str, address: str | None) -> dict[str, Any] | None:
        """Listen and announce the address, or connect to ``address``, by one of `PATHS`."""
        self._end = await self._server.stack.enter_async_context(PATHS[path](address, self._server.announce))
        self._meter = UsageMeter([self._outgoing, self._incoming])
        return {} if address else None

    async def send(self, size: int) -> dict[str, Any]:
        """Send the first ``size`` bytes."""
        with self._meter.running() as figures:
            await self._end.send(self._outgoing[:size])
        return figures

    async def receive(self, size: int) -> dict[str, Any]:
        """Receive ``size`` bytes."""
        with self._meter.running() as figures:
            await self._end.receive_into(self._incoming[:size])
        return figures

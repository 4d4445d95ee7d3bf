"""What carries a connection: a TCP socket, or a circuit through a relay; and the messages of Noise on it.

Dials may leave from the listening port: then a NAT's mapping of that port is known, and two such dials can meet.

Both ends agree on what a connection is upgraded to, and on the protocol of each stream, by multistream-select 1.0
(github.com/multiformats/multistream-select): one end proposes protocol ids, and the other echoes the one that it
accepts, or answers that it knows none. Messages are bounded in size and number for any peer: py-libp2p 0.8.1 allocates
whatever length it reads.

A handshake costs this node about 2 ms, and a stranger next to nothing. Each pass of the event loop processes a few
steps of unauthenticated handshakes, round-robin over the addresses: a flood from one address delays neither the others
nor connected peers.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Container
from typing import Final, NamedTuple, cast

import trio
from cryptography.hazmat.primitives.ciphers import CipherContext

from farandole.protocol.run.invite import NONCE_BYTES, cipher_of
from farandole.protocol.wire.errors import RemoteProtocolError

from ..base.streams import read_delimited
from ..base.system.sockets import leave_nothing, listen_alone, prefer_congestion_control, share_port
from .addresses import multiaddr_of
from .libp2p_parts import ISecureConn, NoiseTransportReadWriter, SecureSession, encode_delim

# Steps of handshakes in one pass of the event loop: each takes up to 1 ms, which is how long everything else waits.
STEPS_PER_PASS: Final = 2
# Everything read from a connection until it is authenticated and multiplexed. Noise XX and the negotiation take about
# 600 bytes; one Noise message is at most 65,537.
MAX_HANDSHAKE_BYTES: Final = 64 * 1024
# Connections that the kernel queues between two accepts; it caps this by net.core.somaxconn itself.
LISTEN_BACKLOG = 1024
# One read: nearly two Noise messages. Its buffer is allocated before it is known how much has arrived. From 128 KiB on
# (`base.system.tuning.MMAP_THRESHOLD`) each buffer is a new mapping, and a small read takes three times as long.
READ_BYTES: Final = 120 * 1024
# Of a message of Noise, which precedes it.
LENGTH_BYTES: Final = 2
MULTISTREAM: Final = "/multistream/1.0.0"
# A message is a protocol id; go-libp2p allows 1,024 bytes too.
MAX_NEGOTIATION_BYTES: Final = 1024
# Messages of one negotiation: the greeting, and proposals; a peer that knows farandole proposes one.
MAX_NEGOTIATION_MESSAGES: Final = 16
NEGOTIATION_TIMEOUT: Final = 8.0
NOT_AVAILABLE: Final = "na"
# A peer that has dialled proposes its first protocol within a round trip of the greetings.
ROLE_PAUSE: Final = 0.7


class Site(NamedTuple):
    """The origin of a connection."""

    network: str
    """The block that one stranger may own: an IPv4 /24, an IPv6 /48."""
    address: str
    """An IPv4 address, or an IPv6 /64 (one customer has 2^64 addresses)."""

    @property
    def is_global(self) -> bool:
        """Return whether this is a public address: not this machine's, a local network's, or unknown."""
        return bool(self.address) and ipaddress.ip_network(self.address).is_global


def site_of(host: str) -> Site:
    """Return the site of an IP address; all invalid addresses share one site."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return Site("", "")
    widths = (24, 32) if address.version == 4 else (48, 64)
    network, narrow = (ipaddress.ip_network((address, width), strict=False) for width in widths)
    return Site(str(network), str(narrow))


class Turns:
    """Lets handshakes go on, `STEPS_PER_PASS` in each pass of the event loop, round-robin over the addresses."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Site, deque[trio.Event]] = OrderedDict()
        self._work = trio.Event()

    async def take(self, site: Site) -> None:
        """Wait for this site's turn."""
        turn = trio.Event()
        self._waiting.setdefault(site, deque()).append(turn)
        self._work.set()
        await turn.wait()

    async def run(self) -> None:
        """Grant turns until cancelled. A waiter that was cancelled still uses up its turn."""
        while True:
            for _ in range(STEPS_PER_PASS):
                if not self._waiting:
                    break
                site, turns = self._waiting.popitem(last=False)
                turns.popleft().set()
                if turns:
                    self._waiting[site] = turns
            if not self._waiting:
                self._work = trio.Event()
                await self._work.wait()
            await trio.lowlevel.checkpoint()


Ciphers = tuple[CipherContext | None, CipherContext | None]
"""What hides the bytes that are sent, and what reveals those that come, in a private run."""


class RawLink(ABC):
    """Bytes to and from a peer that is not authenticated at first: reads are bounded until it is."""

    is_relayed = False

    def __init__(self, carrier: trio.abc.Stream, address: str, remote: tuple[str, int] | None) -> None:
        """``address``: the other end as a multiaddr without a peer id; ``remote``: as host and port, if it has them."""
        self._carrier = carrier
        self.address = address
        self.remote = remote
        self.site: Site = site_of(remote[0] if remote else "")
        self._buffer = bytearray()
        self._unwritten = b""
        self._handshake_bytes_left: int | None = MAX_HANDSHAKE_BYTES
        self._encryptor: CipherContext | None = None
        self._decryptor: CipherContext | None = None

    def finish_handshake(self) -> None:
        """Note that the peer is authenticated: reads are no longer counted."""
        self._handshake_bytes_left = None

    async def hide(self, network_key: bytes) -> bytes:
        """Send a nonce, and encrypt what follows; return the nonce."""
        nonce = os.urandom(NONCE_BYTES)
        await self.write(nonce)
        self._encryptor = cipher_of(network_key, nonce)
        return nonce

    async def reveal(self, network_key: bytes) -> bytes:
        """Receive the other end's nonce, and decrypt what follows; return the nonce."""
        nonce = await self.read(NONCE_BYTES)
        self._decryptor = cipher_of(network_key, nonce)
        self._buffer[:] = self._decryptor.update(bytes(self._buffer))
        return nonce

    async def read(self, n: int | None = None) -> bytes:
        """Return exactly n bytes, or what comes next; raise `trio.BrokenResourceError` if the connection ends before.

        libp2p's Noise asks for missing bytes a hundred times, also at the end, and gives up if a message comes in more
        pieces than that. So it gets the whole message, or an error.
        """
        while len(self._buffer) < (1 if n is None else n):
            self._buffer += await self._receive()
        n = len(self._buffer) if n is None else n
        with memoryview(self._buffer) as buffered:
            data = bytes(buffered[:n])
        del self._buffer[:n]  # an idle connection keeps no memory
        return data

    async def _receive(self) -> bytes:
        """Return at least one byte."""
        left = self._handshake_bytes_left
        if left is not None and left <= 0:
            raise trio.BrokenResourceError("handshake too long")
        data = await self._receive_some(READ_BYTES if left is None else min(left, READ_BYTES))
        if not data:
            raise trio.BrokenResourceError("connection closed")
        if left is not None:
            self._handshake_bytes_left = left - len(data)
        return data if self._decryptor is None else self._decryptor.update(data)

    async def _receive_some(self, max_bytes: int) -> bytes:
        """Return what comes next, b"" at the end; `trio.BrokenResourceError` if either end closed the connection."""
        try:
            return bytes(await self._carrier.receive_some(max_bytes))
        except trio.ClosedResourceError as error:
            raise trio.BrokenResourceError("connection closed here") from error

    async def write(self, data: bytes) -> None:
        """Send all of it; raise as `_receive_some`."""
        self.write_now(data)
        await self.flush()

    def write_now(self, data: bytes) -> None:
        """Send as much as can be sent without waiting. `flush` sends the rest; write nothing else before."""
        if self._encryptor is not None:
            data = self._encryptor.update(data)
        self._unwritten = data[self._send_now(data) :]

    def _send_now(self, data: bytes) -> int:
        """Return the number of bytes sent without waiting: none if the carrier can only wait."""
        return 0

    @property
    def has_unwritten(self) -> bool:
        """Return whether `flush` has something to send."""
        return bool(self._unwritten)

    async def flush(self) -> None:
        """Send what `write_now` has not sent; raise as `_receive_some`."""
        try:
            await self._carrier.send_all(self._unwritten)
        except trio.ClosedResourceError as error:
            raise trio.BrokenResourceError("connection closed here") from error
        self._unwritten = b""

    async def close(self) -> None:
        """Close; written data is still sent, and tasks that wait on the link are woken."""
        await self._carrier.aclose()

    @abstractmethod
    def abort(self) -> None:
        """`close` without a checkpoint."""


class Socket(RawLink):
    """A TCP socket. With ``turns``, data before the end of the handshake is processed when its site has a turn."""

    def __init__(self, stream: trio.SocketStream, turns: Turns | None = None) -> None:
        try:
            host, port = stream.socket.getpeername()[:2]
        except OSError:  # it is gone already
            super().__init__(stream, "", None)
        else:
            super().__init__(stream, multiaddr_of(str(host).partition("%")[0], int(port)), (str(host), int(port)))
        self._stream = stream
        self._turns = turns
        self.waiting_since = math.inf

    async def _receive(self) -> bytes:
        is_shaking_hands = self._handshake_bytes_left is not None
        data = await super()._receive()
        if is_shaking_hands and self._turns is not None:
            await self._turns.take(self.site)
        return data

    async def _receive_some(self, max_bytes: int) -> bytes:
        self.waiting_since = trio.current_time()
        try:
            return await super()._receive_some(max_bytes)
        finally:
            self.waiting_since = math.inf

    def _send_now(self, data: bytes) -> int:
        try:
            return os.write(self._stream.socket.fileno(), data)
        except OSError:  # it takes nothing now, or is broken: the wait for it raises the error
            return 0

    def leave_nothing(self) -> None:
        """See `farandole.node.base.system.sockets.leave_nothing`."""
        leave_nothing(self._stream)

    def detach(self) -> tuple[socket.socket, Ciphers]:
        """Return the socket, which is the caller's from now on, and the ciphers; all that has come was read."""
        return socket.socket(fileno=self._stream.socket.detach()), (self._encryptor, self._decryptor)

    def abort(self) -> None:
        """See `RawLink`."""
        self._stream.socket.close()


def listen_at(ip: str, port: int) -> socket.socket:
    """Return a listening socket, from whose port connections may be dialled; raise `OSError` if it is taken."""
    listening = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    try:
        listen_alone(listening)
        if listening.family is socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((ip, port))
        share_port(listening)  # once it is bound, so that no second listener can take the same port
        listening.listen(LISTEN_BACKLOG)
        listening.setblocking(False)
    except BaseException:  # nothing else owns the socket yet
        listening.close()
        raise
    return listening


async def connect_from(local: tuple[str, int], target: tuple[str, int]) -> trio.SocketStream:
    """Return a TCP connection from a listening socket's address; raise `OSError` if it fails."""
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    connection = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        share_port(connection)
        await connection.bind(local)
        await connection.connect(target)
        # BBR slows a connection from a simultaneous open for about ten seconds.
        prefer_congestion_control(connection, "cubic")
    except BaseException:  # also when cancelled: nothing else owns the socket yet
        connection.close()
        raise
    return trio.SocketStream(connection)


class NoiseSession:
    """Reads and writes messages of at most 65,519 bytes. One task may read, and one may write."""

    def __init__(self, session: ISecureConn, link: RawLink) -> None:
        """``session``: libp2p's, over the same link; it must not be in the middle of a message."""
        self._handshake: SecureSession | None = cast("SecureSession", session)
        self._state = cast("NoiseTransportReadWriter", self._handshake.conn).noise_state
        self._link = link
        self.handshake_hash = bytes(self._state.get_handshake_hash())
        """32 bytes, the same at both ends and nowhere else."""

    async def read(self) -> bytes:
        """Return the next message.

        Raises `trio.BrokenResourceError` at the end of the connection, and `NoiseInvalidMessage` if it was changed.
        """
        if (session := self._handshake) is not None:
            self._handshake = None
            if session.high_watermark > session.low_watermark:  # it came with the last message of the negotiation
                return bytes(await session.read())
        size = int.from_bytes(await self._link.read(LENGTH_BYTES), "big")
        return bytes(self._state.decrypt(await self._link.read(size)))

    def write_now(self, message: bytes) -> None:
        """Send a message as far as this needs no wait. The link's `flush` sends the rest; send nothing else before."""
        sealed = self._state.encrypt(message)
        self._link.write_now(len(sealed).to_bytes(LENGTH_BYTES, "big") + sealed)


class Negotiation:
    """One negotiation on a connection or a stream."""

    def __init__(self, receive: Callable[[int], Awaitable[bytes]], send: Callable[[bytes], Awaitable[None]]) -> None:
        """``receive``: returns at most that many bytes, none at the end."""
        self._receive = receive
        self._send = send
        self._num_received = 0

    async def propose(self, protocol: str) -> None:
        """Agree on this protocol; raise `RemoteProtocolError` if the peer does not speak it, or says why it refuses."""
        await self._greet(protocol)
        await self._expect(protocol)

    async def answer(self, protocols: Container[str]) -> str:
        """Accept the first proposal that is in ``protocols``; raise `RemoteProtocolError` if there is none."""
        await self._greet()
        while (proposal := await self._next()) not in protocols:
            await self._say(NOT_AVAILABLE)
        await self._say(proposal)
        return proposal

    async def find_role(self, protocol: str) -> bool:
        """Negotiate on an accepted connection whose other end may be a peer that waits for us.

        Return whether it waits: then it proposes nothing, and we are the initiator. A peer that dials in the usual way
        proposes at once.
        """
        await self._greet()
        proposal = None
        with trio.move_on_after(ROLE_PAUSE):
            proposal = await self._next()
        if proposal not in (None, protocol):
            raise RemoteProtocolError("the peer proposes something else")
        await self._say(protocol)
        if proposal is None:
            await self._expect(protocol)
        return proposal is None

    async def _greet(self, *proposal: str) -> None:
        await self._say(MULTISTREAM, *proposal)
        if await self._next() != MULTISTREAM:
            raise RemoteProtocolError("the peer does not speak multistream-select")

    async def _expect(self, protocol: str) -> None:
        answer = await self._next()
        if answer == NOT_AVAILABLE:
            raise RemoteProtocolError(f"the peer does not speak {protocol}")
        if answer != protocol:
            raise RemoteProtocolError(f"the peer refuses {protocol}: {answer!r}")

    async def _next(self) -> str:
        self._num_received += 1
        if self._num_received > MAX_NEGOTIATION_MESSAGES:
            raise RemoteProtocolError("too many negotiation messages")
        message = await read_delimited(self._receive, MAX_NEGOTIATION_BYTES)
        if message is None:
            raise RemoteProtocolError("the peer ended the negotiation")
        if not message.endswith(b"\n"):
            raise RemoteProtocolError("a negotiation message without its newline")
        return message[:-1].decode(errors="replace")

    async def _say(self, *texts: str) -> None:
        await self._send(b"".join(encode_delim(text.encode()) for text in texts))

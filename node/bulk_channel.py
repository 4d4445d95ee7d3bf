"""A bulk channel: one TLS 1.3 connection, on which worker threads move memory both ways at once.

OpenSSL lets go of the interpreter's lock while it encrypts, and so does BLAKE3 while it hashes, so the event loop goes
on meanwhile; nothing is copied in Python. A TLS connection must not be read and written at the same moment, so both
threads take turns at it, a few records at a time; they wait for the socket, and hash, outside of the lock. (Two
connections, one for each direction, would need no lock, but have to find their way through a NAT twice, and a machine
with many cores gains little: one direction alone is as fast. OpenSSL on memory, with the socket outside of the lock,
took a fifth less of the receiver's processor time, as much more of the sender's, and was no faster.)

Where the node has caps, the threads move as much at a time as `farandole.node.shaping` lets them.

Cancellation shuts the socket down, which ends the threads, and waits for them: when a call returns or raises, nobody
touches the caller's memory any more.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import selectors
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from farandole.protocol.errors import FarandoleError
from farandole.protocol.exchange import Incoming

from .shaping import Shaping

# Hashed at once: enough for BLAKE3 to use its widest vectors, little enough to be still in the cache.
HASH_BYTES = 1 << 18
# The server says that it has verified the client and is ready: the first byte that TLS carries.
_READY = b"\x01"
# Clocks of volunteers' machines are wrong at times; a certificate is for one life of a node, and names it to one peer.
_VALID_FROM, _VALID_UNTIL = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2000, 2200))

T = TypeVar("T")


class ChannelError(FarandoleError):
    """A channel broke, or did not come about; the message says why."""


class Credentials:
    """A key and a self-signed certificate for one life of a node."""

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "farandole bulk")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_VALID_FROM)
            .not_valid_after(_VALID_UNTIL)
            .sign(key, hashes.SHA256())
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.DER)
        self._pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def context(self, is_server: bool, peer_certificate: bytes) -> ssl.SSLContext:
        """TLS 1.3 with a peer that shows this certificate (DER); raises `ssl.SSLError` if it is none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if is_server:
            context.num_tickets = 0  # nobody resumes
        with tempfile.TemporaryDirectory() as folder:  # the module takes keys from files alone
            path = Path(folder, "pem")
            path.touch(0o600)
            path.write_bytes(self._pem)
            context.load_cert_chain(path)
        context.load_verify_locations(cadata=peer_certificate)
        return context


class BulkChannel:
    """An authenticated connection with ``peer``, named by both ends by the session in which it was negotiated."""

    def __init__(self, peer: bytes, session: bytes, connection: ssl.SSLSocket, shaping: Shaping) -> None:
        self.peer = peer
        self.session = session
        self.idle_since = 0.0
        self.num_sent = 0
        """Bytes given to it so far, whether they have arrived or not."""
        self._connection = connection
        self._shaping = shaping
        self._is_broken_off = threading.Event()
        self._lock = threading.Lock()
        self._threads = trio.CapacityLimiter(2)

    @property
    def is_fit(self) -> bool:
        """Whether an idle channel may be used again: it is open, and nothing has come that nobody asked for."""
        if self._connection.fileno() < 0 or self._connection.pending():
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            return not selector.select(0)

    async def send(self, data: memoryview) -> None:
        """Send all of it. Raises `ChannelError`. A cancelled channel is no longer fit."""
        await self._run(lambda: self._send(data))

    async def receive(self, incoming: Incoming) -> None:
        """Fill it to its end, hashing what comes, and noting how far that is. Otherwise as `send`."""
        await self._run(lambda: self._receive(incoming))

    async def receive_into(self, memory: memoryview) -> bytes:
        """Fill the memory; returns the BLAKE3 of what was received. Otherwise as `send`."""
        incoming = Incoming(memory)
        await self.receive(incoming)
        return incoming.digest()

    def announce(self) -> None:
        """The server's last word of the handshake: the channel can be called for."""
        with contextlib.suppress(OSError):
            self._connection.send(_READY)

    def close(self) -> None:
        """Close at once. Nothing may be moving."""
        self._connection.close()

    async def _run(self, move: Callable[[], None]) -> None:
        if self._connection.fileno() < 0:
            raise ChannelError("the channel is closed")
        await run_with_socket(self._connection, move, self._threads, self._is_broken_off)

    def _pause(self, seconds: float) -> None:
        if seconds > 0 and self._is_broken_off.wait(seconds):
            raise ChannelError("the channel was broken off")

    def _send(self, data: memoryview) -> None:
        shaper = self._shaping.up
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_WRITE)
            sent = due = 0
            while sent < data.nbytes:
                if sent == due:
                    due = min(sent + shaper.quantum, data.nbytes)
                    self._pause(shaper.reserve(due - sent))
                taken = self._take_turn(selector, partial(self._connection.send, data[sent:due]))
                sent += taken
                self.num_sent += taken

    def _receive(self, incoming: Incoming) -> None:
        shaper = self._shaping.down
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while piece := incoming.rest[:HASH_BYTES]:
                received = due = 0
                while received < piece.nbytes:
                    if received == due:
                        due = min(received + shaper.quantum, piece.nbytes)
                        self._pause(shaper.reserve(due - received))
                    got = self._take_turn(selector, partial(self._read, piece[received:due]))
                    if not got:
                        raise ChannelError("the peer closed the channel")
                    received += got
                    incoming.position += got
                incoming.hash_up()

    def _read(self, memory: memoryview) -> int:
        """As much as is there; 0 at the end. OpenSSL gives a record at a time."""
        received = 0
        while received < memory.nbytes:
            try:
                got = self._connection.recv_into(memory[received:])
            except ssl.SSLWantReadError:
                if not received:
                    raise
                break
            if not got:
                break
            received += got
        return received

    def _take_turn(self, selector: selectors.BaseSelector, move: Callable[[], int]) -> int:
        """Do it as soon as the connection lets us; the same call has to be tried again, with the same memory."""
        while True:
            try:
                with self._lock:
                    return move()
            except ssl.SSLWantReadError:
                wanted = selectors.EVENT_READ
            except ssl.SSLWantWriteError:
                wanted = selectors.EVENT_WRITE
            if selector.get_key(self._connection).events != wanted:
                selector.modify(self._connection, wanted)
            selector.select()


async def open_channel(
    peer: bytes,
    session: bytes,
    plain: socket.socket,
    own: Credentials,
    certificate: bytes,
    is_server: bool,
    shaping: Shaping,
) -> BulkChannel:
    """TLS over a connected socket, which is taken over, and closed if this fails (`ChannelError`) or is cancelled.

    ``certificate`` is the peer's. The client's channel opens when the server calls `BulkChannel.announce`.
    """
    connection = plain
    try:
        plain.setblocking(True)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shaping.fit_buffers(plain)
        context = await trio.to_thread.run_sync(own.context, is_server, certificate)
        connection = secure = context.wrap_socket(plain, server_side=is_server, do_handshake_on_connect=False)
        await run_with_socket(secure, partial(_shake_hands, secure, certificate), trio.CapacityLimiter(1))
    except OSError as error:
        connection.close()
        raise ChannelError(f"no TLS: {error}") from error
    except BaseException:
        connection.close()
        raise
    return BulkChannel(peer, session, secure, shaping)


def _shake_hands(connection: ssl.SSLSocket, certificate: bytes) -> None:
    connection.do_handshake()
    if not hmac.compare_digest(connection.getpeercert(binary_form=True) or b"", certificate):
        raise ChannelError("the peer shows another certificate than it proposed")
    if not connection.server_side and connection.recv(len(_READY)) != _READY:
        raise ChannelError("the peer did not accept the channel")
    connection.setblocking(False)


async def run_with_socket(
    connection: socket.socket,
    work: Callable[[], T],
    limiter: trio.CapacityLimiter,
    is_broken_off: threading.Event | None = None,
) -> T:
    """Run blocking work on a socket in a thread; when cancelled, shut the socket down and wait for the thread.

    ``is_broken_off`` is set then, too. Errors of the network become `ChannelError`.
    """
    result: list[T] = []
    failure: Exception | None = None

    async def shut_down_if_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            if not result and failure is None:
                if is_broken_off is not None:
                    is_broken_off.set()
                with contextlib.suppress(OSError):
                    # Not SSLSocket's own, which forgets the encryption first and lets the threads go on without it.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shut_down_if_cancelled)
        try:
            result.append(await trio.to_thread.run_sync(work, limiter=limiter))
        except (OSError, ValueError, ChannelError) as error:  # ValueError: closed meanwhile
            failure = error
        nursery.cancel_scope.cancel()
    await trio.lowlevel.checkpoint_if_cancelled()
    if failure is not None:
        raise ChannelError(str(failure) or repr(failure)) from failure
    return result[0]

"""A bulk channel: one TCP connection with sealed records, on which worker threads move memory both ways at once.

Why not TLS: its records have 16 KiB, Python's ssl brings the OpenSSL that the system has, and a connection of it must
not be read and written at the same moment. The OpenSSL that `cryptography` brings encrypts with the widest vectors of
the processor, and records of 256 KiB (`farandole.protocol.record_layer`) cost little beside that: 0.4 CPU seconds a
gigabyte at the sender and at the receiver, hash included, where TLS took 0.7 and 1.0; and 0.7 of a raw socket's rate,
where TLS had 0.3 (`farandole testnet bench exchange`, one way, 256 MB and more, a core for each end). What else TLS
has, authentication and an agreement on keys, has happened by then on the libp2p stream: `farandole.protocol.bulk` says
how, and what somebody on the path can do.

The directions share nothing but the socket. What is sent is encrypted into memory that stays in the core's cache; what
comes is received into such memory, decrypted straight to its place, and hashed before it leaves the cache. All this
lets go of the interpreter's lock, so the event loop goes on meanwhile (`cryptography` before its release 50 holds it,
for 30 microseconds a record).

Where the node has caps, the threads move as much at a time as `farandole.node.base.bandwidth` lets them, and records
are as short as that.

Cancellation shuts the socket down, which ends the threads, and waits for them: when a call returns or raises, nobody
touches the caller's memory any more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import trio

from farandole.protocol.bulk import Secrets
from farandole.protocol.errors import FarandoleError, RemoteProtocolError
from farandole.protocol.incoming import Incoming
from farandole.protocol.record_layer import OVERHEAD_BYTES, Opener, Sealer

from ..base.bandwidth import Shaping, limit_unsent
from ..base.system.sockets import prefer_congestion_control

# The first record of each end: it has the keys. That of the answerer says too that the channel can be called for.
_READY = b"ready"


class ChannelError(FarandoleError):
    """A channel broke, or did not come about; the message says why."""


def prefer_bbr(connection: socket.socket) -> None:
    """Have TCP go by the rate that it sees instead of by losses (BBR, Cardwell et al., ACM Queue 2016), if it may.

    CUBIC takes each lost packet for congestion: over 5 Mbit/s, 200 ms and 5 % loss 1 MB took it 14 to 29 s and BBR
    3 to 4 s. Linux only, and for root, or where the system allows it (``net.ipv4.tcp_allowed_congestion_control``).
    """
    prefer_congestion_control(connection, "bbr")


class BulkChannel:
    """An authenticated connection with ``peer``, named by both ends by the session in which it was negotiated."""

    def __init__(
        self, peer: bytes, session: bytes, connection: socket.socket, secrets: Secrets, shaping: Shaping
    ) -> None:
        self.peer = peer
        self.session = session
        self.opened_at = trio.current_time()
        self.idle_since = 0.0
        self.num_sent = 0
        """Bytes given to it so far, whether they have arrived or not."""
        self.num_received = 0
        """Bytes of the wire that have come so far, whether they turn out to be the peer's or not."""
        self.seconds_held_up = 0.0
        """For how long in all this node's own cap has held up what comes; a pause counts when it begins."""
        self._connection = connection
        prefer_bbr(connection)
        self._shaping = shaping
        self._sealer, self._opener = Sealer(secrets.sealing, time.monotonic()), Opener(secrets.opening)
        self._is_between_records = True  # as far as what is sent goes
        self._num_reserved = 0  # bytes that may be received
        self._is_broken_off = threading.Event()
        self._threads = trio.CapacityLimiter(2)

    @property
    def is_fit(self) -> bool:
        """Whether an idle channel may be used again: it is open, and nothing has come that nobody asked for."""
        if self._is_broken_off.is_set() or not self._opener.is_clean:
            return False
        try:
            with self._without_waiting():
                self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @contextlib.contextmanager
    def _without_waiting(self) -> Iterator[None]:
        """Nothing may be moving. A flag for the one call (MSG_DONTWAIT) Windows has not."""
        self._connection.setblocking(False)
        try:
            yield
        finally:
            self._connection.setblocking(True)

    def limit_unsent(self, max_bytes: int) -> None:
        """Let no more wait in the kernel before it is sent, where the system can say so."""
        limit_unsent(self._connection, max_bytes)

    async def send(self, data: memoryview) -> None:
        """Send all of it. Raises `ChannelError`. A channel that broke or was cancelled is no longer fit."""
        await self._run(lambda: self._send(data))

    async def receive(self, incoming: Incoming) -> None:
        """Fill it to its end, hashing what comes, and noting how far that is. Otherwise as `send`.

        After an error the memory beyond its position is undefined.
        """
        await self._run(lambda: self._receive(incoming))

    async def receive_into(self, memory: memoryview) -> bytes:
        """Fill the memory; returns the BLAKE3 of what was received. Otherwise as `send`."""
        incoming = Incoming(memory)
        await self.receive(incoming)
        return incoming.digest()

    def announce(self) -> None:
        """Tell the other end that this one is ready: a few bytes, which a fresh connection takes at once."""
        with contextlib.suppress(OSError), self._without_waiting():
            self._connection.send(self._sealer.seal(memoryview(_READY), time.monotonic()))

    async def confirm(self) -> None:
        """Wait until the other end has announced itself. Otherwise as `send`."""
        await self._run(self._confirm)

    def close(self) -> None:
        """Close at once, and say so by a final record if the connection takes it. Nothing may be moving."""
        if self._is_between_records and not self._is_broken_off.is_set():
            with contextlib.suppress(OSError), self._without_waiting():
                self._connection.send(self._sealer.finish(time.monotonic()))
        self._is_broken_off.set()
        self._connection.close()

    # In threads

    def _send(self, data: memoryview) -> None:
        shaper = self._shaping.up
        size = shaper.quantum - OVERHEAD_BYTES
        for start in range(0, data.nbytes, size):
            record = self._sealer.seal(data[start : start + size], time.monotonic())
            self._is_between_records = False
            self._pause(shaper.reserve(record.nbytes))
            self._connection.sendall(record)
            self._is_between_records = True
            self.num_sent += record.nbytes - OVERHEAD_BYTES

    def _receive(self, incoming: Incoming) -> None:
        while rest := incoming.rest:
            if taken := self._opener.take(rest):
                incoming.advance(taken)
            else:
                self._read_when_due()

    def _read_when_due(self) -> None:
        """Read from the wire; what was reserved and did not come is for the next time."""
        shaper = self._shaping.down
        if not self._num_reserved:
            self._num_reserved = min(self._opener.wanted.nbytes, shaper.quantum)
            seconds = shaper.reserve(self._num_reserved)
            self.seconds_held_up += seconds
            self._pause(seconds)
        self._num_reserved -= self._read(self._num_reserved)

    def _read(self, most: int) -> int:
        if self._opener.has_ended:
            raise ChannelError("the peer closed the channel")
        got = self._connection.recv_into(self._opener.wanted[:most])
        if not got:
            raise ChannelError("the connection ended without a final record")
        self._opener.received(got)
        self.num_received += got
        return got

    def _confirm(self) -> None:
        memory = memoryview(bytearray(len(_READY)))
        while not self._opener.take(memory):
            self._read(self._opener.wanted.nbytes)
        if memory != _READY:
            raise ChannelError("the peer does not say that it is ready")

    def _pause(self, seconds: float) -> None:
        if seconds > 0 and self._is_broken_off.wait(seconds):
            raise ChannelError("the channel was broken off")

    # In the event loop

    async def _run(self, work: Callable[[], None]) -> None:
        """Do blocking work in a thread; when cancelled, shut the socket down and wait for the thread."""
        if self._is_broken_off.is_set():
            raise ChannelError("the channel is closed")
        failure: Exception | None = None
        is_done = False

        async def break_off_if_cancelled() -> None:
            try:
                await trio.sleep_forever()
            finally:
                if not is_done:
                    self._break_off()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(break_off_if_cancelled)
            try:
                await trio.to_thread.run_sync(work, limiter=self._threads)
                is_done = True
            except (OSError, ChannelError, RemoteProtocolError) as error:
                failure = error
            nursery.cancel_scope.cancel()
        await trio.lowlevel.checkpoint_if_cancelled()
        if failure is not None:
            raise ChannelError(str(failure) or repr(failure)) from failure

    def _break_off(self) -> None:
        """End the threads, and whatever the other end does with the connection."""
        self._is_broken_off.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


async def open_channel(
    peer: bytes, session: bytes, connection: socket.socket, secrets: Secrets, is_asker: bool, shaping: Shaping
) -> BulkChannel:
    """A channel over a connected socket, which is taken over, and closed if this raises `ChannelError` or is cancelled.

    Both ends have shown then that they have the secrets; but the answerer's calls `BulkChannel.announce` when it is
    ready for calls, and only then the asker's channel opens.
    """
    channel = BulkChannel(peer, session, connection, secrets, shaping)
    try:
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shaping.fit_buffers(connection)
        if is_asker:
            channel.announce()
        await channel.confirm()
    except OSError as error:
        channel.close()
        raise ChannelError(f"no channel: {error}") from error
    except BaseException:  # cancelled, too: nobody else has the channel yet
        channel.close()
        raise
    return channel

"""A bulk channel: one TCP connection with sealed records, on which worker threads move memory both ways at once.

Why not TLS: its records have 16 KiB, Python's ssl uses the system's OpenSSL, and a TLS connection must not be read and
written at the same moment. The OpenSSL inside `cryptography` encrypts with the widest vectors of the processor, and the
overhead of 256 KiB records (`farandole.protocol.wire.record_layer`) is small: 0.4 CPU seconds a gigabyte at the sender
and at the receiver, hash included, where TLS took 0.7 and 1.0; and 0.7 of a raw socket's rate, where TLS had 0.3
(`farandole testnet bench exchange`, one way, 256 MB and more, a core for each end). The rest of TLS, authentication and
key agreement, happens before on the libp2p stream: `farandole.protocol.exchange.bulk` describes it, and what an
attacker on the path can do.

The directions share only the socket. Outgoing data is encrypted into memory that stays in the core's cache. Incoming
data is received into such memory, decrypted straight to its place, and hashed before it leaves the cache. All this
releases the interpreter's lock, so the event loop runs on (`cryptography` before release 50 holds the lock, for 30
microseconds a record).

If the node has bandwidth caps, the threads move as much at a time as `farandole.node.base.bandwidth` allows, and
records have this length.

Cancellation shuts the socket down, which ends the threads, and waits for them: when a call returns or raises, no thread
touches the caller's memory any more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass

import trio

from farandole.protocol.exchange.bulk import Secrets
from farandole.protocol.exchange.pipe import Transfer
from farandole.protocol.wire.errors import FarandoleError, RemoteProtocolError
from farandole.protocol.wire.record_layer import OVERHEAD_BYTES, Opener, Sealer

from ..base.bandwidth import Shaping, limit_unsent
from ..base.system.sockets import prefer_congestion_control
from ..mesh.links import Ciphers

# The first record of each end proves that it has the keys. The answerer's also says that it is ready for calls.
_READY = b"ready"


class ChannelError(FarandoleError):
    """A channel broke, or did not come about; the message says why."""


@dataclass(eq=False)
class BulkChannel:
    """An authenticated connection with ``peer``; both ends name it by the session in which it was negotiated."""

    peer: bytes
    session: bytes
    _connection: socket.socket
    secrets: InitVar[Secrets]
    _shaping: Shaping
    ciphers: InitVar[Ciphers] = (None, None)

    def __post_init__(self, secrets: Secrets, ciphers: Ciphers) -> None:
        self.opened_at = trio.current_time()
        self.idle_since = 0.0
        self.num_sent = 0
        """Bytes passed to it up to now, whether they have arrived or not."""
        self.num_received = 0
        """Bytes received from the wire up to now, whether they prove to be the peer's or not."""
        self.seconds_held_up = 0.0
        """Total delay of incoming data by this node's own cap; a pause counts when it begins."""
        # BBR (Cardwell et al., ACM Queue 2016) goes by the rate that it measures instead of by losses. CUBIC takes each
        # lost packet for congestion: over 5 Mbit/s, 200 ms and 5 % loss 1 MB took it 14 to 29 s and BBR 3 to 4 s. Linux
        # only, and for root, or where the system allows it (``net.ipv4.tcp_allowed_congestion_control``).
        prefer_congestion_control(self._connection, "bbr")
        self._sealer = Sealer(secrets.sealing, time.monotonic(), hiding=ciphers[0])
        self._opener = Opener(secrets.opening, hiding=ciphers[1])
        self._is_between_records = True  # of what is sent
        self._num_reserved = 0  # bytes that may be received
        self._is_broken_off = threading.Event()
        self._threads = trio.CapacityLimiter(2)

    async def open(self, is_asker: bool) -> None:
        """Let both ends prove that they have the secrets; close the channel on `ChannelError` or cancellation.

        The answerer calls `announce` when it is ready for calls, and only then the asker's channel opens.
        """
        try:
            self._connection.setblocking(True)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._shaping.fit_buffers(self._connection)
            if is_asker:
                self.announce()
            heard = memoryview(bytearray(len(_READY)))

            def hear() -> None:
                while not self._opener.take(heard):
                    self._read(self._opener.wanted.nbytes)

            await self._run(hear)
            if heard != _READY:
                raise ChannelError("the peer does not say that it is ready")
        except BaseException as error:  # also when cancelled: nothing else owns the channel yet
            self.close()
            if isinstance(error, OSError):
                raise ChannelError(f"no channel: {error}") from error
            raise

    @property
    def is_fit(self) -> bool:
        """Return whether an idle channel may be used again: it is open, and no unexpected data has come."""
        if self._is_broken_off.is_set() or not self._opener.is_clean:
            return False
        try:
            self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def limit_unsent(self, max_bytes: int) -> None:
        """Limit the unsent bytes in the kernel, if the system supports it."""
        limit_unsent(self._connection, max_bytes)

    async def send(self, data: memoryview) -> None:
        """Send all of it; raise `ChannelError` on failure. A channel that broke or was cancelled is no longer fit."""
        shaper = self._shaping.up
        size = shaper.quantum - OVERHEAD_BYTES

        def work() -> None:
            for start in range(0, data.nbytes, size):
                record = self._sealer.seal(data[start : start + size], time.monotonic())
                self._is_between_records = False
                self._pause(shaper.reserve(record.nbytes))
                self._connection.sendall(record)
                self._is_between_records = True
                self.num_sent += record.nbytes - OVERHEAD_BYTES

        await self._run(work)

    async def receive(self, incoming: Transfer) -> None:
        """Fill ``incoming`` to its end, hashing the data and noting the progress. Otherwise as `send`.

        After an error the memory beyond its position is undefined.
        """
        shaper = self._shaping.down

        def work() -> None:  # bytes that were reserved and not read count for the next time
            while rest := incoming.rest:
                if taken := self._opener.take(rest):
                    incoming.advance(taken)
                    continue
                if not self._num_reserved:
                    self._num_reserved = min(self._opener.wanted.nbytes, shaper.quantum)
                    seconds = shaper.reserve(self._num_reserved)
                    self.seconds_held_up += seconds
                    self._pause(seconds)
                self._num_reserved -= self._read(self._num_reserved)

        await self._run(work)

    def announce(self) -> None:
        """Tell the other end that this one is ready: a few bytes, which a fresh connection takes at once."""
        with contextlib.suppress(OSError):
            self._connection.send(self._sealer.seal(memoryview(_READY), time.monotonic()), socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Close at once, with a final record if the connection takes it. No thread may be active."""
        if self._is_between_records and not self._is_broken_off.is_set():
            with contextlib.suppress(OSError):
                self._connection.send(self._sealer.finish(time.monotonic()), socket.MSG_DONTWAIT)
        self._is_broken_off.set()
        self._connection.close()

    # In threads

    def _read(self, most: int) -> int:
        if self._opener.has_ended:
            raise ChannelError("the peer closed the channel")
        got = self._connection.recv_into(self._opener.wanted[:most])
        if not got:
            raise ChannelError("the connection ended without a final record")
        self._opener.received(got)
        self.num_received += got
        return got

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
                if not is_done:  # end the threads, and the connection at the other end
                    self._is_broken_off.set()
                    with contextlib.suppress(OSError):
                        self._connection.shutdown(socket.SHUT_RDWR)

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

"""One stream to a node of a neighbouring stage: a task that always reads, and one that writes what waits.

Control messages go before data, so that credits and drops do not wait behind megabytes. Data go in chunks, within the
node's caps.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from farandole.protocol.activations import DATA_BYTES, Control, Dropped, Event, Forward, Gradient, Link, Settled
from farandole.protocol.errors import RemoteProtocolError

from .shaping import Shaping
from .streams import READ_BYTES, Stream, close_stream

# One write, of a chunk or some control messages: on the slowest line a chunk takes a second.
WRITE_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A message whose data follow it; or a `Settled`, which must not overtake its `Forward`."""

    message: Forward | Gradient | Settled
    data: memoryview | None


class ActivationLink:
    """Carries a `Link`. ``on_event`` is called with each event; after those that begin data it calls ``link.place``."""

    def __init__(self, number: int, link: Link, stream: Stream, shaping: Shaping) -> None:
        self.number = number
        self.link = link
        self.bytes_sent = 0
        self.bytes_received = 0
        self._stream = stream
        self._shaping = shaping
        self._scope = trio.CancelScope()
        self._controls: deque[Control] = deque()
        self._transfers: deque[_Transfer] = deque()
        self._wakeup = trio.Event()
        stream.is_bulk = True

    @property
    def peer(self) -> bytes:
        """Its public key."""
        return self._stream.peer

    def close(self) -> None:
        """End it soon."""
        self._scope.cancel()

    def send(self, message: Control, data: memoryview | None = None) -> None:
        """Send it when it is its turn; ``data`` are read then."""
        if isinstance(message, Settled) and self._transfers:
            self._transfers.append(_Transfer(message, None))
        elif isinstance(message, Forward | Gradient):
            self._transfers.append(_Transfer(message, data))
        else:
            self._controls.append(message)
        self._wakeup.set()

    async def run(self, on_event: Callable[[ActivationLink, Event], None]) -> None:
        """Until the stream ends, the peer breaks the protocol, or `close`; closes the stream."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    with contextlib.suppress(
                        trio.BrokenResourceError, trio.ClosedResourceError, RemoteProtocolError, trio.TooSlowError
                    ):
                        await self._read(on_event)
                    nursery.cancel_scope.cancel()
        finally:
            await close_stream(self._stream)

    async def greet(self, on_event: Callable[[Event], None]) -> None:
        """Read until both have greeted; for before `run`."""
        while not self.link.is_open:
            await self._write_controls()
            if self.link.is_open:
                return
            data = await self._stream.receive_some(READ_BYTES)
            if not data:
                raise RemoteProtocolError("the stream ended before its greeting")
            self.link.receive_data(data)
            while not self.link.awaits_place and (event := self.link.next_event()) is not None:
                on_event(event)

    async def _read(self, on_event: Callable[[ActivationLink, Event], None]) -> None:
        while True:
            while (event := self.link.next_event()) is not None:
                on_event(self, event)
            data = await self._stream.receive_some(READ_BYTES)
            if not data:
                return
            self.bytes_received += len(data)
            await self._shaping.down.wait(len(data))
            self.link.receive_data(data)

    async def _write(self) -> None:
        try:
            while True:
                wakeup = self._wakeup = trio.Event()
                await self._write_controls()
                if self._transfers:
                    await self._transfer(self._transfers.popleft())
                elif not self._controls:
                    await wakeup.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            self.close()

    async def _transfer(self, transfer: _Transfer) -> None:
        message, data = transfer.message, transfer.data
        if isinstance(message, Gradient | Settled) and message.index not in self.link.open:
            return  # it has ended meanwhile
        await self._send(self.link.send(message))
        for offset in range(0, len(data or b""), DATA_BYTES):
            assert data is not None, "it has a length"
            chunk = data[offset : offset + DATA_BYTES]
            await self._shaping.up.wait(len(chunk))
            while self._controls:  # who has dropped it may use its memory again: the peer hears that first
                await self._write_controls()
            await self._send(self.link.send_data(chunk))

    async def _write_controls(self) -> None:
        waiting, self._controls = self._controls, deque()
        frames = b"".join(self.link.send(message) for message in waiting if self._is_due(message))
        if frames:
            self._shaping.up.charge(len(frames))
            await self._send(frames)

    def _is_due(self, message: Control) -> bool:
        """Whether it still says something: its microbatch may have ended meanwhile."""
        if isinstance(message, Dropped):
            return self.link.may_drop(message.index)
        return not isinstance(message, Settled) or message.index in self.link.open

    async def _send(self, data: bytes) -> None:
        with trio.fail_after(WRITE_TIMEOUT):
            await self._stream.send_all(data)
        self.bytes_sent += len(data)

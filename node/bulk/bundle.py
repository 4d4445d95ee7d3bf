"""A bulk channel of several strands (`protocol.exchange.strands`): connections over different lines, used at once.

Each strand has a thread for each direction. A thread that sends takes the next piece when its connection has room for
it. A thread that receives decrypts each piece straight to its place. If one strand breaks, the whole channel does, and
the pipe goes on over another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import trio

from farandole.protocol.exchange.strands import HEADER, PIECE_BYTES, Pieces
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.incoming import Incoming

from .channel import BulkChannel, ChannelError

# Bytes that wait in the kernel of a strand. With more of them, a slow line has pieces that a fast one could send.
MAX_UNSENT: Final = 2 * PIECE_BYTES


class Bundle:
    """A channel of ``strands``; the first one gives it its name. No strand is used otherwise."""

    def __init__(self, strands: Sequence[BulkChannel]) -> None:
        self.peer = strands[0].peer
        self.session = strands[0].session
        self.opened_at = trio.current_time()
        self.idle_since = 0.0
        self._strands = strands
        self._sent = 0  # position in the bytes of a direction
        self._received = 0
        self._awaited: set[BulkChannel] = set()  # strands that have not ended what is received
        self._heard = [0] * len(strands)
        self._num_heard = 0
        for strand in strands:
            strand.limit_unsent(MAX_UNSENT)

    @property
    def num_strands(self) -> int:
        """Return the number of connections."""
        return len(self._strands)

    @property
    def num_sent(self) -> int:
        """Return the bytes passed to it up to now, with the headers of pieces, whether they have arrived or not."""
        return sum(strand.num_sent for strand in self._strands)

    @property
    def num_received(self) -> int:
        """Return a number that grows as long as bytes come on each strand that has not ended what is received.

        So whoever watches it notices a strand that falls silent, although others move.
        """
        counts = [strand.num_received for strand in self._strands]
        pairs = zip(self._strands, counts, self._heard, strict=True)
        if all(count > heard for strand, count, heard in pairs if strand in self._awaited):
            self._heard = counts
            self._num_heard += 1
        return self._num_heard

    @property
    def seconds_held_up(self) -> float:
        """Return the total delay of incoming data by this node's own cap."""
        return sum(strand.seconds_held_up for strand in self._strands)

    @property
    def is_fit(self) -> bool:
        """Return whether an idle channel may be used again."""
        return all(strand.is_fit for strand in self._strands)

    def limit_unsent(self, max_bytes: int) -> None:
        """Do nothing: the strands have a limit of their own."""

    async def send(self, data: memoryview) -> None:
        """Send all of it; raise `ChannelError` on failure. Otherwise as `BulkChannel.send`."""
        begin, queue, lock = self._sent, iter(range(0, data.nbytes, PIECE_BYTES)), threading.Lock()

        def send(strand: BulkChannel) -> None:
            while True:
                with lock:
                    start = next(queue, None)
                if start is None:
                    break
                piece = data[start : start + PIECE_BYTES]
                strand.write(_header(begin + start, piece.nbytes))
                strand.write(piece)
            strand.write(_header(begin + data.nbytes, 0))

        await self._on_each(send)
        self._sent += data.nbytes

    async def receive(self, incoming: Incoming) -> None:
        """Fill ``incoming`` to its end, as `BulkChannel.receive`; bytes count when all before them are here."""
        begin, shift = self._received, self._received - incoming.position
        pieces, lock = Pieces(begin, incoming.rest.nbytes), threading.Lock()
        self._awaited = set(self._strands)

        def receive(strand: BulkChannel) -> None:
            header, ended = memoryview(bytearray(HEADER.size)), begin
            while ended < pieces.end:
                strand.read(header)
                offset, size = HEADER.unpack(header)
                if not size:
                    if not ended < offset <= pieces.end:
                        raise RemoteProtocolError(f"an end at {offset}, after {ended} of {pieces.end} bytes")
                    ended = offset
                    continue
                with lock:
                    pieces.claim(offset, size)
                strand.read(incoming.memory[offset - shift : offset - shift + size])
                with lock:
                    if advanced := pieces.arrived(offset):
                        incoming.advance(advanced)
            self._awaited.discard(strand)

        await self._on_each(receive)
        if pieces.position < pieces.end:
            raise ChannelError(f"the strands end at {pieces.position} of {pieces.end} bytes")
        self._received = pieces.end

    async def _on_each(self, work: Callable[[BulkChannel], None]) -> None:
        """Work in a thread for each strand; if one fails, break off the others, and raise its `ChannelError`."""
        failure: ChannelError | None = None

        async def on_one(strand: BulkChannel) -> None:
            nonlocal failure
            try:
                await strand.run(partial(work, strand))
            except ChannelError as error:
                failure = failure or error
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for strand in self._strands:
                nursery.start_soon(on_one, strand)
        await trio.lowlevel.checkpoint_if_cancelled()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Close all strands at once. No thread may be active."""
        for strand in self._strands:
            strand.close()


def _header(offset: int, size: int) -> memoryview:
    return memoryview(HEADER.pack(offset, size))

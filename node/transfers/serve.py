"""Serves blocks of checkpoints to peers that need them, without harm to this node's own training.

A few peers are served at once, each over a stream and, where there is a route, a bulk channel. They share the node's
upload round-robin: under a bandwidth cap the shaper serves pieces in the order of the requests, and each peer has one
piece at a time in flight. Peers over the limit get a retry-after. A peer that has been served for a while then makes
room. So no peer has to wait for another's whole checkpoint, and no slow reader keeps others out.

While the node's own exchange runs, blocks get a tenth of the time: the run's rounds come first. For that, only a small
part of the data may wait in the kernel, where it would go before the exchange.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import trio

from farandole.protocol.checkpoints import block_transfer as messages
from farandole.protocol.checkpoints.blocks import BLOCK_BYTES, encode_signed_index
from farandole.protocol.exchange.pipe import BULK_FROM, Pipe, RouteStep
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame

from ..base.bandwidth import Shaping
from ..base.streams import Stream, receive_frame
from ..bulk.exchange_service import ExchangeService
from ..bulk.pipe import BulkPipe, Outgoing, Patience
from .fetch import Conditions
from .holdings import Holding

# A question and its answer, if no fresh checkpoint has to be saved for it.
ANSWER_TIMEOUT: Final = 10.0
# Peers served at once. With an upload cap, as many as get more than `MIN_SHARE` of half of it, the other half being for
# exchanges, but at least one.
MAX_SERVED: Final = 4
MIN_SHARE: Final = 64 * 1024
# A peer that asks for nothing for this long has what it needs, or waits for another's blocks.
IDLE_TIMEOUT: Final = 20.0
# The minimum time for which a peer is served while others wait: on a line of 20 Mbit/s that is 75 MB. Then it has this
# long to take the block that is in flight.
TURN_SECONDS: Final = 30.0
GRACE_SECONDS: Final = 10.0
# Retry-after for a peer that is served over another stream: that may be about to close.
CLOSING_SECONDS: Final = 0.5
# Retry-after for a peer whose turn is over: others have come by then.
TURNED_OUT_SECONDS: Final = 5.0
# Retry-after for all peers while this node saves its month's traffic, which takes hours: other donors serve them.
SAVING_SECONDS: Final = 30.0
# Where a block takes long, or an exchange runs, blocks move in pieces of this size: a tenth of a second on a line of
# 20 Mbit/s. No more than this waits in the kernel of a channel.
PIECE_BYTES: Final = 256 * 1024
LONG_SECONDS: Final = 0.1
# A rest between two pieces while an exchange runs: nine times as long as the piece took, but short enough that the
# waiting peer does not take this node for dead (`block_transfer.SILENCE`).
REST: Final = 9.0
MAX_REST: Final = 2.0
# The share of the slowest piece's pace that is kept at the next one.
FORGETTING: Final = 0.9
# The peer that needs blocks opens the channel, and takes what it has asked for.
PATIENCE: Final = Patience(route=ANSWER_TIMEOUT, answer=ANSWER_TIMEOUT, write=messages.BLOCK_TIMEOUT)

Find = Callable[[messages.BlockQuestion], Awaitable[Holding | None]]
"""Returns the checkpoint that is asked for; None if it is not here."""


class BlockService:
    """Serves blocks of the checkpoints that ``find`` finds, of one run. ``exchanges`` take precedence."""

    def __init__(self, conditions: Conditions, find: Find, exchanges: ExchangeService | None = None) -> None:
        self._conditions = conditions
        self._find = find
        self._exchanges = exchanges
        rate = conditions.shaping.up.rate
        self._max_served = min(MAX_SERVED, max(1, int(rate / (2 * MIN_SHARE)))) if rate else MAX_SERVED
        self._served: dict[bytes, _Turn] = {}
        """The peers that are served, in the order in which they came."""

    def register(self) -> None:
        """Register the protocol's handler on the host."""
        self._conditions.host.set_handler(messages.BLOCKS_PROTOCOL, self.serve)

    async def serve(self, stream: Stream) -> None:
        """Serve one peer, until it has what it needs. Peers that had their turn are asked to make room for another."""
        parser, peer, shaping = FrameParser(messages.MAX_MESSAGE_BYTES), stream.peer, self._conditions.shaping
        with trio.fail_after(ANSWER_TIMEOUT):
            question = messages.decode_question(await receive_frame(stream, parser))
        refusal: messages.Absent | messages.Busy | None = None
        if question.run_id != self._conditions.run_id:
            refusal = messages.Absent()
        elif not shaping.may_spend(BLOCK_BYTES):
            refusal = messages.Busy(SAVING_SECONDS)
        elif peer in self._served:
            refusal = messages.Busy(CLOSING_SECONDS)
        elif len(self._served) >= self._max_served:
            oldest = next(iter(self._served.values()))
            oldest.end_after_turn()
            refusal = messages.Busy(max(1.0, oldest.ends_at - trio.current_time()))
        if refusal is not None:
            await _answer(stream, refusal)
            return
        turn = self._served[peer] = _Turn(shaping, self._exchanges)
        try:
            with turn.scope:
                stream.is_bulk = False
                if (holding := await self._find(question)) is None:
                    await _answer(stream, messages.Absent())
                    return
                await self._give(stream, parser, question, turn, holding)
        finally:
            del self._served[peer]

    async def _give(
        self, stream: Stream, parser: FrameParser, question: messages.BlockQuestion, turn: _Turn, holding: Holding
    ) -> None:
        size, channels, shaping = holding.index.size, self._conditions.channels, self._conditions.shaping
        here = messages.Here(holding.num_held, b"" if question.has_index else encode_signed_index(holding.signed))
        with channels.expecting(stream.peer) if channels else contextlib.nullcontext():
            await _answer(stream, here, messages.max_answer_bytes(size))
            pipe = Pipe(False, max_message_bytes=messages.MAX_MESSAGE_BYTES, is_large=size >= BULK_FROM)
            # With a cap, the shaper already limits what waits in the kernel.
            max_unsent = None if shaping.up.rate else PIECE_BYTES
            bulk = BulkPipe(pipe, stream, channels, shaping, max_unsent, turn.piece_bytes, turn.rest)
            await turn.give(bulk, holding, parser.take_rest())


class _Turn:
    """The time for which a peer is served, and the blocks that it gets in it: at the pace that exchanges leave."""

    def __init__(self, shaping: Shaping, exchanges: ExchangeService | None) -> None:
        self.scope = trio.CancelScope()
        self.ends_at = trio.current_time() + TURN_SECONDS
        self._shaping = shaping
        self._exchanges = exchanges
        self._pace = 0.0  # seconds a byte
        self._gives_until = math.inf

    def end_after_turn(self) -> None:
        """End the service after its turn, because others are waiting."""
        self._gives_until = self.ends_at
        self.scope.deadline = max(trio.current_time(), self.ends_at) + GRACE_SECONDS

    async def give(self, bulk: BulkPipe, holding: Holding, received: bytes) -> None:
        """Give blocks until the peer goes, falls silent, or others have their turn.

        ``received`` was read from the stream before.
        """
        wanted, has_more = messages.Wanted(holding.num_held), trio.lowlevel.ParkingLot()

        async def hear(payload: bytes) -> None:
            message = messages.decode_asked(payload)
            match message:
                case _ if bulk.pipe.step is RouteStep.UNROUTED:
                    raise RemoteProtocolError(f"{type(message).__name__} before the route")
                case messages.Want():
                    wanted.add(message)
                    has_more.unpark_all()
                case messages.Forget(block):
                    wanted.forget(block)

        async def read() -> None:
            await bulk.run(hear, received=received)
            nursery.cancel_scope.cancel()

        def announce(block: int, data: memoryview) -> tuple[bytes, Outgoing]:
            bulk.pipe.offer(block, data.nbytes)
            return bulk.pipe.send_message(messages.encode(messages.Give(block))), Outgoing(data)

        bulk.begin(PATIENCE)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                while trio.current_time() < self._gives_until and self._shaping.may_spend(BLOCK_BYTES):
                    if not wanted:
                        with trio.move_on_after(IDLE_TIMEOUT) as patience:
                            await has_more.park()
                        if patience.cancelled_caught:
                            break
                        continue
                    block = wanted.pop()
                    data = memoryview(await trio.to_thread.run_sync(holding.read, block))
                    with trio.fail_after(messages.BLOCK_TIMEOUT):
                        await bulk.send(partial(announce, block, data))
                else:
                    bulk.post(bulk.pipe.send_message(messages.encode(messages.Busy(TURNED_OUT_SECONDS))))
                    with trio.fail_after(ANSWER_TIMEOUT):
                        await bulk.drain()
                nursery.cancel_scope.cancel()
        except* (RemoteProtocolError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass  # the cause does not matter: the peer asks again, or asks another donor
        finally:
            bulk.close()

    def piece_bytes(self) -> int:
        """Return the maximum size of the next piece over a channel."""
        is_exchanging = self._exchanges is not None and self._exchanges.is_exchanging
        return PIECE_BYTES if self._pace * BLOCK_BYTES > LONG_SECONDS or is_exchanging else BLOCK_BYTES

    async def rest(self, num_bytes: int, seconds: float) -> None:
        """Wait while an exchange runs, after a piece of ``num_bytes`` that took ``seconds``."""
        # That is the line's pace only where the piece had to wait: after a rest there is room in buffers.
        rate = self._shaping.up.rate
        self._pace = max(seconds / num_bytes, FORGETTING * self._pace, 1 / rate if rate else 0.0)
        if self._exchanges is not None:
            with trio.move_on_after(min(REST * self._pace * num_bytes, MAX_REST)):
                await self._exchanges.wait_quiet()


async def _answer(
    stream: Stream,
    message: messages.Here | messages.Busy | messages.Absent,
    max_bytes: int = messages.MAX_MESSAGE_BYTES,
) -> None:
    with trio.fail_after(ANSWER_TIMEOUT):
        await stream.send_all(frame(messages.encode(message), max_bytes))

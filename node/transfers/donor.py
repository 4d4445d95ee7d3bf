"""Takes blocks of one checkpoint from one donor: a conversation per `farandole.protocol.checkpoints.block_transfer`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from farandole.protocol.checkpoints import block_transfer as messages
from farandole.protocol.checkpoints.blocks import block_range
from farandole.protocol.exchange.pipe import BULK_FROM, MAX_OPEN, Pipe
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame

from ..base.bandwidth import Shaping
from ..base.errors import PeerUnreachableError
from ..base.nurseries import open_service_nursery
from ..base.streams import Stream, StreamHost, close_stream, receive_frame
from ..bulk.negotiation import BulkService
from ..bulk.pipe import BulkPipe, Patience
from ..store.disk_space import Room, save_seconds

# A question and its answer.
ANSWER_TIMEOUT: Final = 10.0
# A donor may have to save its newest checkpoint again. It gets this much longer at most, whatever the size: a newcomer
# loses this time with each donor that does not answer, and asks eight of them in one turn.
MAX_FRESH_SAVE: Final = 60.0
# For a bulk channel, if one opens; a donor whose stream accepts nothing for this long is lost.
PATIENCE: Final = Patience(route=6.0, answer=ANSWER_TIMEOUT, write=messages.SILENCE)
# Blocks of one donor in memory: the ones in transit, one that is verified and written, and the next one.
NUM_BUFFERS: Final = MAX_OPEN + 2
# Messages to a donor that it has not read yet.
MAX_UNSAID: Final = 1_024


def fresh_save_timeout(max_size: int) -> float:
    """Return how long a donor may take to save a checkpoint of ``max_size`` bytes again, on top of `ANSWER_TIMEOUT`."""
    return min(save_seconds(max_size), MAX_FRESH_SAVE)


class AbsentError(PeerUnreachableError):
    """A donor does not have the checkpoint: not any more, as a rule, and never again."""


class DonorBusyError(PeerUnreachableError):
    """A donor serves others first, for ``seconds`` or so."""

    def __init__(self, seconds: float) -> None:
        super().__init__("it serves others first")
        self.seconds = seconds


@dataclass
class Conditions:
    """The host, run and limits that all conversations of one node share."""

    host: StreamHost
    run_id: bytes
    shaping: Shaping = field(default_factory=Shaping)
    channels: BulkService | None = None
    """Bulk channels in addition to the streams; without them everything goes over the streams."""
    room: Room = field(default_factory=Room)
    """The space for what is fetched."""


class DonorSession:
    """One conversation with a donor, while its stream lasts; made by `open_donor`."""

    def __init__(self, conditions: Conditions, stream: Stream, parser: FrameParser, answer: messages.Here) -> None:
        self.answer = answer
        self._conditions = conditions
        self._stream = stream
        self._parser = parser
        self._asked: set[int] = set()
        self._buffers: dict[int, memoryview] = {}  # of blocks on their way
        self._bulk: BulkPipe | None = None
        self._progress = 0

    def has_advanced(self) -> bool:
        """Return whether bytes have arrived since the last call, over any route and from any start."""
        before, self._progress = self._progress, 0 if self._bulk is None else self._bulk.progress
        return self._progress != before

    def tell(self, message: messages.Asked) -> None:
        """Ask for blocks, or withdraw a request; raises `trio.WouldBlock` if too many messages are unread."""
        assert self._bulk is not None, "a donor is asked once it is ready"
        if isinstance(message, messages.Want):
            self._asked.update(range(message.first, message.first + message.count))
        if self._bulk.num_posted >= MAX_UNSAID:
            raise trio.WouldBlock
        self._bulk.post(self._bulk.pipe.send_message(messages.encode(message)))

    async def run(
        self, size: int, on_ready: Callable[[], None], on_block: Callable[[int, memoryview], Awaitable[None]]
    ) -> None:
        """Take what is asked for, of a checkpoint of ``size`` bytes, until cancelled.

        ``on_ready`` is called once, when blocks may be asked for. ``on_block`` is called with each block that has
        arrived, unverified. Raises `DonorBusyError`, `RemoteProtocolError`, `trio.TooSlowError`,
        `trio.BrokenResourceError` or `trio.ClosedResourceError` when nothing more comes.
        """
        pipe = Pipe(True, max_message_bytes=messages.MAX_MESSAGE_BYTES, is_large=size >= BULK_FROM)
        bulk = self._bulk = BulkPipe(pipe, self._stream, self._conditions.channels, self._conditions.shaping)
        come, coming = trio.open_memory_channel[tuple[int, memoryview]](NUM_BUFFERS)
        free = trio.Semaphore(NUM_BUFFERS)

        async def hear(payload: bytes) -> None:
            match messages.decode_given(payload):
                case messages.Give(block) if block in self._asked and block not in self._buffers:
                    await free.acquire()  # if none is, two blocks are here to be written: this waits for no transfer
                    start, end = block_range(size, block)
                    self._buffers[block] = memoryview(bytearray(end - start))
                    pipe.expect(block, self._buffers[block])
                case messages.Busy(seconds):
                    raise DonorBusyError(seconds)
                case message:
                    raise RemoteProtocolError(f"{type(message).__name__} out of turn")

        def receive(block: int) -> None:
            self._asked.remove(block)
            come.send_nowait((block, self._buffers.pop(block)))

        async def hand_on() -> None:
            async for block, memory in coming:
                await on_block(block, memory)
                free.release()

        async def tell_when_ready() -> None:
            await bulk.wait_routed()
            on_ready()

        async with open_service_nursery() as nursery:
            nursery.start_soon(hand_on)
            nursery.start_soon(tell_when_ready)
            bulk.begin(PATIENCE)
            await bulk.run(hear, receive, self._parser.take_rest())
            raise RemoteProtocolError("the donor closed the stream")

    def close(self) -> None:
        """Close it; its channel is kept for other uses, unless blocks are still expected over it."""
        if self._bulk is not None:
            self._bulk.close(is_clean=not self._asked)


@contextlib.asynccontextmanager
async def open_donor(
    conditions: Conditions, donor: bytes, question: messages.BlockQuestion, max_size: int
) -> AsyncIterator[DonorSession]:
    """Ask a donor for a checkpoint of at most ``max_size`` bytes; without an id for its newest, maybe saved again.

    Raises `AbsentError`, `DonorBusyError`, `PeerUnreachableError`, `RemoteProtocolError`, `trio.TooSlowError`,
    `trio.BrokenResourceError` or `trio.ClosedResourceError`.
    """
    stream = await conditions.host.open_stream(donor, messages.BLOCKS_PROTOCOL)
    try:
        with trio.fail_after(ANSWER_TIMEOUT + (fresh_save_timeout(max_size) if question.id is None else 0.0)):
            await stream.send_all(frame(messages.encode(question), messages.MAX_MESSAGE_BYTES))
            parser = FrameParser(messages.max_answer_bytes(max_size))
            answer = messages.decode_answered(await receive_frame(stream, parser))
        match answer:
            case messages.Absent():
                raise AbsentError("it does not have the checkpoint")
            case messages.Busy(seconds):
                raise DonorBusyError(seconds)
            case messages.Here():
                session = DonorSession(conditions, stream, parser, answer)
                try:
                    yield session
                finally:
                    session.close()
    finally:
        await close_stream(stream)

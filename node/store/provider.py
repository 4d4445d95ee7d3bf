"""Taking blocks of one checkpoint from one donor: a conversation as `farandole.protocol.block_transfer` says."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from farandole.protocol.block_transfer import (
    BLOCKS_PROTOCOL,
    MAX_MESSAGE_BYTES,
    Absent,
    Busy,
    Forget,
    Give,
    Here,
    Question,
    Route,
    Routed,
    Want,
    decode_answered,
    decode_given,
    encode,
    max_answer_bytes,
)
from farandole.protocol.blocks import BLOCK_BYTES, Index, SignedIndex, block_range, decode_signed_index
from farandole.protocol.download import SILENCE
from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.exchange import BULK_FROM
from farandole.protocol.framing import FrameParser, frame
from farandole.protocol.incoming import Incoming

from ..base.bandwidth import Shaping
from ..base.errors import PeerUnreachableError
from ..base.nurseries import open_service_nursery
from ..base.streams import READ_BYTES, Stream, StreamHost, close_stream, receive_frame
from ..bulk.transport import Channels, Way
from .disk_space import Room

# A question and its answer, for which a fresh checkpoint may have to be saved.
ANSWER_TIMEOUT: Final = 10.0
# For a bulk channel, if it comes to one.
ROUTE_TIMEOUT: Final = 6.0
# Blocks of one donor in memory: one that comes, and one that is verified and written.
NUM_BUFFERS: Final = 2
# What is to be said to a donor: it says when it does not take that, by taking nothing.
MAX_UNSAID: Final = 1_024


class DonorError(PeerUnreachableError):
    """A donor gives nothing; another may."""


class AbsentError(DonorError):
    """It does not have the checkpoint: not any more, as a rule, and never again."""

    def __init__(self) -> None:
        super().__init__("it does not have the checkpoint")


class DonorBusyError(DonorError):
    """It serves others first, for ``seconds`` or so."""

    def __init__(self, seconds: float) -> None:
        super().__init__("it serves others first")
        self.seconds = seconds


@dataclass
class Conditions:
    """What all conversations of one node have in common."""

    host: StreamHost
    run_id: bytes
    shaping: Shaping = field(default_factory=Shaping)
    channels: Channels[Any] | None = None
    """Ways beside the streams; without them everything goes over the streams."""
    room: Room = field(default_factory=Room)
    """For what is fetched."""


class Taking:
    """One conversation, while its stream lasts; made by `open_taking`.

    ``on_block`` is called with each block that has come, of which nothing is known yet; its memory is another's when
    that returns.
    """

    def __init__(self, conditions: Conditions, stream: Stream, answer: Here) -> None:
        self.num_held = answer.num_held
        self.num_received = 0
        """Bytes over the stream; see also `progress`."""
        self._conditions = conditions
        self._stream = stream
        self._answer = answer
        self._way = Way(stream.peer, conditions.channels)
        self._asked: set[int] = set()
        self._unsaid, self._to_say = trio.open_memory_channel[Want | Forget](MAX_UNSAID)
        self._parser = FrameParser(MAX_MESSAGE_BYTES)

    @property
    def progress(self) -> int:
        """Bytes that have come so far, over whatever way, from any start."""
        channel = self._way.channel
        return self.num_received + (0 if channel is None else channel.num_received)

    def signed_index(self, max_size: int, run_id: bytes) -> tuple[SignedIndex, Index]:
        """What the donor answered; raises `RemoteProtocolError` if it is no index of a run's checkpoint."""
        return decode_signed_index(self._answer.index, run_id, max_size)

    def want(self, first: int, count: int) -> None:
        """Ask for blocks; raises `trio.WouldBlock` if the donor has not taken many such messages before."""
        self._asked.update(range(first, first + count))
        self._unsaid.send_nowait(Want(first, count))

    def forget(self, block: int) -> None:
        """A block need not be given. Otherwise as `want`."""
        self._unsaid.send_nowait(Forget(block))

    async def route(self, size: int) -> None:
        """Agree on a way for a checkpoint of ``size`` bytes. Raises as `run`."""
        name: bytes | None = None
        if size >= BULK_FROM:
            name = await self._way.open(trio.current_time() + ROUTE_TIMEOUT)
        with trio.fail_after(ANSWER_TIMEOUT):
            await self._stream.send_all(frame(encode(Route(name)), MAX_MESSAGE_BYTES))
            message = await self._next()
        if not isinstance(message, Routed) or message.channel not in (name, None):
            raise RemoteProtocolError("not an answer to a route")
        if message.channel is None:
            self._way.discard()
            self._stream.is_bulk = True

    async def run(self, size: int, on_block: Callable[[int, memoryview], Awaitable[None]]) -> None:
        """Take what is asked for, of a checkpoint of ``size`` bytes, until cancelled.

        Raises `DonorBusyError`, `RemoteProtocolError`, `ChannelError`, `trio.TooSlowError`,
        `trio.BrokenResourceError` or `trio.ClosedResourceError` when nothing more comes.
        """
        come, coming = trio.open_memory_channel[tuple[int, bytearray]](NUM_BUFFERS)
        free, freed = trio.open_memory_channel[bytearray](NUM_BUFFERS)
        for _ in range(NUM_BUFFERS):
            free.send_nowait(bytearray(BLOCK_BYTES))

        def part_of(block: int, memory: bytearray) -> memoryview:
            start, end = block_range(size, block)
            return memoryview(memory)[: end - start]

        async def hand_on() -> None:
            async for block, memory in coming:
                await on_block(block, part_of(block, memory))
                free.send_nowait(memory)

        async with open_service_nursery() as nursery:
            nursery.start_soon(self._speak)
            nursery.start_soon(hand_on)
            while True:
                message = await self._next()
                match message:
                    case Give(block) if block in self._asked:
                        memory = await freed.receive()
                        await self._receive(part_of(block, memory))
                        self._asked.remove(block)
                        come.send_nowait((block, memory))
                    case Busy(seconds):
                        raise DonorBusyError(seconds)
                    case _:
                        raise RemoteProtocolError(f"{type(message).__name__} out of turn")

    def close(self) -> None:
        """Its channel is kept for other uses, if nothing is to come over it any more."""
        (self._way.discard if self._asked else self._way.keep)()

    async def _next(self) -> Routed | Give | Busy:
        while (payload := self._parser.next_frame()) is None:
            data = await self._stream.receive_some(READ_BYTES)
            if not data:
                raise RemoteProtocolError("the donor closed the stream")
            if self._stream.is_bulk:
                self._conditions.shaping.down.charge(len(data))
            self._parser.receive_data(data)
        return decode_given(payload)

    async def _receive(self, data: memoryview) -> None:
        """A block's bytes; who watches `progress` says when it takes too long."""
        channel = self._way.channel
        if channel is not None:
            await channel.receive(Incoming(data))
            return
        down = self._conditions.shaping.down
        piece: bytes | bytearray = self._parser.take_rest()
        while True:
            taken = min(len(piece), len(data))
            data[:taken] = piece[:taken]
            data = data[taken:]
            self.num_received += taken
            if not data:
                self._parser.receive_data(piece[taken:])
                return
            piece = await self._stream.receive_some(min(READ_BYTES, down.quantum))
            if not piece:
                raise RemoteProtocolError("the donor closed the stream inside a block")
            await down.wait(len(piece))

    async def _speak(self) -> None:
        """A donor that takes nothing, or is gone, is told nothing more: who waits for its blocks will notice."""
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            async for message in self._to_say:
                with trio.fail_after(SILENCE):
                    await self._stream.send_all(frame(encode(message), MAX_MESSAGE_BYTES))


@contextlib.asynccontextmanager
async def open_taking(conditions: Conditions, donor: bytes, question: Question, max_size: int) -> AsyncIterator[Taking]:
    """Ask a donor for a checkpoint of at most ``max_size`` bytes.

    Raises `AbsentError`, `DonorBusyError`, `PeerUnreachableError`, `RemoteProtocolError`, `trio.TooSlowError`,
    `trio.BrokenResourceError` or `trio.ClosedResourceError`.
    """
    stream = await conditions.host.open_stream(donor, BLOCKS_PROTOCOL)
    try:
        with trio.fail_after(ANSWER_TIMEOUT):
            await stream.send_all(frame(encode(question), MAX_MESSAGE_BYTES))
            answer = decode_answered(await receive_frame(stream, FrameParser(max_answer_bytes(max_size))))
        match answer:
            case Absent():
                raise AbsentError
            case Busy(seconds):
                raise DonorBusyError(seconds)
            case Here():
                taking = Taking(conditions, stream, answer)
                try:
                    yield taking
                finally:
                    taking.close()
    finally:
        await close_stream(stream)

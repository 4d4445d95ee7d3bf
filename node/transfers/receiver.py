"""Fetches a checkpoint, or some of its tensors, from all peers that have it at once.

`farandole.protocol.checkpoints.block_transfer` decides what to ask of which donor; this module does the I/O, a
conversation with each donor. The header comes first, since it says where the wanted tensors are. Their blocks follow,
and each is verified before it is written to its place.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import trio

from farandole.protocol.checkpoints import block_transfer as messages
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import (
    BLOCK_BYTES,
    Index,
    Selection,
    SignedIndex,
    block_range,
    blocks_between,
    decode_signed_index,
    num_blocks,
    select,
)
from farandole.protocol.exchange.pipe import BULK_FROM, MAX_OPEN, Pipe
from farandole.protocol.run.rules import is_required
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.identity import short_name
from farandole.protocol.wire.safetensors import header_size, parse_header

from ..base.bandwidth import Shaping
from ..base.errors import PeerUnreachableError
from ..base.nurseries import open_service_nursery
from ..base.streams import Stream, StreamHost, receive_frame
from ..bulk.negotiation import BulkService
from ..bulk.pipe import BulkPipe, Patience
from ..mesh.host import Host
from ..state.membership import Membership
from ..status.journal import Journal
from ..store.disk_space import Room, WeightFiles, save_seconds
from .block_file import PartialFile, partial_path, remove_partials

logger = logging.getLogger(__name__)

# A question and its answer.
ANSWER_TIMEOUT: Final = 10.0
# A donor may have to save its newest checkpoint again. It gets this much longer at most, whatever the size: a newcomer
# loses this time with each donor that does not answer, and asks eight of them in one turn.
MAX_FRESH_SAVE: Final = 60.0
# For a bulk channel, if one opens; a donor whose stream accepts nothing for this long is lost.
PATIENCE: Final = Patience(route=6.0, answer=ANSWER_TIMEOUT, write=messages.SILENCE)
# Blocks of one donor in memory: the ones in transit, and the ones that are verified and written.
NUM_BUFFERS: Final = MAX_OPEN + 2
# Messages to a donor that it has not read yet.
MAX_UNSAID: Final = 1_024
TICK_SECONDS: Final = 0.1

# The errors of a donor that gives nothing (more).
LOST: Final = (
    PeerUnreachableError,
    RemoteProtocolError,
    trio.TooSlowError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)


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


# A conversation with one donor


@contextlib.asynccontextmanager
async def open_donor(
    conditions: Conditions, donor: bytes, question: BlockQuestion, max_size: int
) -> AsyncIterator[tuple[Stream, FrameParser, messages.Here]]:
    """Ask a donor for a checkpoint of at most ``max_size`` bytes; without an id for its newest, maybe saved again.

    Yields the stream, what was read from it, and the answer. Raises `LOST`, with `AbsentError` and `DonorBusyError`.
    """
    async with contextlib.aclosing(await conditions.host.open_stream(donor, messages.BLOCKS_PROTOCOL)) as stream:
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
                yield stream, parser, answer


class DonorSession:
    """Takes blocks of a checkpoint of ``size`` bytes over the stream of `open_donor`."""

    def __init__(self, conditions: Conditions, stream: Stream, size: int) -> None:
        pipe = Pipe(True, max_message_bytes=messages.MAX_MESSAGE_BYTES, is_large=size >= BULK_FROM)
        self._bulk = BulkPipe(pipe, stream, conditions.channels, conditions.shaping)
        self._size = size
        self._asked: set[int] = set()
        self._buffers: dict[int, memoryview] = {}  # of blocks on their way
        self._progress = 0

    def has_advanced(self) -> bool:
        """Return whether bytes have arrived since the last call, over any route and from any start."""
        before, self._progress = self._progress, self._bulk.progress
        return self._progress != before

    def tell(self, message: messages.Asked) -> None:
        """Ask for blocks, or withdraw a request; raises `trio.WouldBlock` if too many messages are unread."""
        if isinstance(message, messages.Want):
            self._asked.update(range(message.first, message.first + message.count))
        if self._bulk.num_posted >= MAX_UNSAID:
            raise trio.WouldBlock
        self._bulk.post(self._bulk.pipe.send_message(messages.encode(message)))

    async def run(
        self, received: bytes, on_ready: Callable[[], None], on_block: Callable[[int, memoryview], Awaitable[None]]
    ) -> None:
        """Take what is asked for, until cancelled; ``received`` was read from the stream before.

        ``on_ready`` is called once, when blocks may be asked for. ``on_block`` is called with each block that has
        arrived, unverified. Raises `LOST` when nothing more comes. The channel is kept for other uses, unless blocks
        are still expected over it.
        """
        bulk, pipe = self._bulk, self._bulk.pipe
        free = trio.Semaphore(NUM_BUFFERS)

        async def hear(payload: bytes) -> None:
            match messages.decode_given(payload):
                case messages.Give(block) if block in self._asked and block not in self._buffers:
                    await free.acquire()  # if none is, blocks are here to be written: this waits for no transfer
                    start, end = block_range(self._size, block)
                    self._buffers[block] = memoryview(bytearray(end - start))
                    pipe.expect(block, self._buffers[block])
                case messages.Busy(seconds):
                    raise DonorBusyError(seconds)
                case message:
                    raise RemoteProtocolError(f"{type(message).__name__} out of turn")

        def receive(block: int) -> None:
            self._asked.remove(block)
            nursery.start_soon(hand_on, block, self._buffers.pop(block))

        async def hand_on(block: int, memory: memoryview) -> None:
            await on_block(block, memory)
            free.release()

        async def tell_when_ready() -> None:
            await bulk.wait_routed()
            on_ready()

        try:
            async with open_service_nursery() as nursery:
                nursery.start_soon(tell_when_ready)
                bulk.begin(PATIENCE)
                await bulk.run(hear, receive, received)
                raise RemoteProtocolError("the donor closed the stream")
        finally:
            bulk.close(is_clean=not self._asked)


# A fetch from all donors


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """The progress of a fetch."""

    num_bytes: int
    """The bytes that are here, including the ones of an earlier attempt."""
    total: int
    rate: float
    """The mean rate in bytes a second."""
    num_donors: int
    """The donors that give now."""

    def __str__(self) -> str:
        text = f"{self.num_bytes / 1e6:.1f} of {self.total / 1e6:.1f} MB"
        text += f" ({self.num_bytes * 100 // max(self.total, 1)} %), {self.rate / 1e6:.1f} MB/s"
        donors = "donor" if self.num_donors == 1 else "donors"
        left = f", {(self.total - self.num_bytes) / self.rate:.0f} s left" if self.rate > 0 else ""
        return f"{text} from {self.num_donors} {donors}{left}"


Show = Callable[[FetchProgress], None]


@dataclass(slots=True)
class Fetched:
    """The result of a fetch, so far."""

    num_by_donor: dict[bytes, int]
    """The blocks that each donor gave, including the ones that came twice."""
    num_bytes: int = 0
    """The bytes that arrived, including the ones that came twice."""


async def ask_for_index(
    conditions: Conditions,
    donor: bytes,
    stage: int,
    max_size: int,
    checkpoint_id: bytes | None = None,
    made_by: bytes | None = None,
) -> tuple[SignedIndex, Index]:
    """Ask a donor for the index of its newest checkpoint of a stage, saved again if old, or of the one with this id.

    ``made_by`` is the run that made it, if that is not the donor's own. Raises `PeerUnreachableError`, of which
    `DonorBusyError` is a subclass.
    """
    question = BlockQuestion(conditions.run_id, stage, checkpoint_id)
    try:
        async with open_donor(conditions, donor, question, max_size) as (_, _, answer):
            signed, index = decode_signed_index(answer.index, made_by or conditions.run_id, max_size)
    except PeerUnreachableError:
        raise
    except LOST as error:
        raise PeerUnreachableError(f"no index: {str(error) or 'too slow'}") from error
    if index.stage != stage or checkpoint_id not in (None, signed.id):
        raise PeerUnreachableError("it gave the index of another checkpoint")
    return signed, index


async def fetch_checkpoint(
    conditions: Conditions,
    signed: SignedIndex,
    index: Index,
    donors: Callable[[], Collection[bytes]],
    wanted: Callable[[str], bool],
    path: Path,
    on_progress: Show = lambda progress: None,
    accuse: Callable[[bytes, str], None] = lambda donor, reason: None,
    *,
    is_prefix: bool = False,
) -> Fetched:
    """Fetch the tensors whose name is wanted, as a safetensors file at ``path``.

    ``donors`` returns the peers that announce the checkpoint now, the best first; it is called at intervals. ``accuse``
    is called with each donor that gave wrong bytes. With ``is_prefix`` the file is no safetensors file but the
    checkpoint's own first blocks, up to the last wanted tensor: what can be given to others.

    Raises `PeerUnreachableError`, which says why it is not here: nobody gives it, or it cannot be stored.
    """
    run_sync = trio.to_thread.run_sync
    try:
        await run_sync(remove_partials, path, signed.id)
        file = await run_sync(PartialFile, partial_path(path, signed.id), index)
        have = await run_sync(file.blocks)
        async with open_service_nursery() as nursery:
            # Patience starts when donors are asked: hashing the blocks of an earlier attempt may take minutes.
            fetch = _Fetch(conditions, signed, donors, on_progress, accuse, file, have, nursery)
            nursery.start_soon(fetch.watch)
            selection = await fetch.run(wanted, is_prefix)
        await run_sync(partial(file.make, selection, path, is_prefix=is_prefix))
        return fetch.fetched
    except OSError as error:
        raise PeerUnreachableError(f"the download cannot be stored: {error}") from error
    except RemoteProtocolError as error:
        raise PeerUnreachableError(f"its author made it no checkpoint: {error}") from error


@dataclass(eq=False)
class _Fetch:
    """One fetch, from the first contact with the donors to the file. ``have``: the blocks that are here."""

    conditions: Conditions
    signed: SignedIndex
    donors: Callable[[], Collection[bytes]]
    on_progress: Show
    accuse: Callable[[bytes, str], None]
    file: PartialFile
    have: set[int]
    nursery: trio.Nursery

    def __post_init__(self) -> None:
        self.fetched = Fetched(Counter())
        self._scopes: dict[bytes, trio.CancelScope] = {}  # of donors that were dialled
        self._sessions: dict[bytes, DonorSession] = {}  # of donors that give
        self._absent: set[bytes] = set()  # donors that do not have it
        self._needed: frozenset[int] = frozenset()
        self._problem = "nobody is known who has it"
        self._download = messages.Download(trio.current_time(), self.have)
        self._is_over = trio.Event()  # of the blocks that are needed now
        self._failure: PeerUnreachableError | None = None

    async def run(self, wanted: Callable[[str], bool], is_prefix: bool) -> Selection:
        """Fetch the header, and then the blocks of the wanted tensors."""
        size, read = self.file.index.size, partial(trio.to_thread.run_sync, self.file.read_range)
        await self._fetch(range(1))
        header_end = header_size(await read(*block_range(size, 0)), size)
        await self._fetch(blocks_between(0, header_end))
        selection = select(parse_header(await read(0, header_end), size), wanted)
        blocks = range(selection.blocks[-1] + 1) if is_prefix else selection.blocks
        made = selection.size if selection.header and not is_prefix else 0
        num_bytes = self._size_of(set(blocks) - self.have) + made
        await trio.to_thread.run_sync(self.conditions.room.check, self.file.path.parent, num_bytes)
        await self._fetch(blocks)
        return selection

    async def _fetch(self, blocks: Iterable[int]) -> None:
        self._is_over = trio.Event()
        self._needed = frozenset(blocks)
        self._carry_out(self._download.need(sorted(self._needed), trio.current_time()))
        await self._is_over.wait()
        if self._failure is not None:
            raise self._failure

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or PeerUnreachableError(reason)
        self._is_over.set()

    async def watch(self) -> None:
        """Follow which donors there are and how many bytes have arrived, until cancelled."""
        known: tuple[bytes, ...] = ()
        began_at = trio.current_time()
        while True:
            now = trio.current_time()
            if (names := tuple(self.donors())) != known:
                known = names
                self._carry_out(self._download.know(known, now))
            for donor, session in list(self._sessions.items()):
                if session.has_advanced():
                    self._carry_out(self._download.heard(donor, now))
            self._carry_out(self._download.tick(now))
            num_bytes = self._size_of(self._needed & self.have)
            rate = self.fetched.num_bytes / max(now - began_at, TICK_SECONDS)
            self.on_progress(FetchProgress(num_bytes, self._size_of(self._needed), rate, self._download.num_open))
            await trio.sleep(TICK_SECONDS)

    def _size_of(self, blocks: Collection[int]) -> int:
        """Return the size of these blocks in bytes."""
        is_last_among = num_blocks(self.file.index.size) - 1 in blocks
        return len(blocks) * BLOCK_BYTES - (is_last_among and -self.file.index.size % BLOCK_BYTES)

    # Donors

    def _carry_out(self, outputs: Iterable[messages.Output]) -> None:
        for output in outputs:
            match output:
                case messages.DialDonor(donor):
                    self._scopes[donor] = trio.CancelScope()
                    self.nursery.start_soon(self._converse, donor, self._scopes[donor])
                case messages.Tell(donor, message):
                    try:
                        self._sessions[donor].tell(message)
                    except trio.WouldBlock:  # it does not read
                        self._scopes[donor].cancel()
                case messages.HangUp(donor, reason, wrong_block):
                    self._note_problem(donor, reason)
                    self._sessions.pop(donor, None)
                    self._scopes.pop(donor).cancel()
                    if wrong_block is not None:
                        self.accuse(donor, f"gave wrong bytes for block {wrong_block} of a checkpoint")
        if not self._download.num_missing:
            self._is_over.set()
        elif self._download.is_hopeless(trio.current_time()):
            self._fail(f"the download does not get on: {self._problem}")

    def _note_problem(self, donor: bytes, problem: object) -> None:
        self._problem = f"{short_name(donor)}: {problem or 'too slow'}"
        logger.info("checkpoint %s: %s", self.signed.id.hex()[:8], self._problem)

    async def _converse(self, donor: bytes, scope: trio.CancelScope) -> None:
        """Take blocks from a donor until it has nothing more to give."""
        index, busy_seconds = self.file.index, None
        question = BlockQuestion(self.conditions.run_id, index.stage, self.signed.id, has_index=True)

        def begin() -> None:
            num_held = min(answer.num_held, num_blocks(index.size))
            self._carry_out(self._download.opened(donor, num_held, trio.current_time()))

        try:
            with scope:
                async with open_donor(self.conditions, donor, question, index.size) as (stream, parser, answer):
                    session = self._sessions[donor] = DonorSession(self.conditions, stream, index.size)
                    await session.run(parser.take_rest(), begin, partial(self._take, donor, scope))
        except DonorBusyError as error:
            busy_seconds = error.seconds
            self._note_problem(donor, error)
        except LOST as error:
            self._note_problem(donor, error)
            if isinstance(error, AbsentError):
                self._absent.add(donor)
        if self._scopes.get(donor) is scope:
            del self._scopes[donor]
            self._sessions.pop(donor, None)
            self._carry_out(self._download.lost(donor, trio.current_time(), busy_seconds))
            donors = set(self.donors())
            if donors and donors <= self._absent and not self._scopes:  # there are newer checkpoints: no wait for it
                self._fail(f"nobody has it any more: {self._problem}")

    async def _take(self, donor: bytes, scope: trio.CancelScope, block: int, data: memoryview) -> None:
        """Take in data that a donor gave as this block."""
        try:
            is_right = await trio.to_thread.run_sync(self.file.write, block, data)
        except OSError as error:
            self._fail(f"the download cannot be stored: {error}")
            return
        if self._scopes.get(donor) is not scope:
            return
        if not is_right:
            self._carry_out(self._download.refused(donor, block, trio.current_time()))
            return
        self.have.add(block)
        self.fetched.num_by_donor[donor] += 1
        self.fetched.num_bytes += len(data)
        self._carry_out(self._download.arrived(donor, block, trio.current_time()))


# The assumed rate of a line until a download has been measured, bytes a second: 10 Mbit/s.
USUAL_RATE: Final = 1.25e6
# Cause of warnings about weights that were not given; weights that come end them.
NO_WEIGHTS: Final = "weights"


@dataclass
class Downloads:
    """Fetches from checkpoints what a newcomer needs; remembers the rate."""

    host: Host
    conditions: Conditions
    files: WeightFiles
    membership: Membership
    journal: Journal
    rate: float = field(init=False)
    """The last download's rate in bytes a second; before the first one, the cap, or a guess."""

    def __post_init__(self) -> None:
        self.rate = self.conditions.shaping.down.rate or USUAL_RATE

    async def ask(self, donor: bytes, stage: int, known: bytes | None = None) -> tuple[SignedIndex, Index]:
        """Ask a donor for the index of its newest checkpoint of a stage, or of the one with the id ``known``.

        Raises `PeerUnreachableError`.
        """
        return await ask_for_index(self.conditions, donor, stage, self.files.max_bytes(stage), known)

    async def fetch(
        self, signed: SignedIndex, index: Index, donors: tuple[bytes, ...], path: Path, show: Show, *, is_copy: bool
    ) -> Fetched | None:
        """Fetch from these donors and all others that hold the checkpoint; on failure, warn and return None.

        ``is_copy``: as blocks for other nodes, with low priority; else as a file for this node's trainer.
        """
        began_at, membership = trio.current_time(), self.membership

        def accuse(donor: bytes, reason: str) -> None:
            """Take credit from a donor that gives bytes which its index contradicts: it is not believed for a while."""
            self.journal.warn(f"{short_name(donor)} {reason}")
            membership.credit.lose([donor], trio.current_time())

        def known() -> dict[bytes, None]:
            return dict.fromkeys((*donors, *membership.holders(index.stage, signed.id)))

        try:
            fetched = await fetch_checkpoint(
                self.conditions,
                signed,
                index,
                known,
                partial(is_required, self.files.manifest.outer),
                path,
                show,
                accuse,
                is_prefix=is_copy,
            )
        except PeerUnreachableError as error:
            self.journal.warn(f"no weights of round {index.round}: {error}", NO_WEIGHTS)
            return None
        self.journal.history.bytes_received += fetched.num_bytes
        if fetched.num_bytes:
            self.rate = fetched.num_bytes / max(trio.current_time() - began_at, 1e-3)
        return fetched

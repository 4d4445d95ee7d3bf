"""Fetches a checkpoint, or some of its tensors, from all peers that have it at once.

`farandole.protocol.checkpoints.download` decides what to ask of which donor; this module does the I/O. The header comes
first, since it says where the wanted tensors are. Their blocks follow, and each is verified before it is written to its
place. A fetch that was interrupted resumes when it is started again (`farandole.node.transfers.partial_file`).
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

from farandole.protocol.checkpoints import download
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import BLOCK_BYTES, Index, Selection, SignedIndex, blocks_between, select
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import short_name
from farandole.protocol.wire.safetensors import header_size, parse_header

from ..base.driver import Driver
from ..base.errors import PeerUnreachableError
from ..base.nurseries import open_service_nursery
from .donor import AbsentError, Conditions, DonorBusyError, DonorError, DonorSession, open_donor
from .partial_file import PartialFile, partial_path, remove_partials

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.1
# How often the displayed rate is measured, and the weight of the newest measurement.
RATE_SECONDS: Final = 0.5
RATE_WEIGHT: Final = 0.2

# The errors of a donor that gives nothing (more).
LOST: Final = (
    PeerUnreachableError,
    RemoteProtocolError,
    trio.TooSlowError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)


class FetchError(PeerUnreachableError):
    """The checkpoint is not here: nobody gives it, or it cannot be stored; the message says why."""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """The progress of a fetch."""

    num_bytes: int
    """The bytes that are here, including the ones of an earlier attempt."""
    total: int
    rate: float
    """The recent rate in bytes a second."""
    num_donors: int
    """The donors that give now."""

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds left at this rate; None if nothing moves."""
        return (self.total - self.num_bytes) / self.rate if self.rate > 0 else None

    def __str__(self) -> str:
        text = f"{self.num_bytes / 1e6:.1f} of {self.total / 1e6:.1f} MB"
        text += f" ({self.num_bytes * 100 // max(self.total, 1)} %), {self.rate / 1e6:.1f} MB/s"
        donors = "donor" if self.num_donors == 1 else "donors"
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return f"{text} from {self.num_donors} {donors}{left}"


Show = Callable[[FetchProgress], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a fetch."""

    num_by_donor: dict[bytes, int]
    """The blocks that each donor gave, including the ones that came twice."""
    num_bytes: int
    """The bytes that arrived, including the ones that came twice."""
    total: int
    """The bytes that were needed: of whole blocks."""
    num_kept: int
    """The blocks of an earlier attempt."""


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
        async with open_donor(conditions, donor, question, max_size) as session:
            signed, index = session.signed_index(made_by or conditions.run_id, max_size)
    except PeerUnreachableError:
        raise
    except LOST as error:
        raise DonorError(f"no index: {str(error) or 'too slow'}") from error
    if index.stage != stage or checkpoint_id not in (None, signed.id):
        raise DonorError("it gave the index of another checkpoint")
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
    checkpoint's own first blocks, up to the last wanted tensor: what can be given to others. Raises `FetchError`.
    """
    run_sync = trio.to_thread.run_sync
    try:
        await run_sync(remove_partials, path, signed.id)
        with contextlib.closing(await run_sync(PartialFile, partial_path(path, signed.id), index)) as file:
            have = await run_sync(file.blocks)
            num_kept = len(have)
            async with open_service_nursery() as nursery:
                # Patience starts when donors are asked: hashing the blocks of an earlier attempt may take minutes.
                fetch = _Fetch(conditions, signed, donors, on_progress, accuse, file, have, nursery)
                nursery.start_soon(fetch.watch)
                selection = await fetch.run(wanted, is_prefix)
            if is_prefix:
                await run_sync(file.make_prefix, selection.blocks[-1] + 1, path)
            else:
                await run_sync(file.make, selection, path)
        return fetch.result(num_kept)
    except OSError as error:
        raise FetchError(f"the download cannot be stored: {error}") from error
    except RemoteProtocolError as error:
        raise FetchError(f"its author made it no checkpoint: {error}") from error


class _Contact:
    """A donor that this node has dialled."""

    def __init__(self, donor: bytes) -> None:
        self.donor = donor
        self.scope = trio.CancelScope()
        self.session: DonorSession | None = None
        """The conversation, once the donor gives."""
        self._progress = 0

    def has_advanced(self) -> bool:
        """Return whether something has arrived since the last call."""
        before, self._progress = self._progress, self.session.progress if self.session else 0
        return self._progress != before


class _Speedometer:
    """Measures the recent rate at which a counter grows."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._count, self._at = 0, trio.current_time()

    def note(self, count: int) -> None:
        """Record the counter's present value."""
        seconds = trio.current_time() - self._at
        if seconds >= RATE_SECONDS:
            newest = (count - self._count) / seconds
            self.rate += (newest - self.rate) * (RATE_WEIGHT if self.rate else 1.0)
            self._count, self._at = count, trio.current_time()


class _Fetch:
    """One fetch, from the first contact with the donors to the file."""

    def __init__(
        self,
        conditions: Conditions,
        signed: SignedIndex,
        donors: Callable[[], Collection[bytes]],
        on_progress: Show,
        accuse: Callable[[bytes, str], None],
        file: PartialFile,
        have: set[int],
        nursery: trio.Nursery,
    ) -> None:
        self._conditions = conditions
        self._signed = signed
        self._donors = donors
        self._on_progress = on_progress
        self._accuse = accuse
        self._file = file
        self._have = have
        self._nursery = nursery
        self._contacts: dict[bytes, _Contact] = {}
        self._absent: set[bytes] = set()  # donors that do not have it
        self._needed: frozenset[int] = frozenset()
        self._num_by_donor: Counter[bytes] = Counter()
        self._num_bytes = 0
        self._problem = "nobody is known who has it"
        self._download = download.Download(have)
        self._driver = Driver[download.Event, download.Output](self._carry_out)
        self._driver.begin(self._download)
        self._is_complete = trio.Event()
        self._failure: FetchError | None = None

    async def run(self, wanted: Callable[[str], bool], is_prefix: bool) -> Selection:
        """Fetch the header, and then the blocks of the wanted tensors."""
        size = self._file.index.size
        await self._fetch(range(1))
        header_end = header_size(await trio.to_thread.run_sync(self._file.read_block, 0), size)
        await self._fetch(blocks_between(0, header_end))
        selection = select(parse_header(await trio.to_thread.run_sync(self._file.read, 0, header_end), size), wanted)
        blocks = range(selection.blocks[-1] + 1) if is_prefix else selection.blocks
        made = selection.size if selection.header and not is_prefix else 0
        num_bytes = self._size_of(set(blocks) - self._have) + made
        await trio.to_thread.run_sync(self._conditions.room.check, self._file.path.parent, num_bytes)
        await self._fetch(blocks)
        return selection

    def result(self, num_kept: int) -> Fetched:
        """Return the result; ``num_kept`` blocks were here before."""
        return Fetched(dict(self._num_by_donor), self._num_bytes, self._size_of(self._needed), num_kept)

    async def _fetch(self, blocks: Iterable[int]) -> None:
        self._is_complete = trio.Event()
        self._needed = frozenset(blocks)
        self._driver.handle(download.Needed(sorted(self._needed)))
        await self._is_complete.wait()
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: FetchError) -> None:
        self._failure = self._failure or failure
        self._is_complete.set()

    # Time

    async def watch(self) -> None:
        """Follow which donors there are and how many bytes have arrived, until cancelled."""
        known: tuple[bytes, ...] = ()
        speedometer = _Speedometer()
        while True:
            if (names := tuple(self._donors())) != known:
                known = names
                self._driver.handle(download.DonorsKnown(known))
            self._listen()
            self._driver.handle(download.Tick())
            num_bytes = self._size_of(self._needed & self._have)
            speedometer.note(num_bytes)
            self._on_progress(
                FetchProgress(num_bytes, self._size_of(self._needed), speedometer.rate, self._download.num_open)
            )
            await trio.sleep(TICK_SECONDS)

    def _size_of(self, blocks: Collection[int]) -> int:
        """Return the size of these blocks in bytes."""
        is_last_among = self._file.index.num_blocks - 1 in blocks
        return len(blocks) * BLOCK_BYTES - (is_last_among and -self._file.index.size % BLOCK_BYTES)

    def _listen(self) -> None:
        for contact in list(self._contacts.values()):
            if contact.has_advanced():
                self._driver.handle(download.BytesArrived(contact.donor))

    # Donors

    def _carry_out(self, output: download.Output) -> None:
        match output:
            case download.DialDonor(donor):
                contact = self._contacts[donor] = _Contact(donor)
                self._nursery.start_soon(self._converse, contact)
            case download.AskBlocks(donor, first, count):
                self._say(donor, lambda session: session.want(first, count))
            case download.ForgetBlock(donor, block):
                self._say(donor, lambda session: session.forget(block))
            case download.HangUp(donor, reason):
                self._note_problem(donor, reason)
                self._contacts.pop(donor).scope.cancel()
            case download.Accuse(donor, block):
                self._accuse(donor, f"gave wrong bytes for block {block} of a checkpoint")
            case download.Complete():
                self._is_complete.set()
            case download.GiveUp():
                self._fail(FetchError(f"the download does not get on: {self._problem}"))

    def _say(self, donor: bytes, say: Callable[[DonorSession], None]) -> None:
        contact = self._contacts[donor]
        assert contact.session is not None, "only who is ready is asked"
        try:
            say(contact.session)
        except trio.WouldBlock:
            contact.scope.cancel()  # it does not listen

    def _note_problem(self, donor: bytes, problem: object) -> None:
        self._problem = f"{short_name(donor)}: {problem or 'too slow'}"
        logger.info("checkpoint %s: %s", self._signed.id.hex()[:8], self._problem)

    async def _converse(self, contact: _Contact) -> None:
        """Take blocks from a donor until it has nothing more to give."""
        donor, size = contact.donor, self._file.index.size
        question = BlockQuestion(self._conditions.run_id, self._file.index.stage, self._signed.id, has_index=True)
        ended = download.DonorLost(donor)
        try:
            with contact.scope:
                async with open_donor(self._conditions, donor, question, size) as session:
                    num_held = min(session.answer.num_held, self._file.index.num_blocks)
                    contact.session = session
                    await session.run(
                        size,
                        lambda: self._driver.handle(download.DonorReady(donor, num_held)),
                        partial(self._take, contact),
                    )
        except DonorBusyError as error:
            ended = download.DonorLost(donor, error.seconds)
            self._note_problem(donor, error)
        except LOST as error:
            self._note_problem(donor, error)
            if isinstance(error, AbsentError):
                self._absent.add(donor)
        if self._contacts.get(donor) is contact:
            del self._contacts[donor]
            self._driver.handle(ended)
            donors = set(self._donors())
            if donors and donors <= self._absent and not self._contacts:  # there are newer checkpoints: no wait for it
                self._fail(FetchError(f"nobody has it any more: {self._problem}"))

    async def _take(self, contact: _Contact, block: int, data: memoryview) -> None:
        """Take in data that a donor gave as this block."""
        try:
            is_right = await trio.to_thread.run_sync(self._file.write, block, data)
        except OSError as error:
            self._fail(FetchError(f"the download cannot be stored: {error}"))
            return
        donor = contact.donor
        if self._contacts.get(donor) is not contact:
            return
        if is_right:
            self._have.add(block)
            self._num_by_donor[donor] += 1
            self._num_bytes += len(data)
        self._driver.handle(download.BlockArrived(donor, block) if is_right else download.BlockWrong(donor, block))

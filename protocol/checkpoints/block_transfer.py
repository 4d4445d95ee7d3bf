"""How the blocks of a checkpoint move: the messages about them, and from which donor each block is requested.

    needs    Question                     which checkpoint: by its id, or the newest of a stage
    has      Here | Busy | Absent         the signed index, unless it is known already, and the blocks held
    needs    Want*, Forget*               at any time, up to `MAX_WANTED` blocks that were not given yet
    has      (Give, the block's bytes)*   in the order in which they were wanted

These have a stream of their own. After `Here` it is a pipe (`farandole.protocol.exchange.pipe`), whose opener is the
one that needs blocks. `Give` announces a transfer: the block's bytes. `Busy` may also come instead of a `Give`: then
others are waiting, and the session ends. The receiver trusts none of this: a block is right if its hash is.

Several donors give at once, each at its own rate. `Download` is a state machine. It requests blocks in the order of the
file, from donors with room in their *window*: the blocks that a donor may owe at once, about as many as it gives in
`WINDOW_SECONDS` at its measured rate. So a donor of ten times the rate gets requests for ten times the blocks, and one
that dies owes little. When no block is left to request, a donor that has finished also gets requests for blocks that a
much slower one still owes; the first copy counts.

A donor that dies is replaced, and the blocks that it owed go to others: the ones that it gave were verified block by
block, and are kept. A donor that gave wrong bytes gets no more requests, and is reported: no other peer can have made
them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from ..state.entries import Sha256
from ..wire import messagepack as wire
from ..wire.errors import RemoteProtocolError
from .blocks import BLOCK_BYTES, MAX_BLOCKS, max_index_bytes

# Messages

BLOCKS_PROTOCOL = "/farandole/blocks/1"
# Two ids and some numbers. The index inside a `Here` is not counted.
MAX_MESSAGE_BYTES = 128
# Blocks that a donor may owe at most: 16 MiB, which keep a line of 1 Gbit/s and 100 ms busy.
MAX_WINDOW = 16
# Blocks that one peer may want at once: what a downloader asks for, and as much that it has since asked to forget.
MAX_WANTED = 4 * MAX_WINDOW
# Most of a busy donor's own estimate that is sent, and believed.
MAX_BUSY = 60.0
_Block = Annotated[int, msgspec.Meta(ge=0, lt=MAX_BLOCKS)]


class BlockQuestion(wire.TaggedMessage, frozen=True):
    """A question to a peer: does it have this checkpoint."""

    run_id: Sha256
    stage: Annotated[int, msgspec.Meta(ge=0, le=511)]
    id: Sha256 | None = None
    """None: the newest of the stage, saved again if it is old."""
    has_index: bool = False
    """Whether the asker has the index of this id."""


class Here(wire.TaggedMessage, frozen=True):
    """The sender has the checkpoint: its first ``num_held`` blocks."""

    num_held: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)]
    index: bytes = b""
    """Result of `farandole.protocol.checkpoints.blocks.encode_signed_index`; empty if the asker has it."""


class Busy(wire.TaggedMessage, frozen=True):
    """The sender is giving blocks to others; ask again after about ``seconds``."""

    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_BUSY)]


class Absent(wire.TaggedMessage, frozen=True):
    """The sender does not have the checkpoint."""


class Want(wire.TaggedMessage, frozen=True):
    """A request for ``count`` blocks from ``first`` on."""

    first: _Block
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_WANTED)]


class Forget(wire.TaggedMessage, frozen=True):
    """The sender has this block from another peer: it need not be given, unless that has begun."""

    block: _Block


class Give(wire.TaggedMessage, frozen=True):
    """The bytes of this block follow."""

    block: _Block


Asked = Want | Forget
"""Messages of the node that needs blocks, after its `BlockQuestion`."""
Answered = Here | Busy | Absent
"""The answer to a `BlockQuestion`."""
Given = Give | Busy
"""Messages of the node that has blocks, after `Here`."""


def max_answer_bytes(max_size: int) -> int:
    """Return the most bytes that the answer to a question takes for a checkpoint of at most ``max_size`` bytes."""
    return max_index_bytes(max_size) + MAX_MESSAGE_BYTES


encode = wire.encode
"""Encode a message: at most `MAX_MESSAGE_BYTES`, and a `Here` at most `max_answer_bytes`."""
_NAME = "a message about blocks"
decode_question = wire.MessageDecoder[BlockQuestion](BlockQuestion, _NAME)
decode_answered = wire.MessageDecoder[Answered](Answered, _NAME)
decode_asked = wire.MessageDecoder[Asked](Asked, _NAME)
decode_given = wire.MessageDecoder[Given](Given, _NAME)


class Wanted:
    """The blocks that one peer wants, in its order, of a checkpoint of which this node has ``num_held`` blocks."""

    def __init__(self, num_held: int) -> None:
        self._num_held = num_held
        self._blocks: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, want: Want) -> None:
        """Add blocks; raise `RemoteProtocolError` if this node does not have them, or if they are too many."""
        end = want.first + want.count
        if end > self._num_held:
            raise RemoteProtocolError(f"blocks up to {end} of {self._num_held} are wanted")
        self._blocks |= dict.fromkeys(range(want.first, end))
        if len(self._blocks) > MAX_WANTED:
            raise RemoteProtocolError(f"more than {MAX_WANTED} blocks are wanted at once")

    def forget(self, block: int) -> None:
        """Drop a block, if it is still wanted."""
        self._blocks.pop(block, None)

    def pop(self) -> int:
        """Remove and return the next block to give."""
        block = next(iter(self._blocks))
        del self._blocks[block]
        return block


# The choice of donors

# Donors that give at once. Two fill most lines; more are a reserve for slow ones.
MAX_DONORS = 4
# Donors known at once; a run of thousands announces more copies than a node needs to know.
MAX_KNOWN = 64
# Seconds for which the blocks that a donor owes keep it busy: some round trips of a bad line.
WINDOW_SECONDS = 2.0
# Window until the donor's rate is known. One block arrives while the other is requested.
FIRST_WINDOW = 2
# Weight of the newest block in a donor's rate.
RATE_WEIGHT = 0.3
# A block that a donor owes is also requested from another one that is likely to have it in half the time.
HELP_RATIO = 2.0
# A donor that owes blocks and sends no byte for this long is dropped. A donor that its owner has capped, and that is in
# an exchange, rests for two seconds between two pieces (`farandole.node.transfers.giver`).
SILENCE = 15.0
# The slowest rate at which a node gives, in bytes a second: 50 kbit/s, its share of the tightest cap.
MIN_RATE = 6_250
BLOCK_TIMEOUT = SILENCE + BLOCK_BYTES / MIN_RATE
# A download without progress for this long is given up, unless donors are busy. It leaves time for some retries with a
# lost donor, and for two of the slowest blocks.
PATIENCE = 20.0
BLOCK_PATIENCE = 2 * BLOCK_TIMEOUT
# Pause before a lost donor is tried again, doubled each time.
FIRST_RETRY, MAX_RETRY = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class DialDonor:
    """Ask a donor whether it gives; `Download.opened` or `Download.lost` takes the answer."""

    donor: bytes


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a donor that has opened a message."""

    donor: bytes
    message: Asked


@dataclass(frozen=True, slots=True)
class HangUp:
    """End the session with a donor for now; for good, and accuse it, if it gave wrong bytes for a block."""

    donor: bytes
    reason: str
    wrong_block: int | None = None


Output = DialDonor | Tell | HangUp


@dataclass(slots=True)
class _Donor:
    """The state of one donor."""

    name: bytes
    standing: Literal["idle", "dialled", "open", "barred"] = "idle"
    due_at: float = -math.inf
    """Time from which it may be dialled."""
    num_failures: int = 0
    """Failures since it last gave a block."""
    num_held: int = 0
    owed: dict[int, None] = field(default_factory=dict)
    """Blocks, in the order in which they were requested."""
    seconds_a_block: float | None = None
    heard_at: float = 0.0
    """Time of its last bytes, or of a request while it owed nothing."""
    gave_at: float = 0.0
    """Time of its last block, or of a request while it owed nothing."""

    @property
    def room(self) -> int:
        """Return the number of further blocks that it may owe."""
        if self.seconds_a_block is None:
            return FIRST_WINDOW - len(self.owed)
        window = math.ceil(WINDOW_SECONDS / max(self.seconds_a_block, WINDOW_SECONDS / MAX_WINDOW))
        return window - len(self.owed)

    def pace(self, now: float) -> float:
        """Return seconds per block, from past blocks and the time since the last one; a guess if nothing is known."""
        if self.owed:
            return max(now - self.gave_at, self.seconds_a_block or 0.0)
        return WINDOW_SECONDS if self.seconds_a_block is None else self.seconds_a_block

    def note_given(self, now: float) -> None:
        """Record that a block has arrived from it."""
        took = now - self.gave_at
        before = took if self.seconds_a_block is None else self.seconds_a_block
        self.seconds_a_block = before + RATE_WEIGHT * (took - before)
        self.heard_at = self.gave_at = now
        self.num_failures = 0


class Download:
    """The download of one checkpoint's blocks, from ``now`` on. ``have``: the blocks that are here already.

    Each method that returns outputs notes an event, and returns what to do. `tick` must be called a few times a second.
    """

    def __init__(self, now: float, have: Iterable[int] = ()) -> None:
        self._have = set(have)
        self._unasked: list[int] = []  # a heap
        self._asked: dict[int, set[bytes]] = {}  # block -> donors that owe it
        self._donors: dict[bytes, _Donor] = {}
        self._heard_at = now  # last bytes, or the end of a busy donor's time
        self._given_at = now  # last block

    @property
    def num_missing(self) -> int:
        """The number of needed blocks that are missing."""
        return len(self._unasked) + len(self._asked)

    @property
    def num_open(self) -> int:
        """The number of donors that give now."""
        return sum(donor.standing == "open" for donor in self._donors.values())

    def need(self, blocks: Iterable[int], now: float) -> list[Output]:
        """Blocks are needed, in addition to the earlier ones."""
        for block in set(blocks).difference(self._have, self._asked, self._unasked):
            heapq.heappush(self._unasked, block)
        return self.tick(now)

    def know(self, names: Sequence[bytes], now: float) -> list[Output]:
        """These donors are reported to have the checkpoint now, the best first.

        One that has left the list is kept while it gives, and liars are remembered.
        """
        before = self._donors
        self._donors = {name: before.get(name) or _Donor(name) for name in names[:MAX_KNOWN]}
        self._donors |= {name: donor for name, donor in before.items() if donor.standing != "idle"}
        return self.tick(now)

    def opened(self, name: bytes, num_held: int, now: float) -> list[Output]:
        """A donor that was dialled has the first ``num_held`` blocks, and gives them."""
        self._donors[name].standing, self._donors[name].num_held = "open", num_held
        return self.tick(now)

    def lost(self, name: bytes, now: float, busy_seconds: float | None = None) -> list[Output]:
        """A donor cannot be reached, does not have the checkpoint, has gone, or serves others for ``busy_seconds``."""
        if busy_seconds is None:
            self._fail(self._donors[name], now)
        else:
            due_at = now + min(max(busy_seconds, 0.0), MAX_BUSY)
            self._lose(self._donors[name], due_at)
            self._heard_at = max(self._heard_at, due_at)
        return self.tick(now)

    def heard(self, name: bytes, now: float) -> list[Output]:
        """Some bytes of a block that a donor owes have arrived."""
        self._donors[name].heard_at = now
        self._heard_at = max(self._heard_at, now)
        return self.tick(now)

    def arrived(self, name: bytes, block: int, now: float) -> list[Output]:
        """A whole block with the right hash has arrived from a donor, and is stored."""
        self._donors[name].note_given(now)
        self._given_at = now
        self._have.add(block)
        outputs: list[Output] = []
        for owner in self._asked.pop(block, ()):
            self._donors[owner].owed.pop(block)
            if owner != name:
                outputs.append(Tell(owner, Forget(block)))
        return [*outputs, *self.tick(now)]

    def refused(self, name: bytes, block: int, now: float) -> list[Output]:
        """A donor gave wrong bytes for a block."""
        self._lose(self._donors[name], math.inf)
        self._donors[name].standing = "barred"
        return [HangUp(name, "it gave wrong bytes", block), *self.tick(now)]

    def tick(self, now: float) -> list[Output]:
        """Time has passed."""
        outputs: list[Output] = []
        for donor in self._donors.values():
            is_late = now >= donor.heard_at + SILENCE or now >= donor.gave_at + BLOCK_TIMEOUT
            if donor.owed and is_late:
                outputs += self._hang_up(donor, "it gives nothing any more", now)
        if self.num_missing:
            outputs += [*self._ask_for_more(now), *self._ask_for_help(now), *self._dial(now)]
        return outputs

    def is_hopeless(self, now: float) -> bool:
        """Return whether too little has arrived for too long, and no donor is known to be busy."""
        return now > min(self._heard_at + PATIENCE, self._given_at + BLOCK_PATIENCE)

    # Donors

    def _dial(self, now: float) -> Iterator[Output]:
        idle = [donor for donor in self._donors.values() if donor.standing == "idle" and donor.due_at <= now]
        idle.sort(key=lambda donor: donor.num_failures)  # stable: otherwise the best known first
        engaged = [d for d in self._donors.values() if d.standing in ("dialled", "open")]
        num_free = MAX_DONORS - len(engaged)
        first_missing = min(itertools.chain(self._unasked[:1], self._asked))
        for donor in engaged:
            is_useless = donor.standing == "open" and not donor.owed and first_missing >= donor.num_held
            if num_free < len(idle) and is_useless:
                yield from self._hang_up(donor, "it has nothing more to give", now)
                num_free += 1
        for donor in idle[: max(0, num_free)]:
            donor.standing = "dialled"
            yield DialDonor(donor.name)

    def _lose(self, donor: _Donor, due_at: float) -> None:
        """Return the blocks that it owes to the unrequested ones."""
        donor.standing, donor.due_at, donor.seconds_a_block = "idle", due_at, None
        for block in donor.owed:
            owners = self._asked[block]
            owners.discard(donor.name)
            if not owners:
                del self._asked[block]
                heapq.heappush(self._unasked, block)
        donor.owed.clear()

    def _fail(self, donor: _Donor, now: float) -> None:
        self._lose(donor, now + min(FIRST_RETRY * 2.0**donor.num_failures, MAX_RETRY))
        donor.num_failures = min(donor.num_failures + 1, 30)

    def _hang_up(self, donor: _Donor, reason: str, now: float) -> list[Output]:
        self._fail(donor, now)
        return [HangUp(donor.name, reason)]

    # Blocks

    def _open_by_pace(self, now: float) -> list[_Donor]:
        """Return the open donors, the fastest first."""
        is_open = [donor for donor in self._donors.values() if donor.standing == "open"]
        return sorted(is_open, key=lambda donor: (donor.pace(now), donor.num_failures))

    def _ask_for_more(self, now: float) -> Iterator[Output]:
        """Request blocks, of the last ones only a donor's share: a block that one owes cannot come from another."""
        donors = self._open_by_pace(now)
        share = math.ceil(len(self._unasked) / max(len(donors), 1))
        for donor in donors:
            blocks: list[int] = []
            while self._unasked and self._unasked[0] < donor.num_held and len(blocks) < min(donor.room, share):
                blocks.append(heapq.heappop(self._unasked))
            yield from self._ask(donor, blocks, now)

    def _ask(self, donor: _Donor, blocks: list[int], now: float) -> Iterator[Output]:
        if not blocks:
            return
        if not donor.owed:
            donor.heard_at = donor.gave_at = now
        for block in blocks:
            donor.owed[block] = None
            self._asked.setdefault(block, set()).add(donor.name)
        first = blocks[0]
        for block, following in zip(blocks, [*blocks[1:], -1], strict=True):
            if following != block + 1:
                yield Tell(donor.name, Want(first, block + 1 - first))
                first = following

    def _ask_for_help(self, now: float) -> Iterator[Output]:
        """Request blocks of slower donors from a donor with room and nothing else to give, the latest block first.

        Only a block that this donor is likely to give much earlier is requested twice.
        """
        for helper in self._open_by_pace(now):
            while helper.room > 0:
                late = [
                    (position * donor.pace(now), block)
                    for donor in self._donors.values()
                    for position, block in enumerate(donor.owed, 1)
                    if donor is not helper and len(self._asked[block]) == 1 and block < helper.num_held
                ]
                seconds, latest = max(late, default=(0.0, 0))
                if seconds <= HELP_RATIO * (len(helper.owed) + 1) * helper.pace(now):
                    break
                yield from self._ask(helper, [latest], now)

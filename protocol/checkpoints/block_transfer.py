"""Messages by which a node that needs blocks of a checkpoint gets them from one that has them, on a separate stream.

    needs    Question                     which checkpoint: by its id, or the newest of a stage
    has      Here | Busy | Absent         the signed index, unless it is known already, and the blocks held
    needs    Want*, Forget*               at any time, up to `MAX_WANTED` blocks that were not given yet
    has      (Give, the block's bytes)*   in the order in which they were wanted

After `Here` the stream is a pipe (`farandole.protocol.exchange.pipe`), whose opener is the one that needs blocks.
`Give` announces a transfer: the block's bytes. `Busy` may also come instead of a `Give`: then others are waiting, and
the session ends. The receiver trusts none of this: a block is right if its hash is.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..state.entries import Sha256
from ..wire import messagepack as wire
from ..wire.errors import RemoteProtocolError
from .blocks import MAX_BLOCKS, max_index_bytes
from .download import MAX_BUSY, MAX_WINDOW

BLOCKS_PROTOCOL = "/farandole/blocks/1"
# Two ids and some numbers. The index inside a `Here` is not counted.
MAX_MESSAGE_BYTES = 128
# Blocks that one peer may want at once: what a downloader asks for, and as much that it has since asked to forget.
MAX_WANTED = 4 * MAX_WINDOW
_Block = Annotated[int, msgspec.Meta(ge=0, lt=MAX_BLOCKS)]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    pass


class BlockQuestion(_Message, frozen=True):
    """A question to a peer: does it have this checkpoint."""

    run_id: Sha256
    stage: Annotated[int, msgspec.Meta(ge=0, le=511)]
    id: Sha256 | None = None
    """None: the newest of the stage, saved again if it is old."""
    has_index: bool = False
    """Whether the asker has the index of this id."""


class Here(_Message, frozen=True):
    """The sender has the checkpoint: its first ``num_held`` blocks."""

    num_held: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)]
    index: bytes = b""
    """Result of `farandole.protocol.checkpoints.blocks.encode_signed_index`; empty if the asker has it."""


class Busy(_Message, frozen=True):
    """The sender is giving blocks to others; ask again after about ``seconds``."""

    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_BUSY)]


class Absent(_Message, frozen=True):
    """The sender does not have the checkpoint."""


class Want(_Message, frozen=True):
    """A request for ``count`` blocks from ``first`` on."""

    first: _Block
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_WANTED)]


class Forget(_Message, frozen=True):
    """The sender has this block from another peer: it need not be given, unless that has begun."""

    block: _Block


class Give(_Message, frozen=True):
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

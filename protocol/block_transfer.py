"""What a node that needs blocks of a checkpoint and one that has them say to each other, on a stream of their own.

    needs    Question                     which checkpoint: by its id, or the newest of a stage
    has      Here | Busy | Absent         the signed index, unless it is known already, and how much of the file
    needs    Want*, Forget*               whenever it likes, up to `MAX_WANTED` blocks that were not given yet
    has      (Give, the block's bytes)*   in the order in which they were wanted

After `Here` the stream is a pipe (`farandole.protocol.pipe`), whose opener is the one that needs blocks. `Give`
announces a transfer: the block's bytes. `Busy` may also come instead of a `Give`: then others are waiting, and the
session ends. Nothing of what comes is believed: a block is right if its hash is.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from . import wire
from .blocks import MAX_BLOCKS, max_index_bytes
from .download import MAX_BUSY, MAX_WINDOW
from .entries import Sha256
from .errors import RemoteProtocolError

BLOCKS_PROTOCOL = "/farandole/blocks/1"
# Two ids and some numbers; and for `Here` beside the index in it.
MAX_MESSAGE_BYTES = 128
# Blocks that one peer may want at once: what a downloader asks for, and as much that it has asked to forget meanwhile.
MAX_WANTED = 4 * MAX_WINDOW
_Block = Annotated[int, msgspec.Meta(ge=0, lt=MAX_BLOCKS)]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    pass


class Question(_Message, frozen=True):
    """Whether the other has this checkpoint."""

    run_id: Sha256
    stage: Annotated[int, msgspec.Meta(ge=0, le=511)]
    id: Sha256 | None = None
    """None: the newest of the stage, saved anew if it is old."""
    has_index: bool = False
    """The asker has the index of this id."""


class Here(_Message, frozen=True):
    """I have it: its first ``num_held`` blocks."""

    num_held: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)]
    index: bytes = b""
    """Of `farandole.protocol.blocks.encode_signed_index`; empty where the asker has it."""


class Busy(_Message, frozen=True):
    """I give to others now; ask again after about ``seconds``."""

    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_BUSY)]


class Absent(_Message, frozen=True):
    """I do not have it."""


class Want(_Message, frozen=True):
    """Give me ``count`` blocks from ``first`` on."""

    first: _Block
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_WANTED)]


class Forget(_Message, frozen=True):
    """I have this block from another; do not give it, unless you have begun."""

    block: _Block


class Give(_Message, frozen=True):
    """The bytes of this block come now."""

    block: _Block


Asked = Want | Forget
"""What the one that needs blocks says after its `Question`."""
Answered = Here | Busy | Absent
"""The answer to a `Question`."""
Given = Give | Busy
"""What the one that has blocks says after `Here`."""


def max_answer_bytes(max_size: int) -> int:
    """The most that the answer to a question takes, where a checkpoint has at most ``max_size`` bytes."""
    return max_index_bytes(max_size) + MAX_MESSAGE_BYTES


encode = wire.encode
"""The bytes of a message: at most `MAX_MESSAGE_BYTES`, and of `Here` at most `max_answer_bytes`."""
_NAME = "a message about blocks"
decode_question = wire.MessageDecoder[Question](Question, _NAME)
decode_answered = wire.MessageDecoder[Answered](Answered, _NAME)
decode_asked = wire.MessageDecoder[Asked](Asked, _NAME)
decode_given = wire.MessageDecoder[Given](Given, _NAME)


class Wanted:
    """What one peer wants of a checkpoint of which ``num_held`` blocks are here, in its order."""

    def __init__(self, num_held: int) -> None:
        self._num_held = num_held
        self._blocks: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, want: Want) -> None:
        """Raises `RemoteProtocolError` if these are not here, or too many."""
        end = want.first + want.count
        if end > self._num_held:
            raise RemoteProtocolError(f"blocks up to {end} of {self._num_held} are wanted")
        self._blocks |= dict.fromkeys(range(want.first, end))
        if len(self._blocks) > MAX_WANTED:
            raise RemoteProtocolError(f"more than {MAX_WANTED} blocks are wanted at once")

    def forget(self, block: int) -> None:
        """It is not wanted any more, if it still was."""
        self._blocks.pop(block, None)

    def pop(self) -> int:
        """The next one to be given."""
        block = next(iter(self._blocks))
        del self._blocks[block]
        return block

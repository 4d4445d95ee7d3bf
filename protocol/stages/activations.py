"""Activations: a stream between nodes of neighbouring stages, for microbatches and, in return, their gradients.

    upstream     Hello           Forward data  Forward data ...                 Settled
    downstream          Welcome                                 Gradient data            Credits

The upstream node opens the stream, which is a pipe (`farandole.protocol.exchange.pipe`). It may have as many
microbatches in flight as the downstream node has given it credits, which are slots of memory: so every queued
microbatch has a slot. The n-th `Forward` is microbatch n of the link, and announces a transfer: its data. So does a
`Gradient`. All data of a direction have one size, which both nodes know from the run's settings: no size that a peer
sends is ever allocated.

A microbatch ends by the downstream node's `Dropped`, or by the upstream node's `Settled`, which says whether its
gradient counts at all stages or at none. The two may cross, and so may `Settled` and a gradient: a node that has ended
a microbatch ignores anything that still arrives for it.

Microbatches return to the node that drew them over a link of the same kind: there ``stage`` 0 is downstream of the last
stage.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from ..exchange.pipe import BULK_FROM, CHUNK_BYTES, Pipe
from ..run.manifest import Manifest
from ..run.rules import encoded_bytes
from ..state.entries import Key, Sha256, Small
from ..wire.errors import LocalProtocolError, RemoteProtocolError
from ..wire.messagepack import PRINTABLE, MessageDecoder, encode

ACTIVATIONS_VERSION = 1
TICKET_BYTES = 16
# The longest control frame, a Hello, has some 80 bytes; a Dropped's reason at most 128 characters of up to 4.
MAX_CONTROL_BYTES = 640
DATA_BYTES = CHUNK_BYTES
# A link's credits are a share of its downstream node's slots, of which a run has 256 at most.
MAX_CREDITS = 256
# Twice the slots: a node that forwards holds a slot for each microbatch until it has ended it, and its `Settled` may
# follow later. A node that never sends `Settled` has to stop forwarding at this number.
MAX_OPEN = 512
# A run allows at most an hour for a microbatch; nodes after its origin add seconds of grace.
MAX_SECONDS_LEFT = 3_660

Ticket = Annotated[bytes, msgspec.Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
"""A microbatch's name, drawn at random by its origin: only nodes on its route can know it."""
_Index = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
MAX_REASON_CHARS = 128
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS, pattern=PRINTABLE)]
"""Shown on terminals: no control characters."""


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """The upstream node's first message. The downstream node closes the stream if its own values differ."""

    run_id: Sha256
    stage: Annotated[int, msgspec.Meta(ge=0, le=511)]
    """The downstream node's; 0 on the link by which microbatches return to the node that drew them."""
    shape: Sha256
    """Result of `shape_hash`."""
    version: Annotated[int, msgspec.Meta(ge=1, le=255)] = ACTIVATIONS_VERSION


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """The downstream node's first message."""

    credits: Annotated[int, msgspec.Meta(ge=0, le=MAX_CREDITS)]
    """Total number of microbatches that may be forwarded, until `Credits` raises it."""


class Credits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The total number of microbatches that may be forwarded; never less than before."""

    total: _Index


class Forward(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The next microbatch; its activations follow."""

    ticket: Ticket
    origin: Key
    """The node that drew it."""
    round: Small
    """The sender's round."""
    seconds_left: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS_LEFT)]
    """Time until its origin gives it up."""
    is_held_out: bool = False
    """Whether it only goes forward: its origin measures its loss, and drops it."""


class Gradient(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """The gradient of this microbatch's activations follows."""

    index: _Index


class Dropped(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """No gradient of this microbatch, or no more of it, will be sent; the sender no longer counts it."""

    index: _Index
    reason: _Reason
    is_untouched: bool
    """Whether it got no further than the sender: another node of the sender's stage may do better."""


class Settled(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7):
    """The microbatch has ended."""

    index: _Index
    is_kept: bool
    """Whether its gradient counts, as it has arrived at all stages."""


Control = Hello | Welcome | Credits | Forward | Gradient | Dropped | Settled


class Question(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """A question to a microbatch's origin, outside the links: how it ended, asked by a node that lost its way back."""

    ticket: Ticket


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Reply from the microbatch's origin."""

    ticket: Ticket
    is_kept: bool | None
    """None: it has not ended yet."""


# Of a question or an answer, encoded.
MAX_QUESTION_BYTES = 32


@dataclass(frozen=True, slots=True)
class DataReceived:
    """The event that all data of the last `Forward` or `Gradient` are in `Link.landed`."""

    index: int


Event = Control | DataReceived


def link_bytes(manifest: Manifest) -> tuple[int, int]:
    """Return the bytes of one microbatch's activations, and of their gradient."""
    num_elements = manifest.pipeline.microbatch_size * manifest.model.context * manifest.model.width
    forward, back = manifest.pipeline.codecs
    return encoded_bytes(forward, num_elements), encoded_bytes(back, num_elements)


def shape_hash(manifest: Manifest) -> bytes:
    """Return a hash, 32 bytes, of the activations' shape (B, T, C) and their codecs."""
    model, pipeline = manifest.model, manifest.pipeline
    shape = f"{pipeline.microbatch_size}x{model.context}x{model.width} {pipeline.codec}"
    if pipeline.gradient_codec is not None:
        shape += f" {pipeline.gradient_codec}"
    return hashlib.sha256(f"farandole/activations/1\n{shape}".encode()).digest()


class Transit(enum.Enum):
    """The progress of a microbatch of a link."""

    FORWARD = "going forward"  # its data move downstream
    THERE = "there"
    BACK = "going back"  # its gradient's data move upstream
    RETURNED = "returned"


# (Sender, message) -> step of a microbatch -> its next step; None: it has ended.
UPSTREAM, DOWNSTREAM = True, False
TRANSITIONS: dict[tuple[bool, type[Control]], Mapping[Transit, Transit | None]] = {
    (DOWNSTREAM, Gradient): {Transit.THERE: Transit.BACK},
    (DOWNSTREAM, Dropped): {Transit.FORWARD: None, Transit.THERE: None, Transit.BACK: None},
    (UPSTREAM, Settled): dict.fromkeys(Transit),
}

_decode_control = MessageDecoder[Control](Control, "a message of a link")
decode_question = MessageDecoder[Question | Answer](Question | Answer, "a question about a microbatch")


class Link:
    """One node's side of one stream. Sans-IO: it decides about microbatches, and its ``pipe`` frames the stream.

    Of the pipe's events, messages are for `hear`, and transfers for `receive`.

    `RemoteProtocolError`: close the stream. `LocalProtocolError`: the message may not be sent now.
    """

    def __init__(self, is_upstream: bool, hello: Hello, sizes: tuple[int, int]) -> None:
        """``sizes``: see `link_bytes`."""
        self.is_upstream = is_upstream
        self.is_open = False
        """Whether both sides have greeted."""
        self.num_forwarded = 0
        self.credits = 0
        """Total number of microbatches that may be forwarded."""
        self.size, self._size_in = sizes if is_upstream else sizes[::-1]
        """Bytes of one microbatch's data that this side sends."""
        self.pipe = Pipe(is_upstream, max_message_bytes=MAX_CONTROL_BYTES, is_large=max(sizes) >= BULK_FROM)
        self._hello = hello
        self._has_hello = False
        self._steps: dict[int, Transit] = {}
        self._sending: int | None = None  # the microbatch whose data are being sent
        self.landed = bytearray()
        """The data of the last `DataReceived`, which the next data overwrite: copy them at once. They do not arrive in
        a microbatch's own memory, as that may be another's before they are complete."""

    @property
    def open(self) -> dict[int, Transit]:
        """Return the microbatches in flight; at most `MAX_OPEN`, and no more than there were credits."""
        if self._sending is not None and not self.is_sending:
            sent, self._sending = self._sending, None
            self._arrive(sent)
        return self._steps

    @property
    def is_sending(self) -> bool:
        """Return whether data of this side's last `Forward` or `Gradient` are still to be sent."""
        return self.pipe.num_sent < self.pipe.outgoing.end

    def may_drop(self, index: int) -> bool:
        """Return whether the downstream node may send `Dropped`: it has not ended, and its gradient is not all sent.

        A thread that sends over a channel cannot be stopped: its gradient counts as sent.
        """
        is_leaving = self.pipe.channel is not None and self.is_sending and self._sending == index
        return self.open.get(index) in TRANSITIONS[DOWNSTREAM, Dropped] and not is_leaving

    def means_something(self, message: Control) -> bool:
        """Return whether the microbatch of an own message is still under way, so that it may be sent."""
        match message:
            case Dropped(index):
                return self.may_drop(index)
            case Settled(index) | Gradient(index):
                return index in self.open
            case _:
                return True

    def send(self, message: Control) -> bytes:
        """Apply an own message; return the bytes to write to the stream, in the order of the calls."""
        self._apply(message, by_us=True)
        return self.pipe.send_message(encode(message))

    def hear(self, payload: bytes) -> Control | None:
        """Apply a message of the pipe and return it; None if it comes too late to mean anything."""
        message = _decode_control(payload)
        if isinstance(message, Forward) and not math.isfinite(message.seconds_left):  # NaN passes every bound
            raise RemoteProtocolError(f"not a duration: {message.seconds_left}")
        return message if self._apply(message, by_us=False) else None

    def receive(self, index: int) -> DataReceived | None:
        """Take a microbatch's data, now that the pipe has them all; return None if it has ended."""
        is_awaited = index in self._steps
        self._arrive(index)
        return DataReceived(index) if is_awaited else None

    def _apply(self, message: Control, by_us: bool) -> bool:
        """Apply a message; return False if it came too late to mean anything to its receiver."""
        from_upstream = self.is_upstream is by_us
        if not (isinstance(message, Hello | Welcome) or self.is_open):
            raise _error(by_us)("not greeted yet")
        match message:
            case Hello() | Welcome():
                self._greet(message, by_us)
            case Credits(total) if not from_upstream:
                self._give_credits(total, by_us)
            case Forward() if from_upstream:
                if self.num_forwarded >= self.credits:
                    raise _error(by_us)(f"microbatch {self.num_forwarded}, there are credits for {self.credits}")
                if len(self.open) >= MAX_OPEN:
                    raise _error(by_us)(f"microbatch {self.num_forwarded}, {MAX_OPEN} have not ended")
                self._begin_data(self.num_forwarded, by_us)
                self._steps[self.num_forwarded] = Transit.FORWARD
                self.num_forwarded += 1
            case Gradient(index) | Dropped(index) | Settled(index):
                return self._move(index, message, by_us)
            case _:
                raise _error(by_us)(f"{type(message).__name__} from the wrong side")
        return True

    def _greet(self, message: Hello | Welcome, by_us: bool) -> None:
        is_hello = isinstance(message, Hello)
        if is_hello is not (self.is_upstream is by_us):
            raise _error(by_us)(f"{type(message).__name__} from the wrong side")
        if self.is_open or is_hello is self._has_hello:
            raise _error(by_us)(f"{type(message).__name__} twice, or before its turn")
        if isinstance(message, Hello):
            for field in ("version", "run_id", "stage", "shape"):
                if getattr(message, field) != getattr(self._hello, field):
                    raise _error(by_us)(f"the link is of another {field.replace('_', ' ')}")
            self._has_hello = True
        else:
            self._give_credits(message.credits, by_us)
            self.is_open = True
            self.pipe.begin()

    def _give_credits(self, total: int, by_us: bool) -> None:
        if not self.credits <= total <= self.num_forwarded + MAX_CREDITS:
            raise _error(by_us)(f"credits for {total} microbatches after {self.credits}")
        self.credits = total

    def _move(self, index: int, message: Gradient | Dropped | Settled, by_us: bool) -> bool:
        """Move a microbatch to its next step, or end it; return False if the receiver has ended it."""
        if index >= self.num_forwarded:
            raise _error(by_us)(f"{type(message).__name__} of microbatch {index}: {self.num_forwarded} were forwarded")
        transitions = TRANSITIONS.get((self.is_upstream is by_us, type(message)))
        if transitions is None:
            raise _error(by_us)(f"{type(message).__name__} from the wrong side")
        step = self.open.get(index)
        if step is None and by_us:
            raise LocalProtocolError(f"{type(message).__name__} of microbatch {index}, which has ended")
        if step is not None and step not in transitions:
            raise _error(by_us)(f"{type(message).__name__} of microbatch {index}, which is {step.value}")
        if isinstance(message, Settled) and message.is_kept and step not in (None, Transit.RETURNED):
            raise _error(by_us)(f"microbatch {index} is kept, but its gradient has not returned")
        if isinstance(message, Gradient):
            self._begin_data(index, by_us)
        if step is None:
            return False
        following = transitions[step]
        if following is None:
            del self._steps[index]  # any data that still arrive are discarded
        else:
            self._steps[index] = following
        return True

    def _begin_data(self, index: int, by_us: bool) -> None:
        if by_us:
            self.pipe.offer(index, self.size)
            self._sending = index
        else:
            self.landed = self.landed or bytearray(self._size_in)
            self.pipe.expect(index, memoryview(self.landed))

    def _arrive(self, index: int) -> None:
        """Move a microbatch to its next step, now that its data are complete."""
        following = {Transit.FORWARD: Transit.THERE, Transit.BACK: Transit.RETURNED}
        if index in self._steps:
            self._steps[index] = following[self._steps[index]]


def _error(by_us: bool) -> type[LocalProtocolError | RemoteProtocolError]:
    return LocalProtocolError if by_us else RemoteProtocolError

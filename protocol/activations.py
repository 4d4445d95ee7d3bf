"""Activations: one stream between two nodes of neighbouring stages, microbatches there and their gradients back.

    upstream     Hello           Forward data  Forward data ...                 Settled
    downstream          Welcome                                 Gradient data            Credits

The upstream node opens the stream. It may have as many microbatches under way as the downstream node has given it
credits, which are slots of memory: so nothing queues that has no place. The n-th `Forward` is microbatch n of the link,
and its data follow it in `Data` frames, with room for other frames between them; so do a gradient's. All data have one
size, which both know from the run's settings: what a peer says is never allocated.

Large data go beside the stream, over a bulk channel (`farandole.protocol.bulk`) that the two have opened and named to
each other by `Way`: a `Forward` or `Gradient` that says `is_bulk` announces them there, where they follow each other in
the order of their announcements.

A microbatch ends by the downstream node's `Dropped`, or by the upstream node's `Settled`, which says whether its
gradient counts at all stages or at none. The two may cross, and so may `Settled` and a gradient: who has ended a
microbatch ignores what else comes of it.

Microbatches return to where they were drawn over a link of the same kind: there ``stage`` 0 is downstream of the last.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from .entries import Key
from .errors import LocalProtocolError, RemoteProtocolError
from .framing import LENGTH_BYTES, FrameParser
from .manifest import Manifest
from .pairing_messages import Session
from .pipe import CHUNK_FRAME_BYTES

ACTIVATIONS_VERSION = 1
TICKET_BYTES = 16
# The longest control frame, a Hello, has some 80 bytes; a Dropped's reason at most 128 characters of up to 4.
MAX_CONTROL_BYTES = 640
DATA_BYTES = CHUNK_FRAME_BYTES - LENGTH_BYTES - 1
# A link's credits are a share of its downstream node's slots, of which a run has 256 at most.
MAX_CREDITS = 256
# Who forwards has a slot for each microbatch until it has ended it, and may yet have to say so: twice the slots. Who
# never says so may not forward for ever.
MAX_OPEN = 512
# A run gives a microbatch an hour at most; nodes after its origin add seconds of grace.
MAX_SECONDS_LEFT = 3_660

Ticket = Annotated[bytes, msgspec.Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
"""Names a microbatch, drawn at random by its origin: only nodes on its route can know it."""
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Round = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
MAX_REASON_CHARS = 128
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS, pattern=r"\A[\x20-\x7e]*\Z")]
"""People's terminals show it: no control characters."""


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """The upstream node's first word. The downstream node has the same, or closes the stream."""

    run_id: _Digest
    stage: Annotated[int, msgspec.Meta(ge=0, le=511)]
    """The downstream node's; 0 where microbatches return to who drew them."""
    shape: _Digest
    """`shape_hash`."""
    version: Annotated[int, msgspec.Meta(ge=1, le=255)] = ACTIVATIONS_VERSION


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """The downstream node's first word."""

    credits: Annotated[int, msgspec.Meta(ge=0, le=MAX_CREDITS)]
    """Microbatches that may be forwarded in all, until `Credits` says more."""


class Credits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Microbatches that may be forwarded in all; never less than before."""

    total: _Index


class Forward(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The next microbatch; its activations follow."""

    ticket: Ticket
    origin: Key
    """Who drew it."""
    round: _Round
    """Of the sender."""
    seconds_left: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS_LEFT)]
    """Until its origin gives it up."""
    is_bulk: bool = False
    is_held_out: bool = False
    """It goes forward alone: its origin measures its loss, and drops it."""


class Gradient(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """Of the activations of this microbatch; it follows."""

    index: _Index
    is_bulk: bool = False


class Dropped(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """There will be no gradient of this microbatch, or no more of it, and the sender counts it no more."""

    index: _Index
    reason: _Reason
    is_untouched: bool
    """Whether it got no further than the sender: another node of its stage may do better."""


class Settled(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7):
    """The microbatch is at its end."""

    index: _Index
    is_kept: bool
    """Whether its gradient counts: it has arrived at all stages."""


class Way(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=8):
    """There is a bulk channel of this name. The upstream node opens it, the downstream one says that it has it too."""

    channel: Session


Control = Hello | Welcome | Credits | Forward | Gradient | Dropped | Settled | Way


class Question(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """How did this microbatch of yours end? Asked, beside the links, by one who has lost its way back."""

    ticket: Ticket


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """By its origin."""

    ticket: Ticket
    is_kept: bool | None
    """None: it has not ended yet."""


MAX_QUESTION_BYTES = 32


@dataclass(frozen=True, slots=True)
class DataReceived:
    """All data of the last `Forward`, or of the last `Gradient`, are in the memory that was given for them."""

    index: int


Event = Control | DataReceived


def shape_hash(manifest: Manifest) -> bytes:
    """32 bytes: what activations look like, (B, T, C) and their codec."""
    model, pipeline = manifest.model, manifest.pipeline
    shape = f"{pipeline.microbatch_size}x{model.context}x{model.width} {pipeline.codec}"
    return hashlib.sha256(f"farandole/activations/1\n{shape}".encode()).digest()


class Step(enum.Enum):
    """How far a microbatch of a link is."""

    FORWARD = "going forward"  # its data move downstream
    THERE = "there"
    BACK = "going back"  # its gradient's data move upstream
    RETURNED = "returned"


# Who sends what, in which step of a microbatch, and where that takes it; None: it is at its end.
UPSTREAM, DOWNSTREAM = True, False
TRANSITIONS: dict[tuple[bool, type[Control]], Mapping[Step, Step | None]] = {
    (DOWNSTREAM, Gradient): {Step.THERE: Step.BACK},
    (DOWNSTREAM, Dropped): {Step.FORWARD: None, Step.THERE: None, Step.BACK: None},
    (UPSTREAM, Settled): dict.fromkeys(Step),
}

_CONTROL, _DATA = 0, 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Control)
_question_decoder: msgspec.msgpack.Decoder[Question | Answer] = msgspec.msgpack.Decoder(Question | Answer)


class _Moving:
    """The data that move in one direction: of one microbatch at a time."""

    def __init__(self) -> None:
        self.index: int | None = None
        self.left = 0
        self.memory: memoryview | None = None
        """Where they go; None: nowhere, or not known yet."""
        self.is_placed = False
        self.is_bulk = False


class Link:
    """One node's side of one stream. Sans-IO: bytes in by `receive_data`, events out by `next_event`, bytes by `send`.

    After a `Forward` or a `Gradient` event, `place` says where its data go. `RemoteProtocolError`: close the stream.
    `LocalProtocolError`: what was to be sent may not be sent now.
    """

    def __init__(self, is_upstream: bool, hello: Hello, size: int) -> None:
        """``size``: bytes of one microbatch's activations, and of their gradient."""
        self.is_upstream = is_upstream
        self.is_open = False
        """Whether both have greeted."""
        self.num_forwarded = 0
        self.credits = 0
        """Microbatches that may be forwarded in all."""
        self.open: dict[int, Step] = {}
        """Microbatches that are under way; at most `MAX_OPEN`, and no more than there were credits."""
        self._hello = hello
        self.size = size
        self._has_hello = False
        self._named: bytes | None = None
        self.channel: bytes | None = None
        """The bulk channel that both have named."""
        self._parser = FrameParser(1 + DATA_BYTES)
        self._incoming = _Moving()
        self._outgoing = _Moving()

    @property
    def is_sending(self) -> bool:
        """Whether data of this side's last `Forward` or `Gradient` are still to be sent."""
        return self._outgoing.left > 0

    @property
    def awaits_place(self) -> bool:
        """Whether `place` is due."""
        return self._incoming.left > 0 and not self._incoming.is_placed

    @property
    def awaits_bulk(self) -> bool:
        """Whether the last data announced are to be received over the channel, and have their place."""
        moving = self._incoming
        return moving.left > 0 and moving.is_placed and moving.is_bulk

    @property
    def awaited(self) -> tuple[int, int] | None:
        """The microbatch whose data were announced and are not all here, and how many bytes of them are missing.

        Of data that come over the channel all are missing until `bulk_received`.
        """
        moving = self._incoming
        return (moving.index, moving.left) if moving.index is not None and moving.left else None

    @property
    def bulk_memory(self) -> memoryview | None:
        """Where those go; None: nowhere."""
        return self._incoming.memory

    def bulk_sent(self) -> None:
        """The data that were announced have gone into the channel."""
        self._end_bulk(self._outgoing)

    def bulk_received(self) -> DataReceived | None:
        """The data that were announced have come out of the channel; None if they went nowhere."""
        is_wanted = self._incoming.memory is not None
        index = self._end_bulk(self._incoming)
        return DataReceived(index) if is_wanted else None

    def _end_bulk(self, moving: _Moving) -> int:
        if not (moving.is_bulk and moving.left):
            raise LocalProtocolError("no data move over the channel")
        moving.left = 0
        return self._end_data(moving)

    def may_drop(self, index: int) -> bool:
        """Whether the downstream node may send `Dropped`: it has not ended, and its gradient is not all sent."""
        is_leaving = self._outgoing.is_bulk and self._outgoing.left > 0 and self._outgoing.index == index
        return self.open.get(index) in TRANSITIONS[DOWNSTREAM, Dropped] and not is_leaving

    def send(self, message: Control) -> bytes:
        """The bytes to write to the stream, in the order of the calls."""
        self._apply(message, by_us=True)
        return _frame(_CONTROL, _encoder.encode(message))

    def send_data(self, data: memoryview) -> bytes:
        """The next `DATA_BYTES` at most of what was announced; ``data`` are contiguous, of any format."""
        moving = self._outgoing
        if moving.is_bulk:
            raise LocalProtocolError("these data go over the channel")
        if not 0 < data.nbytes <= min(DATA_BYTES, moving.left):
            raise LocalProtocolError(f"{data.nbytes} bytes of data, {moving.left} are left to be sent")
        moving.left -= data.nbytes
        if not moving.left:
            self._end_data(moving)
        return _frame(_DATA, data.cast("B"))

    def place(self, memory: memoryview | None) -> None:
        """Where the data of the last `Forward` or `Gradient` received go; None: nowhere.

        ``memory``: writable, contiguous, at least ``size`` bytes; kept until the data are there or the microbatch ends.
        """
        moving = self._incoming
        if not self.awaits_place:
            raise LocalProtocolError("no data are awaited")
        if memory is not None and (memory.readonly or memory.nbytes < self.size):
            raise LocalProtocolError(f"{self.size} bytes of data need that much writable memory")
        moving.memory = None if memory is None else memory.cast("B")[: self.size]
        moving.is_placed = True

    def receive_data(self, data: bytes | bytearray) -> None:
        """Add bytes from the stream, and take all events that they complete before adding more."""
        self._parser.receive_data(data)

    def next_event(self) -> Event | None:
        """The next thing that the peer has sent, or None until more comes."""
        while True:
            if self.awaits_place:
                raise LocalProtocolError("where the data go must be known before they are read")
            frame = self._parser.next_frame()
            if frame is None:
                return None
            event = self._take_data(frame) if frame[:1] == bytes((_DATA,)) else self._take_control(frame)
            if event is not None:
                return event

    def _take_data(self, frame: bytes) -> DataReceived | None:
        moving, size = self._incoming, len(frame) - 1
        if moving.is_bulk or not 0 < size <= moving.left:
            raise RemoteProtocolError(f"{size} bytes of data, {moving.left} are awaited")
        if moving.memory is not None:
            done = self.size - moving.left
            moving.memory[done : done + size] = memoryview(frame)[1:]
        moving.left -= size
        if moving.left:
            return None
        is_wanted = moving.memory is not None
        index = self._end_data(moving)
        return DataReceived(index) if is_wanted else None

    def _take_control(self, frame: bytes) -> Control | None:
        if frame[:1] != bytes((_CONTROL,)) or not 1 < len(frame) <= MAX_CONTROL_BYTES:
            raise RemoteProtocolError(f"a frame of kind {frame[:1].hex()} and {len(frame)} bytes")
        message = _decode(frame[1:])
        return message if self._apply(message, by_us=False) else None

    def _apply(self, message: Control, by_us: bool) -> bool:
        """What a message changes; whether it means anything to its receiver, or came too late."""
        from_upstream = self.is_upstream is by_us
        if not (isinstance(message, Hello | Welcome) or self.is_open):
            raise _error(by_us)("not greeted yet")
        match message:
            case Hello() | Welcome():
                self._greet(message, by_us)
            case Credits(total) if not from_upstream:
                self._give_credits(total, by_us)
            case Forward(is_bulk=is_bulk) if from_upstream:
                self._forward(is_bulk, by_us)
            case Way(channel):
                self._name(channel, by_us)
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

    def _give_credits(self, total: int, by_us: bool) -> None:
        if not self.credits <= total <= self.num_forwarded + MAX_CREDITS:
            raise _error(by_us)(f"credits for {total} microbatches after {self.credits}")
        self.credits = total

    def _name(self, channel: bytes, by_us: bool) -> None:
        """The upstream node names a channel once, and the downstream one the same or none."""
        if self.is_upstream is by_us:
            if self._named is not None:
                raise _error(by_us)("another channel than the one named before")
            self._named = channel
        elif channel != self._named or self.channel is not None:
            raise _error(by_us)("a channel that was not named, or twice")
        else:
            self.channel = channel

    def _forward(self, is_bulk: bool, by_us: bool) -> None:
        if self.num_forwarded >= self.credits:
            raise _error(by_us)(f"microbatch {self.num_forwarded}, there are credits for {self.credits}")
        if len(self.open) >= MAX_OPEN:
            raise _error(by_us)(f"microbatch {self.num_forwarded}, {MAX_OPEN} have not ended")
        self._begin_data(self.num_forwarded, is_bulk, by_us)
        self.open[self.num_forwarded] = Step.FORWARD
        self.num_forwarded += 1

    def _move(self, index: int, message: Gradient | Dropped | Settled, by_us: bool) -> bool:
        """A microbatch goes on, or ends; False if the receiver has ended it."""
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
        if isinstance(message, Settled) and message.is_kept and step not in (None, Step.RETURNED):
            raise _error(by_us)(f"microbatch {index} is kept, but its gradient has not returned")
        if isinstance(message, Gradient):
            self._begin_data(index, message.is_bulk, by_us)
            if step is None:
                self.place(None)
        if step is None:
            return False
        following = transitions[step]
        if following is None:
            del self.open[index]
            self._forget(index)
        else:
            self.open[index] = following
        return True

    def _forget(self, index: int) -> None:
        """What still comes of an ended microbatch goes nowhere."""
        if self._incoming.index == index and self._incoming.left:
            self._incoming.memory, self._incoming.is_placed = None, True

    def _begin_data(self, index: int, is_bulk: bool, by_us: bool) -> None:
        moving = self._outgoing if by_us else self._incoming
        if moving.left:
            raise _error(by_us)("data of two microbatches at a time")
        if is_bulk and self.channel is None:
            raise _error(by_us)("data over a channel that is not there")
        moving.is_bulk = is_bulk
        moving.index, moving.left, moving.memory, moving.is_placed = index, self.size, None, False

    def _end_data(self, moving: _Moving) -> int:
        """The microbatch whose data they were goes on."""
        index, moving.memory = moving.index, None
        assert index is not None, "data move of one microbatch"
        following = {Step.FORWARD: Step.THERE, Step.BACK: Step.RETURNED}
        if index in self.open:
            self.open[index] = following[self.open[index]]
        return index


def encode_question(message: Question | Answer) -> bytes:
    """The bytes of a message; at most `MAX_QUESTION_BYTES`."""
    return _encoder.encode(message)


def decode_question(payload: bytes) -> Question | Answer:
    """The message in these bytes; `RemoteProtocolError` if they hold none."""
    try:
        return _question_decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"not a question about a microbatch: {error}") from error


def _frame(kind: int, payload: Any) -> bytes:
    return b"".join(((1 + len(payload)).to_bytes(LENGTH_BYTES, "big"), bytes((kind,)), payload))


def _error(by_us: bool) -> type[LocalProtocolError | RemoteProtocolError]:
    return LocalProtocolError if by_us else RemoteProtocolError


def _decode(payload: bytes) -> Control:
    try:
        message: Control = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a message of a link: {error}") from error
    if isinstance(message, Forward) and not math.isfinite(message.seconds_left):  # NaN passes every bound
        raise RemoteProtocolError(f"not a duration: {message.seconds_left}")
    return message

"""Exchange: one stream, both partners' contributions both ways at once, and a commit by both or by neither.

    initiator   Offer         Chunk...  Sealed  Chunk            Commit
    responder          Offer  Chunk...  Sealed  Chunk  Accepted          Committed

Contributions from `BULK_FROM` on move beside the stream, where there is a way (`farandole.protocol.bulk`):

    initiator   Offer         Route         data  Sealed  Received            Commit
    responder          Offer         Route  data  Sealed  Received  Accepted          Committed

The initiator's `Route` names a bulk channel that it has with the responder, the responder's names the same if it has it
too; otherwise chunks go over the stream as above. `Received` says that the other's contribution is here, whole and with
its hash. A channel that breaks before is no end: whoever lacks something asks for another way, the responder by
`Reroute`, the initiator by the `Route` with which it also answers that. The Routes say from where to go on, so nothing
moves again that has arrived. A session has at most `MAX_ROUTES` of them, and one that has come to the stream stays
there.

A contribution is offered when its encoding begins, and moves while it goes on; so its hash comes last: `Sealed` is said
when all is encoded, before the last bytes are sent, and the receiver, which has hashed what came, compares. (Were it
the receiver that says its hash, and the sender that compares, what a node uses would hang on its partner's care; and
where chunks move, one message more would be waited for.) The hash finds what was damaged, or sent before it was
encoded. It is the sender's word for its own bytes, so to lie with it costs the exchange, and gains nothing: who wants
to send something harmful hashes that, and the screening judges it. Bytes of third parties are kept out by Noise and by
the seals of the channel's records. A hash in the offer would also bind its sender before it has seen the other's
contribution; but what one could learn from that, all members know well enough from the rounds before.

Either side may send `Aborted` instead, as long as `TRANSITIONS` allows it. A contribution is received straight into
memory that the caller gives, of exactly the size that both know beforehand: nothing that a peer says is allocated.

The commit is two-phase, with the initiator as coordinator. It decides to commit when its screening has accepted and it
has the responder's `Accepted`, and not later than `DECIDE_UNTIL`; anything else before that is an abort. A responder
that has sent `Accepted` is *in doubt* until it reads the decision; if the stream breaks it asks on a new one
(`Resolve`) until its deadline, and the initiator answers from its `Outcomes`.

What holds: two nodes that both live, and can reach each other at any time between the decision and the deadline, never
believe different things of a session; a contribution counts as received only whole and with its sender's hash; and a
node commits only what it has accepted itself. What cannot hold (two generals; Gray 1978): if the network parts both
from the decision until the deadline, the initiator may have committed while the responder goes on alone. Then one
average was taken by one side only: the next meetings pull the two together as they do any two replicas. An initiator
that dies takes its outcomes with it; restarted from its checkpoint it has not committed, and answers so.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from .errors import LocalProtocolError, RemoteProtocolError
from .framing import LENGTH_BYTES, FrameParser, frame
from .manifest import Codec
from .pairing_messages import Session

EXCHANGE_VERSION = 4
DIGEST_BYTES = 32
# An offer has about 160 bytes; an abort's reason at most 256 characters of up to 4.
MAX_CONTROL_BYTES = 1_280
# A chunk's frame fills one Noise message: 65,535 bytes less the tag (16) and yamux's header (12).
CHUNK_FRAME_BYTES = 65_507
_KIND_BYTES = 1
_OFFSET_BYTES = 8
CHUNK_BYTES = CHUNK_FRAME_BYTES - LENGTH_BYTES - _KIND_BYTES - _OFFSET_BYTES
# 512 layers of the widest model in fp32 are below this; checked against the own size before anything else.
MAX_CONTRIBUTION_BYTES = 2**44
# Smaller ones have moved over the stream before a channel is open (milliseconds here, round trips on the internet).
BULK_FROM = 1_000_000
# Of one session: three channels, each of which may break, and the stream.
MAX_ROUTES = 4
# Sessions whose outcome an initiator remembers. It has one a round, and is asked about it for exchange_seconds.
MAX_OUTCOMES = 1_024

# Shares of the time from the start of a session to its deadline. Contributions are in and screened until the first,
# the initiator decides until the second, a responder without news asks from the third, everybody goes on at 1.
DATA_UNTIL, DECIDE_UNTIL, ASK_FROM = 0.7, 0.8, 0.9

_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_CONTRIBUTION_BYTES)]
Reason = Annotated[str, msgspec.Meta(max_length=256)]


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True, tag=1):
    """What the sender is about to send. All but the last three fields must equal the receiver's own offer."""

    version: Annotated[int, msgspec.Meta(ge=1, le=255)] = EXCHANGE_VERSION
    run_id: _Digest
    session: Session
    stage: Annotated[int, msgspec.Meta(ge=0, le=511)]
    layout: _Digest
    """Hash of the names, shapes and order of the tensors in a contribution."""
    codec: Codec
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONTRIBUTION_BYTES)]
    """Bytes of the contribution; follows from layout and codec."""
    # From here on the sender's own.
    round: _Count
    tokens: _Count
    """Tokens that the contribution was trained on: its weight in the mean."""
    seconds_left: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    """Until the sender goes on without its partner; set when it is sent. The lesser of both holds for both."""


class Route(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """Over which bulk channel the contributions move; None: over this stream. The responder's word counts."""

    channel: Session | None
    received: _Size
    """Bytes of the receiver's contribution that its sender has: from there it goes on."""


class Reroute(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7):
    """The responder lacks something and nothing comes any more: the initiator is to say another `Route`."""


class Sealed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=9):
    """The sender's contribution is encoded to its end. Said once, before the last of it is sent."""

    digest: _Digest
    """BLAKE3 of the contribution; SHA-256 would take as long as all the rest of moving it."""


class Received(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=8):
    """The receiver's contribution has come over the channel, whole and with its hash."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """The responder has the initiator's contribution, whole, and its screening accepts it."""


class Commit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The initiator's decision, which implies its own verdict: both use what they have."""


class Committed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The responder has read the decision."""


class Aborted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """Nobody uses anything: refused by the screening, out of time, or not expected."""

    reason: Reason


Control = Offer | Route | Reroute | Sealed | Received | Accepted | Commit | Committed | Aborted


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next bytes of the contribution, at most `CHUNK_BYTES`."""

    offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class ContributionReceived:
    """The partner's contribution is whole and has its sender's hash."""

    size: int


Event = Control | ContributionReceived


class Incoming:
    """A contribution on its way in: filled from the front, over whatever ways, and hashed as it comes."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.position = 0
        """Bytes that are in."""
        self._hash = blake3()
        self._num_hashed = 0

    @property
    def rest(self) -> memoryview:
        """Where the next bytes go."""
        return self.memory[self.position :]

    def write(self, data: memoryview) -> None:
        """The next bytes, hashed too."""
        self.memory[self.position : self.position + len(data)] = data
        self.position += len(data)
        self.hash_up()

    def hash_up(self) -> None:
        """Hash what is in; worth doing while it is still in the processor's cache."""
        self._hash.update(self.memory[self._num_hashed : self.position])
        self._num_hashed = self.position

    def digest(self) -> bytes:
        """The BLAKE3 of what is in."""
        self.hash_up()
        return self._hash.digest()


class Step(enum.Enum):
    """How far one of the two is, in what it has sent."""

    OFFERING = "offering"
    ROUTING = "routing"  # it has offered a large contribution
    ROUTED = "routed"  # it has said how it would move it
    SENDING = "sending"  # its chunks
    MOVING = "moving"  # its contribution over the channel, or the other's is not here yet
    JUDGING = "judging"  # it has sent its contribution, and screens the other's
    ACCEPTED = "accepted"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Sent(enum.Enum):
    """Kinds of messages, as the table needs them."""

    OFFER = "Offer"
    LARGE_OFFER = "large Offer"
    ROUTE = "Route"
    REROUTE = "Reroute"
    SEALED = "Sealed"
    RECEIVED = "Received"
    CHUNK = "Chunk"
    LAST_CHUNK = "last Chunk"
    ACCEPTED = "Accepted"
    COMMIT = "Commit"
    COMMITTED = "Committed"
    ABORTED = "Aborted"


Role = Literal["initiator", "responder"]
_BOTH: dict[Step, dict[Sent, Step]] = {
    Step.OFFERING: {Sent.OFFER: Step.SENDING, Sent.LARGE_OFFER: Step.ROUTING, Sent.ABORTED: Step.ABORTED},
    Step.ROUTING: {Sent.ROUTE: Step.ROUTED, Sent.SEALED: Step.ROUTING, Sent.ABORTED: Step.ABORTED},
    Step.ROUTED: {  # and the responder's Route takes both on
        Sent.SEALED: Step.ROUTED,
        Sent.ABORTED: Step.ABORTED,
    },
    Step.MOVING: {  # and the second Received takes both on
        Sent.ROUTE: Step.ROUTED,
        Sent.SEALED: Step.MOVING,
        Sent.RECEIVED: Step.MOVING,
        Sent.ABORTED: Step.ABORTED,
    },
    Step.SENDING: {
        Sent.CHUNK: Step.SENDING,
        Sent.SEALED: Step.SENDING,
        Sent.LAST_CHUNK: Step.JUDGING,  # after Sealed
        Sent.ABORTED: Step.ABORTED,
    },
    Step.COMMITTED: {},
    Step.ABORTED: {},
}
# What each role may send when, and where that takes it. After its Accepted a responder cannot back out.
TRANSITIONS: dict[Role, dict[Step, dict[Sent, Step]]] = {
    "initiator": _BOTH
    | {
        Step.JUDGING: {Sent.COMMIT: Step.COMMITTED, Sent.ABORTED: Step.ABORTED},
        Step.ACCEPTED: {},
    },
    "responder": _BOTH
    | {
        Step.MOVING: _BOTH[Step.MOVING] | {Sent.REROUTE: Step.MOVING},
        Step.JUDGING: {Sent.ACCEPTED: Step.ACCEPTED, Sent.ABORTED: Step.ABORTED},
        Step.ACCEPTED: {Sent.COMMITTED: Step.COMMITTED},
    },
}
# Where the other one must be for a message to make sense.
REQUIRES: dict[Role, dict[Sent, frozenset[Step]]] = {
    "initiator": {
        Sent.ROUTE: frozenset({Step.ROUTING, Step.MOVING}),
        Sent.RECEIVED: frozenset({Step.MOVING}),
        Sent.COMMIT: frozenset({Step.ACCEPTED}),
    },
    "responder": {
        Sent.OFFER: frozenset({Step.SENDING, Step.JUDGING}),
        Sent.LARGE_OFFER: frozenset({Step.ROUTING}),
        Sent.ROUTE: frozenset({Step.ROUTED}),
        Sent.REROUTE: frozenset({Step.MOVING, Step.ROUTED}),  # it may cross the initiator's own Route
        Sent.RECEIVED: frozenset({Step.MOVING, Step.ROUTED}),  # and so may this
        Sent.ACCEPTED: frozenset({Step.JUDGING}),  # it has sent everything
        Sent.COMMITTED: frozenset({Step.COMMITTED}),
    },
}

_SENT_OF: dict[type[Control], Sent] = {
    Route: Sent.ROUTE,
    Reroute: Sent.REROUTE,
    Sealed: Sent.SEALED,
    Received: Sent.RECEIVED,
    Accepted: Sent.ACCEPTED,
    Commit: Sent.COMMIT,
    Committed: Sent.COMMITTED,
    Aborted: Sent.ABORTED,
}
_CONTROL, _CHUNK = 0, 1
_HEADER_BYTES = LENGTH_BYTES + _KIND_BYTES
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Control)


class Exchange:
    """One node's side of one session. Sans-IO: bytes in by `receive_data`, events out by `next_event`, bytes by `send`.

    ``offer`` is the node's own; ``incoming`` is writable memory for the partner's contribution, which has the same
    size, and holds rubbish until `ContributionReceived`. `RemoteProtocolError`: drop the stream, and the session with
    it unless it `is_in_doubt`. `LocalProtocolError`: what was to be sent may not be sent now.
    """

    def __init__(self, is_initiator: bool, offer: Offer, incoming: memoryview) -> None:
        if incoming.readonly or incoming.nbytes < offer.size:
            raise LocalProtocolError(f"a contribution of {offer.size} bytes needs that much writable memory")
        self.is_initiator = is_initiator
        self.offer = offer
        self.partner_offer: Offer | None = None
        self.ours = Step.OFFERING
        self.theirs = Step.OFFERING
        self.num_sent = 0
        """Bytes of the contribution sent over the stream, or moved over a channel as far as the partner has told."""
        self.incoming = Incoming(incoming.cast("B")[: offer.size])
        self.digest: bytes | None = None
        """BLAKE3 of the own contribution, once it is said."""
        self.partner_digest: bytes | None = None
        """Of the partner's."""
        self.is_whole = False
        """Whether the partner's contribution is in the memory, with this hash."""
        self.num_routes = 0
        self.channel: bytes | None = None
        """The bulk channel that both have named."""
        self._named: bytes | None = None  # by the initiator
        self._has_said_received = False
        self._has_heard_received = False
        self._is_reroute_due = False
        self._head = bytearray()  # of an unfinished frame, without a chunk's bytes; at most MAX_CONTROL_BYTES
        self._chunk_left = 0
        self._input = memoryview(b"")

    @property
    def num_received(self) -> int:
        """Bytes of the partner's contribution that lie in the memory."""
        return self.incoming.position

    @property
    def can_abort(self) -> bool:
        """Whether this side may still end the session on its own."""
        role: Role = "initiator" if self.is_initiator else "responder"
        return Sent.ABORTED in TRANSITIONS[role][self.ours]

    @property
    def is_in_doubt(self) -> bool:
        """Whether this responder has promised to commit, and does not know the decision."""
        is_decided = self.theirs in (Step.COMMITTED, Step.ABORTED)
        return not self.is_initiator and self.ours is Step.ACCEPTED and not is_decided

    def send(self, message: Control | Chunk) -> bytes:
        """The bytes to write to the stream, in the order of the calls; copies one chunk at most."""
        if isinstance(message, Chunk):
            return self._send_chunk(message)
        if isinstance(message, Accepted | Commit | Received) and not self.is_whole:
            raise LocalProtocolError("a verdict before the contribution is here")
        ours = self._moved(self.ours, self._kind_of(message), by_us=True)
        self._check(message, by_us=True)
        self.ours = ours
        self._apply(message, by_us=True)
        payload = _encoder.encode(message)
        return (_KIND_BYTES + len(payload)).to_bytes(LENGTH_BYTES, "big") + bytes((_CONTROL,)) + payload

    def _send_chunk(self, chunk: Chunk) -> bytes:
        size = chunk.data.nbytes
        end = chunk.offset + size
        if not 0 < size <= CHUNK_BYTES or chunk.offset != self.num_sent or end > self.offer.size:
            raise LocalProtocolError(f"chunk of {size} bytes at {chunk.offset}, {self.num_sent} bytes are sent")
        sent = Sent.LAST_CHUNK if end == self.offer.size else Sent.CHUNK
        if sent is Sent.LAST_CHUNK and self.digest is None:
            raise LocalProtocolError("the last chunk before the hash")
        self.ours = self._moved(self.ours, sent, by_us=True)
        self.num_sent = end
        length = (_KIND_BYTES + _OFFSET_BYTES + size).to_bytes(LENGTH_BYTES, "big")
        offset = chunk.offset.to_bytes(_OFFSET_BYTES, "big")
        return b"".join((length, bytes((_CHUNK,)), offset, chunk.data))

    def receive_data(self, data: bytes) -> None:
        """Add bytes from the stream, and take all events that they complete before adding more."""
        self._input = memoryview(bytes(self._input) + data) if self._input else memoryview(data)

    def next_event(self) -> Event | None:
        """The next thing that the partner has sent, or None until more data comes."""
        while self._input:
            if self._chunk_left:
                event: Event | None = self._take_chunk()
            else:
                event = self._take_control()
            if event is not None:
                return event
        return None

    def _take_chunk(self) -> ContributionReceived | None:
        piece = self._take(self._chunk_left)
        self.incoming.write(piece)
        self._chunk_left -= len(piece)
        if self.num_received < self.offer.size:
            return None
        self.theirs = self._moved(self.theirs, Sent.LAST_CHUNK, by_us=False)
        self.check_whole()
        return ContributionReceived(self.num_received)

    def check_whole(self) -> None:
        """The last byte has come, over a channel perhaps: compare the hash, which must have come before.

        (Over a channel that is for the stream, where it was said before, to bring: wait for `partner_digest`.)
        """
        if self.partner_offer is None or self.num_received < self.offer.size:
            raise LocalProtocolError("a contribution that is not here yet")
        if self.partner_digest is None:
            raise RemoteProtocolError("all of the contribution, and no hash")
        if self.incoming.digest() != self.partner_digest:
            raise RemoteProtocolError("the contribution's hash is not what its sender says")
        self.is_whole = True

    def _take_control(self) -> Control | None:
        """Complete a control frame, or begin a chunk."""
        if self.theirs in (Step.COMMITTED, Step.ABORTED):
            raise RemoteProtocolError("data after the end of the session")
        if not self._fill_head(_HEADER_BYTES):
            return None
        length = int.from_bytes(self._head[:LENGTH_BYTES], "big") - _KIND_BYTES
        kind = self._head[LENGTH_BYTES]
        if kind == _CHUNK:
            if self._fill_head(_HEADER_BYTES + _OFFSET_BYTES):
                self._begin_chunk(length - _OFFSET_BYTES)
            return None
        if kind != _CONTROL or not 0 < length <= MAX_CONTROL_BYTES:
            raise RemoteProtocolError(f"a frame of kind {kind} and {length} bytes")
        if not self._fill_head(_HEADER_BYTES + length):
            return None
        message = _decode_control(bytes(self._head[_HEADER_BYTES:]))
        self._head.clear()
        self._receive(message)
        return message

    def _begin_chunk(self, size: int) -> None:
        offset = int.from_bytes(self._head[_HEADER_BYTES:], "big")
        self._head.clear()
        end = offset + size
        if not 0 < size <= CHUNK_BYTES or offset != self.num_received or end > self.offer.size:
            raise RemoteProtocolError(f"a chunk of {size} bytes at {offset}, {self.num_received} were received")
        self.theirs = self._moved(self.theirs, Sent.CHUNK, by_us=False)
        self._chunk_left = size

    def _receive(self, message: Control) -> None:
        theirs = self._moved(self.theirs, self._kind_of(message), by_us=False)
        self._check(message, by_us=False)
        self.theirs = theirs
        self._apply(message, by_us=False)

    def _kind_of(self, message: Control) -> Sent:
        if isinstance(message, Offer):  # of equal sizes, or `_check_offer` refuses it
            return Sent.OFFER if self.offer.size < BULK_FROM else Sent.LARGE_OFFER
        return _SENT_OF[type(message)]

    def _check(self, message: Control, by_us: bool) -> None:
        """What the table does not say of a message."""
        match message:
            case Offer() if not by_us:
                self._check_offer(message)
            case Route():
                self._check_route(message, by_us)
            case Sealed() if self._digest_of(by_us) is not None:
                raise _error(by_us)("a second hash")
            case Received() if self._digest_of(not by_us) is None:
                raise _error(by_us)("Received before the other's hash was said")
            case Reroute() if self._is_reroute_due or self._lacks_nothing(by_us):
                raise _error(by_us)("a Reroute by one that has asked already, or lacks nothing")
            case Received() if self._lacks_nothing(by_us) or (self._is_reroute_due and self.is_initiator is not by_us):
                raise _error(by_us)("Received by one that has said so, or asks for another way")

    def _check_route(self, route: Route, by_us: bool) -> None:
        lacks_nothing = self._lacks_nothing(by_us)
        if by_us and route.received != self.num_received:
            raise LocalProtocolError("a Route from elsewhere than where we are")
        if route.received > self.offer.size or lacks_nothing is not (route.received == self.offer.size):
            raise _error(by_us)(f"a Route of one that would have {route.received} bytes")
        if self.is_initiator is not by_us:
            if route.channel not in (None, self._named):
                raise _error(by_us)("a channel that the initiator has not named")
        elif self.num_routes == MAX_ROUTES or (lacks_nothing and not self._is_reroute_due):
            raise _error(by_us)("a Route that nobody needs, or beyond those of a session")

    def _digest_of(self, is_us: bool) -> bytes | None:
        return self.digest if is_us else self.partner_digest

    def _lacks_nothing(self, is_us: bool) -> bool:
        """Whether one of the two has said that it has the other's contribution."""
        return self._has_said_received if is_us else self._has_heard_received

    def _apply(self, message: Control, by_us: bool) -> None:
        """What a message does beside moving its sender."""
        match message:
            case Offer() if not by_us:
                self.partner_offer = message
            case Route():
                self._route(message, by_us)
            case Reroute():
                self._is_reroute_due = True
            case Sealed(digest) if by_us:
                self.digest = digest
            case Sealed(digest):
                self.partner_digest = digest
            case Received():
                self._note_received(by_us)

    def _route(self, route: Route, by_us: bool) -> None:
        """The initiator names a channel, the responder confirms it; then both know the way."""
        if not by_us:
            self.num_sent = route.received
        if self.is_initiator is by_us:
            self.num_routes += 1
            self._named = route.channel
            return
        self.channel = route.channel
        self._is_reroute_due = False
        if self.channel is not None:
            self.ours = self.theirs = Step.MOVING
        else:
            self.ours = Step.SENDING if self.num_sent < self.offer.size else Step.JUDGING
            self.theirs = Step.SENDING if self.num_received < self.offer.size else Step.JUDGING

    def _note_received(self, by_us: bool) -> None:
        """When both have said so, both go on."""
        if by_us:
            self._has_said_received = True
        else:
            self._has_heard_received = True
            self.num_sent = self.offer.size
        if self._has_said_received and self._has_heard_received:
            self.ours = self.theirs = Step.JUDGING

    def _check_offer(self, theirs: Offer) -> None:
        for field in ("version", "run_id", "session", "stage", "layout", "codec", "size"):
            if getattr(theirs, field) != getattr(self.offer, field):
                raise RemoteProtocolError(f"the partner's offer is of another {field.replace('_', ' ')}")

    def _moved(self, step: Step, sent: Sent, by_us: bool) -> Step:
        """Where a message takes its sender."""
        role: Role = "initiator" if self.is_initiator is by_us else "responder"
        other = self.theirs if by_us else self.ours
        required = REQUIRES[role].get(sent)
        after = TRANSITIONS[role][step].get(sent)
        if after is None or (required is not None and other not in required):
            raise _error(by_us)(f"{sent.value} while its sender is {step.value} and the other {other.value}")
        return after

    def _fill_head(self, size: int) -> bool:
        self._head += self._take(size - len(self._head))
        return len(self._head) >= size

    def _take(self, size: int) -> memoryview:
        piece, self._input = self._input[: max(size, 0)], self._input[max(size, 0) :]
        return piece


def _error(by_us: bool) -> type[LocalProtocolError | RemoteProtocolError]:
    return LocalProtocolError if by_us else RemoteProtocolError


def _decode_control(payload: bytes) -> Control:
    try:
        message: Control = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a message of an exchange: {error}") from error
    if isinstance(message, Offer) and not math.isfinite(message.seconds_left):  # NaN passes every bound
        raise RemoteProtocolError(f"not a duration: {message.seconds_left}")
    return message


def peek_offer(data: bytes | bytearray) -> Offer | None:
    """The offer with which a stream begins, or None until more of it is there.

    A responder learns from it which session the stream belongs to; the same bytes then go into its `Exchange`.
    """
    if len(data) < _HEADER_BYTES:
        return None
    length = int.from_bytes(data[:LENGTH_BYTES], "big")
    if data[LENGTH_BYTES] != _CONTROL or not _KIND_BYTES < length <= _KIND_BYTES + MAX_CONTROL_BYTES:
        raise RemoteProtocolError("an exchange begins with an offer")
    if len(data) < LENGTH_BYTES + length:
        return None
    offer = _decode_control(bytes(data[_HEADER_BYTES : LENGTH_BYTES + length]))
    if not isinstance(offer, Offer):
        raise RemoteProtocolError("an exchange begins with an offer")
    return offer


Outcome = Literal["undecided", "committed", "aborted"]


class Outcomes:
    """What an initiator has decided of its sessions, for responders in doubt; the newest `MAX_OUTCOMES`."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[bytes, tuple[bytes, Outcome]] = OrderedDict()

    def begin(self, session: bytes, peer: bytes) -> None:
        """A session with this peer is under way, undecided."""
        self._outcomes[session] = (peer, "undecided")
        if len(self._outcomes) > MAX_OUTCOMES:
            self._outcomes.popitem(last=False)

    def decide(self, session: bytes, committed: bool) -> bool:
        """Decide a session; the first decision holds. Returns whether the session is committed."""
        peer, outcome = self._outcomes.get(session, (b"", "aborted"))
        if outcome == "undecided":
            outcome = "committed" if committed else "aborted"
            self._outcomes[session] = (peer, outcome)
        return outcome == "committed"

    def answer(self, session: bytes, peer: bytes) -> Outcome:
        """What the peer is told that asks about a session. One that is unknown was never committed."""
        partner, outcome = self._outcomes.get(session, (peer, "aborted"))
        if partner != peer:
            raise RemoteProtocolError("a question about a session of two others")
        return outcome


class Resolve(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A responder in doubt asks its initiator how it was decided, on a stream of its own."""

    session: Session


class Resolution(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer; after ``undecided`` the responder asks again."""

    outcome: Outcome


MAX_RESOLVE_BYTES = 64
_resolve_decoder = msgspec.msgpack.Decoder(Resolve)
_resolution_decoder = msgspec.msgpack.Decoder(Resolution)


def encode_resolve(message: Resolve | Resolution) -> bytes:
    """The frame of a question or its answer."""
    return frame(_encoder.encode(message), MAX_RESOLVE_BYTES)


def resolve_parser() -> FrameParser:
    """Cuts a stream of questions and answers into frames."""
    return FrameParser(MAX_RESOLVE_BYTES)


def decode_resolve(payload: bytes) -> Resolve:
    """The question in a frame; `RemoteProtocolError` if there is none."""
    try:
        return _resolve_decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"not a question about a session: {error}") from error


def decode_resolution(payload: bytes) -> Resolution:
    """The answer in a frame; `RemoteProtocolError` if there is none."""
    try:
        return _resolution_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not an answer about a session: {error}") from error

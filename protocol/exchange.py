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

The messages are in `exchange_messages`, the states and `TRANSITIONS` in `exchange_steps`, `Resolve` and `Outcomes` in
`outcomes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import LocalProtocolError, RemoteProtocolError
from .exchange_messages import (
    CHUNK_BYTES,
    CHUNK_KIND,
    CONTROL_KIND,
    HEADER_BYTES,
    KIND_BYTES,
    MAX_CONTROL_BYTES,
    OFFSET_BYTES,
    Accepted,
    Chunk,
    Commit,
    Control,
    Offer,
    Received,
    Reroute,
    Route,
    Sealed,
    decode_control,
    encode_chunk,
    encode_control,
)
from .exchange_steps import REQUIRES, SENT_OF, TRANSITIONS, Role, Sent, Step
from .framing import LENGTH_BYTES
from .incoming import Incoming

# Smaller ones have moved over the stream before a channel is open (milliseconds here, round trips on the internet).
BULK_FROM = 1_000_000
# Of one session: three channels, each of which may break, and the stream.
MAX_ROUTES = 4

# Shares of the time from the start of a session to its deadline. Contributions are in and screened until the first,
# the initiator decides until the second, a responder without news asks from the third, everybody goes on at 1.
DATA_UNTIL, DECIDE_UNTIL, ASK_FROM = 0.7, 0.8, 0.9


@dataclass(frozen=True, slots=True)
class ContributionReceived:
    """The partner's contribution is whole and has its sender's hash."""

    size: int


Event = Control | ContributionReceived


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
        return encode_control(message)

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
        return encode_chunk(chunk)

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
        if not self._fill_head(HEADER_BYTES):
            return None
        length = int.from_bytes(self._head[:LENGTH_BYTES], "big") - KIND_BYTES
        kind = self._head[LENGTH_BYTES]
        if kind == CHUNK_KIND:
            if self._fill_head(HEADER_BYTES + OFFSET_BYTES):
                self._begin_chunk(length - OFFSET_BYTES)
            return None
        if kind != CONTROL_KIND or not 0 < length <= MAX_CONTROL_BYTES:
            raise RemoteProtocolError(f"a frame of kind {kind} and {length} bytes")
        if not self._fill_head(HEADER_BYTES + length):
            return None
        message = decode_control(bytes(self._head[HEADER_BYTES:]))
        self._head.clear()
        self._receive(message)
        return message

    def _begin_chunk(self, size: int) -> None:
        offset = int.from_bytes(self._head[HEADER_BYTES:], "big")
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
        return SENT_OF[type(message)]

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

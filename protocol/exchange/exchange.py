"""Exchange: one session that moves both partners' contributions at once, with a commit by both or by neither.

    initiator   Offer         contribution            Commit
    responder          Offer  contribution  Accepted          Committed

The session's stream is a pipe (`farandole.protocol.exchange.pipe`), whose opener is the initiator; each contribution is
one transfer. Contributions of `BULK_FROM` bytes or more move over a bulk channel if one can be opened.

A contribution is offered when its encoding begins, and is sent while it is encoded; so its hash comes last. (If the
receiver sent the hash and the sender compared it, a node's result would depend on its partner's care; and a transfer by
chunks would wait for one more message.) The hash is the sender's claim about its own bytes. A false one costs the
exchange, and gains nothing: a partner that wants to send something harmful hashes that, and the screening judges it. A
hash in the offer would also bind its sender before it has seen the other's contribution; but all members know what one
could learn from that well enough from earlier rounds.

Either side may send `Aborted` instead, as long as `TRANSITIONS` allows it. A contribution is received directly into
memory from the caller, of exactly the size that both know beforehand: no size that a peer sends is allocated.

The commit is two-phase, with the initiator as coordinator. It decides to commit when its screening has accepted and it
has the responder's `Accepted`, and not later than `DECIDE_UNTIL`; anything else before that is an abort. A responder
that has sent `Accepted` is *in doubt* until it reads the decision; if the stream breaks it asks on a new one
(`Resolve`) until its deadline, and the initiator answers from its `Outcomes`.

Guarantees: two nodes that are both alive, and can reach each other at any time between the decision and the deadline,
agree on a session's outcome; a contribution counts as received only if it is whole and has its sender's hash; and a
node commits only what it has accepted itself. One guarantee is impossible (two generals; Gray 1978): if the network
separates the two from the decision until the deadline, the initiator may have committed while the responder goes on
alone. Then only one side has taken an average: the next exchanges pull the two together as they do any two replicas. An
initiator that dies loses its outcomes; restarted from its checkpoint it has not committed, and answers so.

`TRANSITIONS` is the table of a session's steps. Its messages have no fields but these, since both partners must mean
the same by a commit: any change of them needs another protocol id.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable
from typing import Annotated, Final, Literal

import msgspec

from ..run.rules import Codec
from ..wire.bounds import Latest
from ..wire.errors import LocalProtocolError, RemoteProtocolError
from ..wire.messagepack import PRINTABLE, MessageDecoder, Session, encode
from .pipe import BULK_FROM, KIND_BYTES, MESSAGE_KIND, Pipe, TransferReceived

EXCHANGE_VERSION = 5
# An offer has about 160 bytes; an abort's reason at most 256 characters.
MAX_CONTROL_BYTES = 1_280
MAX_FIRST_BYTES = KIND_BYTES + MAX_CONTROL_BYTES
# 512 layers of the widest model in fp32 take less; compared with the node's own size before anything else.
MAX_CONTRIBUTION_BYTES = 2**44

_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
MAX_REASON_CHARS: Final = 256
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS, pattern=PRINTABLE)]
"""Shown on terminals: no control characters."""


def reason_of(text: str) -> str:
    """Return a text as a `Reason`: cut to its length, with ``?`` for other characters."""
    return re.sub(r"[^\x20-\x7e]", "?", text[:MAX_REASON_CHARS])


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True, tag=1):
    """The contribution that the sender offers. All but the last three fields must equal the receiver's own offer."""

    version: Annotated[int, msgspec.Meta(ge=1, le=255)] = EXCHANGE_VERSION
    run_id: _Digest
    session: Session
    stage: Annotated[int, msgspec.Meta(ge=0, le=511)]
    layout: _Digest
    """Hash of the names, shapes and order of the tensors in a contribution."""
    codec: Codec
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONTRIBUTION_BYTES)]
    """Bytes of the contribution; follows from layout and codec."""
    # The next fields are the sender's own.
    round: _Count
    tokens: _Count
    """Tokens that the contribution was trained on: its weight in the mean. 0 and 1 in a round without inner steps."""
    seconds_left: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    """Time until the sender goes on without its partner; set when it is sent. The lesser of both holds for both."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """The responder has the initiator's contribution, whole, and its screening accepts it."""


class Commit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The initiator's decision, which implies its own acceptance: both use the contribution that they have received."""


class Committed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The responder has read the decision."""


class Aborted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """Neither side uses a contribution: refused by the screening, out of time, or not expected."""

    reason: Reason


Control = Offer | Accepted | Commit | Committed | Aborted


_decode = MessageDecoder[Control](Control, "a message of an exchange")


def decode_control(payload: bytes) -> Control:
    """Decode a message; raise `RemoteProtocolError` if it is none."""
    message = _decode(payload)
    if isinstance(message, Offer) and not math.isfinite(message.seconds_left):  # NaN passes every bound
        raise RemoteProtocolError(f"not a duration: {message.seconds_left}")
    return message


def decode_first(payload: bytes) -> Offer:
    """Return the offer in a stream's first frame, of at most `MAX_FIRST_BYTES`.

    A responder learns from it which session the stream belongs to; the same bytes then go into its `Exchange`.
    """
    offer = decode_control(payload[KIND_BYTES:]) if payload[:KIND_BYTES] == bytes((MESSAGE_KIND,)) else None
    if not isinstance(offer, Offer):
        raise RemoteProtocolError("an exchange begins with an offer")
    return offer


# Shares of the time from the start of a session to its deadline. A verdict is awaited for the first, and not beyond the
# second: a trainer in a long inner step judges later, before it averages. (Without the first, nodes whose steps take a
# round had no partner in 35 % of their rounds, not in 18, simulated.) Both contributions are received until the third,
# the initiator decides until the fourth, a responder without news asks from the fifth, both go on at 1.
JUDGE_FOR, JUDGE_UNTIL, DATA_UNTIL, DECIDE_UNTIL, ASK_FROM = 0.1, 0.65, 0.7, 0.8, 0.9
# The pipe's name for either contribution.
CONTRIBUTION = 0


# The pipe decides how the contributions move (`farandole.protocol.exchange.pipe` has its table). An exchange
# needs one fact about that for each partner: the other side has its contribution, whole and with its hash.
class Step(enum.Enum):
    """The step of one partner, by what it has sent."""

    OFFERING = "offering"
    MOVING = "sending its contribution"
    JUDGING = "judging"  # the other has its contribution, and it screens the other's
    ACCEPTED = "accepted"
    COMMITTED = "committed"
    ABORTED = "aborted"


INITIATOR, RESPONDER = True, False
# What moves a partner on: a message that it sends, or its contribution, which the pipe reports (`TransferReceived`).
Moving = type[Control | TransferReceived]
_BOTH: dict[Step, dict[Moving, Step]] = {
    Step.OFFERING: {Offer: Step.MOVING, Aborted: Step.ABORTED},
    Step.MOVING: {TransferReceived: Step.JUDGING, Aborted: Step.ABORTED},
    Step.COMMITTED: {},
    Step.ABORTED: {},
}
# Role -> step of the sender -> what it sends -> its next step. After its Accepted a responder cannot back out.
TRANSITIONS: dict[bool, dict[Step, dict[Moving, Step]]] = {
    INITIATOR: _BOTH | {Step.JUDGING: {Commit: Step.COMMITTED, Aborted: Step.ABORTED}, Step.ACCEPTED: {}},
    RESPONDER: _BOTH
    | {
        Step.JUDGING: {Accepted: Step.ACCEPTED, Aborted: Step.ABORTED},
        Step.ACCEPTED: {Committed: Step.COMMITTED},
    },
}
# What a sender sends -> the step in which the other side must be. Either side may abort at any step of the other, and
# an initiator offers first.
REQUIRED: dict[tuple[bool, Moving], Step] = {
    (INITIATOR, Commit): Step.ACCEPTED,
    (RESPONDER, Offer): Step.MOVING,
    (RESPONDER, Accepted): Step.JUDGING,  # it has sent everything
    (RESPONDER, Committed): Step.COMMITTED,
}
# Fields of an offer that must be equal in both; otherwise there is no session.
AGREED_FIELDS = ("version", "run_id", "session", "stage", "layout", "codec", "size")


class Exchange:
    """One node's side of one session. Sans-IO: it decides, and its ``pipe`` frames the stream.

    ``offer`` is the node's own; ``incoming`` is writable memory for the partner's contribution, which has the same
    size, and is undefined until `is_whole`. `RemoteProtocolError`: drop the stream, and the session with it unless it
    `is_in_doubt`. `LocalProtocolError`: the message may not be sent now.
    """

    def __init__(
        self,
        is_initiator: bool,
        offer: Offer,
        incoming: memoryview,
        on_advance: Callable[[int], None] | None = None,
    ) -> None:
        """``on_advance`` gets the number of bytes of the partner's contribution in the memory."""
        if incoming.readonly or incoming.nbytes < offer.size:
            raise LocalProtocolError(f"a contribution of {offer.size} bytes needs that much writable memory")
        self.is_initiator = is_initiator
        self.offer = offer
        self.partner_offer: Offer | None = None
        is_large = offer.size >= BULK_FROM
        self.pipe = Pipe(is_initiator, max_message_bytes=MAX_CONTROL_BYTES, is_large=is_large, is_hashed=True)
        self._incoming = incoming.cast("B")[: offer.size]
        self._on_advance = on_advance
        self._ours = self._theirs = Step.OFFERING

    @property
    def ours(self) -> Step:
        """Return this side's step."""
        is_delivered = self._ours is Step.MOVING and self.pipe.outgoing.settled == self.offer.size
        return TRANSITIONS[self.is_initiator][self._ours][TransferReceived] if is_delivered else self._ours

    @property
    def theirs(self) -> Step:
        """Return the partner's step."""
        is_here = self._theirs is Step.MOVING and self.pipe.incoming.settled == self.offer.size
        return TRANSITIONS[not self.is_initiator][self._theirs][TransferReceived] if is_here else self._theirs

    @property
    def is_whole(self) -> bool:
        """Return whether the partner's contribution is in the memory, with its hash."""
        arriving = self.pipe.arriving
        return self.pipe.incoming.settled == self.offer.size if arriving is None else arriving.is_whole

    @property
    def can_abort(self) -> bool:
        """Return whether this side may still end the session on its own."""
        return Aborted in TRANSITIONS[self.is_initiator][self.ours]

    @property
    def is_in_doubt(self) -> bool:
        """Return whether this responder has promised to commit, and does not know the decision."""
        is_decided = self.theirs in (Step.COMMITTED, Step.ABORTED)
        return not self.is_initiator and self.ours is Step.ACCEPTED and not is_decided

    def send(self, message: Control) -> bytes:
        """Apply an own message; return the bytes to write to the stream, in the order of the calls."""
        if isinstance(message, Accepted | Commit) and not self.is_whole:
            raise LocalProtocolError("a verdict before the contribution is here")
        self._ours = self._moved(message, by_us=True)
        data = self.pipe.send_message(encode(message))
        if isinstance(message, Offer):
            self._begin()
        return data

    def receive(self, payload: bytes) -> Control:
        """Apply a message of the pipe and return it."""
        message = decode_control(payload)
        theirs = self._moved(message, by_us=False)
        if isinstance(message, Offer):
            for field in AGREED_FIELDS:
                if getattr(message, field) != getattr(self.offer, field):
                    raise RemoteProtocolError(f"the partner's offer is of another {field.replace('_', ' ')}")
            self.partner_offer = message
        self._theirs = theirs
        self._begin()
        if self._theirs in (Step.COMMITTED, Step.ABORTED):
            self.pipe.is_over = True
        return message

    def _begin(self) -> None:
        """Let the contributions move, once both are offered."""
        if self._ours is self._theirs is Step.MOVING and not self.pipe.outgoing.end:
            self.pipe.begin()
            self.pipe.offer(CONTRIBUTION, self.offer.size)
            self.pipe.expect(CONTRIBUTION, self._incoming, self._on_advance)

    def _moved(self, message: Control, by_us: bool) -> Step:
        """Return the step to which a message takes its sender."""
        role, sent = self.is_initiator is by_us, type(message)
        step, other = (self.ours, self.theirs) if by_us else (self.theirs, self.ours)
        after = TRANSITIONS[role][step].get(sent)
        if after is None or REQUIRED.get((role, sent), other) is not other:
            error = LocalProtocolError if by_us else RemoteProtocolError
            raise error(f"{sent.__name__} while its sender is {step.value} and the other {other.value}")
        return after


# Outcomes of an initiator's sessions, and the messages to query them.

# Sessions whose outcome an initiator remembers. It has one a round, and peers ask about it for exchange_seconds.
MAX_OUTCOMES = 1_024


Outcome = Literal["undecided", "committed", "aborted"]


class Outcomes:
    """The initiator's decisions on its newest `MAX_OUTCOMES` sessions, for responders in doubt."""

    def __init__(self) -> None:
        self._outcomes = Latest[bytes, tuple[bytes, Outcome]](MAX_OUTCOMES)

    def begin(self, session: bytes, peer: bytes) -> None:
        """Note that a session with this peer is under way, undecided."""
        self._outcomes[session] = (peer, "undecided")

    def decide(self, session: bytes, committed: bool) -> bool:
        """Decide a session; the first decision holds. Returns whether the session is committed."""
        peer, outcome = self._outcomes.get(session, (b"", "aborted"))
        if outcome == "undecided":
            outcome = "committed" if committed else "aborted"
            self._outcomes[session] = (peer, outcome)
        return outcome == "committed"

    def answer(self, session: bytes, peer: bytes) -> Outcome:
        """Return the outcome for a peer that asks about a session. An unknown session was never committed."""
        partner, outcome = self._outcomes.get(session, (peer, "aborted"))
        if partner != peer:
            raise RemoteProtocolError("a question about a session of two others")
        return outcome


# The question of a responder in doubt to its initiator, a session, and the answer, its outcome, on a separate stream:
# frames of an array of one. After ``undecided`` the responder asks again.
Question = tuple[Session]
Answer = tuple[Outcome]
MAX_RESOLVE_BYTES = 64
decode_question = MessageDecoder[Question](Question, "a question about a session")
decode_answer = MessageDecoder[Answer](Answer, "an answer about a session")

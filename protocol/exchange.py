"""Exchange: one session, both partners' contributions both ways at once, and a commit by both or by neither.

    initiator   Offer         contribution            Commit
    responder          Offer  contribution  Accepted          Committed

The session's stream is a pipe (`farandole.protocol.pipe`), whose opener is the initiator; each contribution is one
transfer. Contributions from `BULK_FROM` bytes on move over a bulk channel where one opens.

A contribution is offered when its encoding begins, and moves while it goes on; so its hash comes last. (Were it the
receiver that says its hash, and the sender that compares, what a node uses would hang on its partner's care; and where
chunks move, one message more would be waited for.) The hash is the sender's word for its own bytes, so to lie with it
costs the exchange, and gains nothing: a partner that wants to send something harmful hashes that, and the screening
judges it. A hash in the offer would also bind its sender before it has seen the other's contribution; but what one
could learn from that, all members know well enough from the rounds before.

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

from collections.abc import Callable

from .errors import LocalProtocolError, RemoteProtocolError
from .exchange_messages import MAX_CONTROL_BYTES, Accepted, Commit, Control, Offer, decode_control
from .exchange_steps import AGREED_FIELDS, REQUIRES, SENT_OF, TRANSITIONS, Role, Sent, Step
from .pipe import BULK_FROM, Pipe
from .wire import encode

# Shares of the time from the start of a session to its deadline. Contributions are in and screened until the first,
# the initiator decides until the second, a responder without news asks from the third, everybody goes on at 1.
DATA_UNTIL, DECIDE_UNTIL, ASK_FROM = 0.7, 0.8, 0.9
# What the pipe calls either contribution.
CONTRIBUTION = 0


class Exchange:
    """One node's side of one session. Sans-IO: it decides, and its ``pipe`` knows of the stream.

    ``offer`` is the node's own; ``incoming`` is writable memory for the partner's contribution, which has the same
    size, and is undefined until `is_whole`. `RemoteProtocolError`: drop the stream, and the session with it unless it
    `is_in_doubt`. `LocalProtocolError`: what was to be sent may not be sent now.
    """

    def __init__(
        self,
        is_initiator: bool,
        offer: Offer,
        incoming: memoryview,
        on_advance: Callable[[int], None] | None = None,
    ) -> None:
        """``on_advance`` gets how many bytes of the partner's contribution lie in the memory."""
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
        """How far this side is."""
        is_delivered = self._ours is Step.MOVING and self.pipe.outgoing.settled == self.offer.size
        return TRANSITIONS[self._role(True)][self._ours][Sent.CONTRIBUTION] if is_delivered else self._ours

    @property
    def theirs(self) -> Step:
        """How far the partner is."""
        is_here = self._theirs is Step.MOVING and self.pipe.incoming.settled == self.offer.size
        return TRANSITIONS[self._role(False)][self._theirs][Sent.CONTRIBUTION] if is_here else self._theirs

    @property
    def is_whole(self) -> bool:
        """Whether the partner's contribution is in the memory, with its hash."""
        is_open = self.pipe.incoming.is_open
        return self.pipe.incoming.open[0].is_whole if is_open else self.pipe.incoming.settled == self.offer.size

    @property
    def can_abort(self) -> bool:
        """Whether this side may still end the session on its own."""
        return Sent.ABORTED in TRANSITIONS[self._role(True)][self.ours]

    @property
    def is_in_doubt(self) -> bool:
        """Whether this responder has promised to commit, and does not know the decision."""
        is_decided = self.theirs in (Step.COMMITTED, Step.ABORTED)
        return not self.is_initiator and self.ours is Step.ACCEPTED and not is_decided

    def send(self, message: Control) -> bytes:
        """The bytes to write to the stream, in the order of the calls."""
        if isinstance(message, Accepted | Commit) and not self.is_whole:
            raise LocalProtocolError("a verdict before the contribution is here")
        self._ours = self._moved(message, by_us=True)
        data = self.pipe.send_message(encode(message))
        if isinstance(message, Offer):
            self._begin()
        return data

    def receive(self, payload: bytes) -> Control:
        """What the partner has said in a message of the pipe."""
        message = decode_control(payload)
        theirs = self._moved(message, by_us=False)
        if isinstance(message, Offer):
            self._check_offer(message)
            self.partner_offer = message
        self._theirs = theirs
        self._begin()
        if self._theirs in (Step.COMMITTED, Step.ABORTED):
            self.pipe.end()
        return message

    def _begin(self) -> None:
        """The contributions may move once both are offered."""
        if self._ours is self._theirs is Step.MOVING and not self.pipe.outgoing.end:
            self.pipe.begin()
            self.pipe.offer(CONTRIBUTION, self.offer.size)
            self.pipe.expect(CONTRIBUTION, self._incoming, self._on_advance)

    def _check_offer(self, theirs: Offer) -> None:
        for field in AGREED_FIELDS:
            if getattr(theirs, field) != getattr(self.offer, field):
                raise RemoteProtocolError(f"the partner's offer is of another {field.replace('_', ' ')}")

    def _role(self, is_us: bool) -> Role:
        return "initiator" if self.is_initiator is is_us else "responder"

    def _moved(self, message: Control, by_us: bool) -> Step:
        """Where a message takes its sender."""
        role, sent = self._role(by_us), SENT_OF[type(message)]
        step, other = (self.ours, self.theirs) if by_us else (self.theirs, self.ours)
        required = REQUIRES[role].get(sent)
        after = TRANSITIONS[role][step].get(sent)
        if after is None or (required is not None and other not in required):
            error = LocalProtocolError if by_us else RemoteProtocolError
            raise error(f"{sent.value} while its sender is {step.value} and the other {other.value}")
        return after

"""Pairing: nodes agree on the partner for the end of a round while its inner steps still run.

NoLoCo (arXiv 2506.10911) leaves open how nodes without a clock, a coordinator or equal speeds form pairs. Here each
node proposes to a uniformly random live peer, well before it is ready:

- *No livelock.* A node with an outstanding proposal accepts another's, and withdraws its own, only if the other comes
  first by a coin that the node tosses for each peer and each proposal of its own: so every second one succeeds. (If the
  least session came first, as in Luby's matchings of 1986, a peer that names its sessions 0, 1, 2, ... would be every
  node's partner.) Of two proposals that cross between the same two nodes the smaller session holds.
- *Uniform partners.* Partners end an exchange together, so if every node proposed at the start of its round, the same
  pairs would meet for ever. Each node waits for a random share of its round before it proposes (`PROPOSE_FROM`,
  `PROPOSE_UNTIL`), and accepts proposals while it waits. So groups that are out of phase with each other meet too.
- *No waiting.* Where rounds are boxed in time, partners move the ends of their boxes to the mean of both. This is
  gossip averaging of the phases: the network synchronises without a clock. A partner that is let go takes its word with
  it, so peers that never come do not pull the phases apart. Without boxes, nodes whose ends are far apart do not pair.
- *Fragments.* Where a round exchanges a part of the parameters, a proposal is for the part that its sender has
  exchanged least, named by the session's last byte. A node that is ready accepts no other.
- *Bounded waiting.* From the time it is ready a node waits at most `WAIT_SHARE` of ``exchange_seconds``, or of two
  rounds if these are shorter; an odd node out, or one for which no peer is free, goes on at once. A partner that never
  exchanged with this node is left for another after half of that; while others fail, after an eighth of the inner
  steps, and its exchange may take four times the last one.
- *Meetings are remembered.* A peer whose exchange failed is asked once no other is left, for longer each time, and
  given up for any better one; a peer that is met more often than by chance waits for its turn (`.pairing_order`).
- *Swaps.* Few peers are in turn at the start, and random proposals among few peers leave out a tenth of the nodes. A
  node whose peers in turn all have partners asks each of them once more. The asked peer then gives its partner up, once
  a round and while neither is ready; that partner most often finds another peer in turn.
- *Further tries.* A ready node whose partner does not come, or whose exchange breaks, seeks another one while it would
  still wait: half of ``exchange_seconds`` is always left for that transfer. It asks all again, for others were let down
  too; these are ready, and soon show it. Where rounds overlap, the next begins once the partner's offer is due.
- *Several partners.* Rounds without inner steps follow (`RoundConfig.partners`), in which all are ready at once.

Rejected: leaving any late partner early (in short rounds, five times as many are alone). docs/decisions.md has others.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Set

from ..run.rules import RoundConfig
from ..trainer.trainer_messages import FinishRound, UseFragment
from ..wire.bounds import PeerMeters
from ..wire.errors import LocalProtocolError, RemoteProtocolError
from ..wire.messagepack import SESSION_BYTES
from ..wire.timers import SetTimer, TimerFired
from . import pairing_messages as messages
from .pairing_events import (
    FOLLOWING,
    ContributionReady,
    Event,
    ExchangeEnded,
    GoAlone,
    MessageReceived,
    Missed,
    Output,
    PeerLost,
    PeersChanged,
    RoundStarted,
    SendMessage,
    StartExchange,
    State,
    Stopped,
    TrafficSaved,
    failure,
)
from .pairing_order import PeerOrder
from .pairing_waits import ANSWER_SHARE, MIN_ANSWER, MIN_RETRY, Bond, PairingRound, Waits

# A replica further behind takes a peer's weights: its own would pull partners back. A newcomer's are at most this old.
MAX_ROUNDS_BEHIND = 10
# From a quarter on, nodes that ended the last round late are back; the last is for those whose proposals are refused.
PROPOSE_FROM, PROPOSE_UNTIL = 0.25, 0.75
# Share of the time to an exchange's deadline in which the partner's offer must come; in a later try, most seconds.
OFFER_SHARE, MAX_LATER_OFFER = 0.25, 2.0
# A box moves by at most this share of its length, so that no partner can stretch a round endlessly.
MAX_BOX_SHIFT = 0.5
# Among 1,000 nodes the last free ones rarely find each other, and each proposal may cost a dial: then it only accepts.
MAX_PROPOSALS = 64
# In this last share of a round no partner is given up: it would not find another before the round ends.
SWAP_SHARE = 0.25
NOT_READY = "the partner was not ready in time"
# An exchange whose offer did not come has ended after this many times the time for it.
_OFFER_GRACE = 1.25
_ORDER_BYTES = 32  # a key of BLAKE3


class _Timer(enum.StrEnum):
    """Timers in the order in which they fire: an overdue answer or partner frees the node to propose at that moment."""

    OTHER = "other"
    BOX = "box"
    PROPOSE = "propose"
    PATIENCE = "patience"
    FOLLOW = "follow"


class Pairing:
    """One node's pairing; ``own`` is the node's public key, ``rng`` draws delays, partners and sessions.

    `handle` takes monotonic times in seconds, never decreasing, and returns outputs to carry out in order. It raises
    `RemoteProtocolError` only for `MessageReceived`, and is then unchanged.
    """

    def __init__(self, own: bytes, config: RoundConfig, rng: random.Random, num_fragments: int = 1) -> None:
        self.state = State.IDLE
        self.round = -1
        self._config = config
        self._rng = rng
        self._meters = PeerMeters(messages.MAX_MESSAGES, messages.MAX_MESSAGES)
        self._order = PeerOrder(own, may_doubt=not 0 < config.round_seconds < config.exchange_seconds)
        self._bond: Bond | None = None
        self._timers: dict[_Timer, float] = {}
        self._timer_set_at: float | None = None
        self._outputs: list[Output] = []
        self._is_saving = False
        self._num_fragments = num_fragments
        self._num_exchanged = [0] * num_fragments  # alone or not
        self.current = PairingRound()
        self._waits = Waits(config, config.round_seconds or None)
        self._exchange_started_at = 0.0
        self._following: RoundStarted | None = None
        """The next round, while the exchange of this one may still fail for want of an offer."""

    @property
    def partner(self) -> bytes | None:
        """Return the partner agreed on for this round, if any."""
        return self._bond.peer if self._bond and self.state in (State.MATCHED, State.EXCHANGING) else None

    @property
    def wait_ends_at(self) -> float:
        """Return when a ready node stops waiting for a partner; infinity while it is not ready."""
        takes_steps = self._config.takes_steps(self.round)
        return self.current.ready_at + (self._waits.longest if takes_steps else self._waits.meeting)

    def handle(self, event: Event, now: float) -> list[Output]:
        """Process an event and return the outputs to carry out."""
        self._outputs = []
        match event:
            case RoundStarted():
                self._following = event
                if self.state is not State.EXCHANGING or not self._timers:
                    self._follow(now)
            case ContributionReady():
                self._become_ready(event.round, event.fragment, event.step_seconds, now)
            case PeersChanged(peers=peers):
                self._set_peers(peers, now)
            case MessageReceived(peer=peer, payload=payload):
                self._receive(peer, payload, now)
            case PeerLost(peer=peer):
                self._lose(peer, now)
            case TimerFired():
                self._timer_set_at = None
            case ExchangeEnded():
                self._end_exchange(event, now)
            case TrafficSaved(is_on=is_on):
                self._is_saving = is_on
                if self.state is State.SEEKING:
                    self._seek(now)
            case Stopped():
                self._withdraw()
                self._timers.clear()
                self._bond = None
                self._move(State.AWAY)
        for timer in _Timer:
            if self._timers.get(timer, math.inf) <= now:
                del self._timers[timer]
                self._fire(timer, now)
        next_at = min(self._timers.values(), default=None)
        if next_at is not None and next_at != self._timer_set_at:
            self._outputs.append(SetTimer(next_at))
            self._timer_set_at = next_at
        return self._outputs

    # Rounds

    def _follow(self, now: float) -> None:
        """Start the next round, if the trainer has begun it."""
        if (start := self._following) is None:
            return
        self._following, round_ = None, start.round
        at = now if start.at is None else start.at
        if self.current.failure:  # what was lost on a partner that did not come is taken off the box: phases stay
            at -= min(at - self.current.ready_at, MAX_BOX_SHIFT * self._config.round_seconds)
        self._withdraw()
        self._timers.clear()
        self._bond = None
        self._move(State.SEEKING)
        self.round = round_
        self._order.begin(round_)
        order, long_step = self._rng.randbytes(_ORDER_BYTES), self._waits.long_step
        self.current = current = PairingRound(order=order, started_at=at, long_step=long_step)
        takes_steps = self._config.takes_steps(round_)
        current.ends_at = None if self._waits.inner_seconds is None else at + self._waits.inner_seconds
        if not takes_steps:
            current.ends_at = at
        elif self._config.round_seconds:
            current.ends_at = self._timers[_Timer.BOX] = at + self._config.round_seconds
        seconds_left = 0.0 if current.ends_at is None else max(0.0, current.ends_at - now)
        share = self._rng.uniform(PROPOSE_FROM, PROPOSE_UNTIL)
        current.propose_at = now + (share / 2 if self._order.is_wary else share) * seconds_left
        self._use_fragment(self._num_exchanged.index(min(self._num_exchanged)))
        self._seek(now)

    def _become_ready(self, round_: int, fragment: int, step_seconds: float, now: float) -> None:
        if round_ != self.round or self.current.is_ready or self.state in (State.IDLE, State.AWAY):
            return  # of a round that has been given up
        if self._bond is not None and self._fragment_of(self._bond.session) != fragment:  # agreed on too late
            self._withdraw()
            self._part(math.inf)
        self.current.fragment = fragment
        self.current.ready_at = self.current.propose_at = now
        if self._config.takes_steps(round_):
            self._waits.inner_seconds = now - self.current.started_at
            self._waits.step_seconds = step_seconds
        self._timers.pop(_Timer.BOX, None)
        self._timers[_Timer.PATIENCE] = self.wait_ends_at
        if self.state is State.MATCHED and self._bond:
            self._await_partner(self._bond, now)
            self._begin_if_both_ready(now)
        elif self.state is State.SEEKING:
            self._seek(now)

    def _await_partner(self, bond: Bond, now: float) -> None:
        """Tell the partner that this node is ready, and wait for it; less for one that never came before."""
        self._send(bond.peer, messages.Ready(bond.session))
        if self._is_brief_with(bond.peer):
            self._timers[_Timer.OTHER] = now + self._waits.answer
        elif not self._order.is_proven(bond.peer):  # without boxes many are late
            wait = self.wait_ends_at - self.current.ready_at
            self._timers[_Timer.OTHER] = now + wait / (2 if self._config.round_seconds else 1)

    def _is_brief_with(self, peer: bytes) -> bool:
        """Return whether a peer gets little time: it never exchanged, and others fail, or one has in this round."""
        return not self._order.is_proven(peer) and (bool(self.current.failure) or self._order.has_doubts)

    def _patience_with(self, peer: bytes, now: float) -> float:
        patience = self._waits.answer if self._is_brief_with(peer) else self._waits.patience
        return min(self.wait_ends_at - now, patience)

    def _begin_if_both_ready(self, now: float) -> None:
        """Begin the exchange as the proposer; the partner follows. So neither awaits one that has just given up."""
        bond = self._bond
        if bond is not None and bond.is_proposer and bond.is_partner_ready and self.current.is_ready:
            self._send(bond.peer, messages.Begin(bond.session))
            self._exchange(bond, now)

    def _exchange(self, bond: Bond, now: float) -> None:
        self._timers.clear()
        self._move(State.EXCHANGING)
        self._num_exchanged[self.current.fragment] += 1
        self._exchange_started_at = now
        self._order.note_meeting(bond.peer)
        deadline = self.current.ready_at + self._config.exchange_seconds
        is_proven = self._order.is_proven(bond.peer)
        if is_doubted := not is_proven and self._order.has_doubts:
            deadline = min(deadline, now + self._waits.brief_exchange)
        is_brief = is_doubted or self.current.failure
        most = MAX_LATER_OFFER if is_brief else (self.wait_ends_at - self.current.ready_at) / 2
        offered = max(min(OFFER_SHARE * (deadline - now), most), MIN_ANSWER)
        if not is_proven:
            self._timers[_Timer.FOLLOW] = deadline if is_doubted else now + _OFFER_GRACE * offered
        by = now + offered
        self._outputs.append(StartExchange(bond.session, bond.peer, self.round, bond.is_proposer, deadline, by))

    def _end_exchange(self, end: ExchangeEnded, now: float) -> None:
        if end.committed and end.clip > 0.0:
            self._order.note_success(end.peer)
        else:
            self._order.note_failure(end.peer)
        if end.committed:
            self._waits.exchange_seconds = end.seconds
        if self.state is not State.EXCHANGING or self._bond is None or self._bond.session != end.session:
            if not end.committed and end.round != self.round:  # another one runs already
                self._outputs.append(GoAlone(end.round, failure(end.reason)))
            return
        self._timers.clear()
        if end.is_broken and now < self.wait_ends_at:
            # with another partner, or with this one if it is still there and no other peer is free
            ask_again_at = self._ask_lost_at(self._bond.peer, now)
            self.current.let_down(failure(end.reason))
            self._num_exchanged[self.current.fragment] -= 1
            self._timers[_Timer.PATIENCE] = self.wait_ends_at
            self._seek_another(now, ask_again_at)
            return
        self._bond = None
        self._move(State.IDLE)
        if not end.committed:
            self._outputs.append(GoAlone(self.round, failure(end.reason)))
        self._follow(now)

    def _go_alone(self, reason: str, now: float) -> None:
        self._timers.clear()
        self._move(State.IDLE)
        self._num_exchanged[self.current.fragment] += 1
        if self.current.failure and reason != self.current.failure:
            reason = f"{self.current.failure}, and {reason}"
        self._outputs.append(GoAlone(self.round, reason))
        self._follow(now)

    # Looking for a partner

    def _seek(self, now: float) -> None:
        """Plan the next proposal; if no peer is left to ask and the node is ready, go on alone."""
        current, ask_at = self.current, math.inf
        if not self._is_saving and current.num_proposals < MAX_PROPOSALS:
            left = self._left()
            next_at = (
                0.0 if left - current.ask_at.keys() else min(map(current.ask_at.__getitem__, left), default=math.inf)
            )
            ask_at = max(current.propose_at, 0.0 if self._to_ask_again(now) else next_at)
        if ask_at < self.wait_ends_at:
            self._timers[_Timer.PROPOSE] = max(ask_at, now)
            return
        self._timers.pop(_Timer.PROPOSE, None)
        if self.current.is_ready:
            reason = f"no peer is {'free' if self._order.peers else 'live'}"
            self._go_alone("this node saves its traffic" if self._is_saving else reason, now)

    def _propose(self, now: float) -> None:
        askable = self._left() - {peer for peer, at in self.current.ask_at.items() if at > now}
        best, nearest = self._order.nearest(askable)
        if best > 0 and (again := self._to_ask_again(now)):
            peer = self._rng.choice(sorted(again))
            self.current.matched[peer] = False
        elif nearest:
            peer = self._rng.choice(sorted(nearest))  # so that one seed chooses the same in every process
        else:
            self._seek(now)
            return
        session = self._rng.randbytes(SESSION_BYTES)
        if self._num_fragments > 1:  # a session's last byte is the proposal's fragment
            session = session[:-1] + bytes((self.current.fragment,))
        self._bond = Bond(peer, session, is_proposer=True)
        self.current.num_proposals += 1
        self._timers[_Timer.OTHER] = now + self._waits.answer
        self._move(State.PROPOSED)
        self._send(peer, messages.Propose(self._bond.session, self.current.seconds_left(now)))

    def _agree(self, bond: Bond, seconds_left: float | None, now: float) -> None:
        self._bond = bond
        if (fragment := self._fragment_of(bond.session)) != self.current.fragment:
            self._use_fragment(fragment)
        self._timers.pop(_Timer.PROPOSE, None)
        self._timers.pop(_Timer.OTHER, None)
        self._move(State.MATCHED)
        if self.current.is_ready:
            if not self._config.takes_steps(self.round):  # the partner is ready within `Waits.meeting`, by its word
                at = min(now + 2 * self._waits.meeting, self.current.ready_at + self._waits.longest)
                self._timers[_Timer.PATIENCE] = max(at, self.wait_ends_at)
            self._await_partner(bond, now)
        elif self._config.round_seconds and seconds_left is not None:
            own_left = self.current.seconds_left(now) or 0.0
            self._end_box_at(now + (own_left + seconds_left - self.current.long_step) / 2)  # with the nearest step

    def _part(self, ask_again_at: float) -> None:
        """Drop a failed proposal or a lost partner; this peer is not asked again before ``ask_again_at``."""
        if self._bond is None:
            raise LocalProtocolError("nobody to part from")
        if self._bond.peer in self._order.peers:
            self.current.ask_at[self._bond.peer] = ask_again_at
        self._bond = None
        self._timers.pop(_Timer.OTHER, None)
        self._end_box_at(self.current.started_at + self._config.round_seconds)  # as before the agreement
        self._move(State.SEEKING)

    def _seek_another(self, now: float, ask_again_at: float = math.inf) -> None:
        self._part(ask_again_at)
        self._seek(now)

    def _withdraw(self) -> None:
        """Withdraw an outstanding proposal or an agreement, if there is one."""
        if self._bond and self.state in (State.PROPOSED, State.MATCHED):
            self._send(self._bond.peer, messages.Withdraw(self._bond.session))

    def _end_box_at(self, at: float) -> None:
        length = self._config.round_seconds
        earliest = self.current.started_at + (1 - MAX_BOX_SHIFT) * length
        latest = self.current.started_at + (1 + MAX_BOX_SHIFT) * length
        if _Timer.BOX in self._timers:  # else the box is over, and the trainer only ends its last inner step
            self.current.ends_at = self._timers[_Timer.BOX] = min(max(at, earliest), latest)

    @property
    def _retry_after(self) -> float:
        is_over = self.state in (State.EXCHANGING, State.IDLE)
        return self._waits.retry_after(self.round + is_over)

    # Fragments

    def _use_fragment(self, fragment: int) -> None:
        self.current.fragment = fragment
        if self._num_fragments > 1:
            self._outputs.append(UseFragment(self.round, fragment))

    def _fragment_of(self, session: bytes) -> int:
        """Return a session's fragment; raise `RemoteProtocolError` if there is no such fragment."""
        if self._num_fragments == 1:
            return 0
        if session[-1] >= self._num_fragments:
            raise RemoteProtocolError(f"a proposal for fragment {session[-1]} of {self._num_fragments}")
        return session[-1]

    # Peers

    def _set_peers(self, peers: frozenset[bytes], now: float) -> None:
        self._order.set_peers(peers)
        self.current.ask_at = {peer: at for peer, at in self.current.ask_at.items() if peer in self._order.peers}
        if self.state in (State.PROPOSED, State.MATCHED) and self._bond and self._bond.peer not in peers:
            self._withdraw()
            self._seek_another(now)
        elif self.state is State.SEEKING:
            self._seek(now)

    def _lose(self, peer: bytes, now: float) -> None:
        is_ours = self._bond is not None and self._bond.peer == peer
        if is_ours and self.state in (State.PROPOSED, State.MATCHED):  # an exchange ends by itself
            self._seek_another(now, ask_again_at=self._ask_lost_at(peer, now))

    def _ask_lost_at(self, peer: bytes, now: float) -> float:
        return math.inf if peer in self.current.ask_at else now + self._retry_after

    # Messages

    def _receive(self, peer: bytes, payload: bytes, now: float) -> None:
        if not self._meters.of(peer, now).take(now):
            raise RemoteProtocolError(f"more than {messages.MAX_MESSAGES} pairing messages a second")
        message = messages.decode_message(payload)
        bond = self._bond if self._bond is not None and self._bond.session == message.session else None
        if bond is not None and bond.peer != peer:
            raise RemoteProtocolError("a message about a session of two others")
        is_answer = bond is not None and self.state is State.PROPOSED
        match message:
            case messages.Propose() if is_answer:
                raise RemoteProtocolError("a proposal with the session of our own")
            case messages.Propose():
                self._receive_proposal(peer, message, now)
            case messages.Agree(seconds_left=seconds_left) if is_answer and bond is not None:
                wait = self._waits.between(self.current.seconds_left(now), seconds_left)
                if (late := wait - self._patience_with(peer, now)) <= 0.0:
                    self._agree(bond, seconds_left, now)
                else:  # by its own word
                    self._withdraw()
                    self._seek_another(now, ask_again_at=now + max(late, MIN_RETRY))
            case messages.Agree(session=session) if bond is None:
                self._send(peer, messages.Withdraw(session))
            case messages.Decline(reason=reason) if is_answer:
                if reason == "matched" and self._order.tier(peer) == 0:
                    self.current.matched.setdefault(peer, True)
                self._seek_another(now)
            case messages.Busy(retry_after=retry_after) if is_answer:
                self._seek_another(now, ask_again_at=now + max(retry_after, MIN_RETRY))
            case messages.Withdraw() if is_answer:
                self._seek_another(now)
            case messages.Withdraw() if bond is not None and self.state is State.MATCHED:
                if not self._is_early(now):
                    self._order.note_withdrawal(peer)
                self._seek_another(now)
            case messages.Ready(session=session) if bond is None or is_answer:
                self._send(peer, messages.Withdraw(session))
            case messages.Ready() if bond is not None and self.state is State.MATCHED:
                bond.is_partner_ready = True
                if self._config.round_seconds and self.current.ends_at is not None:  # end the box soon
                    self._end_box_at(min(self.current.ends_at, now + self._waits.patience))
                self._begin_if_both_ready(now)
            case messages.Begin() if bond is not None:  # else we gave up, and nothing awaits the stream that comes
                if bond.is_proposer or not self.current.is_ready:
                    raise RemoteProtocolError("an exchange begun by the wrong side, or before we are ready")
                if self.state is State.MATCHED:
                    self._exchange(bond, now)

    def _receive_proposal(self, peer: bytes, proposal: messages.Propose, now: float) -> None:
        self._fragment_of(proposal.session)
        is_of_ours = self._bond is not None and self._bond.peer == peer
        if is_of_ours and self.state is State.MATCHED:
            self._order.note_failure(peer)  # it has forgotten what we agreed on: it was restarted, or lies
            self._seek_another(now, ask_again_at=now)
        if is_of_ours and self.state is State.PROPOSED and self._bond and self._bond.session < proposal.session:
            return  # they cross, and ours holds: the peer accepts it
        answer = self._answer_to(peer, proposal, now)
        if isinstance(answer, messages.Agree) and not is_of_ours:
            self._withdraw()
            if self.state is State.MATCHED:
                self.current.has_given_up = True
                self._part(math.inf)
        self._send(peer, answer)
        if isinstance(answer, messages.Agree):
            self._agree(Bond(peer, proposal.session, is_proposer=False), proposal.seconds_left, now)

    def _answer_to(self, peer: bytes, proposal: messages.Propose, now: float) -> messages.Message:
        session = proposal.session
        match self.state:
            case State.AWAY:
                return messages.Decline(session, "away")
            case State.MATCHED if not self._gives_partner_up_for(peer, proposal.seconds_left, now):
                if self._order.tier(peer) == 0:
                    self.current.declined.add(peer)
                return messages.Decline(session, "matched")
            case State.EXCHANGING | State.IDLE:
                is_exchanging = self.state is State.EXCHANGING
                left = self._exchange_started_at + self._waits.exchange_seconds - now if is_exchanging else 0.0
                if self._waits.until_next_round(self.round, proposal.seconds_left, left) > self._waits.patience:
                    return messages.Decline(session, "matched")
                return messages.Busy(session, max(left, self._retry_after))
            case State.PROPOSED if (
                self._bond and self._bond.peer != peer and not self.current.comes_first(peer, self._bond)
            ):
                return messages.Busy(session, self._retry_after)
            case _ if self.current.is_ready and self._fragment_of(session) != self.current.fragment:
                return messages.Decline(session, "fragment")
            case _ if self._is_saving:
                return messages.Decline(session, "away")
        wait = self._waits.between(self.current.seconds_left(now), proposal.seconds_left)
        patience = self._patience_with(peer, now)
        if self._config.partners > 1 and proposal.seconds_left == 0.0:  # the peer will not wait for longer
            patience = min(patience, self._waits.meeting)
        patience *= 1 - ANSWER_SHARE  # the peer may be a little later than it says
        if wait > patience:
            return messages.Busy(session, max(wait - patience, self._retry_after))
        # a peer that this node has not heard of yet may be of another stage
        if peer not in self._order.peers or self._may_meet_another(peer, now):
            return messages.Busy(session, self._retry_after)
        return messages.Agree(session, self.current.seconds_left(now))

    def _gives_partner_up_for(self, peer: bytes, seconds_left: float | None, now: float) -> bool:
        """Return whether to swap: a peer in turn asks a second time, so it has no other left, and there is time.

        A partner that is put off is a last resort: given up for any better one; a later one for one that is ready.
        """
        assert self._bond is not None
        if self._bond.peer in self._order.put_off:
            return peer in self._order.peers and self._order.tier(peer) < self._order.tier(self._bond.peer)
        if self.current.failure and seconds_left == 0.0 and peer not in self._order.put_off:
            return not self._bond.is_partner_ready
        may_swap = self._is_early(now) and not self._bond.is_partner_ready
        return may_swap and not self.current.has_given_up and peer in self.current.declined

    def _is_early(self, now: float) -> bool:
        """Return whether a partner that is given up now has time to find another."""
        seconds_left = self.current.seconds_left(now)
        return seconds_left is not None and seconds_left > SWAP_SHARE * (self._waits.inner_seconds or 0.0)

    def _may_meet_another(self, peer: bytes, now: float) -> bool:
        """Return whether a peer of a lower tier may still be free in this round.

        A node that is ready after inner steps has asked them: else nodes that prefer each other in a circle would all
        be busy for the next one.
        """
        if not (tier := self._order.tier(peer)):
            return False
        left = self._left()
        if self.current.is_ready and self._config.takes_steps(self.round):
            left = left - self.current.ask_at.keys()
        return bool(self._to_ask_again(now)) or self._order.nearest(left)[0] < tier

    def _left(self) -> Set[bytes]:
        """Return the peers that this node may still ask; those that are put off once no other is left."""
        ends_at, asked = self.wait_ends_at, self.current.ask_at
        left = self._order.peers - {peer for peer, at in asked.items() if at >= ends_at}
        return left - self._order.put_off or left

    def _to_ask_again(self, now: float) -> frozenset[bytes]:
        """Return peers in turn that have a partner, and may give it up while there is time for that."""
        may_ask = self._is_early(now)
        return frozenset(peer for peer, may in self.current.matched.items() if may and may_ask) & self._order.peers

    def _send(self, peer: bytes, message: messages.Message) -> None:
        self._outputs.append(SendMessage(peer, messages.encode_message(message)))

    # Time

    def _fire(self, timer: _Timer, now: float) -> None:
        match timer:
            case _Timer.PROPOSE:
                self._propose(now)
            case _Timer.OTHER if self.state is State.PROPOSED:
                self._withdraw()
                self._seek_another(now)
            case _Timer.FOLLOW:
                self._follow(now)
            case _Timer.BOX:
                self._outputs.append(FinishRound(self.round))
            case _Timer.OTHER:
                asked, ends_at = self.current.ask_at, self.wait_ends_at
                if any(asked.get(peer, 0.0) < ends_at for peer in self._order.peers - {self.partner}):
                    self._give_partner_up()
                    self._seek(now)
            case _Timer.PATIENCE:
                is_matched = self.state is State.MATCHED
                if is_matched:
                    self._give_partner_up()
                elif self.state is not State.SEEKING:
                    self._withdraw()
                    self._part(math.inf)
                self._go_alone(NOT_READY if is_matched else "no partner in time", now)

    def _give_partner_up(self) -> None:
        """Withdraw from a partner that is late; its turn is used."""
        assert self._bond is not None, "the timer runs while there is a partner"
        self.current.let_down(NOT_READY)
        self._order.note_failure(self._bond.peer)
        self._order.note_meeting(self._bond.peer)
        self._withdraw()
        self._outputs.append(Missed(self._bond.peer))
        self._part(math.inf)

    def _move(self, state: State) -> None:
        if state not in FOLLOWING[self.state]:
            raise LocalProtocolError(f"pairing cannot be {state.value} after {self.state.value}")
        self.state = state

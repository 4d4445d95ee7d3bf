"""The state of one round of pairing, and how long a node waits in it for answers and partners."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from blake3 import blake3

from ..run.rules import RoundConfig

# Share of exchange_seconds for which a ready node waits for its partner; the rest is for transfer and decision.
WAIT_SHARE = 0.5
# A partner that is ready before its box ends (its trainer reached inner_steps) is met within this share of
# exchange_seconds, well before its patience (WAIT_SHARE) ends: the last inner step takes its time too.
MEETING_SHARE = 0.25
# In a round without inner steps a node waits for a partner for this many times the duration of its last exchange, at
# least for the seconds that follow: the others are in their exchanges, too. Simulated with 64 nodes, 2 instead of 3
# leaves half as many again without a partner, 4 a third fewer; and every node waits longer.
MEETING_WAIT, MIN_MEETING_WAIT = 3.0, 3.0
# An exchange with a peer that never completed one, while others fail, may take so many times the last one, and at least
# so many seconds: a responder has a fifth to ask for the decision. With 10, held exchanges cost a sixth of averages.
USUAL_TIMES, MIN_EXCHANGE = 4.0, 5.0
# From this share of a box on, an inner step decides when a round ends, and moving the box does not.
LONG_STEP = 2 / 3
# An answer to a proposal is overdue after this share of a round's inner steps, within these bounds in seconds: at
# least a round trip around the earth, at most a dial (8 s) and a round trip.
ANSWER_SHARE, MIN_ANSWER, MAX_ANSWER = 1 / 8, 1.0, 10.0
# A busy peer is asked again after this share of a round's inner steps, within these bounds in seconds.
RETRY_SHARE, MIN_RETRY, MAX_RETRY = 1 / 16, 0.05, 5.0
# Right before and in a round without inner steps it is asked again after this share of the wait for a partner instead.
MEETING_RETRY_SHARE = 1 / 12


@dataclass(slots=True)
class Waits:
    """The waits of one node, in seconds."""

    config: RoundConfig
    inner_seconds: float | None
    """The last round's inner steps; None: not known yet."""
    step_seconds: float = 0.0
    """An inner step of the last round; 0: not known yet."""
    exchange_seconds: float = 0.0
    """The last committed exchange; 0: there was none."""

    @property
    def long_step(self) -> float:
        """Return the duration of an inner step that is too long for a box to end where it is moved to; else 0."""
        return self.step_seconds if self.step_seconds > LONG_STEP * self.config.round_seconds > 0.0 else 0.0

    @property
    def longest(self) -> float:
        """Return for how long a ready node waits; as if exchanges took two rounds at most: the next have partners."""
        round_seconds = self.config.round_seconds or self.inner_seconds or math.inf
        return WAIT_SHARE * min(self.config.exchange_seconds, 2 * round_seconds)

    @property
    def meeting(self) -> float:
        """Return for how long a node waits for a partner that has ended its inner steps too."""
        return min(max(MEETING_WAIT * self.exchange_seconds, MIN_MEETING_WAIT), self.longest)

    @property
    def brief_exchange(self) -> float:
        """Return how long an exchange may take that others would hold open; without an earlier one, half of all."""
        return max(USUAL_TIMES * self.exchange_seconds if self.exchange_seconds else self.longest, MIN_EXCHANGE)

    @property
    def patience(self) -> float:
        """Return for how long one partner may wait for the other at the end of a round."""
        return self.longest * (MEETING_SHARE / WAIT_SHARE if self.config.round_seconds else 1.0)

    @property
    def answer(self) -> float:
        """Return after how long an answer to a proposal is overdue."""
        return min(max(ANSWER_SHARE * (self.inner_seconds or 0.0), MIN_ANSWER), MAX_ANSWER)

    def retry_after(self, round_: int) -> float:
        """Return after how long a busy peer is asked again; ``round_``: the one that the peer is in, or begins next."""
        takes_steps = self.config.takes_steps(round_)
        seconds = RETRY_SHARE * (self.inner_seconds or 0.0) if takes_steps else MEETING_RETRY_SHARE * self.meeting
        return min(max(seconds, MIN_RETRY), MAX_RETRY)

    def between(self, one: float | None, other: float | None) -> float:
        """Return how long one partner would wait for the other, if they are ready after ``one`` and ``other``."""
        if one is None or other is None:
            return 0.0
        if not self.config.round_seconds or self.long_step:
            return abs(one - other)
        return abs(one - other) / 2 if min(one, other) == 0 else 0.0  # both boxes move, unless one ended

    def until_next_round(self, round_: int, seconds_left: float | None, exchange_left: float) -> float:
        """Return how long a ready peer would wait for the end of the round after ``round_``; 0 if it is not ready."""
        if seconds_left != 0.0 or self.inner_seconds is None:
            return 0.0
        wait = max(exchange_left, 0.0)
        if not self.config.takes_steps(round_ + 1):
            return wait
        wait += self.inner_seconds
        return wait / 2 if self.config.round_seconds else wait


@dataclass(slots=True)
class Bond:
    """A proposal of ours that is outstanding, or the agreement with a partner."""

    peer: bytes
    session: bytes
    is_proposer: bool
    is_partner_ready: bool = False


@dataclass(slots=True)
class PairingRound:
    """State of one round; times are monotonic seconds."""

    fragment: int = 0
    order: bytes = b""
    """Key of the coins that decide whose proposal comes first; drawn at random."""
    started_at: float = 0.0
    long_step: float = 0.0
    """`Waits.long_step`: the round is expected to end with one."""
    ends_at: float | None = None
    """End of the box; without boxes the expected end, if known."""
    ready_at: float = math.inf
    propose_at: float = 0.0
    num_proposals: int = 0
    failure: str = ""
    """What first went wrong in this round, for people."""
    ask_at: dict[bytes, float] = field(default_factory=dict)
    """Live peer -> not before; infinity: not in this round."""
    matched: dict[bytes, bool] = field(default_factory=dict)
    """Peer in turn that declined a proposal because it has a partner -> whether it may be asked once more."""
    declined: set[bytes] = field(default_factory=set)
    """Peers in turn whose proposal this node declined because it has a partner."""
    has_given_up: bool = False
    """Whether a partner was given up for a peer that asked a second time; a higher limit leaves over no fewer."""

    @property
    def is_ready(self) -> bool:
        """Return whether the contribution is made."""
        return self.ready_at < math.inf

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the contribution is ready, None if unknown."""
        if self.is_ready or self.ends_at is None:
            return 0.0 if self.is_ready else None
        end = max(self.ends_at, now)
        if self.long_step:
            end = self.started_at + math.ceil((end - self.started_at) / self.long_step) * self.long_step
        return end - now

    def let_down(self, reason: str) -> None:
        """Note that a partner failed this node. All are asked again: theirs may have failed too."""
        self.failure = self.failure or reason
        self.ask_at.clear()

    def comes_first(self, peer: bytes, bond: Bond) -> bool:
        """Return whether a peer's proposals come before ours, ``bond``: half do; asking again changes nothing."""
        return blake3(peer + bond.session, key=self.order).digest()[0] % 2 == 0

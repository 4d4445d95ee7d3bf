"""What a node knows of its part in the pipeline: its schedule of inner steps, its microbatches, links and neighbours.

`farandole.protocol.stages.pipeline` handles the events, with the decisions that are here: when a step is taken, what
the trainer does next, which links are opened, what is promised on them, which of them a microbatch takes, and which
neighbours are avoided.
"""

from __future__ import annotations

import enum
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from ..run.manifest import PipelineConfig
from ..trainer.trainer_messages import Job, Train, Validate
from ..wire.bounds import Latest
from .activations import MAX_CREDITS
from .pipeline_events import NodesChanged

# Schedule of inner steps: the step that a microbatch is for, when a step is taken, and when the round is over.
#
# Each node takes inner steps on its own. When it has begun its quota of microbatches, it begins no more until all of
# them have ended, and then steps. So a microbatch meets the same weights in its forward and backward pass.
#
# **Overlap.** Waiting for the last microbatches leaves a node idle in every step, for as long as a microbatch takes.
# With ``overlap`` the node begins the *following* step's microbatches while it waits, with the weights from before the
# step, which the trainer keeps for their backward passes. Their gradients are one step late (as all are in
# PipeDream-2BW, arXiv 2006.09503, section 3.1). A round that the next one follows at once ends with the step that is
# under way, and keeps what was begun for the following step.

# Time for a round's last microbatches to end; half of it for them to arrive here. Where the next round's microbatches
# begin during this time, the limit is twice the duration of the slowest recent one, if that is more.
DRAIN_SECONDS = 5.0
# Number of recent arrivals that show the age of arriving microbatches, and of recent ends that show their duration.
NUM_AGES = 32

Move = Literal["step", "drained", "next"]
"""``step``: take the inner step. ``drained``: the round is over. ``next``: this step kept nothing, so skip it."""


@dataclass(slots=True, eq=False)
class InnerStep:
    """Counts of the microbatches of one inner step."""

    num_begun: int = 0
    num_open: int = 0
    """Begun microbatches of which the trainer still holds something."""
    num_kept: int = 0
    until: float = math.inf
    """Time from which no more are begun for it."""


class Schedule:
    """One node's schedule. ``quota``: microbatches of an inner step now; ``num_coming``: coming, not yet begun here."""

    def __init__(
        self, config: PipelineConfig, stage: int, *, quota: Callable[[], int], num_coming: Callable[[], int]
    ) -> None:
        self.round = 0
        self.is_open = False
        """True from the beginning of a round until it is drained."""
        self.current, self.following = InnerStep(), InnerStep()
        self.drain_until = math.inf
        """Time at which microbatches under way are dropped, at the end of a round."""
        self._config = config
        self._stage = stage
        self._quota = quota
        self._num_coming = num_coming
        self._is_ending = False
        self._is_followed = False
        self._is_stepping = False
        self._steps_left: float = 0
        self._begin_until = math.inf
        self._arrived_at = -math.inf
        self._ages: deque[float] = deque(maxlen=NUM_AGES)
        self.durations: deque[float] = deque(maxlen=NUM_AGES)
        """Seconds from the beginning of a microbatch here until it was kept, of the newest ones."""

    # Rounds

    def begin_round(self, train: Train) -> None:
        """Begin a round: microbatches may be begun."""
        self.round, self.is_open, self._is_ending = train.round, True, False
        self._steps_left, self._is_followed = train.max_steps or math.inf, train.is_followed and self._config.overlap
        self._begin_until = math.inf

    def end_round(self, now: float) -> None:
        """End the round: its time is up, or its steps are taken."""
        if self.is_open and not self._is_ending:
            self._is_ending = True
            drain = DRAIN_SECONDS
            if self._is_followed:
                drain = max(drain, 2 * max(self.durations, default=0.0))
            drain = min(drain, self._config.microbatch_seconds)
            self._begin_until = now if self._stage == 0 else now + drain / 2
            self.drain_until = now + drain

    def is_draining_over(self, now: float) -> bool:
        """Return whether the time for this round's microbatches under way is up."""
        return now >= self.drain_until and not self._is_stepping

    def is_of_round(self, inner_step: InnerStep | None) -> bool:
        """Return whether ``inner_step`` is taken before the round ends."""
        return inner_step is self.current or not self._is_followed

    def _is_over(self, now: float) -> bool:
        """Return whether no more microbatches are begun for this round's steps.

        In an ending round, an origin stops at once. A later stage stops when the microbatches that origins have begun
        have arrived. If the next round follows at once, every stage stops: later microbatches may be for that round.
        """
        if not self._is_ending or self._is_followed or now >= self._begin_until:
            return self._is_ending
        return now >= self._quiet_at and not self._num_coming()

    @property
    def _quiet_at(self) -> float:
        """Time by which all microbatches should have arrived: twice the largest recent age after the last arrival."""
        return self._arrived_at + 2 * max(self._ages, default=0.0)

    # Microbatches

    def begin(self, now: float) -> InnerStep:
        """Begin a microbatch, and return the inner step that it is for. Call `may_begin` first."""
        inner_step = self.may_begin(now)
        assert inner_step is not None, "it was asked before"
        inner_step.num_begun += 1
        inner_step.num_open += 1
        inner_step.until = min(inner_step.until, now + self._config.microbatch_seconds)
        return inner_step

    def note_arrival(self, age: float, now: float) -> None:
        """Note that a microbatch begins to arrive, ``age`` seconds after it was drawn."""
        self._ages.append(age)
        self._arrived_at = now

    def may_begin(self, now: float) -> InnerStep | None:
        """Return the inner step for which a microbatch may be begun; None if none may."""
        if not self.is_open:
            return None
        is_over = self._is_over(now)
        if not is_over and not self.following.num_begun and self._is_wanting(self.current, now):
            return self.current
        has_following = self._config.overlap and (self._is_followed or (not is_over and self._steps_left > 1))
        return self.following if has_following and self._is_wanting(self.following, now) else None

    def _is_wanting(self, inner_step: InnerStep, now: float) -> bool:
        return inner_step.num_begun < self._quota() and now < inner_step.until

    # Steps

    def move_on(self, now: float) -> Move | None:
        """Make the move that is due when the current step has nothing under way, and return it; None if none is due."""
        if not self.is_open or self._is_stepping or self.current.num_open or self.may_begin(now) is self.current:
            return None
        if self.current.num_kept:
            self._is_stepping = True
            self._shift()
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.end_round(now)
                self._begin_until = now
            return "step"
        if self._is_over(now) and (self._is_followed or not self.following.num_begun):
            self._shift()
            self._close()
            return "drained"
        if self.current.num_begun:
            self._shift()
            return "next"
        return None

    def stepped(self, now: float) -> bool:
        """Note that the step is taken, and return whether that ends the round."""
        self._is_stepping = False
        is_over = self._is_over(now) and self._is_followed
        if is_over:
            self._close()
        return is_over

    def _shift(self) -> None:
        self.current, self.following = self.following, InnerStep()

    def _close(self) -> None:
        self.is_open = False
        self.drain_until = math.inf

    @property
    def deadlines(self) -> list[float]:
        """Times at which a move may be due."""
        return [self._begin_until, self._quiet_at, self.drain_until, self.current.until, self.following.until]


MAX_REASONS = 32
# Outcomes that an origin remembers for the nodes that ask.
MAX_OUTCOMES = 4_096


class LinkStep(enum.Enum):
    """The stages of a microbatch's way through this node."""

    COMING = "coming"  # its activations arrive
    QUEUED = "queued"  # for the forward pass
    STARTING = "starting"  # the forward pass, or drawing it
    ROUTING = "routing"  # choosing its next hop
    OUT = "out"  # at later stages
    HOME_COMING = "home coming"  # at its origin again, for the loss: its activations arrive
    HOME = "home"
    HOME_OUT = "home out"  # the loss's gradient is on its way
    RETURNING = "returning"  # the gradient of what this node has sent on is arriving
    RETURNED = "returned"  # and goes through the backward pass
    DONE = "done"  # its gradient is in the sum and sent back; waits for the origin's verdict
    ENDED = "ended"  # the trainer keeps its gradient, or takes it out of the sum


UNTOUCHED = frozenset({LinkStep.COMING, LinkStep.QUEUED, LinkStep.STARTING, LinkStep.ROUTING})
"""No later stage has seen it."""
SUMMED = frozenset({LinkStep.HOME_OUT, LinkStep.DONE})
"""Some of its gradient is in the sum."""

GIVEN_BACK = frozenset({LinkStep.RETURNED, LinkStep.DONE})
"""The gradient is here: later stages have no more to give."""

Hop = tuple[int, int]
"""A link, and the index of a microbatch on it."""


@dataclass(slots=True, eq=False)
class Microbatch:
    """A microbatch that is at this node, or has been here and is not settled."""

    ticket: bytes
    origin: bytes
    slot: int
    deadline: float
    step: LinkStep
    is_held_out: bool = False
    """Whether only its loss is measured: it trains nothing, belongs to no inner step, and never comes back."""
    number: int = 0
    """Number of a held-out microbatch at its origin."""
    inward: Hop | None = None
    """The hop it came from; where it was drawn, the hop by which it came back."""
    onward: Hop | None = None
    """The next hop."""
    tried: list[bytes] = field(default_factory=list)
    """The peer of each hop that refused or lost it."""
    sender: bytes = b""
    """The peer that sent its newest activations or gradient."""
    begun_at: float = math.inf
    sent_at: float = math.inf
    ask_at: float = math.inf
    has_begun: bool = False
    """Whether the trainer holds something of it."""
    is_kept: bool | None = None
    """Whether its gradient is kept; None: it has not ended."""
    inner_step: InnerStep | None = None
    """The inner step that it was begun for."""


class Microbatches:
    """The microbatches at a node, each in its own slot, and the outcomes of the newest ones drawn here."""

    def __init__(self, num_slots: int) -> None:
        self.by_ticket: dict[bytes, Microbatch] = {}
        self.free_slots = set(range(num_slots))
        self.outcomes: Latest[bytes, bool] = Latest(MAX_OUTCOMES)
        """Whether a microbatch that was drawn here was kept, once it has ended."""

    def at(self, *steps: LinkStep) -> list[Microbatch]:
        """Return the microbatches that are at any of these steps."""
        return [microbatch for microbatch in self.by_ticket.values() if microbatch.step in steps]

    def add(self, ticket: bytes, origin: bytes, deadline: float, step: LinkStep) -> Microbatch:
        """Add a microbatch in the first free slot. There must be one."""
        microbatch = Microbatch(ticket, origin, min(self.free_slots), deadline, step)
        self.free_slots.remove(microbatch.slot)
        self.by_ticket[ticket] = microbatch
        return microbatch

    def release(self, microbatch: Microbatch) -> None:
        """Remove a microbatch, and free its slot."""
        del self.by_ticket[microbatch.ticket]
        self.free_slots.add(microbatch.slot)

    def outcome(self, ticket: bytes) -> bool | None:
        """Return whether a microbatch drawn here is kept; None if it has not ended, False if it is unknown."""
        return self.outcomes.get(ticket, None if ticket in self.by_ticket else False)


@dataclass(slots=True)
class MicrobatchLink:
    """A link to another node, and what is on it."""

    peer: bytes
    is_upstream: bool
    """Whether we are its upstream node."""
    is_return: bool
    credits: int = 0
    """Credits given by its downstream node, in total."""
    num_told: int = 0
    """Credits that its upstream node knows of, where this node is the downstream one."""
    num_forwarded: int = 0
    heard_at: float = 0.0
    wait_until: float = -math.inf
    """Time until which nothing is sent, since its downstream node has refused something."""
    open: dict[int, Microbatch] = field(default_factory=dict)

    @property
    def free(self) -> int:
        """Number of credits left."""
        return self.credits - self.num_forwarded


@dataclass(slots=True)
class Counts:
    """Counts of how this node's microbatches ended since it began."""

    begun: int = 0
    kept: int = 0
    dropped: int = 0
    rerouted: int = 0
    taken_out: int = 0
    """Dropped when all or part of their gradient was in the sum."""
    refused: int = 0
    """Arrived and were not accepted."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons of drops; at most `MAX_REASONS`, since some are text from peers."""

    def note(self, reason: str) -> None:
        """Count a reason."""
        is_new = reason not in self.reasons and len(self.reasons) >= MAX_REASONS
        self.reasons["other reasons" if is_new else reason] += 1


class HeldOut:
    """The held-out microbatches at their origin. Each is drawn until it has come back, or was lost too often."""

    def __init__(self) -> None:
        self.validate = Validate(0)
        """The command for the trainer once all have ended."""
        self.waiting: deque[int] = deque()
        """The numbers of the next ones to draw."""
        self._draws_left: dict[int, int] = {}  # of the unfinished ones

    def begin(self, validate: Validate, num_microbatches: int, max_draws: int) -> None:
        """Start a new measurement; ignore what is under way."""
        self.validate = validate
        self._draws_left = dict.fromkeys(range(num_microbatches), max_draws)
        self.waiting = deque(self._draws_left)

    def note_missing(self, number: int) -> None:
        """Note that the text has no microbatch ``number``, so no later one either, and draw no more."""
        self.waiting.clear()
        self._draws_left = {number: 1} if number in self._draws_left else {}

    def note_measured(self, number: int) -> None:
        """Note that the microbatch has its loss. It is not drawn again, however it ends."""
        if number in self._draws_left:
            self._draws_left[number] = 1

    def note_end(self, number: int) -> bool:
        """Note that a microbatch has ended; draw it again if it was lost. Return whether it was the last one."""
        if number not in self._draws_left:
            return False
        self._draws_left[number] -= 1
        if self._draws_left[number]:
            self.waiting.append(number)
            return False
        del self._draws_left[number]
        return not self._draws_left


# Jobs that the trainer has at once: one under way, and one that waits, so that the trainer is never idle.
MAX_JOBS = 2
# Jobs that free memory come first. Forward passes, and draws after them, run as the inner step allows.
_PRIORITIES: tuple[Job, ...] = ("backward", "tail", "forward")


class MicrobatchJobs:
    """The jobs that wait, and the jobs that the trainer has, which it does in order."""

    def __init__(self) -> None:
        self.given: deque[tuple[Job, Microbatch]] = deque()
        """The oldest first."""
        self.waiting: dict[Job, deque[Microbatch]] = {job: deque() for job in _PRIORITIES}

    def take(self, *, may_begin: bool) -> tuple[Job, Microbatch] | None:
        """Remove the most urgent waiting job, and return it.

        Unless ``may_begin``, the only forward passes are of held-out microbatches.
        """
        for job, waiting in self.waiting.items():
            may_do = job != "forward" or may_begin
            microbatch = next((each for each in waiting if may_do or each.is_held_out), None)
            if microbatch is not None:
                waiting.remove(microbatch)
                return job, microbatch
        return None

    def discard(self, microbatch: Microbatch) -> None:
        """Discard the waiting jobs of a microbatch."""
        for waiting in self.waiting.values():
            if microbatch in waiting:
                waiting.remove(microbatch)


# Links to nodes of the next stage that are kept open: enough choice to be random, few enough that each has credits.
MAX_NEXT_HOPS = 8
# A node waits for this time before it tries a lost link again, or one over which a microbatch was refused.
RETRY_INTERVAL = 2.0
# Microbatches that wait for their forward pass: one that arrives while the one before is computed, and one to spare.
MIN_AHEAD = 2


class Dialling:
    """Decides which links this node opens."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._under_way: set[tuple[bytes, bool]] = set()
        self.not_before: dict[bytes, float] = {}
        """When a link to a node of the next stage that was lost, or could not be opened, is tried again."""

    def note_answer(self, peer: bytes, is_return: bool) -> None:
        """Note that a link was opened, or could not be."""
        self._under_way.discard((peer, is_return))

    def choose(
        self, links: Iterable[MicrobatchLink], peers: Iterable[bytes], now: float, *, is_return: bool
    ) -> list[bytes]:
        """Choose the peers to open links to now: all origins, or nodes of the next stage.

        These are drawn at random, up to `MAX_NEXT_HOPS` in all.
        """
        known = {(link.peer, link.is_return) for link in links if link.is_upstream} | self._under_way
        chosen = [
            peer for peer in peers if (peer, is_return) not in known and self.not_before.get(peer, -math.inf) <= now
        ]
        if not is_return:
            num_wanted = max(0, min(MAX_NEXT_HOPS - len(known), len(chosen)))
            chosen = self._rng.sample(sorted(chosen), num_wanted)
        self._under_way.update((peer, is_return) for peer in chosen)
        return sorted(chosen)


def grant(
    links: Mapping[int, MicrobatchLink],
    nodes: NodesChanged,
    in_flight: int,
    ahead: int,
    *,
    num_free: int,
    num_waiting: int,
    is_starving: bool,
) -> int:
    """Promise the free slots, each to the link from the stage before with the least; return the next ``ahead``.

    So the microbatches sent to this node are limited to its slots (``in_flight``, of which ``num_free`` are free), and
    to its trainer's speed. A returning microbatch has its slot already. So its link gets twice as many credits as there
    are slots, and new ones when half of them are used: a message for each would cost more than it is worth.
    ``ahead``: microbatches that may wait for their forward pass, at first `MIN_AHEAD`; ``num_waiting``: those that do,
    or are arriving; ``is_starving``: the trainer has nothing to do, although it may begin a microbatch.
    """
    for link in links.values():
        if link.is_return and not link.is_upstream and link.free < in_flight:
            link.credits = link.num_forwarded + min(2 * in_flight, MAX_CREDITS)
    previous = [link for link in links.values() if not link.is_upstream and not link.is_return]
    num_promised = sum(link.free for link in previous)
    # A few microbatches wait for their forward pass, and the trainer never waits. More at a slow node would only be
    # late, and delay the steps of the stages before.
    if num_waiting > MIN_AHEAD:
        ahead = max(MIN_AHEAD, ahead - 1)
    elif not num_waiting and is_starving and num_promised > 0:
        ahead = min(in_flight, ahead + 1)
    # A link's share of the slots. Promises cannot be taken back, so expected links are counted too.
    num_expected = math.ceil(nodes.num_previous * min(1.0, MAX_NEXT_HOPS / max(1, nodes.num_own)))
    share = max(1, in_flight // max(1, len(previous), num_expected))
    may_promise = min(num_free, ahead - num_waiting)
    while previous and num_promised < may_promise:
        least = min(previous, key=lambda link: link.free + len(link.open))
        if least.free + len(least.open) >= share:
            break
        least.credits += 1
        num_promised += 1
    return ahead


def choose_hop(
    links: Mapping[int, MicrobatchLink], microbatch: Microbatch, now: float, rng: random.Random
) -> int | None:
    """Draw the link over which a microbatch goes on, in proportion to the credits left; None: it waits.

    ``links``: the links towards its destination. A peer that has refused or lost it is the last resort.
    """
    hops = {
        number: link.free
        for number, link in links.items()
        if link.is_upstream and link.free > 0 and link.wait_until <= now
    }
    untried = {number: free for number, free in hops.items() if links[number].peer not in microbatch.tried}
    hops = untried or hops
    return rng.choices(list(hops), list(hops.values()))[0] if hops else None


# A peer's last `NUM_REMEMBERED` microbatches are remembered; `MAX_OUTLIERS` or `MAX_LOST` among them are too many. One
# honest microbatch in a thousand is an outlier: three in 16 occur by chance once in two million microbatches.
NUM_REMEMBERED = 16
MAX_OUTLIERS = 3
MAX_LOST = 12
# Seconds for which a peer is avoided: the first time, and at most. Short at first, because the direction of honest
# gradients turns in the first inner steps of a small model, and two nodes of two stages have no other peers. The
# doubling starts again if `FORGIVEN_AFTER` times the next duration has passed since the last avoidance ended.
FIRST_SECONDS, MAX_SECONDS = 10.0, 86_400.0
FORGIVEN_AFTER = 10
# Peers that are remembered: twice the links of a node (`farandole.protocol.stages.pipeline.MAX_LINKS`).
MAX_PEERS = 2_048

LOSES_ALL = "its microbatches are lost, and those of others are not"


_newest = partial(deque[bool], maxlen=NUM_REMEMBERED)


@dataclass(slots=True)
class _Record:
    outliers: deque[bool] = field(default_factory=_newest)
    losses: deque[bool] = field(default_factory=_newest)
    seconds: float = FIRST_SECONDS
    """Duration of the next avoidance."""
    until: float = -math.inf


class Avoidance:
    """A node's memory of its neighbours, with some of which it exchanges no microbatches for a while.

    It outlives the trainer. Two things count against a peer. Data that it sends are an outlier, as this node's own
    trainer finds (`farandole.training.engine.link_statistics`). Or microbatches that go over it are lost elsewhere: if
    a node falsifies the data that it forwards, its next neighbour drops them, and the nodes before it see only that
    nothing returns. So a peer is also avoided if most of its microbatches are lost while most of the others' are kept.
    Losses that hit all peers alike count against none.

    A peer is avoided for twice as long each time. Nothing of this is sent to others. A microbatch that others report as
    dropped counts as a loss for the peer that it was sent to. To have an honest peer avoided, liars must make three
    quarters of all its microbatches fail, and less than half of the others', so a minority of liars cannot.
    """

    def __init__(self) -> None:
        self._of = Latest[bytes, _Record](MAX_PEERS)

    def is_avoided(self, peer: bytes, now: float) -> bool:
        """Return whether this peer is avoided at ``now``."""
        record = self._of.get(peer)
        return record is not None and now < record.until

    def until(self, now: float) -> list[float]:
        """Return the times at which the avoided peers are no longer avoided."""
        return [record.until for record in self._of.values() if record.until > now]

    def note_judged(self, peer: bytes, is_outlier: bool, now: float) -> float | None:
        """Note the trainer's verdict on a peer's data; return the seconds for which it is avoided from now, if any."""
        record = self._record(peer)
        record.outliers.append(is_outlier)
        return self._avoid(record, now) if sum(record.outliers) >= MAX_OUTLIERS else None

    def note_end(self, peer: bytes, is_kept: bool, now: float) -> float | None:
        """Note the end of a microbatch that went to a peer, or came from it. Returns the same as `note_judged`."""
        record = self._record(peer)
        record.losses.append(not is_kept)
        if sum(record.losses) < MAX_LOST:
            return None
        others = [is_lost for other in self._of.values() if other is not record for is_lost in other.losses]
        are_kept = len(others) >= NUM_REMEMBERED and 2 * sum(others) < len(others)
        return self._avoid(record, now) if are_kept else None

    def _avoid(self, record: _Record, now: float) -> float | None:
        record.outliers.clear()
        record.losses.clear()
        if now < record.until:
            return None
        if now > record.until + FORGIVEN_AFTER * record.seconds:
            record.seconds = FIRST_SECONDS
        seconds = record.seconds
        record.until = now + seconds
        record.seconds = min(2 * seconds, MAX_SECONDS)
        return seconds

    def _record(self, peer: bytes) -> _Record:
        record = self._of[peer] = self._of.get(peer) or _Record()
        return record

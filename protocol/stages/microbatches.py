"""State of each microbatch and each link at a node of the pipeline, and counts of how its microbatches ended."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from ..trainer.trainer_messages import Job
from .inner_steps import InnerStep

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
    """The hop it came from; None where it was drawn."""
    onward: Hop | None = None
    """The next hop."""
    homeward: Hop | None = None
    """The hop by which it came back to its origin."""
    tried: set[bytes] = field(default_factory=set)
    """Hops that refused or lost it."""
    sender: bytes = b""
    """The peer that sent its newest activations or gradient."""
    num_lost: int = 0
    """Number of times that a hop refused or lost it."""
    begun_at: float = math.inf
    sent_at: float = math.inf
    ask_at: float = math.inf
    has_begun: bool = False
    """Whether the trainer holds something of it."""
    is_working: bool = False
    """Whether the trainer has a job for it."""
    is_kept: bool | None = None
    """Whether its gradient is kept; None: it has not ended."""
    inner_step: InnerStep | None = None
    """The inner step that it was begun for."""


class Microbatches:
    """The microbatches at a node, each in its own slot, and the outcomes of the newest ones drawn here."""

    def __init__(self, num_slots: int) -> None:
        self.by_ticket: dict[bytes, Microbatch] = {}
        self._free_slots = set(range(num_slots))
        self._outcomes: OrderedDict[bytes, bool] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free_slots)

    def at(self, *steps: LinkStep) -> list[Microbatch]:
        """Return the microbatches that are at any of these steps."""
        return [microbatch for microbatch in self.by_ticket.values() if microbatch.step in steps]

    def add(self, ticket: bytes, origin: bytes, deadline: float, step: LinkStep) -> Microbatch:
        """Add a microbatch in the first free slot. There must be one."""
        microbatch = Microbatch(ticket, origin, min(self._free_slots), deadline, step)
        self._free_slots.remove(microbatch.slot)
        self.by_ticket[ticket] = microbatch
        return microbatch

    def release(self, microbatch: Microbatch) -> None:
        """Remove a microbatch, and free its slot."""
        del self.by_ticket[microbatch.ticket]
        self._free_slots.add(microbatch.slot)

    def note_outcome(self, microbatch: Microbatch) -> None:
        """Remember how a microbatch that was drawn here has ended."""
        self._outcomes[microbatch.ticket] = bool(microbatch.is_kept)
        if len(self._outcomes) > MAX_OUTCOMES:
            self._outcomes.popitem(last=False)

    def outcome(self, ticket: bytes) -> bool | None:
        """Return whether a microbatch drawn here is kept; None if it has not ended, False if it is unknown."""
        microbatch = self.by_ticket.get(ticket)
        is_undecided = microbatch is not None and microbatch.is_kept is None
        return None if is_undecided else self._outcomes.get(ticket, False)


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
        self._draws_left: dict[int, int] = {}  # of the unfinished ones
        self._waiting: deque[int] = deque()  # the unfinished ones that are not under way

    def begin(self, num_microbatches: int, max_draws: int) -> None:
        """Start a new measurement; ignore what is under way."""
        self._draws_left = dict.fromkeys(range(num_microbatches), max_draws)
        self._waiting = deque(self._draws_left)

    @property
    def is_waiting(self) -> bool:
        """Return whether there is a microbatch to draw."""
        return bool(self._waiting)

    def next(self) -> int:
        """Return the number of the next microbatch to draw."""
        return self._waiting.popleft()

    def note_missing(self, number: int) -> None:
        """Note that the text has no microbatch ``number``, so no later one either, and draw no more."""
        self._waiting.clear()
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
            self._waiting.append(number)
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
        self._waiting: dict[Job, deque[Microbatch]] = {job: deque() for job in _PRIORITIES}

    @property
    def has_room(self) -> bool:
        """Return whether the trainer may be given another job."""
        return len(self.given) < MAX_JOBS

    def add(self, job: Job, microbatch: Microbatch) -> None:
        """Add a job to the ones that wait."""
        self._waiting[job].append(microbatch)

    def take(self, *, may_begin: bool) -> tuple[Job, Microbatch] | None:
        """Remove the most urgent waiting job, and return it.

        Unless ``may_begin``, the only forward passes are of held-out microbatches.
        """
        for job, waiting in self._waiting.items():
            may_do = job != "forward" or may_begin
            microbatch = next((each for each in waiting if may_do or each.is_held_out), None)
            if microbatch is not None:
                waiting.remove(microbatch)
                return job, microbatch
        return None

    def give(self, job: Job, microbatch: Microbatch) -> None:
        """Note that the trainer has been given a job."""
        microbatch.is_working = True
        self.given.append((job, microbatch))

    def done(self) -> tuple[Job, Microbatch]:
        """Note that the trainer's oldest job is done, and return it."""
        job, microbatch = self.given.popleft()
        microbatch.is_working = False
        return job, microbatch

    def discard(self, microbatch: Microbatch) -> None:
        """Discard the waiting jobs of a microbatch."""
        for waiting in self._waiting.values():
            if microbatch in waiting:
                waiting.remove(microbatch)

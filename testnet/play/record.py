"""One node of a testnet over all its lives: the counters of a restarted daemon begin at 0, its record continues."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from farandole.node.status.status import (
    REFUSED_HERE,
    REFUSED_THERE,
    ExchangeStatus,
    NodeStatus,
    PipelineStatus,
    Resources,
)

# Growth of a node's use of its machine: memory, descriptors and tasks over one life.

# Caches fill and connections open in this time after the start; it does not predict the growth after it.
WARM_UP: Final = 600.0
# Seconds that a life must last in addition, for its growth to be more than chance.
LEAST_SPAN: Final = 900.0
SAMPLE_INTERVAL: Final = 20.0
# Samples of eight hours.
MAX_SAMPLES: Final = 1_440


class Growth(msgspec.Struct, frozen=True):
    """Growth from a life's first third to its last, by their medians, without the warm-up."""

    hours: float
    """Hours between the middles of the two."""
    memory: float
    """Share per hour: 0.01 is 1 %."""
    trainer_memory: float | None
    descriptors: float
    """Increase of their number."""
    tasks: float


@dataclass
class Samples:
    """The samples of one life; times are of one monotonic clock, in seconds."""

    taken: deque[tuple[float, Resources]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    _began_at: float | None = None

    def note(self, resources: Resources | None, now: float) -> None:
        """Keep a sample, if the last is old enough and the node is warm."""
        if self._began_at is None:
            self._began_at = now
        is_due = not self.taken or now - self.taken[-1][0] >= SAMPLE_INTERVAL
        if resources is not None and is_due and now - self._began_at >= WARM_UP:
            self.taken.append((now, resources))

    def growth(self) -> Growth | None:
        """Return the growth, or None if the life was too short to measure."""
        taken = [*self.taken]
        if not taken or taken[-1][0] - taken[0][0] < LEAST_SPAN:
            return None
        third = len(taken) // 3
        first, last = taken[:third], taken[-third:]
        hours = (statistics.median(at for at, _ in last) - statistics.median(at for at, _ in first)) / 3_600

        def medians(name: str) -> tuple[float, float]:
            before, after = ([getattr(resources, name) for _, resources in part] for part in (first, last))
            return _median(before), _median(after)

        def an_hour(name: str) -> float:
            before, after = medians(name)
            return (after / before - 1) / hours if before else 0.0

        # A node that has finished, or restarts its trainer, has no trainer for a while.
        has_trainer = all(any(resources.trainer_memory for _, resources in part) for part in (first, last))
        return Growth(
            hours=hours,
            memory=an_hour("memory"),
            trainer_memory=an_hour("trainer_memory") if has_trainer else None,
            descriptors=medians("descriptors")[1] - medians("descriptors")[0],
            tasks=medians("tasks")[1] - medians("tasks")[0],
        )


def _median(values: Sequence[float | None]) -> float:
    return float(statistics.median(value for value in values if value is not None))


# The time that a node spent in each condition, as the launcher set and saw them: the base of its throughput.
#
# The time given to a node is the time in which it is alive: all but absent and frozen seconds. So the cost of a fault
# is the work missing in the rest of the time: while the node is starved of its processor, cut off, without room on its
# disk, with a wrong clock, and above all while it recovers after a restart.

Condition = Literal["absent", "starting", "returning", "working", "frozen", "starved", "finished"]
"""``absent``: not started, or dead. ``starting``: until its first inner step; ``returning``: the same, started again or
thawed. ``working``: from then on, whether it trains or waits. ``finished``: every round is done."""


# Neither the node nor its partners can change these times.
NOT_GIVEN: Final = ("absent", "frozen", "finished")


@dataclass
class Ledger:
    """The seconds of one node by condition; times are of one monotonic clock."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each condition."""
    condition: Condition = "absent"
    there_since: float = 0.0
    """When the node was last started or thawed."""
    _since: float | None = None

    @property
    def given(self) -> float:
        """Return the seconds in which the node was alive, and not done."""
        return sum(seconds for condition, seconds in self.seconds.items() if condition not in NOT_GIVEN)

    def enter(self, condition: Condition, now: float) -> None:
        """Change the node's condition."""
        self.settle(now)
        if condition in ("starting", "returning"):
            self.there_since = now
        self.condition = condition

    def settle(self, now: float) -> None:
        """Count the time until now."""
        if self._since is not None:
            self.seconds[self.condition] += now - self._since
        self._since = now


COUNTERS: Final = ("exchanges_ok", "exchanges_alone", "exchanges_failed", "bytes_sent", "bytes_received")
"""Counters of a `NodeStatus`, which begin at 0 in each life."""
# The largest number of rounds of a scenario.
MAX_EXCHANGES: Final = 256
REFUSED: Final = (f"failed: {REFUSED_HERE}", f"failed: {REFUSED_THERE}")
"""The beginnings of the verdict on an exchange that the screening refused, here or at the partner."""


@dataclass
class NodeRecord:
    """Collects every status of a node; times are of one monotonic clock, in seconds."""

    index: int
    peer_id: str
    status: NodeStatus | None = None
    """The newest status."""
    seen_at: float | None = None
    died: bool = False
    """Whether the node ended by itself."""
    wedged: bool = False
    is_doomed: bool = False
    """Whether the node was ended on purpose, for good."""
    restarts: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    """Round -> mean training loss."""
    partners: Counter[str] = field(default_factory=Counter)
    """Counts of past lives; `all_partners` adds the present one's."""
    paths: Counter[str] = field(default_factory=Counter)
    """Counts of past lives; `all_paths` adds the present one's."""
    pipeline: PipelineStatus | None = None
    """The newest reported; None while its trainer is not running."""
    loss_first: float | None = None
    """Training loss of its first round."""
    num_parameters: int = 0
    """Largest number of parameters that its trainer held."""
    ledger: Ledger = field(default_factory=Ledger)
    trained_at: float | None = None
    """When a status last had more inner steps than the status before, in one life."""
    exchanges: dict[float, ExchangeStatus] = field(default_factory=dict)
    """The newest committed exchanges, by the time when they ended."""
    refused: set[float] = field(default_factory=set)
    """When exchanges ended that the screening of either partner refused; at most `MAX_EXCHANGES`."""
    samples: Samples = field(default_factory=Samples)
    """Samples of the present life."""
    growths: list[Growth] = field(default_factory=list)
    """Growths of past lives that were long enough."""
    _past: Counter[str] = field(default_factory=Counter)
    _advanced_at: float | None = None
    _position: tuple[int, int] = (0, 0)

    def observe(self, status: NodeStatus, now: float) -> None:
        """Add a status."""
        if self.status is not None and (status.pid, status.started_at) != (self.status.pid, self.status.started_at):
            self._past.update(_counters(self.status))
            self.partners.update(self.status.partners)
            self.paths.update(self.status.paths)
            self.restarts += 1
            self.growths = self.all_growths
            self.samples = Samples()
        elif self.status is not None and status.inner_steps > self.status.inner_steps:
            self.trained_at = now
            if self.ledger.condition in ("starting", "returning"):
                self.ledger.enter("working", now)
        self.status, self.seen_at = status, now
        if self.is_finished and self.ledger.condition != "finished":
            self.ledger.enter("finished", now)
        self._note_exchanges(status)
        self.samples.note(status.resources, now)
        self.losses.update(status.losses)
        self.pipeline = status.pipeline or self.pipeline
        self.num_parameters = max(self.num_parameters, status.num_parameters)
        if self.loss_first is None:
            self.loss_first = status.loss_first
        position = (status.round, status.inner_steps)
        if position != self._position:
            self._position, self._advanced_at = position, now

    def _note_exchanges(self, status: NodeStatus) -> None:
        for exchange in status.recent_exchanges:
            if exchange.verdict == "committed":
                self.exchanges[exchange.ended_at] = exchange
            elif exchange.verdict.startswith(REFUSED) and len(self.refused) < MAX_EXCHANGES:
                self.refused.add(exchange.ended_at)
        while len(self.exchanges) > MAX_EXCHANGES:
            del self.exchanges[min(self.exchanges)]

    def excuse(self, now: float) -> None:
        """Excuse the time without progress until now: the node was just started, or thawed."""
        self._advanced_at = now

    def check_progress(self, now: float, limit: float) -> bool:
        """Return whether the node is found wedged by this call: its training made no progress for ``limit`` seconds."""
        if self.wedged or self.is_finished or self._advanced_at is None or now - self._advanced_at < limit:
            return False
        self.wedged = True
        return True

    @property
    def is_finished(self) -> bool:
        """Return whether the node has trained every round."""
        return self.status is not None and self.status.phase == "finished"

    @property
    def round(self) -> int:
        """Return the current round, which is also the number of completed rounds."""
        return self.status.round if self.status else 0

    @property
    def stage(self) -> int | None:
        """Return the node's stage; None before it reports one."""
        return self.status.stage if self.status else None

    @property
    def is_in_pipeline(self) -> bool:
        """Return whether the trainer computes for a stage, or has done all its rounds."""
        return self.status is not None and (self.status.pipeline is not None or self.is_finished)

    @property
    def tokens(self) -> int:
        """Return the tokens trained on; a restarted daemon continues from its checkpoint's count."""
        return self.status.tokens if self.status else 0

    @property
    def loss_last(self) -> float | None:
        """Return the training loss of the newest round."""
        return self.losses[max(self.losses)] if self.losses else None

    @property
    def all_partners(self) -> Counter[str]:
        """Return peer id -> committed exchanges."""
        return self.partners + Counter(self.status.partners if self.status else {})

    @property
    def all_growths(self) -> list[Growth]:
        """Return the growth of each life that was long enough."""
        growth = self.samples.growth()
        return [*self.growths, *([growth] if growth else [])]

    @property
    def all_paths(self) -> Counter[str]:
        """Return the path of contributions ("bulk" or "stream") -> committed exchanges."""
        return self.paths + Counter(self.status.paths if self.status else {})

    def total(self, counter: str) -> int:
        """Return one of `COUNTERS` over all lives."""
        return self._past[counter] + (_counters(self.status)[counter] if self.status else 0)


def _counters(status: NodeStatus) -> dict[str, int]:
    return {name: getattr(status, name) for name in COUNTERS}


# Live nodes, however slow, that others take for dead.

# A node that was just started or thawed needs this time until others hear from it.
GRACE: Final = 15.0
_THERE: Final = ("working", "starved", "finished")


def false_deaths(records: Iterable[NodeRecord]) -> Iterator[tuple[int, int]]:
    """Yield (live node, observer whose latest status says that it is gone)."""
    records = [*records]
    for observer in records:
        status, seen_at = observer.status, observer.seen_at
        if status is None or seen_at is None or not _is_there(observer, seen_at):
            continue
        live = {member.peer_id for member in status.members if member.is_live or member.is_heard}
        for record in records:
            if record is not observer and _is_there(record, seen_at) and record.peer_id not in live:
                yield record.index, observer.index


def _is_there(record: NodeRecord, at: float) -> bool:
    return record.ledger.condition in _THERE and at - record.ledger.there_since >= GRACE


# Stages without a provider: when, and for how long.


@dataclass
class Vacancies:
    """Tracks the stages whose trainers run; a stage counts from its first provider on."""

    seconds: dict[int, float] = field(default_factory=dict)
    """The longest completed time without a provider, by stage."""
    _held: set[int] = field(default_factory=set)
    _empty_since: dict[int, float] = field(default_factory=dict)

    def observe(self, held: Collection[int], now: float) -> list[str]:
        """Record which stages are held, and return a line for each change."""
        news = []
        for stage in sorted(self._held.difference(held, self._empty_since)):
            self._empty_since[stage] = now
            news.append(f"nobody holds stage {stage}")
        for stage in sorted(self._empty_since.keys() & set(held)):
            seconds = now - self._empty_since.pop(stage)
            self.seconds[stage] = max(seconds, self.seconds.get(stage, 0.0))
            news.append(f"stage {stage} is held again, {seconds:.1f} s later")
        self._held.update(held)
        return news

    def problems(self, limit: float, now: float) -> list[str]:
        """Return stages that were, or have been, without a provider for too long."""
        longest = {**self.seconds}
        for stage, since in self._empty_since.items():
            longest[stage] = max(now - since, longest.get(stage, 0.0))
        return [
            f"nobody held stage {stage} for {seconds:.0f} s, more than {limit:g} s"
            for stage, seconds in sorted(longest.items())
            if seconds > limit
        ]

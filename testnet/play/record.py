"""One node of a testnet over all its lives: the counters of a restarted daemon begin at 0, its record continues."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from farandole.node.status.status import REFUSED_HERE, REFUSED_THERE, ExchangeStatus, NodeStatus, Resources

from .report import Growth, NodeReport

# Growth of a node's use of its machine: memory, descriptors and tasks over one life.

# Caches fill and connections open in this time after the start; it does not predict the growth after it.
WARM_UP: Final = 600.0
# Seconds that a life must last in addition, for its growth to be more than chance.
LEAST_SPAN: Final = 900.0
SAMPLE_INTERVAL: Final = 20.0
# Samples of eight hours.
MAX_SAMPLES: Final = 1_440


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
        parts = taken[:third], taken[third : 2 * third], taken[-third:]
        hours = (statistics.median(at for at, _ in parts[2]) - statistics.median(at for at, _ in parts[0])) / 3_600

        def medians(name: str) -> list[float]:
            return [_median([getattr(resources, name) for _, resources in part]) for part in parts]

        def an_hour(name: str) -> float:
            before, between, after = medians(name)
            return min(between - before, after - between) / before / (hours / 2) if before else 0.0

        # A node that has finished, or restarts its trainer, has no trainer for a while.
        has_trainer = all(any(resources.trainer_memory for _, resources in part) for part in parts)
        return Growth(
            hours=hours,
            memory=an_hour("memory"),
            trainer_memory=an_hour("trainer_memory") if has_trainer else None,
            descriptors=medians("descriptors")[2] - medians("descriptors")[0],
            tasks=medians("tasks")[2] - medians("tasks")[0],
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


# The largest number of rounds of a scenario.
MAX_EXCHANGES: Final = 256
REFUSED: Final = (f"failed: {REFUSED_HERE}", f"failed: {REFUSED_THERE}")
"""The beginnings of the verdict on an exchange that the screening refused, here or at the partner."""
# Fields that a status and a report have in common: those that begin at 0 in each life, and the others.
_COUNTERS: Final = ("exchanges_ok", "exchanges_alone", "exchanges_failed", "bytes_sent", "bytes_received")
_AS_TOLD: Final = ("inner_steps", "tokens", "utilisation", "resources")


@dataclass
class NodeRecord:
    """Writes every status of a node into its report; times are of one monotonic clock, in seconds."""

    report: NodeReport
    """What can be told of it now; `reported` completes it."""
    status: NodeStatus | None = None
    """The newest status."""
    seen_at: float | None = None
    ledger: Ledger = field(default_factory=Ledger)
    trained_at: float | None = None
    """When a status last had more inner steps than the status before, in one life."""
    _samples: Samples = field(default_factory=Samples)
    """Samples of the present life."""
    _past: NodeReport = field(default_factory=lambda: NodeReport(0, ""))
    """The report as it was when the present life began."""
    _exchanges: dict[float, ExchangeStatus] = field(default_factory=dict)
    """The newest committed exchanges, by the time when they ended."""
    _refused: dict[float, ExchangeStatus] = field(default_factory=dict)
    """Exchanges that the screening of either partner refused, by the time when they ended; at most `MAX_EXCHANGES`."""
    _advanced_at: float | None = None

    def observe(self, status: NodeStatus, now: float) -> None:
        """Add a status."""
        report, before = self.report, self.status
        if before is not None and (status.pid, status.started_at) != (before.pid, before.started_at):
            report.restarts += 1
            self._past = self.reported()
            self._samples = Samples()
        elif before is not None and status.inner_steps > before.inner_steps:
            self.trained_at = now
            if self.ledger.condition in ("starting", "returning"):
                self.ledger.enter("working", now)
        self.status, self.seen_at = status, now
        if self.is_finished and self.ledger.condition != "finished":
            self.ledger.enter("finished", now)
        if (status.round, status.inner_steps) != (report.rounds, report.inner_steps):
            self._advanced_at = now
        self._samples.note(status.resources, now)
        for exchange in status.recent_exchanges:
            if exchange.verdict == "committed":
                self._exchanges[exchange.ended_at] = exchange
            elif exchange.verdict.startswith(REFUSED) and len(self._refused) < MAX_EXCHANGES:
                self._refused[exchange.ended_at] = exchange
        while len(self._exchanges) > MAX_EXCHANGES:
            del self._exchanges[min(self._exchanges)]
        for name in _COUNTERS:
            setattr(report, name, getattr(self._past, name) + getattr(status, name))
        for name in ("partners", "paths"):
            setattr(report, name, dict(Counter(getattr(self._past, name)) + Counter(getattr(status, name))))
        for name in _AS_TOLD:
            setattr(report, name, getattr(status, name))
        report.rounds, report.exchanges_since_restart = status.round, status.exchanges_ok
        report.losses = sorted((dict(report.losses) | dict(status.losses)).items())
        report.loss_first = status.loss_first if report.loss_first is None else report.loss_first
        report.loss_last = report.losses[-1][1] if report.losses else None
        report.pipeline = status.pipeline or report.pipeline
        report.num_parameters = max(report.num_parameters, status.num_parameters)
        report.state_root = status.run.state_root
        report.links = {member.peer_id: member.path for member in status.members if member.path}

    def reported(self, *, is_alive: bool = False, home: str = "") -> NodeReport:
        """Return a copy of the report, completed."""
        exchanges, growth = [self._exchanges[at] for at in sorted(self._exchanges)], self._samples.growth()
        clipped = [exchange for exchange in exchanges if exchange.clip < 1.0]
        return msgspec.structs.replace(
            self.report,
            is_alive=is_alive,
            home=home,
            state_root=self.report.state_root if is_alive else "",
            condition_seconds=dict(self.ledger.seconds),
            given_seconds=self.ledger.given,
            exchange_seconds=[exchange.seconds for exchange in exchanges],
            exchange_bytes=min((exchange.bytes_sent for exchange in exchanges), default=0),
            exchanges_clipped=len(clipped),
            exchanges_refused=len(self._refused),
            touched=dict(Counter(exchange.partner for exchange in (*clipped, *self._refused.values()))),
            growths=[*self._past.growths, *([growth] if growth else [])],
        )

    def excuse(self, now: float) -> None:
        """Excuse the time without progress until now: the node was just started, or thawed."""
        self._advanced_at = now

    def check_progress(self, now: float, limit: float) -> bool:
        """Return whether the node is found wedged by this call: its training made no progress for ``limit`` seconds."""
        if self.report.wedged or self.is_finished or self._advanced_at is None or now - self._advanced_at < limit:
            return False
        self.report.wedged = True
        return True

    @property
    def is_finished(self) -> bool:
        """Return whether the node has trained every round."""
        return self.status is not None and self.status.phase == "finished"

    @property
    def stage(self) -> int | None:
        """Return the node's stage; None before it reports one."""
        return self.status.stage if self.status else None


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
            if record is not observer and _is_there(record, seen_at) and record.report.peer_id not in live:
                yield record.report.index, observer.report.index


def _is_there(record: NodeRecord, at: float) -> bool:
    return record.ledger.condition in _THERE and at - record.ledger.there_since >= GRACE


# Stages without a provider: when, and for how long.


@dataclass
class Vacancies:
    """Tracks the stages whose trainers run; a stage counts from its first provider on."""

    seconds: dict[int, float] = field(default_factory=dict)
    """The longest time without a provider, by stage."""
    _held: frozenset[int] = frozenset()
    _held_at: dict[int, float] = field(default_factory=dict)
    """Stage -> when it last had a provider."""

    def observe(self, held: Collection[int], now: float) -> list[str]:
        """Record which stages are held, and return a line for each change."""
        now_held, ago = frozenset(held), {stage: now - at for stage, at in self._held_at.items()}
        news = [f"nobody holds stage {stage}" for stage in sorted(self._held - now_held)]
        again = sorted((now_held & ago.keys()) - self._held)
        news += [f"stage {stage} is held again, {ago[stage]:.1f} s later" for stage in again]
        self.seconds = {stage: max(seconds, self.seconds.get(stage, 0.0)) for stage, seconds in ago.items()}
        self._held, self._held_at = now_held, {**self._held_at, **dict.fromkeys(held, now)}
        return news

    def problems(self, limit: float) -> list[str]:
        """Return stages that were, or have been, without a provider for too long."""
        return [
            f"nobody held stage {stage} for {seconds:.0f} s, more than {limit:g} s"
            for stage, seconds in sorted(self.seconds.items())
            if seconds > limit
        ]

"""Evaluations of a run by its members: which member evaluates which mark, and what the reports of several say.

A *mark* is a round that is a multiple of ``evaluation.every_rounds`` of the manifest. At each mark one member evaluates
its own newest checkpoint on the manifest's tasks, and reports the figures to all members. Only members whose owners
want it evaluate (*evaluators*): it takes computing time, and data sets are downloaded.

The evaluators that are here are ranked for each mark by rendezvous hashing, as in
`farandole.protocol.checkpoints.copies`. The first one leases the mark by an `Evaluator` entry when it has a checkpoint
of the mark. An evaluator gives way to the ones before it that lease or report the mark, and to idle ones for
`GRACE_SECONDS`: members save at different times. It never gives way to those behind it. A mark is over for an evaluator
once it has a checkpoint of the next one; so a slow evaluator leaves marks out, and others take these.

An evaluator *fails* if it lets its turn pass, holds a lease for longer than the run allows, or drops a lease without a
report. No other waits for it again until it reports. This includes honest evaluators whose
machine lacks a data set.

Who gains by lying? Nothing but the display follows from a figure, so a false one misleads people who believe its
author; the author is shown with it, and with three reports of a mark the median hides one liar. A lease without a
report, or none at all, delays a mark at each node once; the mark is lost if the run allows evaluations that are longer
than the time between two marks. False reports of all marks take away the marks at which the liar is
ranked before all honest evaluators that have reached it: one in N of N evaluators for each of its keys. Reports count
only from evaluators that are here, so keys must be connected nodes. If two evaluators have not reached each other, both
evaluate a mark, which costs time only.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ..state.entries import (
    MAX_FIGURES,
    MAX_METRIC_CHARS,
    MAX_TASK_CHARS,
    RULES,
    Evaluation,
    Kind,
    TaskFigure,
    payload_size,
)
from ..wire.identity import framed
from .evaluation_messages import MeasuredFigure

# Three intervals between checkpoints by default: the first evaluator's next checkpoint may be that much later.
GRACE_SECONDS: Final = 180.0
# From the end of a lease until the report must be here; both are pushed at once, but a report that is lost waits for
# the next sync.
REPORT_SECONDS: Final = 60.0
# Authors of one mark that a node keeps: more evaluators than a run has. The first ones count.
MAX_REPORTS: Final = 32
MICRO: Final = 1e6
_LARGEST: Final = 2**53  # of a `TaskFigure`
_MAX_BYTES: Final = RULES[Kind.EVALUATION].max_bytes


# Events


@dataclass(frozen=True, slots=True)
class Looked:
    """The state of things now."""

    round: int
    """Round of this node's newest checkpoint; 0: there is none."""
    evaluators: Mapping[bytes, int]
    """The other evaluators that are here -> the mark that each has leased, or 0."""
    reported: frozenset[tuple[bytes, int]]
    """Authors, this node included, and the marks of their reports."""
    is_free: bool = True
    """Whether this node may begin an evaluation."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The evaluation that `Evaluate` asked for is over, with or without a result."""


Event = Looked | Ended


# Output


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Lease this mark, evaluate the newest checkpoint, and report."""

    mark: int


def mark_of(round_index: int, every_rounds: int) -> int:
    """Return the last mark up to a round; 0: there is none, because initial weights are not evaluated."""
    return round_index // every_rounds * every_rounds


def ranked(run_id: bytes, mark: int, evaluators: Iterable[bytes]) -> list[bytes]:
    """Return the evaluators in the order in which they may take a mark, which is the same at every node."""

    def rank(evaluator: bytes) -> bytes:
        return hashlib.sha256(framed(b"farandole/evaluations/1", run_id, mark.to_bytes(8, "big"), evaluator)).digest()

    return sorted(evaluators, key=rank)


@dataclass(slots=True)
class _Held:
    """A lease of another evaluator."""

    mark: int
    since: float
    """When this node first saw it, monotonic seconds."""
    dropped_at: float | None = None


@dataclass(slots=True)
class Evaluations:
    """One evaluator's decisions. ``author``: its key; ``max_seconds``: the run's bound for one evaluation."""

    run_id: bytes
    author: bytes
    every_rounds: int
    max_seconds: float
    _held: dict[bytes, list[_Held]] = field(default_factory=dict)
    """Evaluator -> its leases without a report yet: the present one and dropped ones."""
    _failed: dict[bytes, int] = field(default_factory=dict)
    """Evaluator that no other waits for -> the mark at which it failed."""
    _mark: int = 0
    """The mark that this node waits to take or has tried."""
    _since: float = 0.0
    """When this node first had a checkpoint of it."""
    _is_tried: bool = True
    _is_busy: bool = False

    def handle(self, event: Event, now: float) -> list[Evaluate]:
        """Return the evaluation to begin, if there is one; ``now``: monotonic seconds."""
        if isinstance(event, Ended):
            self._is_busy = False
            return []
        self._watch(event, now)
        mark = mark_of(event.round, self.every_rounds)
        if mark > self._mark:
            self._blame_idle(event)
            self._mark, self._since, self._is_tried = mark, now, False
        if self._is_busy or self._is_tried or not event.is_free:
            return []
        if (self.author, mark) in event.reported:  # by an earlier life of this node
            self._is_tried = True
            return []
        if any(self._gives_way_to(rival, event, now) for rival in self._before(event)):
            return []
        self._blame_idle(event)
        self._is_tried = self._is_busy = True
        return [Evaluate(mark)]

    def _before(self, event: Looked) -> list[bytes]:
        """Return the evaluators that may take the present mark before this node."""
        order = ranked(self.run_id, self._mark, (*event.evaluators, self.author))
        return order[: order.index(self.author)]

    def _gives_way_to(self, rival: bytes, event: Looked, now: float) -> bool:
        if rival in self._failed:
            return False
        if (rival, self._mark) in event.reported:
            return True
        leased = event.evaluators[rival]
        return leased == self._mark or (not leased and now - self._since < GRACE_SECONDS)

    def _blame_idle(self, event: Looked) -> None:
        """Note the evaluators that had their turn at `_mark` and let it pass: until a newer one, or for too long."""
        if self._is_tried or self._is_busy:
            return
        for rival in self._before(event):
            if rival in self._failed:
                continue
            if (rival, self._mark) in event.reported or event.evaluators[rival] == self._mark:
                break  # those behind it give way rightly
            if not event.evaluators[rival]:
                self._failed[rival] = self._mark

    def _watch(self, event: Looked, now: float) -> None:
        """Follow the others' leases. What is remembered is of evaluators that are here: few, as each is connected."""
        for gone in self._held.keys() - event.evaluators.keys():
            del self._held[gone]
        for gone in self._failed.keys() - event.evaluators.keys():
            del self._failed[gone]
        for rival, mark in event.evaluators.items():
            held = [each for each in self._held.get(rival, ()) if (rival, each.mark) not in event.reported]
            for each in held:
                if each.mark != mark and each.dropped_at is None:
                    each.dropped_at = now
            if mark and (rival, mark) not in event.reported and all(each.mark != mark for each in held):
                held.append(_Held(mark, now))
            late = [each for each in held if self._is_late(each, now)]
            if late:
                self._failed[rival] = max(self._failed.get(rival, 0), *(each.mark for each in late))
            # A failed lease need not be followed, except the present one, which would begin again.
            self._held[rival] = [each for each in held if each not in late or each.mark == mark]
        for rival, failed_at in list(self._failed.items()):
            # Not of marks to come: with such a report it would never have failed.
            if any(author == rival and failed_at <= mark <= event.round for author, mark in event.reported):
                del self._failed[rival]

    def _is_late(self, lease: _Held, now: float) -> bool:
        if lease.dropped_at is not None:
            return now - lease.dropped_at > REPORT_SECONDS
        return now - lease.since > self.max_seconds + REPORT_SECONDS


# Reports


def micros(value: float) -> int | None:
    """Return a figure in millionths; None if it is not finite, or too large for an entry."""
    scaled = value * MICRO
    return round(scaled) if abs(scaled) <= _LARGEST else None  # False for NaN


def report_of(mark: int, round_index: int, measured: Iterable[MeasuredFigure], tasks: Collection[str]) -> Evaluation:
    """Return the entry with as many figures as fit; figures of ``tasks``, which the manifest names, come first.

    A figure that is not finite, or whose names are too long or not printable, is left out.
    """
    figures: list[TaskFigure] = []
    for each in sorted(measured, key=lambda figure: figure.task not in tasks):
        value, stderr = micros(each.value), None if each.stderr is None else micros(each.stderr)
        if value is None or not (_is_name(each.task, MAX_TASK_CHARS) and _is_name(each.metric, MAX_METRIC_CHARS)):
            continue
        more = [*figures, TaskFigure(each.task, each.metric, value, stderr)]
        if len(more) <= MAX_FIGURES and payload_size(Evaluation(mark, round_index, tuple(more))) <= _MAX_BYTES:
            figures = more
    return Evaluation(mark, round_index, tuple(figures))


def _is_name(text: str, max_chars: int) -> bool:
    return 0 < len(text) <= max_chars and text.isascii() and text.isprintable()


@dataclass(frozen=True, slots=True)
class Report:
    """A member's figures at a mark."""

    author: str
    """Peer id."""
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A metric of a task at a mark, by all members that reported it."""

    mark: int
    task: str
    metric: str
    value: float
    """The median of the members' values."""
    stderr: float | None
    """Standard error that the author of the median reported; None: not known, or the median is between two values."""
    lowest: float
    highest: float
    authors: tuple[str, ...]
    """Peer ids, the earliest report first."""


def curve_of(reports: Iterable[Report]) -> list[CurvePoint]:
    """Return the run's curve: by mark, then in the order in which tasks and metrics were first reported.

    The first report of an author at a mark counts, and a figure of it once.
    """
    found: dict[tuple[int, str, str], dict[str, TaskFigure]] = defaultdict(dict)
    for report in reports:
        for figure in report.evaluation.figures:
            found[report.evaluation.mark, figure.task, figure.metric].setdefault(report.author, figure)
    return [_point(*key, by_author) for key, by_author in sorted(found.items(), key=lambda item: item[0][0])]


def _point(mark: int, task: str, metric: str, by_author: Mapping[str, TaskFigure]) -> CurvePoint:
    values = [figure.value for figure in by_author.values()]
    median = statistics.median(values)
    errors = [figure.stderr for figure in by_author.values() if figure.value == median and figure.stderr is not None]
    return CurvePoint(
        mark=mark,
        task=task,
        metric=metric,
        value=median / MICRO,
        stderr=errors[0] / MICRO if errors else None,
        lowest=min(values) / MICRO,
        highest=max(values) / MICRO,
        authors=tuple(by_author),
    )


def is_plausible(evaluation: Evaluation, every_rounds: int, current_round: int) -> bool:
    """Return whether a report has figures, of a mark that the run has reached, and of weights that are not older.

    So the marks that a liar can report are as many as the run has.
    """
    mark = evaluation.mark
    return (
        bool(evaluation.figures) and 0 < mark <= current_round and mark % every_rounds == 0 and evaluation.round >= mark
    )

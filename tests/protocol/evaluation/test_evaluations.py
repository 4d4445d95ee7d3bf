"""Which member evaluates which mark, and what becomes of a run with evaluators that die or lie."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import msgspec
import pytest

from farandole.protocol.evaluation.evaluation_messages import EvaluationAnswer, MeasuredFigure, decode_answer
from farandole.protocol.evaluation.evaluations import (
    MICRO,
    REPORT_SECONDS,
    Ended,
    Evaluate,
    Evaluations,
    Looked,
    Report,
    curve_of,
    is_plausible,
    micros,
    ranked,
    report_of,
)
from farandole.protocol.state.entries import RULES, Evaluation, Kind, TaskFigure, payload_size
from farandole.protocol.wire.errors import LocalProtocolError
from farandole.protocol.wire.identity import peer_id_of

RUN_ID = b"r" * 32
EVERY, MAX_SECONDS = 10, 300.0
STEP = 10.0
ROUND_SECONDS = 60.0


def key(number: int) -> bytes:
    return bytes([number]) * 32


@dataclass
class Member:
    """An evaluator, as the world sees it."""

    author: bytes
    seconds: float = 100.0
    """Duration of an evaluation."""
    every_rounds: int = EVERY
    max_seconds: float = MAX_SECONDS
    machine: Evaluations = field(init=False)
    leased: int = 0
    ends_at: float = 0.0
    is_gone: bool = False
    round: int = 0
    """Of its newest checkpoint."""

    def __post_init__(self) -> None:
        self.machine = Evaluations(RUN_ID, self.author, self.every_rounds, self.max_seconds)

    def act(self, world: World) -> None:
        if self.leased and world.now >= self.ends_at:
            if self.seconds <= self.max_seconds:
                world.report(self, self.leased)
            self.leased = 0
            self.machine.handle(Ended(), world.now)
        for wanted in self.machine.handle(world.seen_by(self), world.now):
            self.leased = wanted.mark
            self.ends_at = world.now + min(self.seconds, self.max_seconds)


class Liar(Member):
    """Leases each mark at once, and never reports."""

    def act(self, world: World) -> None:
        self.leased = self.round // EVERY * EVERY


class Promiser(Liar):
    """Leases each mark, and has published a report of a mark that never comes."""

    def act(self, world: World) -> None:
        super().act(world)
        world.reports.setdefault((self.author, 10**6), 0.0)


class Idler(Member):
    """Says that it evaluates, and leases nothing."""

    def act(self, world: World) -> None:
        pass


class Forger(Member):
    """Reports each mark at once, out of turn, with a figure that it made up."""

    def act(self, world: World) -> None:
        if mark := self.round // EVERY * EVERY:
            world.report(self, mark)


class World:
    """Evaluators in virtual time; entries arrive at once."""

    def __init__(self, *members: Member) -> None:
        self.members = members
        self.now = 0.0
        self.reports: dict[tuple[bytes, int], float] = {}
        self.begun: Counter[int] = Counter()

    def seen_by(self, member: Member) -> Looked:
        others = {each.author: each.leased for each in self.members if each is not member and not each.is_gone}
        return Looked(member.round, others, frozenset(self.reports))

    def report(self, member: Member, mark: int) -> None:
        self.reports.setdefault((member.author, mark), self.now)

    def run(self, num_rounds: int) -> None:
        """Let this number of rounds pass."""
        end = self.now + num_rounds * ROUND_SECONDS
        while self.now < end:
            self.now += STEP
            for member in self.members:
                if not member.is_gone:
                    member.round = int(self.now // ROUND_SECONDS)
                    member.act(self)

    def authors_by_mark(self) -> dict[int, set[bytes]]:
        found: dict[int, set[bytes]] = defaultdict(set)
        for author, mark in self.reports:
            found[mark].add(author)
        return dict(found)


def honest(number: int) -> list[Member]:
    return [Member(key(each)) for each in range(1, number + 1)]


def test_one_evaluator_takes_all_marks_and_none_before_the_first() -> None:
    world = World(*honest(1))
    world.run(9)
    assert not world.reports
    world.run(42)
    assert world.authors_by_mark() == {mark: {key(1)} for mark in (10, 20, 30, 40)}


def test_several_share_the_marks_and_each_mark_has_one() -> None:
    members = honest(4)
    world = World(*members)
    world.run(403)
    by_mark = world.authors_by_mark()
    assert sorted(by_mark) == list(range(10, 401, 10))
    assert all(len(authors) == 1 for authors in by_mark.values())
    assert {author for authors in by_mark.values() for author in authors} == {each.author for each in members}
    for mark, (author,) in by_mark.items():
        assert author == ranked(RUN_ID, mark, [each.author for each in members])[0]


def test_a_slow_evaluator_leaves_out_the_marks_that_pass_while_it_evaluates() -> None:
    member = Member(key(1), seconds=590.0, every_rounds=2, max_seconds=600.0)  # marks are 120 s apart
    world = World(member)
    world.run(40)
    marks = sorted(world.authors_by_mark())
    assert marks[:3] == [2, 10, 20]
    assert all(after - before >= 8 for before, after in itertools.pairwise(marks))


def test_the_next_one_takes_over_from_a_dead_holder_in_the_same_mark() -> None:
    members = honest(3)
    first, second, _ = (next(each for each in members if each.author == author) for author in ranked_of(members, 10))
    world = World(*members)
    world.run(10)
    assert first.leased == 10
    first.is_gone = True
    world.run(4)
    assert world.authors_by_mark()[10] == {second.author}


def ranked_of(members: list[Member], mark: int) -> list[bytes]:
    return ranked(RUN_ID, mark, [each.author for each in members])


def test_the_next_one_takes_over_from_a_holder_that_takes_longer_than_the_run_allows() -> None:
    members = honest(2)
    first, second = (next(each for each in members if each.author == author) for author in ranked_of(members, 10))
    first.seconds = MAX_SECONDS + 1  # its process is killed then
    world = World(*members)
    world.run(10)
    assert (first.leased, second.leased) == (10, 0)
    world.run(4)
    assert (first.leased, second.leased) == (10, 0), "it waits as long as the run allows"
    world.run(6)
    assert world.authors_by_mark() == {10: {second.author}}
    world.run(85)
    by_mark = world.authors_by_mark()
    assert sorted(by_mark) == list(range(10, 101, 10))
    assert all(
        at - mark * ROUND_SECONDS <= second.seconds + 2 * STEP for (_, mark), at in world.reports.items() if mark > 10
    )


def test_deaths_and_comings_leave_no_mark_out() -> None:
    members = honest(5)
    world = World(*members)
    for step in range(60):
        gone = members[step % 5]
        gone.is_gone = step % 3 != 0
        gone.leased = 0
        gone.machine = Evaluations(RUN_ID, gone.author, EVERY, MAX_SECONDS)  # it comes back as a new process
        if all(each.is_gone for each in members):
            members[0].is_gone = False
        world.run(7)
    by_mark = world.authors_by_mark()
    last = int(world.now // ROUND_SECONDS) // EVERY * EVERY
    missing = [mark for mark in range(10, last, 10) if mark not in by_mark]
    assert not missing
    assert sum(map(len, by_mark.values())) < 2 * len(by_mark)


@pytest.mark.parametrize("kind", [Liar, Promiser, Idler])
@pytest.mark.parametrize("num_liars", [1, 5])
def test_leases_that_are_never_fulfilled_stop_no_other(kind: type[Member], num_liars: int) -> None:
    """The attack: keys that lease every mark, or only say that they evaluate, so that all others wait for them."""
    members = honest(2)
    liars = [kind(key(100 + number)) for number in range(num_liars)]
    world = World(*liars, *members)
    world.run(105)
    by_mark = world.authors_by_mark()
    by_mark.pop(10**6, None)
    assert sorted(by_mark) == list(range(10, 101, 10))
    assert set().union(*by_mark.values()) == {each.author for each in members}
    waited = {mark: at - mark * ROUND_SECONDS for (_, mark), at in world.reports.items() if mark in by_mark}
    assert max(waited.values()) <= MAX_SECONDS + REPORT_SECONDS + 100 + 4 * STEP
    assert waited[90] <= 100 + 2 * STEP, "no honest one waits for them any more"
    assert waited[100] <= 100 + 2 * STEP


def test_a_lease_that_is_held_for_ever_stops_no_other_at_later_marks() -> None:
    liar = Idler(key(100))
    liar.leased = 10
    world = World(liar, *honest(2))
    world.run(105)
    assert set(range(20, 101, 10)) <= set(world.authors_by_mark())


def test_reports_of_all_marks_take_away_those_of_the_liars_turn_alone() -> None:
    """The attack: false figures at each mark, so that no other measures it."""
    members, forger = honest(3), Forger(key(100))
    world = World(forger, *members)
    world.run(405)
    everyone = [forger.author, *(each.author for each in members)]
    for mark in range(10, 401, 10):
        authors = world.authors_by_mark()[mark]
        assert forger.author in authors
        if ranked(RUN_ID, mark, everyone)[0] != forger.author:
            assert len(authors) > 1, f"mark {mark} is measured by an honest member, too"
    measured = sum(len(authors) > 1 for authors in world.authors_by_mark().values())
    assert measured > 20


def test_an_evaluator_that_failed_is_waited_for_again_once_it_reports() -> None:
    me, other = key(1), key(2)
    machine = Evaluations(RUN_ID, me, EVERY, MAX_SECONDS)
    mark = next(mark for mark in range(20, 10_000, 10) if ranked(RUN_ID, mark, [me, other])[0] == other)
    before = mark - EVERY
    machine.handle(Looked(before - 1, {other: before}, frozenset()), 0.0)
    machine.handle(Looked(before - 1, {other: 0}, frozenset()), 1.0)
    late = 2.0 + REPORT_SECONDS
    machine.handle(Looked(before - 1, {other: 0}, frozenset()), late)
    reported = frozenset({(other, before)})
    assert machine.handle(Looked(mark, {other: mark}, reported), late + 1) == [], "its report came late"
    again = Evaluations(RUN_ID, me, EVERY, MAX_SECONDS)
    again.handle(Looked(before - 1, {other: before}, frozenset()), 0.0)
    again.handle(Looked(before - 1, {other: 0}, frozenset()), 1.0)
    again.handle(Looked(before - 1, {other: 0}, frozenset()), late)
    assert again.handle(Looked(mark, {other: mark}, frozenset()), late + 1) == [Evaluate(mark)]


def test_a_mark_that_an_earlier_life_has_reported_is_not_taken_again() -> None:
    machine = Evaluations(RUN_ID, key(1), EVERY, MAX_SECONDS)
    assert machine.handle(Looked(14, {}, frozenset({(key(1), 10)})), 0.0) == []
    assert machine.handle(Looked(20, {}, frozenset({(key(1), 10)}), is_free=False), 1.0) == []
    assert machine.handle(Looked(21, {}, frozenset({(key(1), 10)})), 2.0) == [Evaluate(20)]
    assert machine.handle(Looked(21, {}, frozenset()), 3.0) == [], "one at a time"
    machine.handle(Ended(), 4.0)
    assert machine.handle(Looked(22, {}, frozenset()), 5.0) == [], "a failure costs the mark"


# Reports


def report(number: int, value: float, mark: int = 10, task: str = "t", stderr: float | None = 0.01) -> Report:
    figure = TaskFigure(task, "acc", round(value * MICRO), None if stderr is None else round(stderr * MICRO))
    return Report(peer_id_of(key(number)), Evaluation(mark, mark, (figure,)))


def test_with_three_reports_the_median_hides_one_liar_and_its_authors_are_named() -> None:
    (point,) = curve_of([report(1, 0.50), report(2, 1.0), report(3, 0.52)])
    assert (point.value, point.lowest, point.highest, point.stderr) == (0.52, 0.5, 1.0, 0.01)
    assert point.authors == tuple(peer_id_of(key(number)) for number in (1, 2, 3))


def test_a_second_report_of_an_author_does_not_count() -> None:
    (point,) = curve_of([report(1, 0.5), report(1, 1.0), report(2, 0.6)])
    assert (point.value, len(point.authors)) == (0.55, 2)


def test_a_curve_is_in_the_order_of_marks() -> None:
    curve = curve_of([report(1, 0.5, 30), report(1, 0.4, 10), report(1, 0.3, 10, "u")])
    assert [(point.mark, point.task) for point in curve] == [(10, "t"), (10, "u"), (30, "t")]


@pytest.mark.parametrize(
    ("mark", "round_index", "expected"),
    [(10, 12, True), (20, 20, True), (0, 0, False), (15, 15, False), (30, 30, False), (20, 19, False)],
)
def test_only_marks_that_the_run_has_reached_count(mark: int, round_index: int, expected: bool) -> None:
    """Otherwise a liar could fill a node's file with reports of marks that never come."""
    figures = report(1, 0.5).evaluation.figures
    assert is_plausible(Evaluation(mark, round_index, figures), EVERY, current_round=25) is expected
    assert not is_plausible(Evaluation(mark, round_index, ()), EVERY, current_round=25)


def test_an_entry_has_as_many_figures_as_fit_those_of_the_named_tasks_first() -> None:
    parts = [MeasuredFigure(f"group_part_number_{number}", "acc_norm", 0.5, 0.02) for number in range(40)]
    entry = report_of(20, 21, [*parts, MeasuredFigure("group", "acc_norm", 0.25, None)], ("group",))
    assert entry.figures[0] == TaskFigure("group", "acc_norm", 250_000, None)
    assert 8 < len(entry.figures) < 17
    assert payload_size(entry) <= RULES[Kind.EVALUATION].max_bytes


@pytest.mark.parametrize(
    "figure",
    [
        MeasuredFigure("t", "acc", float("nan"), None),
        MeasuredFigure("t", "perplexity", float("inf"), None),
        MeasuredFigure("t", "perplexity", 1e300, None),
        MeasuredFigure("t\x1b[2J", "acc", 0.5, None),
        MeasuredFigure("t" * 97, "acc", 0.5, None),
        MeasuredFigure("", "acc", 0.5, None),
    ],
)
def test_what_no_entry_can_hold_is_left_out(figure: MeasuredFigure) -> None:
    entry = report_of(10, 10, [figure, MeasuredFigure("u", "acc", 0.5, float("nan"))], ("t",))
    assert entry.figures == (TaskFigure("u", "acc", 500_000, None),)
    assert micros(-1.5) == -1_500_000


def test_the_answer_is_the_last_line_and_anything_else_is_none() -> None:
    answer = EvaluationAnswer(20, (MeasuredFigure("t", "acc", 0.5, None),))
    assert decode_answer(b"noise\n" + msgspec.json.encode(answer) + b"\n") == answer
    for output in (b"", b"noise\n", b'{"round": "x"}\n', b"\xff\xfe\n"):
        with pytest.raises(LocalProtocolError):
            decode_answer(output)

"""The keeper of evaluations with a real run state, and the process that evaluates, which is a script here."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.settings import NodeSettings
from farandole.node.base.system.processes import may_exist
from farandole.node.loop import evaluation_process, evaluation_service
from farandole.node.loop.evaluation_process import EvaluationFailedError, evaluate_in_process
from farandole.node.loop.evaluation_service import LOOK_SECONDS, RENEW_SECONDS, EvaluationKeeper
from farandole.node.loop.pause.pause import BY_HAND, Rest
from farandole.node.status.evaluation_log import EvaluationRecord
from farandole.node.status.journal import Journal
from farandole.protocol.evaluation.evaluation_messages import EvaluationAnswer, EvaluationOrder, MeasuredFigure
from farandole.protocol.evaluation.evaluations import MAX_REPORTS, ranked
from farandole.protocol.run.manifest import EvaluationConfig
from farandole.protocol.state.entries import Delta, Evaluation, Evaluator, Kind, Payload, TaskFigure
from farandole.protocol.state.state import RunState
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.identity import peer_id_of, public_bytes

from ...patience import PATIENCE

RUN_ID = b"r" * 32
CONFIG = EvaluationConfig(("t",), every_rounds=10, limit=5, max_seconds=100.0)
ALICE, BOB = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))
NOW = 1_800_000_000.0
FIGURE = MeasuredFigure("t", "acc", 0.5, 0.1)


class Node:
    """Alice's keeper, her run state, and what she published."""

    def __init__(self, home: Path, *, evaluates: bool = True) -> None:
        self.state = RunState(RUN_ID, public_bytes(ALICE))
        self.published: list[Payload] = []
        self.kept: list[EvaluationRecord] = []
        self.reached: frozenset[bytes] = frozenset()
        self.round = 0
        self.rest = Rest()
        self.journal = Journal(say=lambda text: None, keep_evaluation=self.kept.append)
        self.settings = NodeSettings(home=home, evaluate=evaluates)
        self.keeper = EvaluationKeeper(CONFIG, public_bytes(ALICE), self, self, self.journal, self.rest, self.settings)
        self._now = NOW

    def current_round(self) -> int:
        return self.round

    def awaits_contact(self) -> bool:
        return False

    async def publish(self, kind: Kind, index: int, payload: Payload) -> None:
        self.published.append(payload)
        self.write(ALICE, kind, index, payload)
        await trio.lowlevel.checkpoint()

    def write(self, key: Ed25519PrivateKey, kind: Kind, index: int, payload: Payload) -> None:
        self._now += 60.0
        writer = Writer(key, RUN_ID)
        if (mark := writer.mark_needed(kind, index, self._now)) is not None:
            writer.marked(mark)
        self.state.merge(Delta((writer.write(kind, index, payload, self._now).signed,)), self._now)


@pytest.fixture
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what runs in threads run at once: virtual time does not wait for threads."""

    async def run_now(work: Callable[..., object], *arguments: object) -> object:
        await trio.lowlevel.checkpoint()
        return work(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_now)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_threads: None) -> Node:
    """Return Alice, whose newest checkpoint is of the run's round."""
    made = Node(tmp_path)
    monkeypatch.setattr(evaluation_service, "_newest_round", lambda checkpoints: made.round)
    return made


Replace = Callable[[Callable[[EvaluationOrder], Awaitable[EvaluationAnswer]]], None]


@pytest.fixture
def answer_with(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Return a function that replaces the process."""
    return lambda answer: monkeypatch.setattr(evaluation_service, "evaluate_in_process", answer)


async def play(node: Node, *rounds: int, seconds: float = 3 * LOOK_SECONDS) -> None:
    """Run the keeper while the run reaches these rounds, ``seconds`` apart."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.keeper.run)
        for node.round in rounds:
            await trio.sleep(seconds)
        nursery.cancel_scope.cancel()


async def test_a_mark_is_leased_then_reported_and_the_lease_ends(
    node: Node, autojump_clock: trio.testing.MockClock, answer_with: Replace
) -> None:
    orders = []

    async def answer(order: EvaluationOrder) -> EvaluationAnswer:
        orders.append(order)
        assert node.state.payload(public_bytes(ALICE), Evaluator) == Evaluator(10)
        await trio.sleep(RENEW_SECONDS / 40)
        return EvaluationAnswer(12, (FIGURE,))

    answer_with(answer)
    await play(node, 9, 12, seconds=60.0)
    report = Evaluation(10, 12, (TaskFigure("t", "acc", 500_000, 100_000),))
    assert node.published == [Evaluator(0), Evaluator(10), report, Evaluator(0)]
    assert [(order.tasks, order.limit) for order in orders] == [(("t",), 5)]
    assert [(each.author, each.evaluation) for each in node.kept] == [(peer_id_of(public_bytes(ALICE)), report)]
    (shown,) = node.keeper.status()
    assert (shown.mark, shown.value, shown.authors) == (10, 0.5, [peer_id_of(public_bytes(ALICE))])


async def test_a_failure_costs_its_mark_and_its_reason_is_said(
    node: Node, autojump_clock: trio.testing.MockClock, answer_with: Replace
) -> None:
    async def answer(order: EvaluationOrder) -> EvaluationAnswer:
        await trio.lowlevel.checkpoint()
        if node.round < 20:
            raise EvaluationFailedError("no data set")
        return EvaluationAnswer(20, (FIGURE,))

    answer_with(answer)
    await play(node, 10, 15, 20)
    assert [each.mark for each in node.published if isinstance(each, Evaluation)] == [20]
    assert list(node.journal.warnings) == ["round 10 is not evaluated by this node: no data set"]


@pytest.mark.parametrize("answered", [EvaluationAnswer(9, (FIGURE,)), EvaluationAnswer(10)])
async def test_nothing_is_reported_without_figures_of_the_mark(
    node: Node, autojump_clock: trio.testing.MockClock, answer_with: Replace, answered: EvaluationAnswer
) -> None:
    async def answer(order: EvaluationOrder) -> EvaluationAnswer:
        await trio.lowlevel.checkpoint()
        return answered

    answer_with(answer)
    await play(node, 10)
    assert node.published == [Evaluator(0), Evaluator(10), Evaluator(0)]
    assert len(node.journal.warnings) == 1


async def test_an_evaluation_ends_at_the_runs_deadline(
    node: Node, autojump_clock: trio.testing.MockClock, answer_with: Replace
) -> None:
    async def answer(order: EvaluationOrder) -> EvaluationAnswer:
        await trio.sleep_forever()

    answer_with(answer)
    await play(node, 10, seconds=2 * CONFIG.max_seconds)
    assert node.published[-1] == Evaluator(0)
    assert "longer than the run's 100 s" in node.journal.warnings[-1]


async def test_while_the_node_rests_nothing_is_evaluated(
    node: Node, autojump_clock: trio.testing.MockClock, answer_with: Replace
) -> None:
    begun, ended = trio.Event(), trio.Event()

    async def answer(order: EvaluationOrder) -> EvaluationAnswer:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async def rest() -> None:
        await begun.wait()
        node.rest.begin(BY_HAND, "paused")
        await ended.wait()

    answer_with(answer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rest)
        await play(node, 10, 20, 30)
    assert node.published == [Evaluator(0), Evaluator(10), Evaluator(0)]
    assert "this node rests: paused" in node.journal.warnings[-1]


async def test_a_lease_is_renewed_before_its_entry_expires(node: Node, autojump_clock: trio.testing.MockClock) -> None:
    await play(node, 0, seconds=3.5 * RENEW_SECONDS)
    assert node.published == [Evaluator(0)] * 4


async def test_it_gives_way_to_a_member_that_has_the_mark(
    node: Node, autojump_clock: trio.testing.MockClock, answer_with: Replace
) -> None:
    async def answer(order: EvaluationOrder) -> EvaluationAnswer:
        raise AssertionError("it is Bob's turn")

    bob = public_bytes(BOB)
    mark = next(mark for mark in range(10, 1_000, 10) if ranked(RUN_ID, mark, [bob, public_bytes(ALICE)])[0] == bob)
    node.reached = frozenset({bob})
    node.write(BOB, Kind.EVALUATOR, 0, Evaluator(mark))
    answer_with(answer)
    await play(node, mark, seconds=CONFIG.max_seconds / 2)
    assert node.published == [Evaluator(0)]


async def test_a_node_that_does_not_evaluate_keeps_others_reports_and_publishes_nothing(
    tmp_path: Path, without_threads: None, autojump_clock: trio.testing.MockClock
) -> None:
    node = Node(tmp_path, evaluates=False)
    for index, mark in enumerate((10, 20, 25, 90)):
        node.write(BOB, Kind.EVALUATION, index, Evaluation(mark, mark, (TaskFigure("t", "acc", mark),)))
    await play(node, 0, 22)
    assert sorted(each.evaluation.mark for each in node.kept) == [10, 20], "neither 25, no mark, nor 90, which is far"
    assert node.published == []
    assert [shown.mark for shown in node.keeper.status()] == [20]
    # A later life knows them from the file, and the first report of a member counts.
    node.settings.evaluations.write_bytes(b"\n".join(map(msgspec.json.encode, node.kept)) + b"\ncut sho")
    node.write(BOB, Kind.EVALUATION, 1, Evaluation(20, 20, (TaskFigure("t", "acc", 1),)))
    again = Node(tmp_path, evaluates=False)
    again.state = node.state
    again.keeper = EvaluationKeeper(
        CONFIG, public_bytes(ALICE), again, again, again.journal, again.rest, again.settings
    )
    await play(again, 22)
    assert again.kept == []
    assert [shown.value for shown in again.keeper.status()] == [20e-6]


async def test_many_keys_fill_no_more_than_the_places_of_the_marks_that_there_are(
    tmp_path: Path, without_threads: None, autojump_clock: trio.testing.MockClock
) -> None:
    """The attack: keys without number, each with reports of all marks, past and future."""
    node = Node(tmp_path, evaluates=False)
    for number in range(2 * MAX_REPORTS):
        key = Ed25519PrivateKey.from_private_bytes(bytes([number + 3]) * 32)
        for index in range(4):
            node.write(
                key, Kind.EVALUATION, index, Evaluation(10 * (index + 1), 2**31 - 1, (TaskFigure("t", "acc", number),))
            )
    await play(node, 20)
    assert len(node.kept) == 2 * MAX_REPORTS
    assert {each.evaluation.mark for each in node.kept} == {10, 20}


# The process, which is never a fork: it would not be the script

ORDER = EvaluationOrder("home", ("t",), None, None, None, None, (), "cpu")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that has a shell script run in place of Python."""

    def write(text: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


async def measure() -> EvaluationAnswer:
    with trio.fail_after(PATIENCE):
        return await evaluate_in_process(ORDER)


@pytest.mark.started
async def test_the_answer_of_the_process(script: Callable[[str], None]) -> None:
    answer = EvaluationAnswer(20, (FIGURE,))
    script(f"test -n \"$4\" && echo words >&2 && echo noise && echo '{msgspec.json.encode(answer).decode()}'")
    assert await measure() == answer


@pytest.mark.started
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo first >&2; echo 'its last words' >&2; exit 3", "ended with code 3: its last words"),
        ("kill -9 $$", r"killed by signal 9 \(SIGKILL\)"),
        ("echo no answer", "no answer of an evaluation"),
        ("""echo '{"problem": "no such task"}'""", "^no such task$"),
        ("yes", "wrote more than 100000 bytes"),
        ("for i in $(seq 2000); do echo line $i >&2; done; exit 1", "ended with code 1: line 2000"),
    ],
)
async def test_a_process_without_an_answer_has_a_reason(
    script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setattr(evaluation_process, "MAX_ANSWER_BYTES", 100_000)
    script(text)
    with pytest.raises(EvaluationFailedError, match=words):
        await measure()


@pytest.mark.started
async def test_a_process_that_cannot_be_started_has_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(EvaluationFailedError, match="cannot be started"):
        await measure()


@pytest.mark.started
async def test_the_process_does_not_outlive_a_cancelled_caller(script: Callable[[str], None], tmp_path: Path) -> None:
    place = tmp_path / "pid"
    os.mkfifo(place)
    script(f"trap '' INT TERM; echo $$ > {place}; exec sleep 1000")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(measure)
        pid = int(await trio.to_thread.run_sync(place.read_text))  # once the script writes it
        assert may_exist(pid)
        nursery.cancel_scope.cancel()
    assert not may_exist(pid)


async def test_only_the_newest_marks_are_held_and_older_ones_are_heard_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_threads: None, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(evaluation_service, "MAX_MARKS", 2)
    node = Node(tmp_path, evaluates=False)
    for slot, mark in enumerate((10, 20, 30)):
        node.write(BOB, Kind.EVALUATION, slot, Evaluation(mark, mark, (TaskFigure("t", "acc", mark),)))
    await play(node, 30, 30, 30)
    heard = [record.evaluation.mark for record in node.kept]
    assert len(heard) == len(set(heard)), "none is written again and again"
    assert set(node.keeper._known) == {20, 30}

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farandole.node.status.status import (
    REFUSED_HERE,
    REFUSED_THERE,
    ExchangeStatus,
    MemberStatus,
    NodeStatus,
    Resources,
    RunStatus,
)
from farandole.testnet.play.record import GRACE, WARM_UP, Ledger, NodeRecord, Samples, Vacancies, false_deaths
from farandole.testnet.play.report import NodeReport

from ...node.statuses import STATUS

RUN = RunStatus("ab", "demo", 1, 0, 0, 0.0, None, None, None, "root")
PATHS = {"bob": "relayed", "carol": ""}  # carol is not connected


def status(**changes: Any) -> NodeStatus:
    fields: dict[str, Any] = dict.fromkeys(NodeStatus.__struct_fields__, 0) | {
        **{"phase": "training", "run": RUN, "pid": 1, "loss_first": None, "resources": None},
        **{"losses": [], "partners": {}, "paths": {}, "members": [], "recent_exchanges": []},
    }
    return NodeStatus(**{**fields, **changes})


def test_counters_of_several_lives_add_up_and_positions_do_not() -> None:
    record = NodeRecord(NodeReport(3, "alice"))
    first = status(
        exchanges_ok=2, bytes_sent=5, partners={"bob": 2}, paths={"stream": 2}, round=2, tokens=200, loss_first=5.0
    )
    record.observe(msgspec.structs.replace(first, exchanges_ok=1), 0.5)
    record.observe(msgspec.structs.replace(first, losses=[(0, 5.0), (1, 4.5)]), 1.0)
    second = status(pid=2, exchanges_ok=1, bytes_sent=3, partners={"bob": 1, "carol": 1}, round=3, loss_first=4.0)
    record.observe(second, 2.0)
    fields: dict[str, Any] = {"partners": {"carol": 4}, "paths": {"bulk": 3, "stream": 1}, "losses": [(3, 4.0)]}
    record.observe(status(pid=2, exchanges_ok=4, bytes_sent=9, round=4, **fields), 3.0)
    report = record.reported(is_alive=True)
    assert (report.exchanges_ok, report.bytes_sent) == (6, 14)
    assert report.partners == {"bob": 2, "carol": 4}
    assert report.paths == {"stream": 3, "bulk": 3}
    assert (report.rounds, report.restarts) == (4, 1)
    assert (report.loss_first, report.loss_last) == (5.0, 4.0)
    assert report.losses == [(0, 5.0), (1, 4.5), (3, 4.0)]
    assert report.state_root == "root"


def test_a_node_is_wedged_when_it_stands_still_too_long() -> None:
    record = NodeRecord(NodeReport(0, "alice"))
    record.excuse(0.0)
    assert not record.check_progress(9.0, limit=10.0)
    record.observe(status(round=0, inner_steps=1), 9.0)
    record.observe(status(round=0, inner_steps=1), 18.0)
    assert not record.check_progress(18.5, limit=10.0)
    assert record.check_progress(19.5, limit=10.0)
    assert record.report.wedged
    assert not record.check_progress(20.0, limit=10.0), "told once"
    record = NodeRecord(NodeReport(0, "alice"))
    record.observe(status(round=4, phase="finished"), 0.0)
    assert not record.check_progress(1_000.0, limit=10.0)


def test_the_report_says_where_a_node_was_and_by_which_path_it_reached_whom() -> None:
    fields: dict[str, Any] = dict.fromkeys(MemberStatus.__struct_fields__, 0)
    bob, carol = (MemberStatus(**{**fields, "peer_id": name, "path": path}) for name, path in PATHS.items())
    record = NodeRecord(NodeReport(3, "alice"))
    record.observe(status(members=[bob, carol]), 0.0)
    report = record.reported(is_alive=True, home="symmetric")
    assert (report.home, report.links) == ("symmetric", {"bob": "relayed"})


def test_what_the_screening_did_to_exchanges_is_counted_once() -> None:
    verdicts = ["committed", f"failed: {REFUSED_HERE} too far", f"failed: {REFUSED_THERE} too far", "failed: the line"]
    exchanges = [ExchangeStatus(at, "bob", verdict, 0, 0, 0.0, float(at)) for at, verdict in enumerate(verdicts)]
    clipped = [
        ExchangeStatus(4 + at, "bob", "committed", 0, 0, 0.0, 4.0 + at, clip=clip) for at, clip in enumerate((0.0, 0.5))
    ]
    record = NodeRecord(NodeReport(3, "alice"))
    for _ in range(2):
        record.observe(status(recent_exchanges=[*exchanges, *clipped]), 0.0)
    report = record.reported(is_alive=True)
    assert (report.exchanges_clipped, report.exchanges_refused, report.touched) == (2, 2, {"bob": 4})


def test_only_the_time_in_which_it_was_alive_counts() -> None:
    ledger = Ledger()
    told = "0 starting, 10 working, 110 starved, 150 working, 200 frozen, 230 returning, 231 working, 300 absent"
    for at, condition in (each.split() for each in f"{told}, 320 returning, 328 working, 400 finished".split(", ")):
        ledger.enter(condition, float(at))  # type: ignore[arg-type]  # the words above
    ledger.settle(500.0)
    assert ledger.seconds == {
        "starting": 10,
        "working": 100 + 50 + 69 + 72,
        "starved": 40,
        "frozen": 30,
        "returning": 1 + 8,
        "absent": 20,
        "finished": 100,
    }
    assert ledger.given == 10 + 291 + 9 + 40


def life(hours: float, leak: float, once: int = 0) -> Samples:
    """Return samples a minute apart; after a warm-up in which memory doubles it grows by ``leak`` an hour, and once."""
    samples = Samples()
    for second in range(0, int(3_600 * hours), 60):
        cold = max(0.0, 1 - second / WARM_UP)
        memory = round(100e6 * (1 - cold / 2) * (1 + leak * second / 3_600)) + once * (second > 1_440 * hours)
        samples.note(Resources(memory, 2 * memory, 40 + (second // 60) % 3, 90), float(second))
    return samples


@pytest.mark.parametrize("leak", [0.0, 0.02, -0.01])
def test_a_leak_is_seen_and_a_warm_up_is_none(leak: float) -> None:
    assert life(0.4, 0.5).growth() is None, "too short"
    samples = life(2.0, leak)
    growth = samples.growth()
    assert growth is not None
    assert growth.memory == pytest.approx(leak, abs=0.001)
    assert growth.trainer_memory == pytest.approx(leak, abs=0.001)
    assert abs(growth.descriptors) <= 1
    assert growth.tasks == 0
    once = life(2.0, leak, once=5_000_000).growth()
    assert once is not None
    assert once.memory == pytest.approx(leak, abs=0.001), "allocated once"
    end = samples.taken[-1][0]
    for second in range(60, 300, 60):
        samples.note(Resources(100_000_000, None, 40, 90), end + second)
    without_trainer = samples.growth()
    assert without_trainer is not None
    assert without_trainer.trainer_memory == pytest.approx(leak, abs=0.002), "it counts while there is a trainer"


ALICE, BOB = "12D3KooWalice", "12D3KooWbob"


def record(index: int, peer_id: str, live: list[str], since: float) -> NodeRecord:
    made = NodeRecord(NodeReport(index, peer_id))
    made.ledger.enter("starting", since)
    made.ledger.enter("working", since + 1.0)
    members = [msgspec.structs.replace(STATUS.members[0], peer_id=peer, is_live=True) for peer in live]
    made.observe(msgspec.structs.replace(STATUS, members=members), GRACE + 10.0)
    return made


def test_who_is_there_and_not_seen_was_taken_for_dead_unless_it_was_just_started_or_is_gone() -> None:
    alice, bob = record(0, ALICE, [ALICE], 0.0), record(1, BOB, [ALICE, BOB], 0.0)
    assert list(false_deaths([alice, bob])) == [(1, 0)]
    assert list(false_deaths([record(0, ALICE, [ALICE, BOB], 0.0), bob])) == []
    alice, young = record(0, ALICE, [ALICE], 0.0), record(1, BOB, [BOB], 15.0)
    assert list(false_deaths([alice, young])) == [], "it may not have been heard of, nor have heard"
    gone = record(1, BOB, [ALICE, BOB], 0.0)
    gone.ledger.enter("absent", 12.0)
    assert list(false_deaths([alice, gone])) == []


def test_an_empty_stage_is_told_and_so_is_its_end() -> None:
    vacancies = Vacancies()
    assert vacancies.observe({0}, 0.0) == []
    assert vacancies.observe({0, 1, 2}, 5.0) == [], "a stage counts from the first time that it is held"
    assert vacancies.observe({0, 2}, 6.0) == ["nobody holds stage 1"]
    assert vacancies.observe({0, 2}, 20.0) == []
    assert vacancies.problems(15.0) == []
    assert vacancies.observe({0, 1, 2}, 22.5) == ["stage 1 is held again, 17.5 s later"]
    assert vacancies.observe({0, 1, 2}, 90.0) == []
    assert vacancies.problems(70.0) == []
    assert vacancies.seconds[1] == 67.5, "two looks that far apart may have missed a vacancy"

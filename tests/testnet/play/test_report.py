from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from farandole.node.base.errors import Exit
from farandole.node.cli import main
from farandole.testnet.play.fault import FaultReport
from farandole.testnet.play.judge import judged, make_report
from farandole.testnet.play.launch import Testnet, TestnetError, load_report
from farandole.testnet.play.report import Growth, Merged, NodeReport, PlayReport, course_lines, throughput_lines
from farandole.testnet.play.scenario import Scenario, parse_scenario

from .playing import PASSED as CLEAN
from .playing import node as played_node

ROUNDS = 6
GOOD = NodeReport(
    index=0,
    peer_id="alice",
    rounds=ROUNDS,
    partners={"bob": 2, "carol": 2},
    inner_steps=80,
    tokens=1_000,
    loss_first=5.0,
    losses=[(index, 5.0 - index / 2) for index in range(ROUNDS)],
    exchanges_since_restart=4,
    is_alive=True,
    state_root="root",
)
MERGED = Merged(5.5, 2.1, 0.02, bits_per_byte_start=7.9, bits_per_byte_merged=3.0)


def scenario(**settings: Any) -> Scenario:
    run = {"name": "a", "model": "tiny"}
    usual = {"run": run, "nodes": 3, "rounds": ROUNDS, "min_partners": 2, "max_loss_merged": 2.6}
    return parse_scenario({**usual, **settings})


def judge(
    nodes: list[NodeReport], merged: Merged | None = MERGED, *, faults: Sequence[FaultReport] = (), **settings: Any
) -> PlayReport:
    return make_report(scenario(**settings), bytes(32), nodes, merged, seconds=10.0, events=[], faults=faults)


def node(index: int, **changes: Any) -> NodeReport:
    return msgspec.structs.replace(GOOD, index=index, **changes)


def test_good_nodes_pass() -> None:
    report = judge([node(0), node(1, loss_first=3.0), node(2)])
    assert (report.verdict, report.reasons) == ("pass", [])
    assert (report.tokens, report.tokens_per_second) == (3_000, 300.0)
    assert report.loss_first == pytest.approx(13 / 3)
    assert (report.loss_start, report.loss_merged, report.spread) == (5.5, 2.1, 0.02)
    assert (report.bits_per_byte_start, report.bits_per_byte_merged) == (7.9, 3.0)
    assert any("held-out loss 5.500 -> 2.100 (3.000 bits per byte), mean" in line for line in course_lines(report))
    assert report.state_equal


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"died": True, "is_alive": False}, "node 1 died"),
        ({"is_alive": False}, "node 1 was not there at the end"),
        ({"wedged": True}, "node 1 was wedged"),
        ({"restarts": 1, "exchanges_since_restart": 0}, "node 1 exchanged with nobody after"),
        ({"losses": []}, "node 1 never trained"),
        ({"rounds": 3}, "node 1 reached round 3 of 6"),
        ({"partners": {"bob": 9}}, "node 1 had 1 of 2 required partners"),
        ({"state_root": "other"}, "the run state is not equal"),
        ({"state_root": ""}, "the run state is not equal"),
    ],
)
def test_one_bad_node_fails_the_run(changes: dict[str, Any], reason: str) -> None:
    report = judge([node(0), node(1, **changes), node(2)])
    assert report.verdict == "fail"
    assert len(report.reasons) == 1
    assert report.reasons[0].startswith(reason)


def test_a_node_that_was_killed_on_purpose_owes_nothing() -> None:
    gone = node(1, is_alive=False, is_doomed=True, rounds=1, partners={}, state_root="")
    assert judge([node(0), gone, node(2)]).verdict == "pass"


def test_a_node_that_came_when_few_rounds_were_left_needs_fewer_partners() -> None:
    late = {"losses": [(4, 3.0), (5, 2.0)], "partners": {"bob": 1}}
    assert judge([node(0), node(1, **late), node(2)]).verdict == "pass"
    assert judge([node(0), node(1, **late | {"partners": {}}), node(2)]).verdict == "fail"


def test_a_late_joiner_must_begin_with_a_peers_weights() -> None:
    fault = [{"kind": "join", "nodes": [1], "at_round": 2}]
    assert judge([node(0), node(1, losses=[(2, 3.0), (3, 2.0)])], fault=fault).reasons == []
    [reason] = judge([node(0), node(1)], fault=fault).reasons
    assert reason == "node 1 joined late and began in round 0: it got no weights from a peer"


def test_the_merged_loss_must_be_below_its_bound() -> None:
    assert judge([GOOD], Merged(5.5, 2.6, 0.1)).reasons == ["the merged model's loss: 2.600, not below 2.6"]
    assert judge([GOOD], Merged(5.5, float("nan"), 0.1)).verdict == "fail"
    assert judge([GOOD], None).reasons == ["there is no merged model: no replica left a checkpoint"]


def test_every_node_in_every_round_and_slow_ones_with_fewer_steps() -> None:
    settings: dict[str, Any] = {"every_round": True, "slow": [1.0, 8.0]}
    assert judge([node(0), node(1, inner_steps=11)], **settings).reasons == []
    missing = node(1, inner_steps=11, losses=[(1, 4.0), (3, 2.0), (4, 2.0), (5, 2.0)])
    assert judge([node(0), missing], **settings).reasons == ["node 1 took no part in rounds [2]"]
    [reason] = judge([node(0), node(1)], **settings).reasons
    assert reason == "one of the slowest nodes took 80 inner steps, and one of the fastest 80"


@pytest.mark.parametrize(
    ("seconds", "failed", "reason"),
    [
        ([4.0, 5.0, 9.0], 0, None),
        ([4.0, 6.0, 6.5], 0, "an exchange over the ideal (median, worst node): 3.33, not at most 3"),
        ([4.0], 1, "exchanges that failed for good: 1, not 0"),
        ([], 0, "nodes that completed no exchange: 0, not none"),
    ],
)
def test_an_exchange_is_measured_by_its_line(seconds: list[float], failed: int, reason: str | None) -> None:
    """A megabyte at 5 Mbit/s, with a round trip of 200 ms."""
    line = {"kind": "open", "up_mbit": 5, "down_mbit": 20, "delay_ms": 50}
    slow = node(0, exchange_seconds=seconds, exchange_bytes=1_000_000, exchanges_failed=failed)
    good = [node(index, exchange_seconds=[2.0], exchange_bytes=1_000_000) for index in (1, 2)]
    report = judge([slow, *good], max_exchange_over_ideal=3, home=[line])
    assert report.reasons == ([] if reason is None else [reason])


@pytest.mark.parametrize(("memory", "tasks", "is_flat"), [(0.009, 2, True), (0.02, 0, False), (0.0, 20, False)])
def test_who_grows_does_not_pass(memory: float, tasks: float, is_flat: bool) -> None:
    growth = Growth(hours=0.5, memory=memory, trainer_memory=None, descriptors=0, tasks=tasks)
    report = judge([node(0, growths=[growth]), node(1), node(2)], max_growth=0.01)
    assert (report.reasons == []) == is_flat
    assert judge([node(0), node(1), node(2)], max_growth=0.01).reasons == [
        "lives that were long enough to see a growth: 0, not at least 1"
    ]


@pytest.mark.parametrize(("seconds", "is_fine"), [(14.0, True), (16.0, False), (None, False)])
def test_a_partition_heals_in_time_or_not(seconds: float | None, is_fine: bool) -> None:
    partition = FaultReport("partition", [0], 3.0, 1.0, {0: 1.0}, seconds)
    report = judge([node(0), node(1), node(2)], faults=[partition], max_heal_seconds=15)
    assert (report.reasons == []) == is_fine
    assert report.faults[0].healed_in == seconds


KILL = FaultReport("restart", [3], 10.0, 2.0, {3: 9.0})
SCENARIO = parse_scenario(
    {"run": {"name": "chaos", "model": "tiny"}, "min_throughput": 0.977, "max_loss_above_clean": 0.03}
)

OTHERS = parse_scenario({"run": {"name": "chaos", "model": "tiny"}, "min_throughput_of_others": 0.95})


def played(**fields: object) -> PlayReport:
    return msgspec.structs.replace(CLEAN, faults=[KILL], **fields)


def test_what_is_within_the_limits_passes() -> None:
    report = judged(played(tokens_per_given_second=9.8, loss_merged=2.05), CLEAN, SCENARIO)
    assert report.verdict == "pass"
    assert report.beside is not None
    assert report.beside.throughput == pytest.approx(0.98)
    assert report.beside.loss_above == pytest.approx(0.025)
    assert "98.00% of its throughput" in throughput_lines(report)[-1]


@pytest.mark.parametrize(("rate", "told", "shown"), [(9.7, "97.0%", "97.00%"), (None, "not known", "not known")])
def test_too_few_tokens_a_second_and_what_was_not_measured_fail(rate: float | None, told: str, shown: str) -> None:
    """`tests/testnet/zoo/test_verdict.py` has the limit of the loss."""
    report = judged(played(tokens_per_given_second=rate), CLEAN, SCENARIO)
    assert report.verdict == "fail"
    assert report.reasons == [f"tokens a second of the living, of clean: {told}, not at least 97.7%"]
    assert f"beside the clean run: {shown} of its throughput" in throughput_lines(report)[-1]


def test_the_nodes_that_no_fault_befell_are_compared_with_themselves() -> None:
    clean = msgspec.structs.replace(CLEAN, nodes=[played_node(0, 1_000), played_node(3, 1_000)])
    report = judged(played(nodes=[played_node(0, 940), played_node(3, 100)]), clean, OTHERS)
    assert report.beside is not None
    assert report.beside.throughput_of_others == pytest.approx(0.94), "node 3 was killed"
    assert report.reasons == ["tokens a second of the others, without a fault, of clean: 94.0%, not at least 95.0%"]
    assert judged(played(nodes=[played_node(0, 960), played_node(3, 100)]), clean, OTHERS).verdict == "pass"


def test_a_spread_that_stays_is_seen() -> None:
    scenario = msgspec.structs.replace(SCENARIO, max_spread_over_clean=1.25)
    assert judged(played(spread=0.012), CLEAN, scenario).verdict == "pass"
    assert judged(played(spread=0.013), CLEAN, scenario).reasons == [
        "spread of the weights, of clean: 1.30, not at most 1.25"
    ]


def test_a_clean_play_of_the_same_nodes_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays: list[Path] = []

    async def play(testnet: Testnet) -> PlayReport:
        await trio.lowlevel.checkpoint()
        testnet.out.mkdir(exist_ok=True)
        plays.append(testnet.out)
        nodes = [played_node(index) for index in range(testnet.scenario.nodes)]
        return msgspec.structs.replace(CLEAN, nodes=nodes, faults=[KILL] if testnet.scenario.fault else [])

    monkeypatch.setattr(Testnet, "play", play)
    path = tmp_path / "chaos.toml"
    path.write_text(
        'min_throughput = 1.01\n[run]\nname = "chaos"\nmodel = "tiny"\n'
        '[[fault]]\nkind = "kill"\nnodes = [1]\nat_round = 1\n'
    )
    out, clean = tmp_path / "out", tmp_path / "out-clean"
    for nodes, expected in (("2", [clean, out]), ("2", [out]), ("3", [clean, out])):
        plays.clear()
        with pytest.raises(SystemExit) as end:
            main(["testnet", "run", str(path), "--out", str(out), "--nodes", nodes, "--beside-clean"])
        assert (end.value.code, plays) == (Exit.VERDICT_FAILED, expected)
        report = load_report(out)
        assert report.reasons == ["tokens a second of the living, of clean: 100.0%, not at least 101.0%"]
    (clean / "report.json").write_text("no report")
    with pytest.raises(TestnetError, match="cannot read"):
        load_report(clean)

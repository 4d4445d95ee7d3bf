from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

from farandole.node.base.exits import Exit
from farandole.node.cli import main
from farandole.testnet.play.beside import CleanReportError, compare, judged, load_report
from farandole.testnet.play.fault import FaultReport
from farandole.testnet.play.fault_table import throughput_lines
from farandole.testnet.play.launch import Testnet, write_report
from farandole.testnet.play.report import PlayReport
from farandole.testnet.play.scenario import parse_scenario

from .reports import PASSED as CLEAN
from .reports import node

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


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokens_per_given_second": 9.7}, "97.0% of the clean run's throughput, not 97.7%"),
        ({"loss_merged": 2.1}, "the merged model's loss beside the clean run's is +5.0%, not at most +3.0%"),
        ({"loss_merged": None}, "the merged model's loss beside the clean run's is not known, not at most +3.0%"),
    ],
)
def test_what_is_not_says_why(fields: dict[str, object], reason: str) -> None:
    report = judged(played(**fields), CLEAN, SCENARIO)
    assert report.verdict == "fail"
    assert report.reasons == [reason]


def test_only_a_clean_play_of_the_same_scenario_will_do() -> None:
    for other in (msgspec.structs.replace(CLEAN, name="demo"), played()):
        with pytest.raises(CleanReportError, match="without faults"):
            compare(played(), other)
    with pytest.raises(CleanReportError, match="nothing was trained"):
        compare(played(), msgspec.structs.replace(CLEAN, tokens_per_given_second=None))


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_report(played(), tmp_path)
    assert load_report(tmp_path) == load_report(tmp_path / "report.json") == played()
    with pytest.raises(CleanReportError, match="cannot read"):
        load_report(tmp_path / "nowhere")


def test_the_nodes_that_no_fault_befell_are_compared_with_themselves() -> None:
    clean = msgspec.structs.replace(CLEAN, nodes=[node(0, 1_000), node(3, 1_000)])
    report = judged(played(nodes=[node(0, 940), node(3, 100)]), clean, OTHERS)
    assert report.beside is not None
    assert report.beside.throughput_of_others == pytest.approx(0.94), "node 3 was killed"
    assert report.reasons == ["the nodes that no fault befell had 94.0% of the clean run's throughput, not 95.0%"]
    assert judged(played(nodes=[node(0, 960), node(3, 100)]), clean, OTHERS).verdict == "pass"


def test_a_spread_that_stays_is_seen() -> None:
    scenario = msgspec.structs.replace(SCENARIO, max_spread_over_clean=1.25)
    assert judged(played(spread=0.012), CLEAN, scenario).verdict == "pass"
    assert judged(played(spread=0.013), CLEAN, scenario).reasons == [
        "the weights' spread is 1.30 of the clean run's, not at most 1.25"
    ]


def code_of_play_beside(report: PlayReport, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of a play whose result is ``report``, compared with the clean one by ``--beside``."""

    async def play(testnet: Testnet) -> PlayReport:
        await trio.lowlevel.checkpoint()
        testnet.out.mkdir()
        return report

    monkeypatch.setattr(Testnet, "play", play)
    (tmp_path / "clean").mkdir()
    write_report(msgspec.structs.replace(CLEAN, nodes=[node(0)]), tmp_path / "clean")
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(f'nodes = 1\nmin_partners = 0\n[run]\nname = "{name}"\nmodel = "tiny"\n')
    with pytest.raises(SystemExit) as end:
        main(["testnet", "run", str(scenario), "--out", str(tmp_path / "out"), "--beside", str(tmp_path / "clean")])
    return int(end.value.code or 0)


def test_a_clean_report_of_something_else_is_refused_before_the_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of_play_beside(played(nodes=[node(0)]), "another", tmp_path, monkeypatch) != Exit.OK
    assert "no report of the same scenario" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_play_that_cannot_be_compared_is_reported_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = played(nodes=[node(0)], tokens_per_given_second=None)
    assert code_of_play_beside(report, CLEAN.name, tmp_path, monkeypatch) != Exit.OK
    assert "nothing was trained" in capsys.readouterr().err
    assert load_report(tmp_path / "out") == report

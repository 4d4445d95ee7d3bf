"""Members' reports in a node's file, and in the curve that `run metrics` prints."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.node.base.exits import Exit
from farandole.node.base.logs import logging_to_file
from farandole.node.base.settings import NodeSettings
from farandole.node.cli import main
from farandole.node.status.evaluation_log import EvaluationRecord, newest_curve, read_evaluations
from farandole.node.status.journal import Journal
from farandole.node.ui.console import Console
from farandole.protocol.state.entries import Evaluation, TaskFigure
from farandole.protocol.wire.identity import peer_id_of

ALICE, BOB, CAROL = (peer_id_of(bytes([number]) * 32) for number in (7, 8, 9))
RUN = "ab" * 32


def record(author: str, mark: int, value: float, *, run_id: str = RUN, stderr: int | None = 20_000) -> EvaluationRecord:
    figure = TaskFigure("hellaswag", "acc_norm", round(value * 1e6), stderr)
    return EvaluationRecord(1_000.0 + mark, run_id, author, Evaluation(mark, mark + 1, (figure,)))


def keep(home: Path, *records: EvaluationRecord) -> Path:
    """Write reports as a daemon does; return the file."""
    settings = NodeSettings(home=home)
    said: list[str] = []
    with logging_to_file(settings):
        journal = Journal(say=said.append, keep_evaluation=Console(as_json=False).keep_evaluation)
        for each in records:
            journal.record_evaluation(each, is_own=each.author == ALICE)
    assert len(said) == sum(each.author == ALICE for each in records), "only its own are printed"
    return settings.evaluations


def test_what_is_kept_is_read_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    records = [record(ALICE, 10, 0.25), record(BOB, 20, 0.5)]
    path = keep(tmp_path, *records)
    path.with_name("evaluations.jsonl.1").write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[1] + b'{"at": 1.0, "run_')
    assert read_evaluations(path) == records
    handlers = logging.getLogger("farandole.evaluations").handlers  # pytest may have added its own
    assert not any(isinstance(handler, logging.FileHandler) for handler in handlers)
    assert records[0].line == f"evaluation after round 10, by {ALICE[-8:]}: hellaswag acc_norm 0.25"


def test_the_curve_is_of_the_last_run_of_the_folder() -> None:
    curve = newest_curve([record(ALICE, 10, 0.9, run_id="cd" * 32), record(ALICE, 10, 0.25), record(ALICE, 20, 0.5)])
    assert [(point.mark, point.value) for point in curve] == [(10, 0.25), (20, 0.5)]


Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "120")

    def run_metrics(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["run", "metrics", "--home", str(tmp_path), "--evaluations", *arguments])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run_metrics


def test_the_command_prints_medians_and_who_measured(tmp_path: Path, run: Run) -> None:
    code, _, err = run()
    assert (code, "no evaluation is known here" in err) == (Exit.BAD_INPUT, True)
    keep(tmp_path, record(BOB, 10, 0.25), record(ALICE, 20, 0.5), record(BOB, 20, 0.99), record(CAROL, 20, 0.51))
    code, table, _ = run()
    assert code == Exit.OK
    lines = [line.split() for line in table.splitlines() if "hellaswag" in line]
    assert lines == [
        ["10", "hellaswag", "acc_norm", "0.2500", "0.0200", BOB[-8:]],
        ["20", "hellaswag", "acc_norm", "0.5100", "0.0200", "3", "members,", "0.5000", "to", "0.9900"],
    ]
    assert "10" not in [line.split()[0] for line in run("--last", "1")[1].splitlines() if "hellaswag" in line]
    rows = list(csv.DictReader(io.StringIO(run("--csv")[1])))
    assert [(row["mark"], row["value"], row["reports"]) for row in rows] == [("10", "0.25", "1"), ("20", "0.51", "3")]
    assert rows[1]["authors"].split() == [ALICE, BOB, CAROL]


def test_evaluations_alone_go_to_no_tracker(run: Run) -> None:
    assert run("--tensorboard", "runs")[0] == Exit.USAGE
    assert run("--report", "trackio:mine")[0] == Exit.USAGE

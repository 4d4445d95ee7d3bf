"""Reports of evaluations that this node has heard, its own included, one JSON line each in ``evaluations.jsonl``.

Entries of the run state expire after a week, and each author has four; the file keeps the whole curve. It is a log,
rotated when it is full, as `farandole.node.status.round_log`; lines that cannot be read are left out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TextIO

import msgspec

from farandole.protocol.evaluation.evaluations import MICRO, CurvePoint, Report, curve_of
from farandole.protocol.state.entries import Evaluation

EVALUATIONS_NAME: Final = "evaluations.jsonl"
"""The file's name in the node's folder, as in `NodeSettings.evaluations`."""
COLUMNS: Final = ("mark", "task", "metric", "value", "stderr", "lowest", "highest", "reports", "authors")


class EvaluationRecord(msgspec.Struct, frozen=True):
    """One member's report."""

    at: float
    """When this node heard it, Unix seconds."""
    run_id: str
    """In hexadecimal."""
    author: str
    """Peer id."""
    evaluation: Evaluation

    @property
    def report(self) -> Report:
        """Return it without the time and the run."""
        return Report(self.author, self.evaluation)

    @property
    def line(self) -> str:
        """Return it as a line for people."""
        found = self.evaluation
        figures = "; ".join(f"{each.task} {each.metric} {each.value / MICRO:.4g}" for each in found.figures)
        return f"evaluation after round {found.mark}, by {self.author[-8:]}: {figures or 'no figures'}"


def read_evaluations(path: Path) -> list[EvaluationRecord]:
    """Return the reports in a log file and in the older one that it replaced, oldest first. Raises `OSError`."""
    return [record for part in (path.with_name(f"{path.name}.1"), path) for record in _read(part)]


def _read(path: Path) -> Iterator[EvaluationRecord]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=EvaluationRecord)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue


def newest_curve(records: Iterable[EvaluationRecord]) -> list[CurvePoint]:
    """Return the curve of the run of the last record; a folder may have been in several runs."""
    records = list(records)
    return curve_of(record.report for record in records if record.run_id == records[-1].run_id)


def write_curve_csv(curve: Iterable[CurvePoint], file: TextIO) -> None:
    """Write a table with a header; unknown values are empty, authors are joined by spaces."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for point in curve:
        figures = point.value, point.stderr, point.lowest, point.highest
        writer.writerow([point.mark, point.task, point.metric, *figures, len(point.authors), " ".join(point.authors)])

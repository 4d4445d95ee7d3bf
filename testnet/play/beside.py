"""A comparison of a play with faults with one without: throughput of the live nodes, and loss."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from farandole.protocol.wire.errors import FarandoleError

from .report import Beside, PlayReport
from .scenario import Scenario


class CleanReportError(FarandoleError):
    """The report of the clean run cannot be had, or is of another run."""


def check_clean(clean: PlayReport, name: str, num_nodes: int) -> None:
    """Raise `CleanReportError` unless the report is of a clean play of this scenario with ``num_nodes`` nodes.

    The check is for a caller that is about to play the scenario, which takes a while.
    """
    if clean.name != name or len(clean.nodes) != num_nodes or clean.faults:
        raise CleanReportError("that is no report of the same scenario without faults (--clean)")


def compare(report: PlayReport, clean: PlayReport) -> Beside:
    """Return the comparison; `CleanReportError` if a play trained nothing, or the scenarios differ."""
    check_clean(clean, report.name, len(report.nodes))
    if not clean.tokens_per_given_second or report.tokens_per_given_second is None:
        raise CleanReportError("nothing was trained in one of the two plays")
    loss_above = None
    if report.loss_merged is not None and clean.loss_merged:
        loss_above = report.loss_merged / clean.loss_merged - 1
    others = {node.index for node in report.nodes} - {index for fault in report.faults for index in fault.nodes}
    mine, theirs = _throughput(report, others), _throughput(clean, others)
    return Beside(
        clean.tokens_per_given_second,
        clean.loss_merged,
        report.tokens_per_given_second / clean.tokens_per_given_second,
        loss_above,
        throughput_of_others=mine / theirs if mine is not None and theirs else None,
        spread=report.spread / clean.spread if report.spread is not None and clean.spread else None,
    )


def _throughput(report: PlayReport, indices: Collection[int]) -> float | None:
    nodes = [node for node in report.nodes if node.index in indices]
    given = sum(node.given_seconds for node in nodes)
    return sum(node.tokens for node in nodes) / given if given else None


def judged(report: PlayReport, clean: PlayReport, scenario: Scenario) -> PlayReport:
    """Return the report with the comparison, and with its reasons against a pass. Raises as `compare` does."""
    beside = compare(report, clean)
    reasons = [*report.reasons]
    if beside.throughput < scenario.min_throughput:
        reasons.append(f"{beside.throughput:.1%} of the clean run's throughput, not {scenario.min_throughput:.1%}")
    least = scenario.min_throughput_of_others
    if least and (beside.throughput_of_others is None or beside.throughput_of_others < least):
        share = "an unknown share" if beside.throughput_of_others is None else f"{beside.throughput_of_others:.1%}"
        reasons.append(f"the nodes that no fault befell had {share} of the clean run's throughput, not {least:.1%}")
    widest = scenario.max_spread_over_clean
    if widest is not None and (beside.spread is None or beside.spread > widest):
        reasons.append(f"the weights' spread is {beside.spread or 0:.2f} of the clean run's, not at most {widest:g}")
    most = scenario.max_loss_above_clean
    if most is not None and (beside.loss_above is None or beside.loss_above > most):
        above = "not known" if beside.loss_above is None else f"{beside.loss_above:+.1%}"
        reasons.append(f"the merged model's loss beside the clean run's is {above}, not at most {most:+.1%}")
    verdict = "fail" if reasons else "pass"
    return msgspec.structs.replace(report, beside=beside, reasons=reasons, verdict=verdict)


def load_report(path: Path) -> PlayReport:
    """Load a play's ``report.json``, from its path or its folder; raises `CleanReportError`."""
    path = path / "report.json" if path.is_dir() else path
    try:
        return msgspec.json.decode(path.read_bytes(), type=PlayReport)
    except (OSError, msgspec.MsgspecError) as error:
        raise CleanReportError(f"cannot read the report {path}: {error}") from error

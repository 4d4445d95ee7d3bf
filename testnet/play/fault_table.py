"""The effects of a play's faults on its nodes, in words."""

from __future__ import annotations

from collections import defaultdict

from farandole.node.base.figures import count, duration

from .fault import FaultReport
from .report import PlayReport


def fault_lines(report: PlayReport) -> list[str]:
    """Return one line per fault."""
    return [_line(fault) for fault in report.faults]


def _line(fault: FaultReport) -> str:
    stood = ", ".join(
        f"{node}: {'no step any more' if seconds is None else f'{seconds:.1f} s'}"
        for node, seconds in sorted(fault.standstill.items())
    )
    if fault.kind == "partition":
        stood += f"; one run state {'not' if fault.healed_in is None else f'{fault.healed_in:.1f} s'} after it"
    lasted = "" if fault.duration is None else f" for {fault.duration:g} s"
    nodes = " ".join(map(str, fault.nodes))
    return (
        f"  {fault.at:7.1f} s  {fault.kind} of {nodes}{lasted}{f'; longest without a step: {stood}' if stood else ''}"
    )


def throughput_lines(report: PlayReport) -> list[str]:
    """Return lines on the nodes' time by condition, and the throughput in their given time."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for node in report.nodes:
        for condition, spent in node.condition_seconds.items():
            seconds[condition] += spent
    longest_first = sorted(seconds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{condition} {duration(spent)}" for condition, spent in longest_first)
    given = sum(node.given_seconds for node in report.nodes)
    lines = [
        f"nodes' time: {parts}; given (not absent, frozen or finished) {duration(given)}",
        f"tokens a given second: {count(report.tokens_per_given_second or 0.0)}",
    ]
    if report.beside is not None:
        above = "not known" if report.beside.loss_above is None else f"{report.beside.loss_above:+.2%}"
        lines.append(
            f"beside the clean run: {report.beside.throughput:.2%} of its throughput "
            f"({count(report.beside.tokens_per_given_second)} tokens a given second), held-out loss {above}"
        )
        if report.beside.throughput_of_others is not None:
            lines[-1] += f", nodes without a fault {report.beside.throughput_of_others:.2%}"
        if report.beside.spread is not None:
            lines[-1] += f", spread {report.beside.spread:.2f} of the clean one's"
    return lines

"""The result of a play, in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from farandole.node.base.figures import bits_per_byte, count, duration, loss

from ..report.section import Grid
from .fault import FaultReport
from .report import NodeReport, PlayReport


def course_lines(report: PlayReport) -> Iterator[str]:
    """Yield lines on training, exchanges, and links."""
    exchanges = sum(node.exchanges_ok for node in report.nodes) // 2
    yield (
        f"{len(report.nodes)} nodes, {count(report.tokens)} tokens in {duration(report.seconds)} "
        f"({count(report.tokens_per_second)}/s), {exchanges} exchanges"
    )
    yield (
        f"training loss {loss(report.loss_first)} -> {loss(report.loss_last)}; "
        f"held-out loss {loss(report.loss_start)} -> {loss(report.loss_merged)}"
        f"{bits_per_byte(report.bits_per_byte_merged)}, mean of all replicas"
    )
    if report.spread is not None:
        yield f"spread of the weights {report.spread:.2%}; run state {'equal' if report.state_equal else 'not equal'}"
    if shares := [node.utilisation for node in report.nodes if node.utilisation is not None]:
        moved = sum((Counter(node.paths) for node in report.nodes), Counter[str]())
        paths = ", ".join(f"{number // 2} by {path}" for path, number in sorted(moved.items())) or "none"
        yield f"trainers in inner steps {min(shares):.1%} to {max(shares):.1%} of the time; exchanges: {paths}"
    clipped = sum(node.exchanges_clipped for node in report.nodes)
    refused = sum(node.exchanges_refused for node in report.nodes)
    if clipped or refused:
        yield f"screening, counted at both partners: {clipped} clipped, {refused} refused"
    if any(node.home for node in report.nodes):
        links = Counter(path for node in report.nodes for path in node.links.values())
        # The two ends of a link may have reported different paths at that moment.
        ways = ", ".join(f"{(number + 1) // 2} {path}" for path, number in sorted(links.items()))
        yield f"links between homes: {ways or 'none'}"


def stage_lines(report: PlayReport) -> Iterator[str]:
    """Yield one line per stage."""
    for stage in report.stages:
        busy = "not known" if stage.utilisation is None else f"{stage.utilisation:.1%}"
        yield (
            f"stage {stage.stage}: {stage.providers} nodes, {busy} busy of late; microbatches: {stage.kept} kept, "
            f"{stage.dropped} dropped, {stage.rerouted} sent another way, {stage.taken_out} taken out again"
        )


def plot_losses(report: PlayReport, path: Path) -> None:
    """Plot every node's loss over its rounds, and the merged model's. Raises `ImportError` without matplotlib."""
    from ..report.plot import plot

    curves = {f"node {node.index}": [(number + 1, loss) for number, loss in node.losses] for node in report.nodes}
    marks = {}
    if report.loss_start is not None:
        marks[f"start, held-out text: {report.loss_start:.2f}"] = (0, report.loss_start)
    if report.loss_merged is not None:
        last = max((node.rounds for node in report.nodes), default=0)
        label = f"merged model: {report.loss_merged:.2f}{bits_per_byte(report.bits_per_byte_merged)}"
        marks[label] = (last, report.loss_merged)
    title = f"{report.name}: {len(report.nodes)} nodes, {report.tokens:,} tokens, {report.verdict}"
    plot(path, curves, marks, "rounds", title)


# The effects of a play's faults on its nodes, in words.


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


# A table of the links between the homes of a testnet, as their two ends report them.

_NONE: Final = "-"


def link_table(nodes: Sequence[NodeReport]) -> Grid:
    """Return a table of links: its cells are the path from the row's node to the column's; "-" if there is none."""
    header = ["link to node", *(str(node.index) for node in nodes)]
    rows = [
        [
            f"{node.index} {node.home}",
            *(node.links.get(other.peer_id, _NONE) if other is not node else "" for other in nodes),
        ]
        for node in nodes
    ]
    return Grid("Links between homes, as the node of the row says", header, rows)

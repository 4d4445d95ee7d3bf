"""Plots: every node's loss over time and the merged model's (``loss.png``), and the methods of a comparison."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import matplotlib.figure

from farandole.node.base.figures import bits_per_byte

from .methods.compare import Result
from .report import PlayReport

matplotlib.use("Agg")


def plot_losses(report: PlayReport, path: Path) -> None:
    """Write the plot."""
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for node in report.nodes:
        rounds = [round_index + 1 for round_index, _ in node.losses]
        axes.plot(rounds, [loss for _, loss in node.losses], linewidth=1, label=f"node {node.index}")
    last = max((node.rounds for node in report.nodes), default=0)
    if report.loss_start is not None:
        axes.plot([0], [report.loss_start], "k.", label=f"start, held-out text: {report.loss_start:.2f}")
    if report.loss_merged is not None:
        label = f"merged model: {report.loss_merged:.2f}{bits_per_byte(report.bits_per_byte_merged)}"
        axes.plot([last], [report.loss_merged], "k*", markersize=12, label=label)
    axes.set_xlabel("rounds")
    axes.set_ylabel("loss, nats a token")
    axes.set_title(f"{report.name}: {len(report.nodes)} nodes, {report.tokens:,} tokens, {report.verdict}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)


def plot_comparison(results: Sequence[Result], path: Path) -> None:
    """Write the methods' loss curves: means over the seeds, beginning where the first tenth of the steps is over."""
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    by_method: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_method[result.method].append(result)
    for name, group in by_method.items():
        steps = [step for step, _ in group[0].curve]
        means = [statistics.mean(losses) for losses in zip(*(dict(each.curve).values() for each in group), strict=True)]
        shown = [(step, mean) for step, mean in zip(steps, means, strict=True) if 10 * step > steps[-1]]
        axes.plot(*zip(*shown, strict=True), linewidth=1, label=f"{name}: {means[-1]:.3f}")
    axes.set_xlabel("inner steps")
    axes.set_ylabel("loss on held-out text, nats a token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)

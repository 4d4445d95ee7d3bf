"""A plot of every node's loss over time, and the merged model's: ``loss.png``."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.figure

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
        axes.plot([last], [report.loss_merged], "k*", markersize=12, label=f"merged model: {report.loss_merged:.2f}")
    axes.set_xlabel("rounds")
    axes.set_ylabel("loss, nats a token")
    axes.set_title(f"{report.name}: {len(report.nodes)} nodes, {report.tokens:,} tokens, {report.verdict}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)

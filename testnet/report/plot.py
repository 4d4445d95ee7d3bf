"""Plots of losses, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import matplotlib.figure

matplotlib.use("Agg")

Curve = Sequence[tuple[float, float]]


def plot(
    path: Path, curves: Mapping[str, Curve], marks: Mapping[str, tuple[float, float]], across: str, title: str = ""
) -> None:
    """Write a plot of losses against ``across``: curves and single points, by their labels."""
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for label, curve in curves.items():
        axes.plot([x for x, _ in curve], [y for _, y in curve], linewidth=1, label=label)
    for label, (x, y) in marks.items():
        axes.plot([x], [y], "k*", label=label)
    axes.set_xlabel(across)
    axes.set_ylabel("loss, nats a token")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)

"""Tables in Markdown, for the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: str, rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as a Markdown table, below the line ``header``."""
    lines = ("".join(f"| {_cell(cell)} " for cell in row) + "|" for row in rows)
    return "\n".join([header, "|" + "---|" * (header.count("|") - 1), *lines])


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")

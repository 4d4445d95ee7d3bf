"""A table of words, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

# In narrower columns, names break in the middle of a word on a terminal of 80 columns.
LEFT_WIDTH = 18


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of words; the first columns are left-aligned."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_left: int = 1

    def rich(self) -> Table:
        """Return the table for a terminal."""
        table = Table(title=self.title)
        for index, name in enumerate(self.header):
            is_left = index < self.num_left
            table.add_column(name, justify="left" if is_left else "right", min_width=LEFT_WIDTH if is_left else None)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return the table as Markdown, for a document."""
        rule = ["---" if index < self.num_left else "---:" for index in range(len(self.header))]
        lines = [f"| {' | '.join(row)} |" for row in (self.header, *self.rows)]
        return "\n".join([f"{self.title}:", "", lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def cell(value: float | None, form: str, missing: str = "") -> str:
    """Format a number by a form such as ``{:.1f} s``; return ``missing`` for None."""
    return missing if value is None else form.format(value)

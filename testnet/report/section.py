"""Tables of words, and the setting of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.table import Table

# In narrower columns, names break in the middle of a word on a terminal of 80 columns.
LEFT_WIDTH = 18


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of words; the first column is left-aligned."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> Table:
        """Return the table for a terminal."""
        table = Table(title=self.title)
        for index, name in enumerate(self.header):
            table.add_column(name, justify="right" if index else "left", min_width=None if index else LEFT_WIDTH)
        for row in self.rows:
            table.add_row(*row)
        return table


def cell(value: float | None, form: str, missing: str = "") -> str:
    """Format a number by a form such as ``{:.1f} s``; return ``missing`` for None."""
    return missing if value is None else form.format(value)


# The setting of a measurement: command, date and machine. No figure is published without it.


def setting() -> dict[str, str | int | float]:
    """Return the present setting; call it before measuring, so that the load is only from other processes."""
    return {
        "command": shlex.join(["farandole", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count() or 1,
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB",
        "load at the start": round(os.getloadavg()[0], 1),
        "system": platform.platform(terse=True),
        "Python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }

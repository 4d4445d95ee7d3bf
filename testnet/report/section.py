"""Sections of a document that commands write: the text between two comments, each on a line of its own.

    <!-- begin traffic -->
    <!-- end traffic -->

Text outside the sections is never changed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from farandole.protocol.wire.errors import FarandoleError

_MARKER = re.compile(r"^<!-- (begin|end) (\S+) -->(?=\r?$)", re.MULTILINE)


class SectionError(FarandoleError):
    """A document cannot be read or written, or has no such section; the message says what it needs."""


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a document in UTF-8."""

    document: Path
    name: str

    def write(self, content: str) -> None:
        """Replace the section's content, atomically, in the document's present version. Raises `SectionError`."""
        head, tail = self._parts()
        document = self.document.resolve()
        partial = document.with_name(document.name + ".part")
        try:
            partial.write_bytes("\n\n".join([head, content.strip("\n"), tail]).encode())
            shutil.copymode(document, partial)
            partial.replace(document)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise SectionError(f"cannot write {self.document}: {error}") from error

    def _parts(self) -> tuple[str, str]:
        """Return the document up to the section's begin, and from its end on, both with their comments."""
        try:
            text = self.document.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise SectionError(f"cannot read {self.document}: {error}") from error
        markers = list(_MARKER.finditer(text))
        wanted = [("begin", self.name), ("end", self.name)]
        found = [pair for pair in itertools.pairwise(markers) if [marker.groups() for marker in pair] == wanted]
        if len(found) != 1 or sum(marker[2] == self.name for marker in markers) != 2:
            raise SectionError(
                f"{self.document} has no section {self.name!r}: it needs the lines <!-- begin {self.name} --> and "
                f"<!-- end {self.name} -->, in this order, once, and no other section's between them"
            )
        begin, end = found[0]
        return text[: begin.end()], text[end.start() :]


# A table of words.

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

"""Sections of a document that commands write: the text between two comments, each on a line of its own.

    <!-- begin exchange -->
    <!-- end exchange -->

Text outside the sections is never changed. A new measurement replaces all figures of a section, together with the
command and the machine that they come from, so nothing is pasted by hand.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from farandole.protocol.wire.errors import FarandoleError

Write = Annotated[
    Path | None, typer.Option("--write", metavar="DOCUMENT", help="Markdown file whose section gets the figures.")
]
LINE_WIDTH = 120
_MARKER = re.compile(r"^<!-- (begin|end) (\S+) -->(?=\r?$)", re.MULTILINE)


class SectionError(FarandoleError):
    """A document cannot be read or written, or has no such section; the message says what it needs."""


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a document in UTF-8."""

    document: Path
    name: str

    def check(self) -> None:
        """Raise `SectionError` if the section could not be written; for a check before hours of measuring."""
        self._parts()

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


def compose(setting: Mapping[str, object], *parts: str) -> str:
    """Return a section's content: the command, its machine, and its tables and words."""
    words = ", ".join(f"{name} {value}" for name, value in setting.items() if name not in ("command", "date"))
    origin = textwrap.fill(f"Measured on {setting['date']}: {words}.", LINE_WIDTH, break_on_hyphens=False)
    return "\n\n".join([f"    {setting['command']}", origin, *parts]) + "\n"

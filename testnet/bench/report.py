"""The common parts of all benchmarks: their options, their reports, and where a report is written.

A program measures inside `open_bench`, and makes a `BenchReport` of its figures: tables and words for people, data for
JSON, and the limits that were missed. `Bench.publish` writes ``NAME.json`` and ``NAME.md``, prints the report, and
replaces the section of a document if all limits are met.
"""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.status import Status

from ..report.section import LINE_WIDTH, Grid, Section, compose, setting
from ..report.section import Write as Write
from .process import BenchError

OUT: Final = Path("out/bench")
CACHE: Final = Path(".bench")
Out = Annotated[Path, typer.Option(help="Folder for NAME.json, NAME.md and logs.")]
Repeats = Annotated[int, typer.Option(min=1, help="Repetitions of each measurement; the median counts.")]
Cache = Annotated[Path, typer.Option(help="Folder in which other projects are installed.")]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The measurements of a benchmark until now."""

    setting: Mapping[str, Any]
    """Command, date, machine and choices (`farandole.testnet.report.section`)."""
    grids: Sequence[Grid]
    """Tables for people."""
    data: Mapping[str, Any]
    """All figures, for JSON."""
    words: Sequence[str] = ()
    """Paragraphs below the tables; empty ones are left out."""
    misses: Sequence[str] = ()
    """Limits that were not met, in words. A report with misses is not published in a document."""

    @property
    def paragraphs(self) -> list[str]:
        """Return the words, wrapped."""
        return [textwrap.fill(text, LINE_WIDTH, break_on_hyphens=False) for text in self.words if text]

    def document(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {**self.data, "setting": dict(self.setting), "misses": list(self.misses)}

    def markdown(self) -> str:
        """Return the section of a document."""
        return compose(self.setting, *(grid.markdown() for grid in self.grids), *self.paragraphs)


def missing(problems: Mapping[str, str]) -> list[str]:
    """Return words about each part that could not be measured, from its name and the reason."""
    return [f"{name} is missing: {reason}" for name, reason in problems.items()]


@dataclass(slots=True)
class Bench:
    """A running benchmark; made by `open_bench`."""

    name: str
    out: Path
    setting: dict[str, Any]
    section: Section | None
    console: Console = field(default_factory=Console)
    _status: Status | None = None

    @property
    def log(self) -> Path:
        """Return the file for the output of the benchmark's processes."""
        return self.out / f"{self.name}.log"

    def say(self, text: str) -> None:
        """Show what is being measured, in a line that the next one replaces; in a file or a pipe each line stays."""
        if not self.console.is_terminal:
            self.tell(text)
            return
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        self._status.update(text)

    def tell(self, text: str, *, is_miss: bool = False) -> None:
        """Print a line that stays."""
        self.console.print(text, style="red" if is_miss else None, markup=False, highlight=False)

    def close(self) -> None:
        """Remove the line of `say`."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def write(self, report: BenchReport) -> None:
        """Write ``NAME.json`` and ``NAME.md``."""
        (self.out / f"{self.name}.json").write_text(json.dumps(report.document(), indent=2) + "\n")
        (self.out / f"{self.name}.md").write_text(report.markdown())

    def publish(self, report: BenchReport, *others: Path) -> None:
        """Write and print the report, and replace the section; ``others`` are further paths to name.

        Raises `BenchError` if a limit was not met, and then leaves the section as it was; `SectionError`.
        """
        self.write(report)
        for grid in report.grids:
            self.console.print(grid.rich())
        for text in report.paragraphs:
            self.tell(text)
        written = [self.out / f"{self.name}.json", self.out / f"{self.name}.md", *others]
        self.tell(", ".join(map(str, written)))
        if report.misses:
            raise BenchError("; ".join(report.misses))
        if self.section is not None:
            self.section.write(report.markdown())


@contextlib.contextmanager
def open_bench(name: str, out: Path, write: Path | None = None, **choices: Any) -> Iterator[Bench]:
    """Open a benchmark that writes into ``out``, and into the section ``name`` of the document ``write``.

    ``choices`` are shown with the figures. Raises `SectionError`, before anything is measured, if the document has no
    such section.
    """
    section = Section(write, name) if write else None
    if section is not None:
        section.check()
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(name, out, {**setting(), **choices}, section)
    bench.log.unlink(missing_ok=True)
    with contextlib.closing(bench):
        yield bench

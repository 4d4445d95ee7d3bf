"""Benchmarks that measure part after part and judge each: what they have in common."""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rich.console import Console

from ..grid import Grid
from ..section import Section, compose
from .process import BenchError


class Row(Protocol):
    """One part, which is a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def misses(self) -> list[str]:
        """What should hold and does not, for people."""


RowT = TypeVar("RowT", bound=Row)


@dataclass(slots=True)
class RowsReport(abc.ABC, Generic[RowT]):
    """What was measured so far."""

    setting: dict[str, Any]
    rows: list[RowT] = field(default_factory=list)

    @property
    def misses(self) -> list[str]:
        """Of all rows."""
        return [miss for row in self.rows for miss in row.misses()]

    @abc.abstractmethod
    def grid(self) -> Grid:
        """Everything, for people."""

    def words(self) -> str:
        """The verdict in words, where there is more to say than the table does."""
        return ""

    def document(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {"setting": self.setting, "rows": [asdict(row) for row in self.rows], "misses": self.misses}

    def markdown(self) -> str:
        """A document's section."""
        return compose(self.setting, *filter(None, [self.words(), self.grid().markdown()]))

    def write(self, out: Path, name: str) -> None:
        """``NAME.json`` and ``NAME.md``."""
        (out / f"{name}.json").write_text(json.dumps(self.document(), indent=2) + "\n")
        (out / f"{name}.md").write_text(self.markdown())

    def publish(
        self, out: Path, name: str, console: Console, section: Section | None, others: Sequence[Path] = ()
    ) -> None:
        """Write, show, and replace the section; ``others``: where else something was written.

        Raises `BenchError` if something does not hold, and then leaves the section as it was; `SectionError`.
        """
        self.write(out, name)
        console.print(self.grid().rich())
        if self.words():
            console.print(self.words(), markup=False, highlight=False)
        written = [out / f"{name}.json", out / f"{name}.md", *others]
        console.print(", ".join(map(str, written)), markup=False, highlight=False)
        if self.misses:
            raise BenchError("; ".join(self.misses))
        if section is not None:
            section.write(self.markdown())

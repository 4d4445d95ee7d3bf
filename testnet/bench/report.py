"""The common parts of all benchmarks: their options, their results, and the page that is written from all results.

A program measures inside `open_bench`, and makes claims of its figures: each is a row of the page. `Bench.publish`
writes ``OUT/NAME.json`` and prints the claims, or tables instead. With ``--write`` it also keeps them in the folder
`RESULTS`, and writes BENCHMARKS.md from all that is kept there. Results of other commands, such as
`farandole testnet run`, are kept there by hand.
"""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console

from ..report.section import Grid, setting
from .commands import BENCHES
from .process import BenchError

OUT: Final = Path("out/bench")
CACHE: Final = Path(".bench")
RESULTS: Final = Path(__file__).resolve().with_name("results")
PAGE: Final = RESULTS.parents[2] / "BENCHMARKS.md"
Out = Annotated[Path, typer.Option(help="Folder for NAME.json and logs.")]
Repeats = Annotated[int, typer.Option(min=1, help="Repetitions of each measurement; the median counts.")]
Write = Annotated[
    bool, typer.Option("--write", help="Keep the result in testnet/bench/results, and write BENCHMARKS.md.")
]


class Claim(msgspec.Struct, frozen=True):
    """A row of the page."""

    claim: str
    ours: str
    theirs: str = ""
    """A peer's figure, or what ours is compared with; the claim says of whom."""


class KeptResult(msgspec.Struct, frozen=True):
    """A file of `RESULTS`: a section of the page, and the tables behind it."""

    title: str
    setting: dict[str, str | int | float]
    """Command, date, machine and choices (`farandole.testnet.report.section`)."""
    claims: list[Claim]
    tables: list[dict[str, str | list[str]]] = []
    """The tables behind the claims: title and rows, whose cells are separated by ``|``; the first row is the header."""

    def section(self) -> str:
        """Return the section of the page."""
        origin = {name: value for name, value in self.setting.items() if name in ("cores", "device", "Python", "torch")}
        commands = textwrap.indent(str(self.setting["command"]), "    ")
        where = ", ".join(f"{name} {value}" for name, value in origin.items())
        rows = [
            f"| {self.setting['date']}: {where} | ours | theirs |",
            "|---|---:|---:|",
            *(f"| {each.claim} | {each.ours} | {each.theirs} |" for each in self.claims),
        ]
        return "\n\n".join([f"## {self.title}", *([commands] if commands else []), "\n".join(rows)])


def page() -> str:
    """Return BENCHMARKS.md, from the kept results: first those of `farandole testnet bench`, in its order."""
    order = [*BENCHES]

    def rank(path: Path) -> tuple[int, str]:
        bench = next((name for name in order if path.stem.startswith(name)), "")
        return order.index(bench) if bench else len(order), path.stem

    files = sorted(RESULTS.glob("*.json"), key=rank)
    results = [msgspec.json.decode(file.read_bytes(), type=KeptResult) for file in files]
    return "\n\n".join([HEAD, *(result.section() for result in results)]) + "\n"


HEAD: Final = """\
# Benchmarks

What was measured, with the command, the day and the machine; *theirs* is the figure of the peer that the row names.
`testnet/bench/results` has the tables behind some sections. With `--write` a benchmark replaces its section, and
`farandole testnet bench --help` lists what can be measured. `join`, `faults`, `race` and `nat` create network
namespaces, so they need root. Figures are between processes of one machine unless a row says otherwise, a megabyte is
10^6 bytes, and losses are in nats a byte of held-out text."""


@dataclass(slots=True)
class Bench:
    """A running benchmark; made by `open_bench`."""

    name: str
    out: Path
    title: str
    """Title of the section in BENCHMARKS.md."""
    setting: dict[str, Any]
    is_kept: bool
    console: Console = field(default_factory=Console)

    @property
    def log(self) -> Path:
        """Return the file for the output of the benchmark's processes."""
        return self.out / f"{self.name}.log"

    def say(self, text: str) -> None:
        """Print a line: what is being measured, or was."""
        self.console.print(text, markup=False, highlight=False)

    def publish(
        self,
        claims: Sequence[Claim],
        data: Mapping[str, Any],
        *,
        misses: Sequence[str] = (),
        grids: Sequence[Grid] = (),
    ) -> None:
        """Write and print the result, and keep it if that was asked for.

        ``data``: all figures, for ``NAME.json``; ``misses``: limits that were not met, in words; ``grids``: tables that
        are printed in place of the claims, and kept behind them.

        Raises `BenchError` if a limit was not met, and then keeps nothing.
        """
        tables: list[dict[str, str | list[str]]] = [
            {"title": grid.title, "rows": [" | ".join(row) for row in (grid.header, *grid.rows)]} for grid in grids
        ]
        kept = msgspec.to_builtins(KeptResult(self.title, self.setting, [*claims], tables))
        path = self.out / f"{self.name}.json"
        path.write_text(json.dumps({**data, **kept, "misses": [*misses]}, indent=2) + "\n")
        rows = [[each.claim, each.ours, each.theirs] for each in claims]
        for grid in grids or [Grid(self.title, ["", "ours", "theirs"], rows)]:
            self.console.print(grid.rich())
        self.say(str(path))
        if misses:
            raise BenchError("; ".join(misses))
        if self.is_kept:
            (RESULTS / f"{self.name}.json").write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
            PAGE.write_text(page())


@contextlib.contextmanager
def open_bench(name: str, out: Path, write: bool = False, title: str = "", **choices: Any) -> Iterator[Bench]:
    """Open a benchmark that writes into ``out``; ``choices`` are shown with the figures."""
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(name, out, title or name, {**setting(), **choices}, write)
    bench.log.unlink(missing_ok=True)
    yield bench


if __name__ == "__main__":  # after a result was changed by hand
    PAGE.write_text(page())

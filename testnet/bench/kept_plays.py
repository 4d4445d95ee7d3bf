"""Plays of a long benchmark, whose outcomes are kept until all are there: an interrupted benchmark goes on.

An outcome counts only for the same play of the same sources, so a figure is never one of older code.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from farandole import node, protocol, testnet, training
from farandole.training.base.durable import replacing

from ..simulate.plays import play_all
from .report import Bench

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class _Place:
    """The file of a play's outcome; shown as the play's name."""

    file: Path
    name: str = field(compare=False)

    def __str__(self) -> str:
        return self.name


def play_and_keep(
    bench: Bench, plays: Sequence[tuple[str, Callable[[], Outcome]]], outcome: type[Outcome]
) -> dict[str, list[Outcome]]:
    """Run all plays as `play_all` does, and keep each outcome in the folder ``OUT/NAME.plays`` until all are there.

    Plays are `functools.partial` with different arguments, which `repr` shows completely.
    """
    folder = bench.out / f"{bench.name}.plays"
    folder.mkdir(exist_ok=True)
    source = source_hash()
    asked = [(_Place(folder / _file_name(source, play), name), play) for name, play in plays]
    found: dict[_Place, Outcome] = {}
    for place, _ in asked:
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            found[place] = msgspec.msgpack.decode(place.file.read_bytes(), type=outcome)
    if found:
        bench.tell(f"{folder} has {len(found)} of {len(plays)} plays, of a run that was interrupted")

    def keep(place: _Place, result: Outcome) -> None:
        found[place] = result
        with replacing(place.file) as file:
            file.write(msgspec.msgpack.encode(result))

    play_all(bench.say, [(place, play) for place, play in asked if place not in found], keep)
    outcomes: dict[str, list[Outcome]] = {name: [] for name, _ in plays}
    for place, _ in asked:
        outcomes[place.name].append(found[place])
    shutil.rmtree(folder)
    return outcomes


def source_hash() -> str:
    """Return a hash of all of farandole's sources."""
    digest = hashlib.sha256()
    for package in (node, protocol, testnet, training):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _file_name(source: str, play: Callable[[], object]) -> str:
    assert isinstance(play, partial), "plays differ by their arguments"
    return hashlib.sha256(f"{source} {play.func.__qualname__} {play.args} {play.keywords}".encode()).hexdigest()

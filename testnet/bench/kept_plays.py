"""Plays of a long benchmark, whose outcomes are kept until all are there: an interrupted benchmark goes on.

An outcome counts only for the same play of the same sources, so a figure is never one of older code.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farandole import node, protocol, testnet, training

from ..plays import play_all
from .report import Bench

Outcome = TypeVar("Outcome")


class _Kept(msgspec.Struct, frozen=True):
    """A line of the file."""

    source: str
    play: str
    outcome: msgspec.Raw


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a play among all plays of a benchmark; shown as its name."""

    number: int
    name: str = field(compare=False)

    def __str__(self) -> str:
        return self.name


def play_and_keep(
    bench: Bench, plays: Sequence[tuple[str, Callable[[], Outcome]]], outcome: type[Outcome]
) -> dict[str, list[Outcome]]:
    """Run all plays as `play_all` does, and keep each outcome in ``OUT/NAME.plays`` until all are there.

    Plays are `functools.partial` of values that `repr` shows whole.
    """
    path = bench.out / f"{bench.name}.plays"
    source = source_hash()
    earlier = _read(path, source, outcome)
    keys = [_key_of(play) for _, play in plays]
    if num_earlier := sum(key in earlier for key in keys):
        bench.tell(f"{num_earlier} of {len(plays)} plays are there: {path} has them, of a run that was interrupted")
    with path.open("ab") as file:

        def keep(place: _Place, result: Outcome) -> None:
            raw = msgspec.Raw(msgspec.json.encode(result))
            file.write(msgspec.json.encode(_Kept(source, keys[place.number], raw)) + b"\n")
            file.flush()

        missing = [
            (_Place(number, name), play) for number, (name, play) in enumerate(plays) if keys[number] not in earlier
        ]
        played = play_all(bench.say, missing, keep)
    outcomes: dict[str, list[Outcome]] = {name: [] for name, _ in plays}
    for number, (name, _) in enumerate(plays):
        of_play = earlier.get(keys[number])
        outcomes[name].append(played[_Place(number, name)][0] if of_play is None else of_play)
    path.unlink()
    return outcomes


def source_hash() -> str:
    """Return a hash of all of farandole's sources."""
    digest = hashlib.sha256()
    for package in (node, protocol, testnet, training):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _key_of(play: Callable[[], Any]) -> str:
    assert isinstance(play, partial), "its arguments are what tells it from others"
    return hashlib.sha256(f"{play.func.__qualname__} {play.args} {play.keywords}".encode()).hexdigest()


def _read(path: Path, source: str, outcome: type[Outcome]) -> dict[str, Outcome]:
    """Return the outcomes of these sources by play, and remove all else from the file, such as a part of a line."""
    earlier, lines = {}, []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        with contextlib.suppress(msgspec.DecodeError):
            kept = msgspec.json.decode(line, type=_Kept)
            if kept.source == source:
                earlier[kept.play] = msgspec.json.decode(kept.outcome, type=outcome)
                lines.append(line)
    path.write_bytes(b"".join(lines))
    return earlier

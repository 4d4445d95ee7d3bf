"""An interrupted benchmark goes on with the plays that it lacks, unless the sources are others now."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from farandole.testnet.bench import kept_plays
from farandole.testnet.bench.kept_plays import play_and_keep
from farandole.testnet.bench.report import Bench, open_bench


@dataclass
class Doubled:
    losses: list[float]


def double(folder: Path, number: int) -> Doubled:
    """Fails while the folder has a file "fails" and the number is 3; each call leaves a line."""
    with (folder / "played").open("a") as file:
        file.write(f"{number}\n")
    if number == 3 and (folder / "fails").exists():
        raise OSError("interrupted")
    return Doubled([2.0 * number, math.inf])


def play(bench: Bench, folder: Path) -> dict[str, list[Doubled]]:
    numbers = {"small": (1, 2), "large": (3,)}
    plays = [(name, partial(double, folder, number)) for name, each in numbers.items() for number in each]
    return play_and_keep(bench, plays, Doubled)


WHOLE = {"small": [Doubled([2.0, math.inf]), Doubled([4.0, math.inf])], "large": [Doubled([6.0, math.inf])]}


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Interrupt a benchmark at its last play, and return what was played."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    (folder / "fails").touch()
    with open_bench("doubles", folder / "out") as bench, pytest.raises(OSError, match="interrupted"):
        play(bench, folder)
    (folder / "fails").unlink()
    return played(folder)


def played(folder: Path) -> list[str]:
    lines = (folder / "played").read_text().split()
    (folder / "played").unlink()
    return lines


def test_only_what_was_interrupted_is_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interrupted(tmp_path, monkeypatch) == ["1", "2", "3"]
    with open_bench("doubles", tmp_path / "out") as bench:
        assert play(bench, tmp_path) == WHOLE
        assert played(tmp_path) == ["3"]
        assert "2 of 3 plays" in capsys.readouterr().out
        assert play(bench, tmp_path) == WHOLE
    assert played(tmp_path) == ["1", "2", "3"], "after a whole run, all is measured again"


def test_what_cannot_be_read_is_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path, monkeypatch)
    first, _ = (tmp_path / "out" / "doubles.plays").iterdir()
    first.write_bytes(first.read_bytes()[:-1])
    with open_bench("doubles", tmp_path / "out") as bench:
        assert play(bench, tmp_path) == WHOLE
    assert len(played(tmp_path)) == 2


def test_outcomes_of_other_sources_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path, monkeypatch)
    monkeypatch.setattr(kept_plays, "source_hash", lambda: "of another day")
    with open_bench("doubles", tmp_path / "out") as bench:
        assert play(bench, tmp_path) == WHOLE
    assert played(tmp_path) == ["1", "2", "3"]

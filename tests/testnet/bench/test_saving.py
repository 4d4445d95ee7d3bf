"""The benchmark of saving: its results from given figures; as a soak test, a tiny one with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.testnet.bench.report import open_bench
from farandole.testnet.bench.saving import NONE, WAYS, SavingFigures, TimedRound, chance_share, measure, rows_of

TINY = {"num_layers": 2, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256}


def rounds(way: str, *seconds: float, held: float = 0.0, write: float | None = None) -> list[TimedRound]:
    return [TimedRound(way, turn, each, held, 5.0, write, 100_000_000) for turn, each in enumerate(seconds)]


def test_what_is_lost_is_told_turn_by_turn() -> None:
    """The machine becomes slower by half during the test; each turn has a round of each kind."""
    played = [*rounds(NONE, 10.0, 12.0, 15.0), *rounds("behind", 10.1, 12.3, 15.2, held=0.1, write=2.0)]

    none, behind = rows_of(played)

    assert (none.way, none.lost_seconds, none.rate_mb_s) == (NONE, 0.0, None)
    assert behind.lost_seconds == pytest.approx(0.2)
    assert behind.lost_share == pytest.approx(0.2 / 12.0)
    assert (behind.held_seconds, behind.rate_mb_s) == (0.1, 50.0)
    assert chance_share(played) == pytest.approx(2.5 / 12.0)
    assert chance_share(rounds(NONE, 10.0)) is None


def test_people_and_programs_read_the_same() -> None:
    figures = SavingFigures(25_000_000, 8)
    figures.rounds += [*rounds(NONE, 10.0, 10.1), *rounds("torch", 11.0, 11.1, held=1.0, write=1.0)]

    report = figures.report({"command": "c", "date": "d"})
    assert report.grids[0].rows[1] == ["torch.save and fsync", "11.05", "1.00", "10.0%", "1.000", "5", "100"]
    assert report.words == ["Two rounds without a save, one after the other, differ by 1.0%."]
    (_, torch) = report.data["rows"]
    assert torch["rate_mb_s"] == 100.0


@pytest.mark.soak
def test_a_tiny_one(tmp_path: Path) -> None:
    with open_bench("save", tmp_path / "out") as bench:
        figures = measure(bench, turns=2, round_seconds=0.01, model=TINY)
        bench.publish(figures.report(bench.setting))
    rows = rows_of(figures.rounds)
    assert [row.way for row in rows] == list(WAYS)
    assert all(row.write_seconds is not None for row in rows[1:])
    document = json.loads((tmp_path / "out" / "save.json").read_text())
    assert document["num_parameters"] == figures.num_parameters
    assert len(document["claims"]) == 4
    assert not (tmp_path / "out" / "save").exists()

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
    assert "| torch.save and fsync | 11.05 | 1.00 | 10.0% | 1.000 | 5 | 100 |" in report.markdown()
    assert "differ by 1.0%" in report.markdown()
    (_, torch) = report.document()["rows"]
    assert torch["rate_mb_s"] == 100.0


@pytest.mark.soak
def test_a_tiny_one(tmp_path: Path) -> None:
    document = tmp_path / "figures.md"
    document.write_text("<!-- begin saving -->\n\n<!-- end saving -->\n")
    with open_bench("saving", tmp_path / "out", document) as bench:
        figures = measure(bench, turns=2, round_seconds=0.01, model=TINY)
        bench.publish(figures.report(bench.setting))
    rows = rows_of(figures.rounds)
    assert [row.way for row in rows] == list(WAYS)
    assert all(row.write_seconds is not None for row in rows[1:])
    assert "torch.save and fsync" in document.read_text()
    assert json.loads((tmp_path / "out" / "saving.json").read_text())["num_parameters"] == figures.num_parameters
    assert not (tmp_path / "out" / "saving").exists()

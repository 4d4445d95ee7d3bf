"""The benchmark of saving: its results from given figures; as a soak test, a tiny one with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.testnet.bench.report import open_bench
from farandole.testnet.bench.saving import NONE, WAYS, TimedRound, chance_share, measure, medians_of, report

TINY = {"num_layers": 2, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256}


def rounds(way: str, *seconds: float, held: float = 0.0, write: float | None = None) -> list[TimedRound]:
    return [TimedRound(way, turn, each, held, 5.0, write, 100_000_000) for turn, each in enumerate(seconds)]


def test_what_is_lost_is_told_turn_by_turn() -> None:
    """The machine becomes slower by half during the test; each turn has a round of each kind."""
    played = [*rounds(NONE, 10.0, 12.0, 15.0), *rounds("behind", 10.1, 12.3, 15.2, held=0.1, write=2.0)]

    medians = medians_of(played)

    assert medians[NONE][1] == 0.0
    assert medians[NONE][0].rate == ""
    assert medians["behind"][1] == pytest.approx(0.2)
    assert (medians["behind"][0].held_seconds, medians["behind"][0].rate) == (0.1, "50")
    assert chance_share(played) == pytest.approx(2.5 / 12.0)
    assert chance_share(rounds(NONE, 10.0)) is None


def test_people_read_what_is_lost() -> None:
    played = [*rounds(NONE, 10.0, 10.1), *rounds("torch", 11.0, 11.1, held=1.0, write=1.0)]
    made = report({"command": "c", "date": "d"}, played, 25_000_000, 8)
    assert made.grids[0].rows[1] == ["torch.save and fsync", "11.05", "1.00", "10.0%", "1.000", "5", "100"]
    assert made.words == ["Two rounds without a save, one after the other, differ by 1.0%."]


@pytest.mark.soak
def test_a_tiny_one(tmp_path: Path) -> None:
    with open_bench("save", tmp_path / "out") as bench:
        bench.publish(measure(bench, turns=2, round_seconds=0.01, model=TINY))
    document = json.loads((tmp_path / "out" / "save.json").read_text())
    assert {each["way"] for each in document["rounds"]} == set(WAYS)
    assert all(each["write_seconds"] for each in document["rounds"] if each["way"] != NONE)
    assert len(document["claims"]) == 4
    assert not (tmp_path / "out" / "save").exists()

"""The benchmark of saving: its results from given figures; as a soak test, a tiny one with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.testnet.bench.report import open_bench
from farandole.testnet.bench.save import NONE, OURS, TORCH, WAYS, chance_share, claims_of, lost, measure

TINY = {"num_layers": 2, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256}


def rounds(*seconds: float, held: float = 0.0, write: float = 1.0) -> list[dict[str, float]]:
    return [{"seconds": each, "held_seconds": held, "write_seconds": write, "size": 100_000_000} for each in seconds]


def test_what_is_lost_is_told_turn_by_turn() -> None:
    """The machine becomes slower by half during the test; each turn has a round of each kind."""
    played = {
        NONE: rounds(10.0, 12.0, 15.0),
        OURS: rounds(10.1, 12.3, 15.2, held=0.1, write=2.0),
        TORCH: rounds(11.0, 13.2, 16.2, held=1.0),
    }
    assert lost(played, OURS) == pytest.approx(0.2 / 12.0)
    assert chance_share(played) == pytest.approx(2.5 / 12.0)
    share, held, rate, chance = claims_of(played)
    assert (share.ours, share.theirs) == ("1.7%", "10.0%")
    assert (held.ours, held.theirs) == ("0.100", "1.000")
    assert (rate.ours, rate.theirs) == ("50", "100")
    assert chance.ours == "20.8%"


@pytest.mark.soak
def test_a_tiny_one(tmp_path: Path) -> None:
    with open_bench("save", tmp_path / "out") as bench:
        played = measure(bench, turns=2, round_seconds=0.01, model=TINY)
        bench.publish(claims_of(played), {"rounds": played})
    document = json.loads((tmp_path / "out" / "save.json").read_text())
    assert document["rounds"].keys() == set(WAYS)
    assert all(each["write_seconds"] for way in (OURS, TORCH) for each in document["rounds"][way])
    assert len(document["claims"]) == 4
    assert not (tmp_path / "out" / "save").exists()

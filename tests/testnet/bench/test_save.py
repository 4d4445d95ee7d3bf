"""The benchmark of saving, from given figures; `tests/documents/test_long.py` measures a small one."""

from __future__ import annotations

import pytest

from farandole.testnet.bench.save import NONE, OURS, TORCH, chance_share, claims_of, lost


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

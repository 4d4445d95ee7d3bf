from __future__ import annotations

import pytest

from farandole.node.status.status import Resources
from farandole.testnet.play.record import WARM_UP, Samples


def life(hours: float, leak: float) -> Samples:
    """Return samples a minute apart; after a warm-up in which memory doubles it grows by ``leak`` an hour."""
    samples = Samples()
    for second in range(0, int(3_600 * hours), 60):
        cold = max(0.0, 1 - second / WARM_UP)
        memory = round(100e6 * (1 - cold / 2) * (1 + leak * second / 3_600))
        samples.note(Resources(memory, 2 * memory, 40 + (second // 60) % 3, 90), float(second))
    return samples


@pytest.mark.parametrize("leak", [0.0, 0.02, -0.01])
def test_a_leak_is_seen_and_a_warm_up_is_none(leak: float) -> None:
    growth = life(2.0, leak).growth()
    assert growth is not None
    assert growth.memory == pytest.approx(leak, abs=0.001)
    assert growth.trainer_memory == pytest.approx(leak, abs=0.001)
    assert abs(growth.descriptors) <= 1
    assert growth.tasks == 0


def test_a_short_life_says_nothing() -> None:
    assert life(0.4, 0.5).growth() is None


def test_the_memory_of_a_trainer_counts_while_there_is_one() -> None:
    samples = life(2.0, 0.02)
    end = samples.taken[-1][0]
    for second in range(60, 300, 60):
        samples.note(Resources(100_000_000, None, 40, 90), end + second)
    growth = samples.growth()
    assert growth is not None
    assert growth.trainer_memory == pytest.approx(0.02, abs=0.002)

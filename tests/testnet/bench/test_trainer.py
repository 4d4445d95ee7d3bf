from pathlib import Path

import pytest

from farandole.testnet.bench.process import BenchError, open_workers
from farandole.testnet.bench.trainer import slope


def test_a_rate_is_the_slope_of_what_was_seen() -> None:
    """Samples arrive up to a second late; the rate over a minute is right nevertheless."""
    samples = [(10.0 + at + late, 1_000 * at) for at, late in zip(range(60), [0.0, 0.9, 0.4] * 20, strict=True)]

    assert slope(samples) == pytest.approx(1_000, rel=0.01)
    with pytest.raises(BenchError, match="only 2 samples"):
        slope(samples[:2])


def test_a_plain_loop_trains(tmp_path: Path) -> None:
    run = {"name": "plain", "model": "tiny", "inner": {"batch_size": 2}}
    with open_workers("training", ["plain"], tmp_path / "log") as (worker,):
        rate = worker.ask("learn_plainly", run=run, device="cpu", warmup_seconds=0.1, seconds=0.3, author=1)
    assert rate["tokens_per_second"] > 0
    assert rate["device"].startswith("CPU")

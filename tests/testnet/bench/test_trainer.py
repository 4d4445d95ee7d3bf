"""The benchmark of a trainer, in parts; `tests/documents/test_long.py` measures a small one."""

from pathlib import Path
from typing import Any, Final

import pytest

from farandole.node.status.round_log import RoundRecord
from farandole.protocol.run.models import num_parameters, preset
from farandole.testnet.bench.process import BenchError, open_workers
from farandole.testnet.bench.trainer import rate_of

FIELDS: Final[tuple[Any, ...]] = (None, None, "committed", "bob", 0, 0, 0.0, "bulk", 0)


def test_a_rate_is_of_the_rounds_after_the_first_until_one_node_is_done() -> None:
    played = [RoundRecord(10.0 * n, n, 5, 100 * n, 9.0, *FIELDS) for n in range(1, 6)]
    assert rate_of(played, ended_at=45.0) == (200 + 300 + 400) / 30.0
    with pytest.raises(BenchError, match="play more, or longer, rounds"):
        rate_of(played, ended_at=15.0)


def test_a_plain_loop_trains_and_a_trainer_ends_rounds(tmp_path: Path) -> None:
    run = {"name": "plain", "model": "tiny", "inner": {"batch_size": 2}}
    with open_workers("training", ["plain"], tmp_path / "log") as (worker,):
        rate = worker.ask("learn_plainly", run=run, device="cpu", warmup_seconds=0.1, seconds=0.3, author=1)
        end = worker.ask("end_rounds", run=run, device="cpu", path=str(tmp_path / "checkpoint"), turns=1)["seconds"]
    assert rate["tokens_per_second"] > 0
    assert rate["device"].startswith("CPU")
    assert min(end.values()) > 0
    assert end.keys() == {"encode", "decode", "judge", "outer step", "save", "load"}
    size = (tmp_path / "checkpoint").stat().st_size
    assert size > 8 * num_parameters(preset("tiny")), "weights, momentum and the means"

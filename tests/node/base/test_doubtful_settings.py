from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farandole.node.base.config.toml_file import read_toml
from farandole.node.base.requirements import check_times, doubtful_settings
from farandole.node.store.run_file import manifest_of
from farandole.protocol.wire.errors import ManifestError

ROOT = Path(__file__).parents[3]


def warnings(**settings: Any) -> list[str]:
    complete = {"name": "a", "model": "tiny", **settings}
    return [*doubtful_settings(manifest_of(complete, Path(), 0))]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"inner": {"total_steps": 1_000}}, "inner.warmup_steps (1000) is not less than inner.total_steps (1000)"),
        ({"inner": {"warmup_steps": 2}, "model": {"preset": "tiny", "num_stages": 2}}, "the model is in stages"),
    ],
)
def test_what_does_not_work_is_warned_of(settings: dict[str, Any], words: str) -> None:
    (warning,) = warnings(**settings)
    assert words in warning


def test_exchanges_that_may_take_longer_than_rounds_are_refused() -> None:
    run = manifest_of({"name": "a", "model": "tiny", "rounds": {"round_seconds": 1}}, Path(), 0)
    with pytest.raises(ManifestError, match=r"\(30\) is longer than rounds.round_seconds \(1\).*Set a longer"):
        check_times(run, {"rounds.round_seconds"})


def test_what_works_and_the_example_are_not() -> None:
    assert warnings(rounds={"round_seconds": 0, "inner_steps": 10}) == warnings(inner={"total_steps": 1_001}) == []
    settings = read_toml(ROOT / "examples" / "run.toml").values
    assert [*doubtful_settings(manifest_of(settings, ROOT, 0))] == []

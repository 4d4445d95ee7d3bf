"""BENCHMARKS.md is written from the kept results, and a benchmark keeps its result if it met its limits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from farandole.testnet.bench import report
from farandole.testnet.bench.process import BenchError
from farandole.testnet.bench.report import PAGE, RESULTS, Claim, KeptResult, open_bench, page


def test_the_page_is_of_the_kept_results() -> None:
    assert PAGE.read_text() == page(), "run: python -m farandole.testnet.bench.report"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_kept_result_has_claims_a_day_and_a_machine(file: Path) -> None:
    result = msgspec.json.decode(file.read_bytes(), type=KeptResult)
    assert result.claims
    assert {"command", "date"} < result.setting.keys()


def test_only_a_result_without_misses_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "PAGE", tmp_path / "PAGE.md")
    (tmp_path / "results").mkdir()
    with open_bench("save", tmp_path / "out", write=True) as bench:
        with pytest.raises(BenchError, match="too slow"):
            bench.publish([Claim("seconds", "1", "2")], {}, misses=["too slow"])
        assert not (tmp_path / "PAGE.md").exists()
        bench.publish([Claim("seconds", "1", "2")], {})
    assert (tmp_path / "PAGE.md").read_text().endswith("| seconds | 1 | 2 |\n")
    assert (tmp_path / "results" / "save.json").exists()

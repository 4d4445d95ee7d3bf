"""The benchmark of joining, small, and without hivemind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.testnet.bench.join import claims_of, measure
from farandole.testnet.bench.report import open_bench


def test_a_newcomer_joins_from_two_and_from_one(tmp_path: Path) -> None:
    with open_bench("join", tmp_path) as bench:
        figures = measure(bench, size_mb=32, repeats=1, with_link=False)
        bench.publish(claims_of(figures), figures)
    assert {"two_donors_s", "one_donor_s"} <= figures.keys()
    assert "hivemind_s" not in figures
    assert json.loads((tmp_path / "join.json").read_text())["size_mb"] == 32
    assert not list(tmp_path.glob("*.safetensors*"))


@pytest.mark.soak
@pytest.mark.usefixtures("networks")
def test_on_a_slow_line_a_newcomer_uses_it_and_the_others_rounds_hardly_notice(tmp_path: Path) -> None:
    with open_bench("join", tmp_path) as bench:
        figures = measure(bench, size_mb=40, repeats=1)
    assert figures["link_over_ideal"] <= 1.5
    assert figures["rounds_slower"] <= 0.05

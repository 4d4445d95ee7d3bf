import json
from pathlib import Path

import numpy as np
import pytest

from farandole.testnet.compare import choose_methods, run_compare, texts_by_kind
from farandole.testnet.section import Section, SectionError
from farandole.training.baselines import methods
from farandole.training.errors import DataError


def test_a_comparison_prints_and_writes_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "compare.json"

    figures = tmp_path / "FIGURES.md"
    figures.write_text("<!-- begin compare -->\n<!-- end compare -->\n")

    results = run_compare(nodes=2, steps=2, seeds=1, out=out, interval=1, section=Section(figures, "compare"))

    document = json.loads(out.read_text())
    assert [result.method for result in results] == [method.name for method in methods()]
    assert [result["method"] for result in document["results"]] == [method.name for method in methods()]
    assert all(0 < result["loss"] < 7 for result in document["results"])
    assert document["settings"]["nodes"] == len(document["settings"]["kinds"]) == 2
    assert "DiLoCo" in capsys.readouterr().out
    assert all(f"\n| {method.name} | 1 | " in figures.read_text() for method in methods())
    assert "nodes 2, steps 2, seeds 1, interval 1" in figures.read_text().replace("\n", " ")


def test_a_document_without_the_section_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(SectionError, match="cannot read"):
        run_compare(section=Section(tmp_path / "FIGURES.md", "compare"))


def test_some_methods_are_chosen_by_words_of_their_names() -> None:
    assert [method.name for method in choose_methods(["DiLoCo", "nobody"])] == ["DiLoCo", "nobody averages"]
    assert {method.late for method in choose_methods(["late"], interval=5)} == {3, 5}
    assert len(choose_methods([])) == len(methods())
    with pytest.raises(DataError, match="there are synchronous data parallel; DiLoCo"):
        choose_methods(["DiLoCo", "magic"])


def test_kinds_of_text_are_apart_and_the_last_tenth_is_held_out() -> None:
    texts = texts_by_kind(3)

    for text in texts.values():
        assert len(text.held_out) == pytest.approx(len(text.training) / 9, rel=0.01)
        assert text.training.dtype == np.uint8
    assert len({bytes(text.training[:200]) for text in texts.values()}) == 3


def test_more_nodes_than_kinds_are_refused() -> None:
    with pytest.raises(DataError, match="too few for 500 nodes"):
        texts_by_kind(500)

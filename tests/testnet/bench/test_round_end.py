"""The benchmark of a round's end: its table from given figures, and a tiny one with a real trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.protocol.wire.errors import ManifestError
from farandole.testnet.bench.round_end import PARTS, RoundEnd, report, run


def test_people_read_every_part() -> None:
    seconds = {part: float(index) for index, part in enumerate(PARTS, 1)}
    end = RoundEnd("125M", "int8", 124_972_800, "cpu", 126_900_000, 2_000_000_000, 6_300.0, seconds | {"copy": 0.1})
    text = report({"command": "c", "date": "d"}, [end]).markdown()
    assert "| 125 M | int8 | 127 | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 | 6.00 | 7.00 | 2.00 | 6.3 |" in text


def test_a_tiny_one(tmp_path: Path) -> None:
    document = tmp_path / "figures.md"
    document.write_text("<!-- begin round-end -->\n\n<!-- end round-end -->\n")
    run(models="tiny", codecs="fp32", context=16, turns=1, device="cpu", out=tmp_path / "out", write=document)
    (end,) = json.loads((tmp_path / "out" / "round-end.json").read_text())["ends"]
    assert set(PARTS) <= end["seconds"].keys()
    assert all(end["seconds"][part] > 0 for part in PARTS)
    assert end["contribution_bytes"] == 4 * end["num_parameters"]
    assert end["checkpoint_bytes"] > 2 * end["contribution_bytes"], "weights, momentum and the means"
    assert "Copy of the weights" in " ".join(document.read_text().split())
    assert not (tmp_path / "out" / "round-end").exists()


def test_a_wrong_name_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no preset is called '7B'"):
        run(models="tiny,7B", codecs="fp32", context=16, turns=1, device="cpu", out=tmp_path / "out", write=None)
    assert not (tmp_path / "out").exists()

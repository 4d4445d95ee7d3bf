"""A scenario is played on text of one's own, which all nodes train on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from farandole.testnet.play.launch import Testnet
from farandole.testnet.play.scenario import load_scenario
from farandole.training.base.errors import DataError

from .playing import silent


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "there is no text at"), ("too short", "too little text to train on"), ("ab" * 5_000, "too little text is")],
)
def test_text_that_is_missing_or_too_little_is_refused_before_a_node_starts(
    text: str | None, reason: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.txt"
    if text is not None:
        mine.write_text(text)
    with pytest.raises(DataError, match=reason):
        load_scenario("demo", data=[mine])


async def test_all_nodes_train_on_the_text_that_is_named(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):  # of which some are held out
        (texts / f"{number}.txt").write_text("ab" * (500 + number))
    scenario = msgspec.structs.replace(load_scenario("demo", nodes=2, rounds=2, data=[texts]), start_together=True)
    report = await Testnet(scenario, tmp_path / "out", silent).play()
    assert report.reasons == []
    # Of Python's library, a byte costs them twice as much after so few steps.
    assert [node.rounds for node in report.nodes] == [2, 2]
    assert all(node.loss_last is not None and node.loss_last < 2.0 for node in report.nodes), report.nodes
    assert report.loss_merged is not None
    assert report.loss_merged < 1.5

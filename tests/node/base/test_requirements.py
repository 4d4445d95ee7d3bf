from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from farandole.node.base.requirements import (
    MemoryTooSmallError,
    line_shortfall,
    memory_needed,
    memory_shortfall,
    unused_inputs,
)
from farandole.node.base.settings import NodeSettings
from farandole.protocol.planning.needs import needs_of
from farandole.protocol.run.manifest import DataConfig, Manifest
from farandole.protocol.run.models import preset
from farandole.protocol.run.rules import NoLoCoConfig

LARGE = Manifest("large", preset("125M"), outer=NoLoCoConfig(codec="int8"))
GB = 1_000_000_000


def test_memory_that_can_never_be_enough_is_refused_with_both_figures() -> None:
    needed = memory_needed(LARGE, NodeSettings(device="cpu"))
    with pytest.raises(
        MemoryTooSmallError, match=r"needs 8\.56 GB of memory here.* has 550 MB: take .* with a GPU, or"
    ):
        memory_shortfall(needed, 550_000_000, 400_000_000)


def test_memory_that_others_use_is_worth_a_word_and_enough_is_not() -> None:
    needed = memory_needed(LARGE, NodeSettings(device="cpu"))

    assert "4.00 GB is free: close other programs" in memory_shortfall(needed, 16 * GB, 4 * GB)
    assert memory_shortfall(needed, 16 * GB, 12 * GB) == ""
    assert memory_shortfall(needed, None, None) == ""


def test_a_lean_trainer_and_one_that_computes_layers_again_need_less_of_the_gpu() -> None:
    usual = memory_needed(LARGE, NodeSettings(device="cuda:0"))
    lean = memory_needed(LARGE, NodeSettings(device="cuda:0", lean=True))
    both = memory_needed(LARGE, NodeSettings(device="cuda:0", lean=True, recompute=True))
    num_parameters = needs_of(LARGE).num_parameters
    assert usual.device - lean.device == (16 + 2 - 8) * num_parameters
    assert usual.host - lean.host == 4 * num_parameters, "the snapshot's means"
    assert both.device < lean.device


def test_a_node_that_chooses_its_stage_needs_room_for_the_smallest() -> None:
    cut = msgspec.structs.replace(LARGE, model=msgspec.structs.replace(LARGE.model, num_stages=3))
    each = [memory_needed(cut, NodeSettings(device="cpu", stage=stage)).host for stage in range(3)]

    assert memory_needed(cut, NodeSettings(device="cpu")).host == min(each)
    assert max(each) < memory_needed(LARGE, NodeSettings(device="cpu")).host


def test_a_cap_that_the_run_does_not_fit_into_is_named_with_its_remedy() -> None:
    words = line_shortfall(LARGE, 10.0, 0.0)

    assert words.startswith("this run needs 96.7 Mbit/s up and down, more than --upload-mbit 10: at 10 Mbit/s")
    assert "takes 102 s of the 10.5 s that it has" in words
    assert "no exchange can be over in time" in words
    assert words.endswith("Raise --upload-mbit to 97 or more, or leave out the cap")
    assert "--upload-mbit 10 and --download-mbit 20" in line_shortfall(LARGE, 10.0, 20.0)
    assert "only exchanges whose partner is ready early" in line_shortfall(LARGE, 60.0, 0.0)
    assert line_shortfall(LARGE, 0.0, 0.0) == line_shortfall(LARGE, 97.0, 0.0) == ""


def test_inputs_that_a_run_does_not_take_are_named() -> None:
    given = NodeSettings(data=[Path("texts")], tokenizer=Path("tokenizer.json"), allow_model=["a.b:c"])
    assert unused_inputs(LARGE, given) == [
        "--data has no effect: this run trains on the sources of Python's standard library",
        "--tokenizer has no effect: this run's tokens are bytes",
        "--allow-model has no effect: this run's model needs no code of others",
    ]
    of_text = msgspec.structs.replace(LARGE, data=DataConfig("text"))
    assert unused_inputs(of_text, NodeSettings(data=[Path("texts")], stream=["a/b"])) == []
    assert unused_inputs(of_text, NodeSettings(data=[Path("texts")], trainer="external")) == [
        "--data has no effect: the training loop has its own data"
    ]
    assert unused_inputs(LARGE, NodeSettings()) == []

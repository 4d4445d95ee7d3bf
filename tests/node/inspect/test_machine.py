from __future__ import annotations

from pathlib import Path

import msgspec

from farandole.node.base.settings import NodeSettings
from farandole.node.inspect.machine import check_line, memory_needed
from farandole.protocol.planning.needs import needs_of
from farandole.protocol.run.manifest import Manifest, ModelConfig
from farandole.protocol.run.models import preset
from farandole.protocol.run.own_model import ADAPTERS, OwnModel
from farandole.protocol.run.rules import NoLoCoConfig

LARGE = Manifest("large", preset("125M"), outer=NoLoCoConfig(codec="int8"))


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
    (finding,) = check_line(LARGE, 10.0, 0.0)

    assert finding.found.startswith("this run needs 96.7 Mbit/s up and down, more than --upload-mbit 10: at 10 Mbit/s")
    assert "takes 102 s of the 10.5 s that it has" in finding.found
    assert "no exchange can be over in time" in finding.found
    assert finding.remedy == "raise --upload-mbit to 97 or more, or leave out the cap"
    assert "--upload-mbit 10 and --download-mbit 20" in check_line(LARGE, 10.0, 20.0)[0].found
    assert "only exchanges whose partner is ready early" in check_line(LARGE, 60.0, 0.0)[0].found
    assert check_line(LARGE, 0.0, 0.0) == check_line(LARGE, 97.0, 0.0) == []


def test_a_base_model_needs_room_beside_its_adapters(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(bytes(3_000))
    own = OwnModel(ADAPTERS, {"a.{0-9}": (8, 8)})
    adapters = Manifest("adapters", ModelConfig(1, 0, 0, 0, 64, 256, own=own), outer=NoLoCoConfig(codec="int8"))
    for run, device, on_host, on_gpu in (
        (adapters, "cpu", 3_000, 0),
        (adapters, "cuda:0", 3_000, 3_000),
        (LARGE, "cuda:0", 0, 0),  # the base of another run, from the settings file
    ):
        alone, beside = (memory_needed(run, NodeSettings(device=device, base=base)) for base in (None, tmp_path))
        assert (beside.host - alone.host, beside.device - alone.device) == (on_host, on_gpu)

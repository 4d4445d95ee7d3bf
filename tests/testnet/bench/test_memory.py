"""The planned memory of a trainer equals the memory that PyTorch counts, on tensors without contents.

Models are made on the device "meta", whose tensors have sizes and nothing else, in `FakeTensorMode`, which does the
same for the host's tensors. `MemTracker` adds up live tensors. It cannot count the memory of CUDA's kernels, its
context and bf16 autocast.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from farandole.protocol.planning.needs import activation_bytes, needs_of
from farandole.protocol.run.manifest import InnerConfig, Manifest
from farandole.protocol.run.models import parts_of, preset
from farandole.protocol.run.rules import Codec, NoLoCoConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.device import Device
from farandole.training.data.batches import Batch, Batches
from farandole.training.data.tokenizer import ByteTokenizer
from farandole.training.engine.learner import Learner
from farandole.training.model.model import Transformer

GPU: Final = torch.device("meta")
HOST: Final = torch.device("cpu")


class Held(NamedTuple):
    """Bytes on one device, between two inner steps, and at the peak with activations."""

    between: int
    most: int


class NoText(Batches):
    """Batches of one sequence of zeros."""

    def __init__(self, context: int) -> None:
        super().__init__(np.zeros(0, np.int64), 1, context, ByteTokenizer())

    def batch(self, step: int) -> Batch:
        return np.zeros((1, self.context + 1), np.int64)


@torch.no_grad()
def module_of(manifest: Manifest) -> nn.Module:
    """Make a model on the device without contents."""
    with GPU:
        module = Transformer(manifest.model)
    # The module has its device already, and on "meta" `Module.to` cannot exchange parameters.
    module.to = lambda *_, **__: module  # type: ignore[method-assign]
    return module


def member_round(
    manifest: Manifest, *, averages_on_host: bool = True, is_lean: bool = False, recomputes: bool = False
) -> Callable[[], object]:
    """Return a member's inner step, and the end of a round as far as it is on the GPU."""
    learner = Learner(
        module_of(manifest),
        manifest,
        NoText(manifest.model.context),
        run_id=bytes(32),
        device=Device(GPU, "no device"),
        averages_on_host=averages_on_host,
        settings=TrainerSettings(lean=is_lean, recompute=recomputes),
    )
    return lambda: (learner.learn(), learner.round_end.contribution())


def held_by(start: Callable[[], Callable[[], object]]) -> dict[torch.device, Held]:
    """Return the memory that two rounds hold, counted without a GPU."""
    with FakeTensorMode(), MemTracker() as tracker:
        take_round = start()
        take_round()
        tracker.reset_mod_stats()
        take_round()
        gc.collect()
        now, peak = (tracker.get_tracker_snapshot(kind) for kind in ("current", "peak"))
    return {
        device: Held(*(int(snapshot.get(device, {}).get("Total", 0)) for snapshot in (now, peak)))
        for device in (GPU, HOST)
    }


pytestmark = pytest.mark.started  # a fork shares memory


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_gpu_holds_what_inner_steps_need_and_the_rest_where_it_is_asked_to(codec: Codec) -> None:
    model = msgspec.structs.replace(preset("10M"), num_layers=6, context=64)
    manifest = Manifest(name="a", model=model, outer=NoLoCoConfig(codec=codec))
    needs, num_activations = needs_of(manifest), activation_bytes(manifest, 0)

    usual = held_by(partial(member_round, manifest))
    full = held_by(partial(member_round, manifest, averages_on_host=False))

    states = 16 * needs.num_parameters
    assert usual[GPU].between == pytest.approx(states, rel=0.001)
    assert usual[GPU].most == pytest.approx(states + num_activations, rel=0.02)
    assert usual[GPU].most <= needs.on_gpu.device <= usual[GPU].most + 2.1 * needs.num_parameters  # and autocast
    assert full[HOST].between < 1_000
    moved = usual[HOST].between - 4 * needs.num_parameters  # all but a copy of the weights
    assert full[GPU].between == pytest.approx(states + moved, rel=0.001)
    verdict, learning = 4 * needs.num_parameters, 2 * needs.num_parameters + num_activations
    assert needs.all_on_gpu.device == pytest.approx(full[GPU].between + max(verdict, learning), rel=0.001)


def test_muon_needs_less() -> None:
    model = msgspec.structs.replace(preset("10M"), num_layers=2, context=64)
    manifest = Manifest(name="a", model=model)
    num_parameters = needs_of(manifest).num_parameters
    with_muon = msgspec.structs.replace(manifest, inner=InnerConfig(optimizer="muon"))
    ends = parts_of(model).ends
    states_of_muon = 12 * (num_parameters - ends) + 16 * ends
    assert held_by(partial(member_round, with_muon))[GPU].between == pytest.approx(states_of_muon, rel=0.001)


def test_a_lean_trainer_takes_half_of_it_and_layers_computed_again_keep_their_inputs() -> None:
    model = msgspec.structs.replace(preset("10M"), num_layers=3, context=256)
    manifest = Manifest(name="a", model=model, outer=NoLoCoConfig(codec="int8"))
    num_parameters, ends = needs_of(manifest).num_parameters, parts_of(model).ends

    usual, lean = held_by(partial(member_round, manifest)), held_by(partial(member_round, manifest, is_lean=True))
    assert lean[GPU].between <= 8.0 * num_parameters + 1_000_000  # and the rotary tables
    assert lean[HOST].between == usual[HOST].between
    # Activations of matrix products are bf16 there, as under autocast.
    assert lean[GPU].most <= needs_of(manifest).memory(has_gpu=True, is_lean=True).device
    muon = msgspec.structs.replace(manifest, inner=InnerConfig(optimizer="muon"))
    states_of_muon = 6 * (num_parameters - ends) + 8 * ends
    assert held_by(partial(member_round, muon, is_lean=True))[GPU].between == pytest.approx(states_of_muon, rel=0.01)

    again = held_by(partial(member_round, manifest, recomputes=True))
    before, after = (each[GPU].most - 16 * num_parameters for each in (usual, again))
    assert after < 0.5 * before
    assert after == pytest.approx(activation_bytes(manifest, 0, recomputes=True), rel=0.2)

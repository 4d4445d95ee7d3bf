"""The planned memory of a trainer equals the memory that PyTorch reports."""

from __future__ import annotations

import msgspec
import pytest

from farandole.protocol.planning.needs import activation_bytes, needs_of
from farandole.protocol.run.manifest import InnerConfig, Manifest
from farandole.protocol.run.models import parts_of, preset
from farandole.protocol.run.outer_rules import Codec, NoLoCoConfig
from farandole.testnet.bench.memory import GPU, HOST, Way, held_by

pytestmark = pytest.mark.started  # a fork shares memory


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_gpu_holds_what_inner_steps_need_and_the_rest_where_it_is_asked_to(codec: Codec) -> None:
    model = msgspec.structs.replace(preset("10M"), num_layers=6, context=64)
    manifest = Manifest(name="a", model=model, outer=NoLoCoConfig(codec=codec))
    needs, num_activations = needs_of(manifest), activation_bytes(manifest, 0)

    usual = held_by(Way(manifest))
    full = held_by(Way(manifest, averages_on_host=False))

    states = 16 * needs.num_parameters
    assert usual[GPU].between == pytest.approx(states, rel=0.001)
    assert usual[GPU].most == pytest.approx(states + num_activations, rel=0.02)
    assert usual[GPU].most <= needs.on_gpu.device <= usual[GPU].most + 2.1 * needs.num_parameters  # and autocast
    assert full[HOST].between < 1_000
    moved = usual[HOST].between - 4 * needs.num_parameters  # all but a copy of the weights
    assert full[GPU].between == pytest.approx(states + moved, rel=0.001)
    verdict, learning = 4 * needs.num_parameters, 2 * needs.num_parameters + num_activations
    assert needs.all_on_gpu.device == pytest.approx(full[GPU].between + max(verdict, learning), rel=0.001)
    with_muon = msgspec.structs.replace(manifest, inner=InnerConfig(optimizer="muon"))
    ends = parts_of(model).ends
    states_of_muon = 12 * (needs.num_parameters - ends) + 16 * ends
    assert held_by(Way(with_muon))[GPU].between == pytest.approx(states_of_muon, rel=0.001)
    # A loop without a node uses the same memory.
    assert held_by(Way(manifest, is_plain=True))[GPU].between == pytest.approx(states, rel=0.001)


def test_a_lean_trainer_takes_half_of_it_and_layers_computed_again_keep_their_inputs() -> None:
    model = msgspec.structs.replace(preset("10M"), num_layers=3, context=256)
    manifest = Manifest(name="a", model=model, outer=NoLoCoConfig(codec="int8"))
    num_parameters, ends = needs_of(manifest).num_parameters, parts_of(model).ends

    usual, lean = held_by(Way(manifest)), held_by(Way(manifest, is_lean=True))
    assert lean[GPU].between <= 8.0 * num_parameters + 1_000_000  # and the rotary tables
    assert lean[HOST].between == usual[HOST].between
    # Activations of matrix products are bf16 there, as under autocast.
    planned = Way(manifest, is_lean=True).planned
    assert planned is not None
    assert lean[GPU].most <= planned
    muon = msgspec.structs.replace(manifest, inner=InnerConfig(optimizer="muon"))
    states_of_muon = 6 * (num_parameters - ends) + 8 * ends
    assert held_by(Way(muon, is_lean=True))[GPU].between == pytest.approx(states_of_muon, rel=0.01)

    again = held_by(Way(manifest, recomputes=True))
    before, after = (each[GPU].most - 16 * num_parameters for each in (usual, again))
    assert after < 0.5 * before
    assert after == pytest.approx(activation_bytes(manifest, 0, recomputes=True), rel=0.2)

from __future__ import annotations

import msgspec
import pytest

from farandole.protocol.planning.needs import activation_bytes, busy_share, needs_of
from farandole.protocol.run.manifest import Manifest, ModelConfig, PipelineConfig
from farandole.protocol.run.models import preset, stage_parameters
from farandole.protocol.run.rules import DEFAULT_TOPK, Codec, NoLoCoConfig, RoundConfig, encoded_bytes
from farandole.training.outer.codec import form_of

MBIT = 125_000
GIB = 2**30


def manifest(model: str = "125M", codec: Codec = "fp32", fragments: int = 1, context: int = 1_024) -> Manifest:
    sized = msgspec.structs.replace(preset(model), context=context)
    return Manifest(name="a", model=sized, outer=NoLoCoConfig(codec=codec, fragments=fragments))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16", "int8", "int4", "topk"])
@pytest.mark.parametrize("num_elements", [0, 1, 63, 64, 255, 256, 257, 100_001])
def test_sizes_are_those_of_the_forms(codec: str, num_elements: int) -> None:
    for topk in (DEFAULT_TOPK, 32):
        assert encoded_bytes(codec, num_elements, topk) == form_of(codec, topk).size(num_elements)


def test_an_exchange_needs_a_line_that_leaves_the_partner_its_share() -> None:
    needs = needs_of(manifest(codec="int8"))

    assert needs.contribution_bytes == 126_925_500
    assert needs.transfer_seconds == pytest.approx(10.5)  # of 30: half to wait in, and 70 % of the rest to move bytes
    assert needs.latest_seconds == pytest.approx(21)
    assert needs.rate / MBIT == pytest.approx(96.7, abs=0.1)
    assert needs.least_rate / MBIT == pytest.approx(48.4, abs=0.1)
    assert needs.seconds(20 * MBIT) == pytest.approx(50.8, abs=0.1)
    assert needs.join_bytes / (100 * MBIT) == pytest.approx(80, rel=0.01)


@pytest.mark.parametrize(("codec", "gibibytes"), [("int8", 7.13), ("fp32", 7.36)])
def test_memory_is_what_was_measured_at_125m(codec: Codec, gibibytes: float) -> None:
    """Peaks of a process that trains as a trainer does, with one sequence of 64 tokens; a mesh process takes 130 MB."""
    host = needs_of(manifest(codec=codec, context=64)).on_cpu.host - 130_000_000

    assert host / GIB == pytest.approx(gibibytes, rel=0.02)


def test_a_stage_needs_what_its_own_parameters_do() -> None:
    whole = manifest("350M", "int8")
    model = msgspec.structs.replace(whole.model, num_stages=3)
    cut = msgspec.structs.replace(whole, model=model)
    needs = needs_of(cut)

    assert needs.num_parameters == max(stage_parameters(model, stage) for stage in range(model.num_stages))
    assert needs.disk_bytes < needs_of(whole).disk_bytes / 2
    assert needs.hop_bytes == 2 * 2 * 1_024  # bf16, there and back
    assert needs_of(whole).hop_bytes == 0


def test_a_stage_keeps_what_microbatches_need_and_a_version_of_its_weights_for_each_kind_of_overlap() -> None:
    model = msgspec.structs.replace(preset("350M"), num_stages=2)

    def kept(pipeline: PipelineConfig) -> int:
        return activation_bytes(Manifest(name="a", model=model, pipeline=pipeline), 1)

    assert kept(PipelineConfig(in_flight=8)) == 2 * kept(PipelineConfig(in_flight=4))
    assert kept(PipelineConfig(in_flight=8, recompute=True)) < kept(PipelineConfig(in_flight=2))

    def num_vectors(*, steps: bool, rounds: bool) -> int:
        cut = Manifest(
            name="a", model=model, pipeline=PipelineConfig(overlap=steps), rounds=RoundConfig(overlap=rounds)
        )
        needs, plain = needs_of(cut), needs_of(Manifest(name="a", model=model))
        return (needs.on_cpu.host - plain.on_cpu.host) // (4 * needs.num_parameters)

    assert num_vectors(steps=True, rounds=False) == 3  # two versions, and another sum of gradients
    assert num_vectors(steps=False, rounds=True) == 2
    assert num_vectors(steps=True, rounds=True) == 4


def test_codecs_that_remember_audits_and_a_second_partner_take_more() -> None:
    plain, remembers = needs_of(manifest(codec="int8")), needs_of(manifest(codec="topk"))
    inner = msgspec.structs.replace(manifest().inner, deterministic=True)
    audited = needs_of(msgspec.structs.replace(manifest(codec="int8"), inner=inner, audits=0.03))

    assert remembers.on_cpu.host > plain.on_cpu.host
    assert remembers.checkpoint_bytes == 1.25 * plain.checkpoint_bytes
    assert audited.disk_bytes == plain.disk_bytes + 5 * plain.checkpoint_bytes
    one = manifest()
    two = msgspec.structs.replace(one, rounds=msgspec.structs.replace(one.rounds, partners=2))
    more = needs_of(two).on_cpu.host - needs_of(one).on_cpu.host
    assert more == 4 * needs_of(one).num_parameters


def test_a_trainer_is_busy_but_for_exchanges_that_nothing_hides() -> None:
    assert busy_share(RoundConfig(round_seconds=60), 20) == 0.75
    assert busy_share(RoundConfig(round_seconds=60, overlap=True), 20) == 1
    assert busy_share(RoundConfig(round_seconds=60, overlap=True), 120) == 0.5
    assert busy_share(RoundConfig(round_seconds=60, partners=2), 10) == 0.75
    assert busy_share(RoundConfig(round_seconds=0, inner_steps=10), 20) is None


def test_a_model_of_ones_own_says_nothing_of_its_activations() -> None:
    from farandole.protocol.run.own_model import OwnModel

    own = OwnModel(function="a.b:c", package="a", ends={"weight": (100, 100)})
    model = ModelConfig(1, 0, 0, 0, 16, 256, own=own)

    assert activation_bytes(Manifest(name="a", model=model), 0) == 0
    assert needs_of(Manifest(name="a", model=model)).num_parameters == 10_000

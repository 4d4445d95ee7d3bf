from __future__ import annotations

import msgspec
import pytest

from farandole.protocol.planning.needs import USUAL_RATE, activation_bytes, busy_share, needs_of
from farandole.protocol.planning.planning import (
    GOOD_EXCHANGE,
    RATES,
    Machine,
    best_known,
    changes,
    complete,
    given_by,
    judge,
    learning_rate_for,
    plan,
    reason_for,
)
from farandole.protocol.run.manifest import InnerConfig, Manifest, ModelConfig, PipelineConfig, StartConfig
from farandole.protocol.run.models import PRESETS, preset, stage_parameters
from farandole.protocol.run.own_model import ExternalModel
from farandole.protocol.run.rules import Codec, NoLoCoConfig, PlainConfig, RoundConfig, encoded_bytes
from farandole.training.outer.codec import FORMS

HOME = Machine(USUAL_RATE, USUAL_RATE)
GB = 1_000_000_000


def manifest(model: str, **settings: object) -> Manifest:
    return msgspec.structs.replace(Manifest(name="a", model=preset(model)), **settings)


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("gpu", [None, 24 * GB])
def test_every_preset_fits_a_home_line(model: str, gpu: int | None) -> None:
    planned = plan(manifest(model), Machine(USUAL_RATE, USUAL_RATE, gpu=gpu))

    assert planned.fits
    assert planned.needs.rate <= USUAL_RATE
    assert planned.manifest.outer.codec == "int8"
    assert planned.manifest.rounds.exchange_seconds <= GOOD_EXCHANGE
    busy = busy_share(planned.manifest.rounds, planned.seconds)
    assert busy is not None
    assert busy >= 0.9


def test_a_model_that_does_not_fit_the_memory_is_cut_as_little_as_can_be() -> None:
    planned = plan(manifest("1B"), Machine(USUAL_RATE, USUAL_RATE, gpu=24 * GB))
    num_stages = planned.manifest.model.num_stages

    assert planned.fits
    assert num_stages > 1
    assert planned.needs.on_gpu.device <= 24 * GB
    less = msgspec.structs.replace(planned.manifest.model, num_stages=num_stages - 1)
    assert needs_of(msgspec.structs.replace(planned.manifest, model=less)).on_gpu.device > 24 * GB


def test_a_model_that_its_run_file_cuts_keeps_fewer_activations_if_that_is_needed() -> None:
    run = msgspec.structs.replace(manifest("1B"), model=msgspec.structs.replace(preset("1B"), num_stages=4))
    machine = Machine(HOME.upload, HOME.download, gpu=16_000_000_000)
    assert judge(run, machine).lacks_memory
    planned = plan(run, machine, given={"model.num_stages"})
    assert not planned.lacks_memory
    assert planned.manifest.model.num_stages == 4
    assert planned.manifest.pipeline.recompute
    kept = plan(run, machine, given={"model.num_stages", "pipeline.in_flight"})
    assert kept.lacks_memory
    assert not kept.manifest.pipeline.recompute


def test_members_bound_the_stages_and_a_line_that_carries_nothing_is_said_to_lack() -> None:
    machine = Machine(USUAL_RATE, USUAL_RATE, memory=8 * GB)
    alone, many = (plan(manifest("1B"), machine, num_members=number) for number in (2, 40))

    assert alone.lacks_memory
    assert alone.manifest.model.num_stages == 1
    assert many.fits
    planned = plan(manifest("1B"), Machine(1_000, 1_000))
    assert planned.lacks_line
    assert not planned.fits
    assert plan(manifest("125M"), Machine(USUAL_RATE, USUAL_RATE / 4)).needs.rate <= USUAL_RATE / 4, "the slower way"


@pytest.mark.parametrize("inner_steps", [0, 10])
def test_an_exchange_has_long_where_rounds_may_end_far_apart(inner_steps: int) -> None:
    rounds = RoundConfig(inner_steps=inner_steps, round_seconds=0.0 if inner_steps else 60.0)
    completed = complete(manifest("3M", rounds=rounds), ["rounds.inner_steps", "rounds.round_seconds"])
    assert completed.rounds.exchange_seconds == (30.0 if inner_steps else 10.0)


def test_an_exchange_is_no_longer_than_a_round_that_a_run_file_sets() -> None:
    completed = complete(manifest("tiny", rounds=RoundConfig(round_seconds=2.0)), ["rounds.round_seconds"])
    assert completed.rounds.exchange_seconds == 2.0
    external = ModelConfig(1, 0, 0, 0, 0, 0, external=ExternalModel({"a": (4, 4)}))
    own_loop = msgspec.structs.replace(manifest("tiny", rounds=RoundConfig(round_seconds=2.0)), model=external)
    assert complete(own_loop, ["rounds.round_seconds"]).rounds.exchange_seconds == 30.0, "its steps may be long"


def test_what_is_given_stays_and_what_audits_exclude_is_not_planned() -> None:
    run = manifest("125M", outer=NoLoCoConfig(codec="fp32"), rounds=RoundConfig(exchange_seconds=60))
    planned = plan(run, HOME, given={"outer.codec", "rounds.exchange_seconds", "model.num_stages"})

    assert planned.manifest.outer.codec == "fp32"
    assert planned.manifest.rounds.exchange_seconds == 60
    assert planned.manifest.outer.fragments > 1
    assert planned.fits
    run = manifest("125M", inner=InnerConfig(deterministic=True), audits=0.03)
    planned = plan(run, Machine(USUAL_RATE / 8, USUAL_RATE / 8))
    assert planned.fits
    assert not planned.manifest.rounds.overlap
    assert plan(msgspec.structs.replace(run, model=preset("3M")), HOME).manifest.rounds.round_seconds == 45.0


def test_each_of_several_partners_takes_time() -> None:
    one, two = (
        plan(manifest("125M", rounds=RoundConfig(partners=number)), HOME, ["rounds.partners"]) for number in (1, 2)
    )

    assert one.manifest.rounds.overlap
    assert not two.manifest.rounds.overlap
    assert two.manifest.outer.fragments == 1
    assert two.manifest.rounds.round_seconds > 2 * one.seconds
    assert two.fits


def test_what_a_run_file_says() -> None:
    assert given_by({"name": "a", "model": "3M", "outer": {"codec": "int8"}}) == {"outer.codec"}
    assert given_by({"model": {"num_stages": 2}}) == {"model.num_stages"}
    assert given_by({"inner": {"warmup_tokens": 1e6}}) == {"inner.warmup_steps"}
    assert given_by("not a table") == frozenset()


# What a run file leaves open


RUN = Manifest("a", preset("3M"))


def test_measured_sizes_have_their_measured_rates_which_fall_with_the_size() -> None:
    for size, rate in RATES:
        assert learning_rate_for(size, is_muon=False) == pytest.approx(rate, rel=0.05)
        assert learning_rate_for(size, is_muon=True) == pytest.approx(2 * rate, rel=0.05)
    rates = [learning_rate_for(size, is_muon=False) for size in (1, 10**5, 504_672, 10**6, 10**7, 10**8, 10**9, 10**10)]
    assert rates[:3] == [6e-3] * 3
    assert rates[2:] == sorted(set(rates[2:]), reverse=True)
    assert rates[-1] > 0.0


def test_what_a_run_file_leaves_open_is_chosen() -> None:
    known = best_known(RUN, ["outer.codec", "inner.total_steps", "inner.batch_size"])

    assert known.outer == PlainConfig(codec=RUN.outer.codec)
    assert known.inner == msgspec.structs.replace(RUN.inner, optimizer="muon", learning_rate=6e-3, warmup_steps=1_250)
    assert msgspec.structs.replace(known, outer=RUN.outer, inner=RUN.inner) == RUN
    assert best_known(RUN, ["inner.optimizer"]).inner.learning_rate == 3e-3, "AdamW's own"
    assert best_known(RUN, ["inner.learning_rate"]).inner.optimizer == RUN.inner.optimizer


def test_activations_travel_in_int8_where_the_model_is_cut_and_nothing_else_is_said() -> None:
    cut = msgspec.structs.replace(RUN, model=msgspec.structs.replace(RUN.model, num_stages=2))
    assert best_known(cut, ()).pipeline == PipelineConfig(codec="int8")
    assert best_known(cut, ["pipeline.codec"]).pipeline == cut.pipeline
    large = msgspec.structs.replace(RUN, model=preset("1B"))
    small = Machine(USUAL_RATE, USUAL_RATE, memory=16 * 10**9)
    assert plan(large, small).manifest.model.num_stages > 1
    assert plan(large, small).manifest.pipeline.codec == "int8"
    assert plan(large, small, ["pipeline.codec"]).manifest.pipeline.codec == "bf16"


@pytest.mark.parametrize("given", ["outer.kind", "outer.alpha", "outer.gamma", "outer.momentum"])
def test_a_rule_that_a_run_file_means_stays(given: str) -> None:
    run = msgspec.structs.replace(RUN, outer=NoLoCoConfig(alpha=0.3))
    assert best_known(run, [given]).outer == run.outer
    cut = msgspec.structs.replace(RUN, outer=NoLoCoConfig(codec="int4", fragments=2))
    known = best_known(cut, ["outer.codec", "outer.fragments"]).outer
    assert known == PlainConfig(codec="int4", fragments=2), "settings that every rule has"


@pytest.mark.parametrize("name", ["start", "external"])
def test_inner_settings_of_what_was_not_measured_stay(name: str) -> None:
    external = ModelConfig(1, 0, 0, 0, 0, 0, external=ExternalModel({"a": (4, 4)}))
    other = {"model": external} if name == "external" else {"start": StartConfig("1" * 64, "0" * 64)}
    run = msgspec.structs.replace(RUN, **other)
    assert best_known(run, ()).inner == run.inner
    assert best_known(run, ()).outer == PlainConfig()


@pytest.mark.parametrize("model", ["tiny", "125M", "1B"])
def test_every_choice_has_a_reason(model: str) -> None:
    run = msgspec.structs.replace(RUN, model=preset(model))
    cut = plan(best_known(run, ()), Machine(USUAL_RATE, USUAL_RATE, memory=4 * 10**9)).manifest
    thin = plan(best_known(run, ()), Machine(USUAL_RATE / 50, USUAL_RATE / 50)).manifest
    completed = complete(run, ())
    assert (completed.model, needs_of(completed).rate <= USUAL_RATE) == (run.model, True), "homes can exchange it"
    for chosen in (completed, cut, thin):
        assert all(reason_for(name, value) for name, value in changes(run, chosen).items())


MBIT = 125_000
GIB = 2**30


def sized_manifest(model: str = "125M", codec: Codec = "fp32", fragments: int = 1, context: int = 1_024) -> Manifest:
    sized = msgspec.structs.replace(preset(model), context=context)
    return Manifest(name="a", model=sized, outer=NoLoCoConfig(codec=codec, fragments=fragments))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16", "int8", "int4"])
@pytest.mark.parametrize("num_elements", [0, 1, 63, 64, 255, 256, 257, 100_001])
def test_sizes_are_those_of_the_forms(codec: str, num_elements: int) -> None:
    assert encoded_bytes(codec, num_elements) == FORMS[codec].size(num_elements)


def test_an_exchange_needs_a_line_that_leaves_the_partner_its_share() -> None:
    needs = needs_of(sized_manifest(codec="int8"))

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
    host = needs_of(sized_manifest(codec=codec, context=64)).on_cpu.host - 130_000_000

    assert host / GIB == pytest.approx(gibibytes, rel=0.02)


def test_a_stage_needs_what_its_own_parameters_do() -> None:
    whole = sized_manifest("350M", "int8")
    model = msgspec.structs.replace(whole.model, num_stages=3)
    cut = msgspec.structs.replace(whole, model=model)
    needs = needs_of(cut)

    assert needs.num_parameters == max(stage_parameters(model, stage) for stage in range(model.num_stages))
    assert needs.disk_bytes < needs_of(whole).disk_bytes / 2
    assert needs.hop_bytes == 2 * 2 * 1_024  # bf16, there and back
    small = msgspec.structs.replace(cut, pipeline=PipelineConfig(codec="int4"))
    assert needs_of(small).hop_bytes == 2 * (1_024 // 2 + 4 * 1_024 // 64)
    small = msgspec.structs.replace(cut, pipeline=PipelineConfig(gradient_codec="int4"))
    assert needs_of(small).hop_bytes == 2 * 1_024 + 1_024 // 2 + 4 * 1_024 // 64
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


def test_audits_and_a_second_partner_take_more() -> None:
    plain = needs_of(sized_manifest(codec="int8"))
    inner = msgspec.structs.replace(sized_manifest().inner, deterministic=True)
    audited = needs_of(msgspec.structs.replace(sized_manifest(codec="int8"), inner=inner, audits=0.03))

    assert audited.disk_bytes == plain.disk_bytes + 5 * plain.checkpoint_bytes
    one = sized_manifest()
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

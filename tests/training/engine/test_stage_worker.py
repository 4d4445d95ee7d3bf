"""A model in stages learns what the whole model learns; and a microbatch counts wholly or not at all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from farandole.protocol.run.manifest import InnerConfig, ModelConfig, PipelineConfig
from farandole.protocol.run.rules import RoundConfig, encoded_bytes
from farandole.training.base.device import choose_device
from farandole.training.base.errors import ActivationError, DataError, NoSliceError, TrainingError
from farandole.training.data.dataset import Sampler, Text
from farandole.training.engine.learner import Learner
from farandole.training.engine.stage_worker import StageWorker
from farandole.training.model.model import build_model, cross_entropy
from farandole.training.model.stages import build_stage

from ..conftest import ALICE, RUN_ID, manifest_of

STEPS = 20


@pytest.fixture(scope="module")
def deep(model: ModelConfig) -> ModelConfig:
    return replace(model, num_layers=4)


@pytest.fixture(scope="module")
def no_clip(inner: InnerConfig) -> InnerConfig:
    return replace(inner, clip=0.0)  # stages clip each for itself


def sampler_of(text: Text, inner: InnerConfig, model: ModelConfig) -> Sampler:
    return Sampler(text, key=(RUN_ID, ALICE), batch_size=inner.batch_size, context=model.context)


def workers_of(
    model: ModelConfig,
    inner: InnerConfig,
    text: Text,
    num_stages: int,
    *,
    rounds_overlap: bool = False,
    **pipeline: Any,
) -> list[StageWorker]:
    staged = replace(model, num_stages=num_stages)
    return [
        StageWorker(
            build_stage(staged, 7, stage),
            manifest_of(
                staged,
                inner=inner,
                pipeline=PipelineConfig(**{"codec": "fp32", "microbatch_size": inner.batch_size, **pipeline}),
                rounds=RoundConfig(overlap=rounds_overlap),
            ),
            sampler_of(text, inner, model) if stage == 0 else None,
            run_id=RUN_ID,
            device=choose_device("cpu"),
        )
        for stage in range(num_stages)
    ]


def send_through(workers: list[StageWorker], slot: int = 0, turn: Callable[[], None] = lambda: None) -> float:
    """One microbatch there and back, with ``turn`` called where it turns; its loss."""
    here, there = (bytearray(workers[0].activation_bytes) for _ in range(2))
    workers[0].draw(slot, here)
    for worker in workers[1:]:
        worker.forward(slot, here, there)
        here, there = there, here
    loss = float(workers[0].tail(slot, here, there))
    turn()
    for worker in reversed(workers):
        here, there = there, here
        worker.backward(slot, here, there)
    return loss


def learn(workers: list[StageWorker], num_microbatches: int = 1) -> float:
    """One inner step of all stages; the mean loss."""
    losses = []
    for _ in range(num_microbatches):
        losses.append(send_through(workers))
        for worker in workers:
            worker.settle(0, is_kept=True)
    steps = [worker.step() for worker in workers]
    assert all(steps)
    return sum(losses) / num_microbatches


def by_name(workers: list[StageWorker]) -> dict[str, torch.Tensor]:
    return {
        name: view
        for worker in workers
        for name, view in worker.checkpoint.layout.views(worker.round_end.fast_weights()).items()
    }


def whole(model: ModelConfig, inner: InnerConfig, text: Text) -> Learner:
    sampler = sampler_of(text, inner, model)
    return Learner(
        build_model(model, 7), manifest_of(model, inner=inner), sampler, run_id=RUN_ID, device=choose_device("cpu")
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_an_outer_step_between_a_microbatchs_two_passes_does_not_change_its_gradient(
    deep: ModelConfig, no_clip: InnerConfig, text: Text, num_stages: int, recompute: bool
) -> None:
    workers, others = (
        workers_of(deep, no_clip, text, num_stages, recompute=recompute, rounds_overlap=True) for _ in range(2)
    )
    assert learn(workers) == learn(others)

    def take_outer_steps() -> None:
        for worker in workers:
            before = worker.round_end.fast_weights()
            worker.round_end.apply(None)
            assert not torch.equal(worker.round_end.fast_weights(), before)

    assert send_through(workers, turn=take_outer_steps) == send_through(others)

    for worker, other in zip(workers, others, strict=True):
        assert worker.replica.gradient.any()
        assert torch.equal(worker.replica.gradient, other.replica.gradient)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_learn_what_the_whole_model_learns_bit_for_bit(
    deep: ModelConfig, no_clip: InnerConfig, text: Text, num_stages: int, recompute: bool, overlap: bool, optimizer: str
) -> None:
    """Where steps may overlap, but do not, too."""
    no_clip = replace(no_clip, optimizer=optimizer)
    workers = workers_of(deep, no_clip, text, num_stages, recompute=recompute, overlap=overlap)
    learner = whole(deep, no_clip, text)

    for _ in range(STEPS):
        assert learn(workers) == float(learner.learn())

    expected = learner.checkpoint.layout.views(learner.round_end.fast_weights())
    assert all(torch.equal(weights, expected[name]) for name, weights in by_name(workers).items())
    assert [worker.totals.tokens for worker in workers] == [learner.totals.tokens] * num_stages


@pytest.mark.parametrize(("codec", "back"), [("bf16", None), ("int8", None), ("int4", None), ("int8", "int4")])
def test_lossy_activations_still_learn(
    deep: ModelConfig, no_clip: InnerConfig, text: Text, codec: str, back: str | None
) -> None:
    workers = workers_of(deep, no_clip, text, 4, codec=codec, gradient_codec=back)
    exact = workers_of(deep, no_clip, text, 4)
    losses = [(learn(workers), learn(exact)) for _ in range(STEPS)]
    assert losses[-1][0] == pytest.approx(losses[-1][1], rel=0.02)
    assert losses[-1][0] < losses[0][0]


@pytest.mark.parametrize(("codec", "back"), [("fp32", "int4"), ("int4", "fp32")])
def test_gradients_travel_in_their_own_codec(
    deep: ModelConfig, no_clip: InnerConfig, text: Text, codec: str, back: str
) -> None:
    """Each passes in its own bytes, in places that hold the larger of both, and what lies behind it is not read."""
    exact, rounded = (workers_of(deep, no_clip, text, 2, codec="fp32", gradient_codec=each) for each in ("fp32", back))
    first, last = workers_of(deep, no_clip, text, 2, codec=codec, gradient_codec=back)
    num_elements = no_clip.batch_size * deep.context * deep.width
    assert first.activation_bytes == 4 * num_elements
    places = [bytearray(b"\xff" * first.activation_bytes) for _ in range(4)]
    first.draw(0, places[0])
    last.forward(0, places[0], places[1])
    first.tail(0, places[1], places[2])
    last.backward(0, places[2], places[3])
    first.backward(0, places[3], None)

    sizes = [encoded_bytes(each, num_elements) for each in (codec, codec, back, back)]
    for place, size in zip(places, sizes, strict=True):
        assert place[size:] == b"\xff" * (len(place) - size)
        assert any(place[:size])
    if codec == "fp32":
        assert send_through(rounded) == send_through(exact), "the way there is exact"
        assert torch.equal(first.replica.gradient, rounded[0].replica.gradient)
        assert not torch.equal(first.replica.gradient, exact[0].replica.gradient)


def test_microbatches_add_up_to_the_batch(deep: ModelConfig, no_clip: InnerConfig, text: Text) -> None:
    workers = workers_of(deep, no_clip, text, 2, microbatch_size=1)
    learner = whole(deep, no_clip, text)

    for _ in range(3):
        assert learn(workers, no_clip.batch_size) == pytest.approx(float(learner.learn()), rel=1e-5)

    expected = learner.checkpoint.layout.views(learner.round_end.fast_weights())
    for name, weights in by_name(workers).items():
        error = torch.linalg.vector_norm(weights - expected[name]) / torch.linalg.vector_norm(expected[name])
        assert error < 1e-5, name


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_held_out_text_has_the_loss_that_the_whole_model_has_and_teaches_nothing(
    deep: ModelConfig, no_clip: InnerConfig, text: Text, num_stages: int, overlap: bool
) -> None:
    size = no_clip.batch_size // 2
    workers = workers_of(deep, no_clip, text, num_stages, microbatch_size=size, overlap=overlap)
    untold = workers_of(deep, no_clip, text, num_stages, microbatch_size=size, overlap=overlap)
    for _ in range(2):
        learn(workers, 2)
        learn(untold, 2)
    slots = range(1, 5)
    buffers = {slot: bytearray(workers[0].activation_bytes) for slot in slots}
    for slot in slots:
        workers[0].draw(slot, buffers[slot], held_out=slot - 1)
        for worker in workers[1:]:
            worker.forward(slot, buffers[slot], buffers[slot], is_held_out=True)
    for slot in slots:
        workers[0].tail(slot, buffers[slot], bytearray())
    learn(workers, 2)  # before others know that it is at its end
    learn(untold, 2)
    for slot in slots:
        for worker in workers:
            worker.settle(slot, is_kept=False)

    learner = whole(deep, no_clip, text)
    for _ in range(2):
        learner.learn()
    assert workers[0].evaluate(2) == pytest.approx(learner.evaluate(2), rel=1e-5)
    assert all(
        torch.equal(a.round_end.fast_weights(), b.round_end.fast_weights())
        for a, b in zip(workers, untold, strict=True)
    )
    with pytest.raises(DataError, match="were lost"):
        workers[0].evaluate(2)


def test_a_lost_microbatch_leaves_nothing_but_a_rounding(deep: ModelConfig, no_clip: InnerConfig, text: Text) -> None:
    def gradients(lost_at: int | None) -> list[torch.Tensor]:
        """After one microbatch that all keep and one that is lost on its way back, before stage ``lost_at``."""
        workers = workers_of(deep, no_clip, text, 4, microbatch_size=1)
        send_through(workers, slot=0)
        for worker in workers:
            worker.settle(0, is_kept=True)
        if lost_at is not None:
            here, there = (bytearray(workers[0].activation_bytes) for _ in range(2))
            workers[0].draw(1, here)
            for worker in workers[1:]:
                worker.forward(1, here, there)
                here, there = there, here
            workers[0].tail(1, here, there)
            for worker in workers[:lost_at:-1]:
                here, there = there, here
                worker.backward(1, here, there)
            for worker in workers:
                worker.settle(1, is_kept=False)
        assert [worker.sums.counts[0] for worker in workers] == [1] * 4
        return [worker.replica.gradient.clone() for worker in workers]

    expected = gradients(None)
    for lost_at in range(4):
        for gradient, without in zip(gradients(lost_at), expected, strict=True):
            torch.testing.assert_close(gradient, without, rtol=0, atol=1e-6 * float(without.abs().max()))


def test_a_step_waits_until_all_is_settled_and_what_did_not_come_back_counts_nowhere(
    deep: ModelConfig, no_clip: InnerConfig, text: Text
) -> None:
    (first, _) = workers_of(deep, no_clip, text, 2)
    first.draw(3, bytearray(first.activation_bytes))
    with pytest.raises(TrainingError, match="in flight"):
        first.step()
    with pytest.raises(TrainingError, match="not settled"):
        first.draw(3, bytearray(first.activation_bytes))
    first.settle(3, is_kept=False)
    assert not first.step()
    (first, last) = workers_of(deep, no_clip, text, 2)
    here, there = bytearray(first.activation_bytes), bytearray(first.activation_bytes)
    first.draw(0, here)
    last.forward(0, here, there)
    for worker in (first, last):
        worker.settle(0, is_kept=True)  # whatever is said: there is no gradient
        assert not worker.step()
        assert worker.totals.steps == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_a_microbatch_meets_the_same_weights_there_and_back(
    deep: ModelConfig, no_clip: InnerConfig, text: Text, recompute: bool
) -> None:
    """Of three, the second is begun before the first step and ends after it; the third is of the next batch."""
    workers = workers_of(deep, no_clip, text, 2, microbatch_size=1, recompute=recompute, overlap=True)
    first, last = workers
    before = by_name(workers)
    send_through(workers, slot=0)
    early, there = bytearray(first.activation_bytes), bytearray(first.activation_bytes)
    first.draw(1, early, is_following=True)
    last.forward(1, early, there, is_following=True)
    for worker in workers:
        worker.settle(0, is_kept=True)
        assert worker.step()
    after = by_name(workers)
    first.tail(1, there, early)
    last.backward(1, early, there)
    first.backward(1, there, None)
    send_through(workers, slot=2)
    for worker in workers:
        for slot in (1, 2):
            worker.settle(slot, is_kept=True)

    summed = {
        name: g for worker in workers for name, g in worker.checkpoint.layout.views(worker.replica.gradient).items()
    }
    learner = whole(deep, replace(no_clip, batch_size=1), text)
    sampler = sampler_of(text, no_clip, deep)
    rows = [torch.as_tensor(sampler.batch(step)[part : part + 1]) for step, part in ((0, 1), (1, 0))]
    expected = dict.fromkeys(summed, torch.zeros(()))
    for weights, row in zip((before, after), rows, strict=True):
        module = learner.replica.module
        module.load_state_dict(weights, strict=False)
        learner.replica.gradient.zero_()
        cross_entropy(module(row[:, :-1]), row[:, 1:]).backward()
        for name, gradient in learner.checkpoint.layout.views(learner.replica.gradient).items():
            expected[name] = expected[name] + gradient
    for name, gradient in summed.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    assert len(first.versions.kept) == 2, "as many copies as are in use"


def test_what_was_begun_early_is_taken_out_of_its_own_sum(deep: ModelConfig, no_clip: InnerConfig, text: Text) -> None:
    first, last = workers = workers_of(deep, no_clip, text, 2, microbatch_size=1, overlap=True)
    send_through(workers, slot=0)
    here, there = bytearray(first.activation_bytes), bytearray(first.activation_bytes)
    first.draw(1, here, is_following=True)
    last.forward(1, here, there, is_following=True)
    first.tail(1, there, here)
    last.backward(1, here, there)
    for worker in workers:
        worker.settle(0, is_kept=True)
        assert worker.step()
    for worker in workers:
        scale = float(worker.replica.gradient.abs().max())
        assert scale > 0
        worker.settle(1, is_kept=False)
        assert worker.sums.counts[0] == 0
        assert float(worker.replica.gradient.abs().max()) < 1e-6 * scale
        assert not worker.step()


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_unfit_activations_are_refused_and_gradients_that_are_not_finite_are_no_step(
    deep: ModelConfig, no_clip: InnerConfig, text: Text, codec: str
) -> None:
    first, last = workers_of(deep, no_clip, text, 2, codec=codec)
    good, bad = bytearray(first.activation_bytes), bytearray(first.activation_bytes)
    bad[:4] = b"\x00\x00\xc0\x7f"  # NaN, as a number or as a block's scale
    first.draw(0, good)
    for unfit in (bad, good[:-4]):
        with pytest.raises(ActivationError):
            last.forward(0, unfit, bytearray(len(good)))
        with pytest.raises(ActivationError):
            first.tail(0, unfit, bytearray(len(good)))
        with pytest.raises(ActivationError):
            first.backward(0, unfit, None)
    assert not last.microbatches
    assert not first.replica.gradient.any()
    workers = workers_of(deep, no_clip, text, 2, codec=codec)
    send_through(workers)
    for worker in workers:
        worker.settle(0, is_kept=True)
        worker.replica.gradient[0] = torch.inf
        before = worker.round_end.fast_weights()
        assert not worker.step()
        assert torch.equal(worker.round_end.fast_weights(), before)


def test_after_a_restart_no_batch_is_drawn_twice(
    deep: ModelConfig, no_clip: InnerConfig, text: Text, tmp_path: Any
) -> None:
    workers = workers_of(deep, no_clip, text, 2, microbatch_size=2)
    learn(workers, 2)
    workers[0].round_end.apply(None)
    workers[0].checkpoint.save(tmp_path / "checkpoint")
    again = workers_of(deep, no_clip, text, 2, microbatch_size=2)[0]
    again.checkpoint.load(tmp_path / "checkpoint")
    drawn = [bytearray(worker.activation_bytes) for worker in (workers[0], again)]
    workers[0].draw(0, drawn[0])
    again.draw(0, drawn[1])
    assert drawn[0] == drawn[1]


def test_of_its_slices_the_first_stage_draws_a_lost_part_again(
    deep: ModelConfig, no_clip: InnerConfig, text: Text
) -> None:
    workers = workers_of(deep, no_clip, text, 2, microbatch_size=1)
    drawing = workers[0]
    slices = drawing.slices = sampler_of(text, no_clip, deep).slices(num_parts=no_clip.batch_size)
    buffers = bytearray(drawing.activation_bytes)
    with pytest.raises(NoSliceError):
        drawing.draw(0, buffers)
    slices.assign(0, [(3, 1)])

    send_through(workers)
    for worker in workers:
        worker.settle(0, is_kept=False)
    for _ in range(no_clip.batch_size):
        assert slices.take_trained() == []
        send_through(workers)
        for worker in workers:
            worker.settle(0, is_kept=True)

    assert slices.take_trained() == [(3, 1)]
    assert not slices.has_more


def test_a_learner_of_slices_sees_what_stages_of_them_see(deep: ModelConfig, no_clip: InnerConfig, text: Text) -> None:
    workers, learner = workers_of(deep, no_clip, text, 2), whole(deep, no_clip, text)
    workers[0].slices, learner.slices = (sampler_of(text, no_clip, deep).slices() for _ in range(2))
    for slices in (workers[0].slices, learner.slices):
        slices.assign(1, [(5, 2)])
    for _ in range(2):
        assert learn(workers) == float(learner.learn())
    assert learner.slices.take_trained() == workers[0].slices.take_trained() == [(5, 2)]

"""A built-in trainer and a loop of a user's own in one run: equal bytes, equal means, each other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from farandole.protocol.run.manifest import InnerConfig, Manifest, ModelConfig
from farandole.protocol.run.rules import NoLoCoConfig, OuterRules, PlainConfig
from farandole.training.base.errors import TrainingError
from farandole.training.cluster.external import ExternalEngine, Loop, Turns
from farandole.training.inner.optimizer import learning_rate, ramp
from farandole.training.model.model import build_model

from ...tolerance import TOLERANT
from ..conftest import ALICE, BOB, RUN_ID, MakeReplica, manifest_of, rate_of, sent, train, weights_of

OUTER = [
    NoLoCoConfig(),
    NoLoCoConfig(codec="int8"),
    NoLoCoConfig(codec="int4"),
    NoLoCoConfig(fragments=3),
    PlainConfig(),
]
EACH_RULE = pytest.mark.parametrize("outer", OUTER, ids=lambda outer: f"{outer.kind}-{outer.codec}-{outer.fragments}")


@pytest.fixture
def manifest(model: ModelConfig, inner: InnerConfig) -> Manifest:
    return manifest_of(model, seed=7, inner=inner, screening=TOLERANT)


class Script:
    """A user's module with other weights than the run's, and the engine that follows it; the steps are the test's."""

    def __init__(self, manifest: Manifest, outer: OuterRules | None = None, tokens_per_step: int = 64) -> None:
        self.module = build_model(manifest.model, 1)
        manifest = manifest if outer is None else replace(manifest, outer=outer)
        loop = Loop(self.module, tokens_per_step=tokens_per_step)
        self.engine = ExternalEngine(loop, manifest, Turns(), run_id=RUN_ID)
        self.engine.begin_anew()
        self._tokens = tokens_per_step

    @property
    def weights(self) -> Tensor:
        return weights_of(self.module)

    def step_to(self, weights: Tensor) -> None:
        """Take a step that ends at these weights (n,)."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(self.engine.checkpoint.layout.views(weights)[name])
        self.engine.round_end.count_step(self._tokens)

    def step(self) -> None:
        """Take a step of this loop's own."""
        self.step_to(self.weights + 1e-3 * torch.randn(len(self.weights), generator=torch.Generator().manual_seed(3)))


@EACH_RULE
@pytest.mark.parametrize("late_steps", [0, 2])
def test_a_built_in_trainer_and_a_loop_come_to_the_means_of_two_built_in_trainers(
    manifest: Manifest, make_replica: MakeReplica, outer: OuterRules, late_steps: int
) -> None:
    """The third, a built-in trainer, takes the steps of the loop: it is what the loop must come to."""
    alice, loop, oracle = make_replica(ALICE, rule=outer), Script(manifest, outer), make_replica(BOB, rule=outer)
    assert torch.equal(loop.weights, oracle.round_end.fast_weights()), "it begins with the weights of the run's seed"
    assert loop.engine.checkpoint.layout.hash == oracle.checkpoint.layout.hash

    def step(count: int) -> None:
        for _ in range(count):
            alice.learn()
            oracle.learn()
            loop.step_to(oracle.round_end.fast_weights())

    for index in range(4):
        step(3)
        of_alice, of_loop, of_oracle = (sent(each, index % outer.fragments) for each in (alice, loop.engine, oracle))
        assert of_loop == of_oracle
        step(late_steps)
        is_first = index % 2 == 0
        for each, received in ((alice, of_loop), (loop.engine, of_alice), (oracle, of_alice)):
            assert each.round_end.apply(received, own_first=is_first == (each is alice)) == late_steps
        assert loop.engine.checkpoint.counters == oracle.checkpoint.counters
        for name, tensor in loop.engine.checkpoint.tensors().items():
            assert torch.equal(tensor, oracle.checkpoint.tensors()[name]), name
        assert torch.equal(loop.weights, oracle.round_end.fast_weights())
        if isinstance(outer, PlainConfig):
            assert torch.equal(loop.engine.round_end.outer.slow, alice.round_end.outer.slow), "both have the mean"


@EACH_RULE
def test_a_loop_continues_from_a_built_in_trainers_checkpoint(
    manifest: Manifest, make_replica: MakeReplica, outer: OuterRules, tmp_path: Path
) -> None:
    built_in, loop = make_replica(ALICE, rule=outer), Script(manifest, outer)
    for _ in range(2):
        train(built_in, 2)
        built_in.round_end.apply(None)
    built_in.checkpoint.save(tmp_path / "checkpoint")
    loop.engine.checkpoint.load(tmp_path / "checkpoint")
    assert loop.engine.checkpoint.counters == built_in.checkpoint.counters
    for name, tensor in loop.engine.checkpoint.tensors().items():
        assert torch.equal(tensor, built_in.checkpoint.tensors()[name]), name
    assert torch.equal(loop.weights, built_in.round_end.fast_weights())
    loop.step_to(loop.weights)
    built_in.round_end.count_step(64)
    assert sent(loop.engine) == sent(built_in)


@EACH_RULE
def test_a_built_in_trainer_continues_from_a_loops_checkpoint_with_fresh_means(
    manifest: Manifest, make_replica: MakeReplica, outer: OuterRules, tmp_path: Path
) -> None:
    loop, built_in = Script(manifest, outer), make_replica(BOB, rule=outer)
    built_in.learn()  # what it had learnt by itself is replaced, with its means
    for _ in range(3):
        loop.step()
    loop.engine.round_end.apply(None)
    loop.engine.checkpoint.save(tmp_path / "checkpoint")
    built_in.checkpoint.load(tmp_path / "checkpoint")
    assert torch.equal(built_in.round_end.outer.slow, loop.engine.round_end.outer.slow)
    assert torch.equal(built_in.round_end.fast_weights(), loop.engine.round_end.fast_weights())
    means = [tensor for name, tensor in built_in.checkpoint.tensors().items() if name.startswith(("mean/", "square/"))]
    assert means
    assert not any(bool(mean.any()) for mean in means)
    assert (built_in.totals.round, built_in.totals.steps, built_in.replica.optimizer.begun_at) == (1, 3, 3)
    built_in.learn()
    assert built_in.num_skipped == 0


def test_the_schedule_of_a_built_in_trainer_continues_by_the_tokens_of_a_loop(
    manifest: Manifest, make_replica: MakeReplica, inner: InnerConfig, tmp_path: Path
) -> None:
    small_steps, large_steps = Script(manifest, tokens_per_step=16), Script(manifest, tokens_per_step=640)
    built_in = make_replica(BOB)
    for _ in range(21):  # a step of the built-in trainer has 64 tokens
        small_steps.step()
    small_steps.engine.round_end.apply(None)
    small_steps.engine.checkpoint.save(tmp_path / "small")
    built_in.checkpoint.load(tmp_path / "small")
    assert (built_in.totals.steps, built_in.totals.tokens) == (5, 21 * 16)
    assert rate_of(built_in) == pytest.approx(learning_rate(5, inner) * ramp(0, inner))
    built_in.learn()
    built_in.round_end.apply(None)
    built_in.checkpoint.save(tmp_path / "built-in")
    large_steps.engine.checkpoint.load(tmp_path / "built-in")
    large_steps.step()
    assert (large_steps.engine.checkpoint.counters.steps, large_steps.engine.totals.tokens) == (
        6 + 10,
        21 * 16 + 64 + 640,
    )


def test_the_seeds_weights_are_the_same_whatever_a_script_has_set(manifest: Manifest) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        loop = Script(manifest)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(before)
    oracle = weights_of(build_model(manifest.model, 7))
    assert torch.equal(loop.engine.round_end.outer.slow, oracle)
    assert torch.equal(loop.engine.round_end.fast_weights(), oracle), "with what rounding has dropped"
    assert torch.equal(loop.weights, oracle.bfloat16())


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        ({}, {}, "tokens_per_step=.* has 64"),
        ({"num_stages": 2}, {"tokens_per_step": 1}, "exclude each other"),
        ({"width": 32}, {"tokens_per_step": 1}, r"embedding.weight is \(64, 16\) here and \(64, 32\) .* more"),
        ({"num_layers": 1}, {"tokens_per_step": 1}, r"also trains layers.1.* and 3 more\. Give NoLoCo"),
        ({"num_layers": 3}, {"tokens_per_step": 1}, r"lacks layers.2.* and 3 more\. Give NoLoCo"),
    ],
)
def test_a_loop_that_does_not_fit_the_run_hears_what_to_do(
    manifest: Manifest, change: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    run = replace(manifest, model=replace(manifest.model, **change))
    with pytest.raises(TrainingError, match=words):
        ExternalEngine(Loop(build_model(manifest.model, 0), **settings), run, Turns(), run_id=RUN_ID)

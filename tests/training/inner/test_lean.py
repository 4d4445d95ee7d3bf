"""Inner steps in 8 bytes a parameter, and activations that are computed again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import InnerConfig, InnerName
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.device import choose_device
from farandole.training.base.errors import TrainingError
from farandole.training.inner.lean import Rounding
from farandole.training.screening.rule import UNKNOWN

from ..conftest import ALICE, BOB, RUN_ID, MakeReplica, copy_without, exchange, sent, train, weights_of

CPU = torch.device("cpu")


LEAN = TrainerSettings(lean=True)


def test_rounding_at_random_is_right_on_average_and_follows_from_run_author_and_step() -> None:
    values = torch.cat([torch.linspace(-3, 3, 61), torch.tensor([1 + 2**-9, -(1 + 2**-12), 1e-30, 3e38])])
    down = (values.view(torch.int32) & -65536).view(torch.float32)
    up = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
    rounding, many = Rounding(RUN_ID, ALICE, CPU), 20_000
    rounded = torch.empty(many, len(values), dtype=torch.bfloat16)

    rounding.write_(rounded, values.expand(many, -1).contiguous())

    results = rounded.float()
    assert bool(((results == down) | (results == up)).all())
    error = (results.double().mean(0) - values.double()).abs()
    assert bool((error <= 4 * 0.5 * (up - down).abs().double() / math.sqrt(many)).all()), "4 standard errors"
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf]).bfloat16()
    again = torch.empty_like(exact)
    rounding.write_(again, exact.float())
    assert torch.equal(again.view(torch.int16), exact.view(torch.int16))

    def bits(run_id: bytes, author: bytes, step: int) -> list[float]:
        rounding, target = Rounding(run_id, author, CPU), torch.empty(64, dtype=torch.bfloat16)
        rounding.begin(step)
        rounding.write_(target, torch.full((64,), 1 + 2**-9))
        return target.tolist()

    assert bits(RUN_ID, ALICE, 3) == bits(RUN_ID, ALICE, 3)
    others = [bits(RUN_ID, BOB, 3), bits(RUN_ID, ALICE, 4), bits(bytes(32), ALICE, 3)]
    assert all(other != bits(RUN_ID, ALICE, 3) for other in others)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_lean_step_is_a_plain_one_but_for_rounding(
    make_replica: MakeReplica, inner: InnerConfig, optimizer: InnerName
) -> None:
    """Both take a step with the same bf16 weights, gradient and means."""
    inner = msgspec.structs.replace(inner, optimizer=optimizer)
    lean, plain = make_replica(inner_settings=inner, settings=LEAN), make_replica(inner_settings=inner)
    train(lean, 4)
    plain.round_end.weights.flat.copy_(weights_of(lean.replica.module))
    for name, vector in plain.checkpoint.vectors().items():
        if name in ("mean", "square"):
            vector.copy_(lean.checkpoint.vectors()[name])
    plain.replica.gradient.copy_(lean.replica.gradient)
    plain.totals.steps = lean.totals.steps

    lean.replica.inner_step(1)
    plain.replica.inner_step(1)

    def is_near(rounded: Tensor, exact: Tensor) -> bool:
        return bool(((rounded.float() - exact).abs() <= 2**-7 * exact.abs() + 1e-9).all())

    assert is_near(weights_of(lean.replica.module), plain.round_end.weights.flat)
    assert all(
        is_near(lean.checkpoint.vectors()[name], plain.checkpoint.vectors()[name]) for name in ("mean", "square")
    )
    assert {lean.checkpoint.vectors()[name].dtype for name in ("mean", "square")} == {torch.bfloat16}


def test_it_learns_as_fp32_does_where_rounding_to_nearest_stands_still(
    make_replica: MakeReplica, inner: InnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = msgspec.structs.replace(inner, learning_rate=2e-4, warmup_steps=0, total_steps=1_000_000, weight_decay=0.0)

    def loss_after(settings: TrainerSettings) -> tuple[float, float]:
        node = make_replica(inner_settings=slow, settings=settings)
        before = node.evaluate()
        train(node, 150)
        return before, node.evaluate()

    first, plain = loss_after(TrainerSettings())
    _, lean = loss_after(LEAN)
    monkeypatch.setattr(Rounding, "write_", lambda _, target, values: target.copy_(values))
    _, nearest = loss_after(LEAN)

    progress = first - plain
    assert progress > 0.01
    assert abs(lean - plain) < 0.15 * progress
    assert nearest - plain > 0.3 * progress


def test_lean_and_plain_partners_meet_in_the_same_slow_weights(make_replica: MakeReplica) -> None:
    alice = make_replica(ALICE, settings=LEAN)
    bob = make_replica(BOB)
    assert torch.equal(alice.round_end.slow_weights(), bob.round_end.slow_weights()), "the run's seed, in fp32"
    for _ in range(3):
        train(alice, 5)
        train(bob, 5)
        exchange(alice, bob)
        assert torch.equal(alice.round_end.slow_weights(), bob.round_end.slow_weights())
        torch.testing.assert_close(alice.round_end.fast_weights(), bob.round_end.fast_weights(), rtol=2**-7, atol=0)
    assert torch.equal(alice.round_end.fast_weights(), weights_of(alice.replica.module).float()), "read exactly"


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_checkpoints_are_fp32_and_training_goes_on_from_them(
    make_replica: MakeReplica, inner: InnerConfig, tmp_path: Path, fragments: int, optimizer: InnerName
) -> None:
    of_run = {
        "inner_settings": msgspec.structs.replace(inner, optimizer=optimizer),
        "fragments": fragments,
        "codec": "int8",
    }
    node, again = (make_replica(**of_run, settings=LEAN) for _ in range(2))
    for fragment in range(2):
        train(node, 3)
        sent(node, fragment % fragments)
        node.round_end.apply(None)
    node.checkpoint.save(tmp_path / "saved")
    node.checkpoint.snapshot().save(tmp_path / "snapshot")
    assert (tmp_path / "saved").read_bytes() == (tmp_path / "snapshot").read_bytes()
    assert node.checkpoint.snapshot().num_bytes == node.checkpoint.num_bytes

    again.checkpoint.load(tmp_path / "saved")
    assert torch.equal(again.round_end.slow_weights(), node.round_end.slow_weights())
    for name in ("mean", "square"):
        assert torch.equal(again.checkpoint.vectors()[name], node.checkpoint.vectors()[name])
    plain = make_replica(**of_run)
    plain.checkpoint.load(tmp_path / "saved")  # a member that is lean no more
    assert torch.equal(plain.checkpoint.vectors()["mean"], node.checkpoint.vectors()["mean"].float())
    train(plain, 2)
    plain.round_end.apply(None)
    plain.checkpoint.save(tmp_path / "plain")
    newcomer = make_replica(BOB, **of_run, settings=LEAN)
    newcomer.checkpoint.load(copy_without(tmp_path / "plain", ("mean", "square"), tmp_path / "fetched"))
    assert newcomer.replica.optimizer.begun_at == newcomer.totals.steps == plain.totals.steps, "the rate is ramped up"
    for each in (again, newcomer):
        before = each.evaluate()
        train(each, 5)
        assert each.num_skipped == 0
        assert each.evaluate() < before + 0.1


def test_a_verdicts_trial_leaves_the_weights_as_they_were(make_replica: MakeReplica) -> None:
    node, partner = make_replica(settings=LEAN), make_replica(BOB)
    train(node, 5)
    train(partner, 5)
    sent(node)
    before = weights_of(node.replica.module)
    ended = node.round_end.ended
    assert ended is not None
    node.round_end.partner.exam.begin(1.0, math.inf)
    assert node.round_end._partner_of(UNKNOWN, ended.contribution.sent).loss_before() is not None
    assert torch.equal(weights_of(node.replica.module), before)
    node.round_end.screen(sent(partner))
    assert torch.equal(weights_of(node.replica.module), before)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_computed_again_has_the_same_gradient(make_replica: MakeReplica, lean: bool, autocast: bool) -> None:
    device = replace(choose_device("cpu"), autocast_dtype=torch.bfloat16 if autocast else None)
    plain, again = (
        make_replica(device=device, settings=TrainerSettings(lean=lean, recompute=recompute))
        for recompute in (False, True)
    )
    for _ in range(3):
        assert torch.equal(plain.learn(), again.learn())
        assert torch.equal(plain.replica.gradient, again.replica.gradient)
    assert plain.evaluate() == again.evaluate()


def test_what_cannot_be_lean_says_why(make_replica: MakeReplica) -> None:
    for settings in (TrainerSettings(lean=True), TrainerSettings(recompute=True)):
        with pytest.raises(TrainingError, match="for farandole's own models"):
            make_replica(module=nn.Linear(2, 2), settings=settings)

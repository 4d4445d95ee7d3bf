import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import InnerConfig, InnerName, ModelConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.device import choose_device
from farandole.training.base.errors import TrainingError
from farandole.training.base.parameters import flatten_, layout_of
from farandole.training.inner.lean import Rounding
from farandole.training.inner.optimizer import InnerOptimizer, learning_rate, matrices_of, ramp
from farandole.training.model.model import build_model, language_loss
from farandole.training.screening.rule import UNKNOWN

from ..conftest import ALICE, BOB, RUN_ID, MakeReplica, copy_without, exchange, sent, train, weights_of

INNER = InnerConfig(learning_rate=1e-2, warmup_steps=10, total_steps=110, min_learning_rate_ratio=0.1)

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")


def test_the_rate_warms_up_decays_and_stays() -> None:
    rates = [learning_rate(step, INNER) for step in range(200)]

    assert rates[:10] == pytest.approx([1e-3 * (step + 1) for step in range(10)])
    assert rates[60] == pytest.approx((1e-2 + 1e-3) / 2)
    assert rates[110:] == pytest.approx([1e-3] * 90)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))


def test_a_stable_rate_falls_linearly_in_the_last_share_of_the_steps() -> None:
    inner = msgspec.structs.replace(INNER, schedule="wsd", decay_share=0.5)
    rates = [learning_rate(step, inner) for step in range(200)]

    assert rates[:10] == pytest.approx([1e-3 * (step + 1) for step in range(10)])
    assert rates[10:56] == pytest.approx([1e-2] * 46)
    assert rates[82] == pytest.approx(1e-3 + 9e-3 * 28 / 55)
    assert rates[110:] == pytest.approx([1e-3] * 90)


def test_means_that_begin_anew_are_given_twice_their_memory() -> None:
    shares = [ramp(step, InnerConfig(beta2=0.95)) for step in range(60)]
    assert shares[:40] == pytest.approx([(step + 1) / 40 for step in range(40)])
    assert shares[40:] == [1.0] * 20


@pytest.mark.parametrize(
    ("optimizer", "device"), [("adamw", "cpu"), ("muon", "cpu"), pytest.param("adamw", "cuda", marks=NEEDS_CUDA)]
)
def test_a_step_that_is_queued_is_the_same_and_counts_as_a_change(
    model: ModelConfig, optimizer: InnerName, device: str
) -> None:
    """A GPU gets this step; it may be taken on the CPU too. The fourth gradient is not finite."""
    inner = msgspec.structs.replace(INNER, optimizer=optimizer, weight_decay=0.1)
    optimizers: list[tuple[InnerOptimizer, Tensor, Tensor]] = []
    for is_queued in (False, True):
        module = build_model(model, 0).to(device if is_queued else "cpu")
        layout = layout_of(module, "fp32")
        weights, gradient = flatten_(module, layout)
        made = InnerOptimizer(inner, module, layout, weights, gradient)
        made.is_queued = is_queued
        optimizers.append((made, weights, gradient))
    generator = torch.Generator().manual_seed(0)

    for step in range(6):
        drawn = torch.randn(len(optimizers[0][1]), generator=generator)
        drawn[7] = torch.inf if step == 3 else drawn[7]
        for made, weights, gradient in optimizers:
            gradient.copy_(drawn)
            version, before = weights._version, weights.clone()
            with torch.no_grad():
                made.step(step, 2)
            assert torch.equal(weights, before) == (step == 3)
            assert weights._version > version or step == 3

    (plain, weights, _), (queued, others, _) = optimizers
    assert plain.num_skipped == queued.num_skipped == 1
    torch.testing.assert_close(weights, others.cpu(), rtol=1e-5, atol=1e-6)
    for name, flat in plain.state().items():
        torch.testing.assert_close(flat, queued.state()[name].cpu(), rtol=1e-5, atol=1e-6)


MUON = InnerConfig(learning_rate=3e-3, warmup_steps=3, total_steps=30, batch_size=4, weight_decay=0.1, optimizer="muon")


def test_matrices_are_all_but_the_models_ends_and_have_one_vector_of_state(make_replica: MakeReplica) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(10, 4)
            self.norm = nn.LayerNorm(4)
            self.mix = nn.Linear(4, 8)
            self.lm_head = nn.Linear(4, 10)
            self.filters = nn.Conv1d(4, 4, 3)

    model = ModelConfig(num_layers=1, width=16, num_heads=2, hidden=24, context=16, vocabulary=64)

    assert matrices_of(Own()) == {"mix.weight"}
    assert matrices_of(build_model(model, 0)) == {
        "layers.0.attention.qkv.weight",
        "layers.0.attention.out.weight",
        "layers.0.mlp.gate_up.weight",
        "layers.0.mlp.down.weight",
    }
    node = make_replica(inner_settings=MUON)
    squares = {name.partition("/")[2] for name in node.checkpoint.tensors() if name.startswith("square/")}
    assert squares == set(node.checkpoint.layout.shapes) - matrices_of(node.replica.module)


@pytest.mark.parametrize(
    ("optimizer", "momentum"), [("muon", "nesterov"), ("adamw", "nesterov"), ("adamw", "heavy_ball")]
)
def test_a_run_of_one_is_plain_training_with_torchs_optimizers_bit_for_bit(
    make_replica: MakeReplica, model: ModelConfig, optimizer: str, momentum: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Muon or AdamW for matrices, and AdamW for the rest.

    With alpha 0 and beta 1 the outer step alone changes nothing: what is left is a loop anybody would write.
    """
    # torch's Muon iterates in bf16 on any device, a node on the CPU in fp32; nothing else of either uses bf16 here.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.to(torch.float32, copy=True))
    inner = msgspec.structs.replace(MUON, optimizer=optimizer)
    node = make_replica(inner_settings=inner, alpha=0.0, beta=1.0, gamma=1.0, momentum=momentum)
    plain = build_model(model, 7)
    matrices = [parameter for name, parameter in plain.named_parameters() if name in matrices_of(plain)]
    rest = [parameter for name, parameter in plain.named_parameters() if name not in matrices_of(plain)]
    decay = MUON.weight_decay

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        betas = MUON.beta1, MUON.beta2
        return torch.optim.AdamW(parameters, betas=betas, eps=MUON.epsilon, weight_decay=decay, foreach=False)

    of_rest = adamw(
        [
            {"params": [parameter for parameter in rest if parameter.ndim > 1]},
            {"params": [parameter for parameter in rest if parameter.ndim == 1], "weight_decay": 0.0},
        ]
    )
    of_matrices = adamw(matrices)
    if optimizer == "muon":
        of_matrices = torch.optim.Muon(
            matrices, weight_decay=decay, momentum=MUON.momentum, adjust_lr_fn="match_rms_adamw"
        )

    for step in range(30):
        plain.zero_grad()
        loss = language_loss(plain, torch.from_numpy(node.sampler.batch(step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), MUON.clip)
        for each in (of_matrices, of_rest):
            for group in each.param_groups:
                group["lr"] = learning_rate(step, MUON)
            each.step()

        assert float(node.learn()) == float(loss.detach())
        if step % 5 == 4:
            node.round_end.apply(None)

    assert torch.equal(node.round_end.fast_weights(), weights_of(plain))
    assert torch.equal(node.round_end.outer.slow, weights_of(plain))
    assert (node.totals.round, node.totals.steps, node.totals.tokens) == (6, 30, 30 * 4 * 16)
    assert node.round_end.tokens_this_round == 0


def test_another_optimizers_vectors_are_not_continued(make_replica: MakeReplica, tmp_path: Path) -> None:
    """A run that starts from another one's checkpoint may have another inner optimizer."""
    node, successor = make_replica(inner_settings=MUON), make_replica()
    train(node, 4)
    node.round_end.apply(None)
    node.checkpoint.save(tmp_path / "checkpoint")

    successor.checkpoint.start_from(tmp_path / "checkpoint", 20, 0)

    assert torch.equal(successor.round_end.outer.slow, node.round_end.outer.slow)
    assert not any(bool(successor.checkpoint.vectors()[name].any()) for name in ("mean", "square"))
    assert successor.replica.optimizer.begun_at == 20, "the rate is ramped up"


# Inner steps in bf16


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
    assert torch.equal(alice.round_end.outer.slow, bob.round_end.outer.slow), "the run's seed, in fp32"
    for _ in range(3):
        train(alice, 5)
        train(bob, 5)
        exchange(alice, bob)
        assert torch.equal(alice.round_end.outer.slow, bob.round_end.outer.slow)
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
    assert torch.equal(again.round_end.outer.slow, node.round_end.outer.slow)
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
    device = replace(choose_device("cpu"), autocast=partial(torch.autocast, "cpu", enabled=autocast))
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

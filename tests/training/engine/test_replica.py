import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from farandole.protocol.run.manifest import InnerConfig
from farandole.protocol.run.rules import Codec, GuardConfig, Momentum, NoLoCoConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.device import is_out_of_memory
from farandole.training.base.errors import DataError, TrainingError
from farandole.training.data.dataset import Text
from farandole.training.engine.learner import Learner
from farandole.training.inner.optimizer import ramp
from farandole.training.outer import codec, outer_state, round_end
from farandole.training.outer.outer_state import MAX_MOMENTUM
from farandole.training.outer.rule import OwnVectors, rule_of
from farandole.training.screening.rule import Accept, Encounter, Partner, Refuse, Verdict

from ..conftest import ALICE, BOB, Asking, MakeReplica, copy_without, exchange, refusal, sent, train


def state(replica: Learner) -> list[Tensor]:
    return [vector.clone() for vector in (replica.round_end.fast_weights(), *replica.checkpoint.vectors().values())]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("momentum", ["heavy_ball", "nesterov"])
@pytest.mark.parametrize("name", codec.CODECS)
@pytest.mark.parametrize("gamma", [0.7, 0.5])
def test_an_exchange_is_the_formula(make_replica: MakeReplica, momentum: Momentum, name: Codec, gamma: float) -> None:
    outer = NoLoCoConfig(codec=name, momentum=momentum, gamma=gamma)
    alice, bob = (make_replica(author, rule=outer) for author in (ALICE, BOB))
    for node in (alice, bob):
        train(node)
        node.round_end.apply(None)  # so that slow weights differ and there is momentum
        train(node)
    before = {node: [vector.double() for vector in state(node)] for node in (alice, bob)}

    def exact(node: Learner) -> Tensor:
        own = OwnVectors(node.round_end.fast_weights(), node.round_end.outer.slow.clone(), {})
        return rule_of(outer).contribution(own)

    def as_sent(node: Learner) -> Tensor:
        buffer = bytearray(node.round_end.contribution_bytes)
        codec.encode(name, exact(node), buffer)
        return codec.decode(name, buffer, node.checkpoint.layout.num_elements).double()

    difference = as_sent(alice) - as_sent(bob)
    means = {alice: exact(alice).double() - 0.25 * difference, bob: exact(bob).double() + 0.75 * difference}
    exchange(alice, bob, tokens=(300, 100))

    for node in (alice, bob):
        _, phi, m, *_ = before[node]
        mean = means[node]
        pull = 0.7 * mean - gamma * phi
        new_m = 0.5 * m + pull
        new_phi = phi + (new_m if momentum == "heavy_ball" else pull + 0.5 * new_m)
        torch.testing.assert_close(node.round_end.outer.slow.double(), new_phi, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(node.checkpoint.vectors()["momentum"].double(), new_m, rtol=1e-5, atol=1e-6)
        assert torch.equal(node.round_end.fast_weights(), node.round_end.outer.slow)


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("lean", [False, True])
def test_a_gradient_that_is_not_finite_costs_a_step_and_nothing_else(
    make_replica: MakeReplica, inner: InnerConfig, clip: float, optimizer: str, lean: bool
) -> None:
    inner = msgspec.structs.replace(inner, clip=clip, optimizer=optimizer)
    node = make_replica(inner_settings=inner, settings=TrainerSettings(lean=lean))
    train(node, 3)
    before, loss_of = state(node), node.loss
    factors = iter([math.inf, math.nan])
    node.loss = lambda module, batch: loss_of(module, batch) * next(factors)
    until = iter([False, False, True])
    node.inner_steps(lambda: next(until))

    assert node.mean_loss() is None
    assert node.num_skipped == 2
    assert same(state(node), before)
    node.loss = loss_of
    train(node, 3)
    assert node.num_skipped == 2
    assert not torch.equal(node.round_end.fast_weights(), before[0])


def test_a_newcomer_claims_nothing_until_it_has_met_a_member_and_little_while_its_rate_is_ramped_up(
    make_replica: MakeReplica, inner: InnerConfig, tmp_path: Path
) -> None:
    donor, newcomer = make_replica(ALICE), make_replica(BOB)
    for _ in range(2):
        train(donor, 5)
        donor.round_end.apply(None)
    donor.checkpoint.save(tmp_path / "whole")
    newcomer.checkpoint.load(copy_without(tmp_path / "whole", ("mean", "square"), tmp_path / "fetched"))
    newcomer.catch_up(4)
    assert (newcomer.totals.round, newcomer.totals.steps, newcomer.replica.optimizer.begun_at) == (2, 20, 20), (
        "the schedule is at the run's place"
    )
    for partner_tokens in (0, 300):
        train(newcomer, 5)
        train(donor)
        of_donor = sent(donor)
        sent(newcomer)
        assert newcomer.round_end.tokens_claimed == 0
        newcomer.round_end.apply(of_donor, Encounter(b"", 0, partner_tokens))
        donor.round_end.apply(None)
    train(newcomer, 5)
    ramps = [ramp(step, inner) for step in range(10, 15)]
    assert 0 < newcomer.round_end.tokens_claimed < newcomer.round_end.tokens_contributed
    assert newcomer.round_end.tokens_claimed == round(newcomer.round_end.tokens_contributed * fmean(ramps))


def test_a_newcomer_claims_nothing_for_each_fragment_that_it_has_not_exchanged_yet(
    make_replica: MakeReplica, tmp_path: Path
) -> None:
    donor, newcomer, met = (make_replica(author, fragments=2) for author in (ALICE, BOB, BOB))
    train(donor)
    donor.checkpoint.save(tmp_path / "whole")
    for missed, claims in ((3, [True, True, True]), (4, [False, False, True])):
        newcomer.checkpoint.load(tmp_path / "whole")
        newcomer.catch_up(newcomer.totals.round + missed)
        found = []
        for fragment in (0, 1, 0):
            train(newcomer)
            train(met)
            contribution = sent(met, fragment)
            sent(newcomer, fragment)
            found.append(newcomer.round_end.tokens_claimed > 0)
            newcomer.round_end.apply(contribution, Encounter(b"", newcomer.round_end.tokens_claimed, 100))
            met.round_end.apply(None)
        assert found == claims


def test_an_outer_step_that_changes_nothing_may_come_late(make_replica: MakeReplica) -> None:
    """Alone, with alpha 0 and beta 1, the correction is zero: what was learnt meanwhile stays as it is."""
    late, plain = (make_replica(alpha=0.0, beta=1.0, gamma=1.0) for _ in range(2))
    for number in range(3):
        train(late, 2)
        sent(late)
        train(late, 3)
        assert late.round_end.awaits_outer_step
        assert late.round_end.tokens_contributed == (5 if number else 2) * 4 * 16
        assert late.round_end.apply(None) == 3
        train(plain, 5)

    assert torch.equal(late.round_end.fast_weights(), plain.round_end.fast_weights())
    assert late.round_end.tokens_this_round == 3 * 4 * 16


@pytest.mark.parametrize(
    ("codec", "fragments", "late"), [("fp32", 1, 0), ("int8", 1, 2), ("int4", 3, 0), ("int8", 3, 2)]
)
def test_what_averages_on_the_host_comes_to_the_same_bits(
    make_replica: MakeReplica, tmp_path: Path, codec: Codec, fragments: int, late: int
) -> None:
    """Inner steps move one vector, and all else works on a copy: for a GPU whose memory is to be the model's."""
    settings = {"codec": codec, "fragments": fragments, "screening": GuardConfig(), "alpha": 0.5}
    apart, plain = (make_replica(**settings, averages_on_host=averages_on_host) for averages_on_host in (True, False))
    partner = make_replica(BOB, **settings)
    for index in range(6):
        for each in (apart, plain, partner):
            each.learn()
        contributions = [sent(each, index % fragments) for each in (apart, plain, partner)]
        assert contributions[0] == contributions[1]
        for each in (apart, plain):
            for _ in range(late):
                each.learn()
            verdict = each.round_end.screen(contributions[2])
            assert not isinstance(verdict, Refuse)
            assert each.round_end.apply(contributions[2]) == late
        partner.round_end.apply(contributions[1], own_first=False)
    for each in (apart, plain):
        each.learn()  # with fragments, this is in the checkpoint
    apart.checkpoint.save(tmp_path / "apart")
    plain.checkpoint.save(tmp_path / "plain")
    assert (tmp_path / "apart").read_bytes() == (tmp_path / "plain").read_bytes()

    apart.learn()
    for each in (apart, plain):
        each.checkpoint.load(tmp_path / "plain")
    assert torch.equal(apart.round_end.fast_weights(), plain.round_end.fast_weights())
    assert apart.learn().equal(plain.learn())


def corrupt(raw: bytearray, value: float) -> bytes:
    values = np.frombuffer(raw, np.float32).copy()
    values[len(values) // 2] = value
    return values.tobytes()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda raw: raw[:-1], "bytes"),
        (lambda raw: raw + b"\0", "bytes"),
        (lambda raw: b"", "bytes"),
        (lambda raw: corrupt(raw, math.nan), "finite"),
        (lambda raw: corrupt(raw, -math.inf), "finite"),
        (lambda raw: corrupt(raw, 1e30), "norm"),
        (lambda raw: bytes(len(raw)), "norm"),
    ],
)
def test_an_unfit_contribution_changes_nothing(make_replica: MakeReplica, harm: object, reason: str) -> None:
    alice, twin, bob = make_replica(ALICE), make_replica(ALICE), make_replica(BOB)
    for node in (alice, twin, bob):
        train(node)
    of_bob = sent(bob)
    sent(alice)
    before = state(alice)

    assert refusal(alice, of_bob) == ""
    assert reason in refusal(alice, harm(of_bob))  # type: ignore[operator]  # a function of the parameters
    assert same(before, state(alice))
    assert alice.totals.round == 0
    # Both have committed to it where there was no time to judge it: it counts for nothing.
    alice.round_end.apply(harm(of_bob), Encounter(b"", 1, 1), own_first=True)  # type: ignore[operator]  # a function of the parameters
    twin.round_end.apply(None)
    assert same(state(alice), state(twin))


def test_a_replica_that_has_exchanged_needs_no_garbage_collector(make_replica: MakeReplica) -> None:
    """In a reference cycle its gigabytes would stay until the collector runs, beside those of the next one."""
    alice, bob = make_replica(ALICE), make_replica(BOB)
    for replica in (alice, bob):
        train(replica, 1)
    exchange(alice, bob)
    memory = weakref.ref(alice.round_end.weights.flat)

    gc.disable()
    try:
        del alice, replica
        assert memory() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("norm", [1e6, math.inf])
def test_momentum_that_no_rounds_have_made_is_clipped(make_replica: MakeReplica, norm: float) -> None:
    """Such as a stranger's checkpoint may have."""
    replica = make_replica(ALICE)
    replica.learn()
    before, momentum = replica.round_end.outer.slow.clone(), replica.checkpoint.vectors()["momentum"]
    movement = float((replica.round_end.fast_weights() - before).norm())
    momentum.fill_(norm / math.sqrt(len(momentum)))
    replica.round_end.apply(None)
    settings = NoLoCoConfig()
    limit = MAX_MOMENTUM * settings.momentum_gain * movement
    assert float((replica.round_end.outer.slow.clone() - before).norm()) <= settings.alpha * limit + 2 * movement


def test_the_momentum_of_honest_rounds_is_left_as_it_is(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = play_rounds(make_replica)
    monkeypatch.setattr(outer_state, "MAX_MOMENTUM", math.inf)
    assert torch.equal(limited, play_rounds(make_replica))


def play_rounds(make_replica: MakeReplica, **settings: object) -> Tensor:
    """Of two replicas, one of which is slower; the slow weights of one."""
    alice, bob = make_replica(ALICE, **settings), make_replica(BOB, **settings)
    for _ in range(8):
        train(alice, 4)
        train(bob, 1)
        exchange(alice, bob)
    return alice.round_end.outer.slow.clone()


def test_fragments_cover_every_parameter_once_and_layouts_tell_codecs_apart(make_replica: MakeReplica) -> None:
    layout = make_replica().checkpoint.layout
    for count in (1, 2, 7):
        parts = layout.fragments(count)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == layout.num_elements
    assert make_replica(ALICE).checkpoint.layout.hash == make_replica(BOB).checkpoint.layout.hash
    assert make_replica(codec="int8").checkpoint.layout.hash != make_replica(codec="fp32").checkpoint.layout.hash
    assert len(make_replica().checkpoint.layout.hash) == 32


def test_a_round_without_inner_steps_is_judged_by_the_steps_before_it(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own movement is nothing, or the codec's rounding: no yardstick for a partner."""
    asked: list[tuple[float, float | None]] = []

    def judge(partner: Partner) -> Verdict:
        asked.append((partner.movement(), partner.loss_before()))
        return Accept()

    monkeypatch.setattr(round_end, "rule_of", lambda settings: Asking(judge))
    alice, bob = (make_replica(author, codec="int8", partners=2) for author in (ALICE, BOB))
    for steps in (2, 0, 2):
        train(alice, steps)
        train(bob, steps)
        sent(alice)
        alice.round_end.apply(sent(bob))
    (first, before), second, (third, _) = asked
    assert first > 0.0
    assert before is not None
    assert second == (first, None)
    assert third not in (0.0, first)


@pytest.mark.parametrize(("missed", "is_newcomer"), [(3, False), (4, True)])
def test_a_newcomer_claims_nothing_in_all_meetings_until_it_has_met_a_member(
    make_replica: MakeReplica, tmp_path: Path, missed: int, is_newcomer: bool
) -> None:
    """Its weights are as old in a round's second meeting as in the first; two meetings are one round's age."""
    member, newcomer = (make_replica(author, partners=2) for author in (ALICE, BOB))
    member.learn()
    member.round_end.apply(None)
    member.checkpoint.save(tmp_path / "whole")
    newcomer.checkpoint.load(tmp_path / "whole")
    newcomer.catch_up(newcomer.totals.round + missed)
    claims = []
    for takes_steps, partner_claim in ((True, 0), (False, 1), (True, 100), (False, 1)):
        for each in (member, newcomer):
            train(each, int(takes_steps))
        of_member = sent(member)
        sent(newcomer)
        claims.append(newcomer.round_end.claim(takes_steps=takes_steps) > 0)
        newcomer.round_end.apply(of_member, Encounter(b"", int(claims[-1]), partner_claim))
        member.round_end.apply(None)
    assert claims == [not is_newcomer, not is_newcomer, True, True]


# Microbatches, and the whole model on one device


def learner(make_replica: MakeReplica, microbatch_size: int, *, is_compiled: bool = False) -> Learner:
    return make_replica(
        inner_settings=InnerConfig(learning_rate=3e-3, warmup_steps=3, total_steps=30, batch_size=6),
        settings=TrainerSettings(microbatch=microbatch_size, compile=is_compiled),
    )


@pytest.mark.parametrize("microbatch_size", [1, 3, 4, 5])  # of 6: equal parts, and a shorter last one
def test_microbatches_sum_to_the_batchs_gradient_and_loss(make_replica: MakeReplica, microbatch_size: int) -> None:
    whole, parts = learner(make_replica, 0), learner(make_replica, microbatch_size)
    for _ in range(3):
        loss = whole.learn()
        torch.testing.assert_close(parts.learn(), loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(parts.replica.gradient, whole.replica.gradient, rtol=1e-4, atol=1e-7)
        # AdamW makes more of a rounding where a gradient is nearly 0.
        parts.round_end.weights.flat.copy_(whole.round_end.weights.flat)
    assert (parts.totals.steps, parts.totals.tokens) == (whole.totals.steps, whole.totals.tokens)
    assert parts.evaluate(2) == pytest.approx(whole.evaluate(2), rel=1e-6)


def test_a_loss_that_cannot_be_measured_changes_nothing_of_the_training(make_replica: MakeReplica, text: Text) -> None:
    """One's own module may have dropout, which is off while the loss is measured."""
    without = make_replica(text=replace(text, held_out=text.held_out[:1]))
    for _ in range(2):
        without.learn()
        with pytest.raises(DataError, match="too little text is held out"):
            without.evaluate()
        assert without.replica.module.training


Forward = Callable[..., object]


def test_inner_steps_run_through_the_compiled_module(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler that leaves everything as it is, and counts."""
    calls: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Forward:
        def forward(*args: object) -> object:
            calls.append(len(args))
            return module.forward(*args)

        return forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, compiled = learner(make_replica, 3), learner(make_replica, 3, is_compiled=True)
    assert len(calls) == 1, "compiled before the first inner step"
    for _ in range(2):
        torch.testing.assert_close(compiled.learn(), plain.learn())
    assert len(calls) == 1 + 2 * 2, "of two microbatches each"
    torch.testing.assert_close(compiled.round_end.weights.flat, plain.round_end.weights.flat)


def test_a_compiler_that_is_missing_is_told_with_what_to_do(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Forward:
        raise FileNotFoundError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with pytest.raises(TrainingError, match=r"No working C\+\+ compiler found.* apt install g\+\+ .* --compile"):
        learner(make_replica, 0, is_compiled=True)


def test_a_tensor_for_which_there_is_no_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    with pytest.raises(MemoryError) as no_bytes:
        bytearray(2**62)
    assert is_out_of_memory(no_bytes.value)
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as mismatch:
        torch.zeros(2) @ torch.zeros(3)
    assert not is_out_of_memory(mismatch.value)

import gc
import math
import weakref
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from torch import Tensor

from farandole.protocol.run.manifest import InnerConfig, ModelConfig
from farandole.protocol.run.rules import Codec, GuardConfig, Momentum, NoLoCoConfig
from farandole.training.base.errors import DivergedError
from farandole.training.data.dataset import Sampler, Text
from farandole.training.engine.learner import Learner
from farandole.training.inner.optimizer import learning_rate, ramp
from farandole.training.model.model import build_model, language_loss
from farandole.training.outer import codec, outer_state
from farandole.training.outer.outer_state import MAX_DRIFT, MAX_MOMENTUM
from farandole.training.outer.rule import OwnVectors, rule_of
from farandole.training.screening.rule import Encounter, Refuse

from ..conftest import ALICE, BOB, RUN_ID, MakeReplica, copy_without, refusal


def train(replica: Learner, steps: int = 5) -> list[float]:
    return [float(replica.learn()) for _ in range(steps)]


def sent(replica: Learner) -> bytes:
    buffer = bytearray(replica.round_end.contribution_bytes)
    size, digest = replica.round_end.contribute(buffer)
    assert (size, digest) == (len(buffer), blake3(buffer).digest())
    return bytes(buffer)


def state(replica: Learner) -> list[Tensor]:
    return [vector.clone() for vector in (replica.round_end.weights.flat, *replica.checkpoint.vectors().values())]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def exchange(alice: Learner, bob: Learner, alice_tokens: int = 300, bob_tokens: int = 100) -> None:
    of_alice, of_bob = sent(alice), sent(bob)
    alice.round_end.apply(of_bob, Encounter(b"", alice_tokens, bob_tokens), own_first=True)
    bob.round_end.apply(of_alice, Encounter(b"", bob_tokens, alice_tokens), own_first=False)


@pytest.mark.parametrize("momentum", ["heavy_ball", "nesterov"])
def test_a_run_of_one_is_plain_training_bit_for_bit(
    make_replica: MakeReplica, model: ModelConfig, inner: InnerConfig, text: Text, momentum: str
) -> None:
    """With alpha 0 and beta 1 the outer step alone changes nothing: what is left is a loop anybody would write."""
    node = make_replica(alpha=0.0, beta=1.0, gamma=1.0, momentum=momentum)
    sampler = Sampler(text, run_id=RUN_ID, author=ALICE, batch_size=inner.batch_size, context=model.context)
    plain = build_model(model, seed=7)
    matrices = [parameter for parameter in plain.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in plain.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": gains, "weight_decay": 0.0}],
        betas=(inner.beta1, inner.beta2),
        eps=inner.epsilon,
        foreach=False,
    )

    for step in range(30):
        optimizer.zero_grad()
        loss = language_loss(plain, torch.from_numpy(sampler.batch(step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), inner.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, inner)
        optimizer.step()

        assert float(node.learn()) == float(loss.detach())
        if step % 5 == 4:
            node.round_end.apply(None)

    weights = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
    assert torch.equal(node.round_end.fast_weights(), weights)
    assert torch.equal(node.round_end.slow_weights(), weights)
    assert (node.totals.round, node.totals.steps, node.totals.tokens, node.round_end.tokens_this_round) == (
        6,
        30,
        30 * 4 * 16,
        0,
    )


@pytest.mark.parametrize("momentum", ["heavy_ball", "nesterov"])
@pytest.mark.parametrize("name", codec.CODECS)
@pytest.mark.parametrize("gamma", [0.7, 0.5])
def test_an_exchange_is_the_formula(make_replica: MakeReplica, momentum: Momentum, name: Codec, gamma: float) -> None:
    outer = NoLoCoConfig(codec=name, momentum=momentum, gamma=gamma)
    settings = {"codec": name, "momentum": momentum, "gamma": gamma}
    alice, bob = make_replica(ALICE, **settings), make_replica(BOB, **settings)
    for node in (alice, bob):
        train(node)
        node.round_end.apply(None)  # so that slow weights differ and there is momentum
        train(node)
    before = {node: [vector.double() for vector in state(node)] for node in (alice, bob)}

    def as_sent(node: Learner) -> Tensor:
        theta, phi = node.round_end.fast_weights(), node.round_end.slow_weights()
        buffer = bytearray(node.round_end.contribution_bytes)
        codec.encode(name, rule_of(outer).contribution(OwnVectors(theta, phi, {})), buffer)
        return codec.decode(name, buffer, len(theta)).double()

    def exact(node: Learner) -> Tensor:
        return (
            rule_of(outer)
            .contribution(OwnVectors(node.round_end.fast_weights(), node.round_end.slow_weights(), {}))
            .double()
        )

    difference = as_sent(alice) - as_sent(bob)
    means = {alice: exact(alice) - 0.25 * difference, bob: exact(bob) + 0.75 * difference}
    exchange(alice, bob)

    for node in (alice, bob):
        _, phi, m, *_ = before[node]
        mean = means[node]
        pull = 0.7 * mean - gamma * phi
        new_m = 0.5 * m + pull
        new_phi = phi + (new_m if momentum == "heavy_ball" else pull + 0.5 * new_m)
        torch.testing.assert_close(node.round_end.slow_weights().double(), new_phi, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(node.checkpoint.vectors()["momentum"].double(), new_m, rtol=1e-5, atol=1e-6)
        assert torch.equal(node.round_end.fast_weights(), node.round_end.slow_weights())


def plain_averages(name: str) -> dict[str, object]:
    """Settings with which an outer step is the mean itself."""
    return {"alpha": 0.0, "beta": 1.0, "gamma": 1.0, "codec": name}


@pytest.mark.parametrize("name", [name for name in codec.CODECS if name != "fp32"])
def test_with_a_lossy_codec_partners_keep_their_sum_and_differ_by_its_errors(
    make_replica: MakeReplica, name: str
) -> None:
    alice, bob = make_replica(ALICE, **plain_averages(name)), make_replica(BOB, **plain_averages(name))
    train(alice)
    train(bob)
    before = {node: node.round_end.fast_weights().double() for node in (alice, bob)}
    errors = {
        node: (before[node] - codec.decode(name, sent(node), node.checkpoint.layout.num_elements).double()).abs()
        for node in (alice, bob)
    }

    exchange(alice, bob, 1, 1)

    after = [node.round_end.slow_weights().double() for node in (alice, bob)]
    torch.testing.assert_close(sum(after), before[alice] + before[bob], rtol=0, atol=1e-6)
    apart = (after[0] - after[1]).abs()
    assert float(apart.max()) > 1e-5
    assert bool((apart <= errors[alice] + errors[bob] + 1e-6).all())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_progress_below_half_a_quantum_is_not_rounded_away(make_replica: MakeReplica, name: str) -> None:
    """In each round both replicas move by a twentieth of int8's quantum, or less."""

    def after(num_rounds: int, **outer: object) -> tuple[Tensor, Tensor]:
        alice, bob = make_replica(ALICE, **outer), make_replica(BOB, **outer)
        for _ in range(num_rounds):
            alice.round_end.weights.flat.add_(1e-5)
            bob.round_end.weights.flat.add_(3e-5)
            exchange(alice, bob, 1, 1)
        return alice.round_end.slow_weights(), bob.round_end.slow_weights()

    start = make_replica().round_end.slow_weights()
    exact, _ = after(200)
    alice, bob = after(200, codec=name)

    moved, missing = float((exact - start).mean()), float((exact - (alice + bob) / 2).mean())
    assert moved == pytest.approx(200 * 2e-5 * 1.4, rel=0.02)  # beta / (1 - alpha) = 1.4 of every step
    assert abs(missing) < 0.01 * moved
    quantum = float(start.abs().max()) / (127 if name == "int8" else 7)
    assert float((alice - bob).abs().max()) < 2 * quantum


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("codec_name", ["fp32", "int8"])
@pytest.mark.parametrize("averages_on_host", [False, True])
def test_the_drift_correction_is_the_formula_and_moves_the_inner_steps(
    make_replica: MakeReplica, tmp_path: Path, fragments: int, codec_name: Codec, averages_on_host: bool
) -> None:
    settings: dict[str, Any] = {"codec": codec_name, "drift": 0.1, "fragments": fragments}
    alice, bob = (make_replica(each, averages_on_host=averages_on_host, **settings) for each in (ALICE, BOB))
    expected = torch.zeros_like(alice.round_end.fast_weights())
    rates, rates_before = 0.0, [0.0] * fragments
    for number in range(3):
        fragment = number % fragments
        for _ in range(4):
            rates += alice.replica.learning_rate
            alice.learn()
            bob.learn()
        part = alice.checkpoint.layout.fragment(fragment, fragments)
        of_alice, of_bob = (bytearray(node.round_end.contribution_bytes) for node in (alice, bob))
        sizes = [node.round_end.contribute(out, fragment)[0] for node, out in ((alice, of_alice), (bob, of_bob))]
        decoded = [
            codec.decode(codec_name, out[:size], part.stop - part.start)
            for out, size in zip((of_alice, of_bob), sizes, strict=True)
        ]
        since = rates - rates_before[fragment]
        expected[part] = 0.98 * expected[part] + 0.1 * 0.5 * (decoded[1] - decoded[0]) / since
        rates_before[fragment] = rates
        alice.round_end.apply(of_bob[: sizes[1]], Encounter(b"", 1, 1))
        bob.round_end.apply(of_alice[: sizes[0]], Encounter(b"", 1, 1), own_first=False)

        torch.testing.assert_close(alice.checkpoint.vectors()["drift"], expected, rtol=1e-3, atol=1e-5)
    assert bool(expected.any())
    alice.checkpoint.save(tmp_path / "checkpoint")
    again, without = (make_replica(ALICE, averages_on_host=averages_on_host, **settings) for _ in range(2))
    again.checkpoint.load(tmp_path / "checkpoint")
    without.checkpoint.load(copy_without(tmp_path / "checkpoint", "drift", tmp_path / "without"))
    rate = again.replica.learning_rate
    again.learn()
    without.learn()
    torch.testing.assert_close(
        again.round_end.fast_weights() - without.round_end.fast_weights(), rate * expected, rtol=1e-2, atol=1e-6
    )


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_costs_a_step_and_nothing_else(
    make_replica: MakeReplica, inner: InnerConfig, clip: float, optimizer: str
) -> None:
    settings = msgspec.structs.replace(inner, clip=clip, optimizer=optimizer)
    node = make_replica(inner_settings=settings, drift=0.1)
    train(node, 3)
    node.checkpoint.vectors()["drift"].fill_(0.5)
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
        train(donor)
        donor.round_end.apply(None)
    donor.checkpoint.save(tmp_path / "whole")
    part = copy_without(tmp_path / "whole", "mean", tmp_path / "part")
    newcomer.checkpoint.load(copy_without(part, "square", tmp_path / "fetched"))
    newcomer.catch_up(4)
    assert (newcomer.totals.round, newcomer.totals.steps, newcomer.replica.optimizer.begun_at) == (2, 20, 20), (
        "the schedule is at the run's place"
    )
    for partner_tokens in (0, 300):
        train(newcomer)
        train(donor)
        of_donor = sent(donor)
        sent(newcomer)
        assert newcomer.round_end.tokens_claimed == 0
        newcomer.round_end.apply(of_donor, Encounter(b"", 0, partner_tokens))
        donor.round_end.apply(None)
    train(newcomer)
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
            contribution = bytearray(met.round_end.contribution_bytes)
            size, _ = met.round_end.contribute(contribution, fragment)
            newcomer.round_end.contribute(bytearray(newcomer.round_end.contribution_bytes), fragment)
            found.append(newcomer.round_end.tokens_claimed > 0)
            newcomer.round_end.apply(
                memoryview(contribution)[:size], Encounter(b"", newcomer.round_end.tokens_claimed, 100)
            )
            met.round_end.apply(None)
        assert found == claims


def test_the_same_calls_give_the_same_bits(make_replica: MakeReplica) -> None:
    def run() -> list[Tensor]:
        alice, bob = make_replica(ALICE, codec="int8"), make_replica(BOB, codec="int8")
        for _ in range(3):
            train(alice, 2)
            train(bob, 2)
            exchange(alice, bob)
        return state(alice) + state(bob)

    assert same(run(), run())


def test_progress_made_during_an_exchange_is_kept(make_replica: MakeReplica) -> None:
    alice, bob = make_replica(ALICE), make_replica(BOB)
    train(alice)
    train(bob)
    of_alice, snapshot = sent(alice), alice.round_end.fast_weights()
    of_bob = sent(bob)
    train(alice, 2)
    late = alice.round_end.fast_weights()

    assert (alice.round_end.awaits_outer_step, alice.round_end.tokens_contributed) == (True, 5 * 4 * 16)

    assert alice.round_end.apply(of_bob, Encounter(b"", 1, 1), own_first=True) == 2
    assert bob.round_end.apply(of_alice, Encounter(b"", 1, 1), own_first=False) == 0

    torch.testing.assert_close(alice.round_end.fast_weights(), late + (alice.round_end.slow_weights() - snapshot))
    assert torch.equal(alice.round_end.slow_weights(), bob.round_end.slow_weights())
    assert alice.round_end.tokens_this_round == alice.round_end.tokens_contributed == 2 * 4 * 16
    assert not alice.round_end.awaits_outer_step


def test_an_outer_step_that_changes_nothing_may_come_late(make_replica: MakeReplica) -> None:
    """Alone, with alpha 0 and beta 1, the correction is zero: what was learnt meanwhile stays as it is."""
    late, plain = (make_replica(alpha=0.0, beta=1.0, gamma=1.0) for _ in range(2))
    for _ in range(3):
        train(late, 2)
        sent(late)
        train(late, 3)
        late.round_end.apply(None)
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
        contributions = [bytearray(each.round_end.contribution_bytes) for each in (apart, plain, partner)]
        for each, out in zip((apart, plain, partner), contributions, strict=True):
            each.learn()
            del out[each.round_end.contribute(out, index % fragments)[0] :]
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


def corrupt(raw: bytes, value: float) -> bytes:
    values = np.frombuffer(raw, np.float32).copy()
    values[len(values) // 2] = value
    return values.tobytes()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda raw: raw[:-1], "take"),
        (lambda raw: raw + b"\0", "take"),
        (lambda raw: b"", "take"),
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


def test_a_diverged_replica_sends_nothing(make_replica: MakeReplica) -> None:
    alice = make_replica(ALICE)
    train(alice)
    slow = alice.round_end.slow_weights()
    alice.round_end.weights.flat[3] = math.nan

    with pytest.raises(DivergedError, match="diverged in round 0"):
        alice.round_end.apply(None)
    assert torch.equal(alice.round_end.slow_weights(), slow)


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
    before, momentum = replica.round_end.slow_weights(), replica.checkpoint.vectors()["momentum"]
    movement = float((replica.round_end.fast_weights() - before).norm())
    momentum.fill_(norm / math.sqrt(len(momentum)))
    replica.round_end.apply(None)
    settings = NoLoCoConfig()
    limit = MAX_MOMENTUM * settings.momentum_gain * movement
    assert float((replica.round_end.slow_weights() - before).norm()) <= settings.alpha * limit + 2 * movement


def test_the_momentum_of_honest_rounds_is_left_as_it_is(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = play_rounds(make_replica)
    monkeypatch.setattr(outer_state, "MAX_MOMENTUM", math.inf)
    assert torch.equal(limited, play_rounds(make_replica))


def test_after_a_restart_with_fragments_the_drift_correction_waits_for_a_whole_turn(
    make_replica: MakeReplica, tmp_path: Path
) -> None:
    """The saved fast weights have progress of steps whose rates nobody has counted."""
    settings: dict[str, Any] = {"drift": 0.1, "fragments": 2}
    alice, bob = make_replica(ALICE, **settings), make_replica(BOB, **settings)

    def meet(number: int) -> None:
        train(alice, 4)
        train(bob, 4)
        outs = [bytearray(node.round_end.contribution_bytes) for node in (alice, bob)]
        sizes = [node.round_end.contribute(out, number % 2)[0] for node, out in zip((alice, bob), outs, strict=True)]
        alice.round_end.apply(outs[1][: sizes[1]], Encounter(b"", 1, 1))
        bob.round_end.apply(outs[0][: sizes[0]], Encounter(b"", 1, 1), own_first=False)

    for number in range(2):
        meet(number)
    alice.checkpoint.save(tmp_path / "checkpoint")
    alice = make_replica(ALICE, **settings)
    alice.checkpoint.load(tmp_path / "checkpoint")
    before = alice.checkpoint.vectors()["drift"].clone()

    for number in range(2, 4):
        meet(number)
        assert torch.equal(alice.checkpoint.vectors()["drift"], before)
    meet(4)
    assert not torch.equal(alice.checkpoint.vectors()["drift"], before)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_liar_cannot_wind_the_drift_correction_up(make_replica: MakeReplica, fragments: int) -> None:
    """The rule of this test accepts everything: the correction is bounded by the movement of one's own rounds."""
    alice = make_replica(ALICE, drift=0.3, alpha=0.0, beta=1.0, gamma=1.0, fragments=fragments)
    for number in range(4 * fragments):
        train(alice, 4)
        movement = float((alice.round_end.fast_weights() - alice.round_end.slow_weights()).norm())
        size, _ = alice.round_end.contribute(out := bytearray(alice.round_end.contribution_bytes), number % fragments)
        codec.encode("fp32", 3.0 * codec.decode("fp32", out[:size], size // 4), memoryview(out)[:size])
        alice.round_end.apply(out[:size], Encounter(b"", 1, 1))
        rates = fragments * 4 * alice.replica.learning_rate  # of a fragment's next steps, nearly
        added = float(alice.checkpoint.vectors()["drift"].norm()) * rates

        assert added <= 2 * fragments * MAX_DRIFT * movement


def test_the_drift_correction_of_honest_rounds_is_left_as_it_is(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = play_rounds(make_replica, drift=0.1)
    monkeypatch.setattr(outer_state, "MAX_DRIFT", math.inf)
    assert torch.equal(limited, play_rounds(make_replica, drift=0.1))


def play_rounds(make_replica: MakeReplica, **settings: object) -> Tensor:
    """Of two replicas, one of which is slower; the slow weights of one."""
    alice, bob = make_replica(ALICE, **settings), make_replica(BOB, **settings)
    for _ in range(8):
        train(alice, 4)
        train(bob, 1)
        exchange(alice, bob)
    return alice.round_end.slow_weights()


def test_fragments_cover_every_parameter_once(make_replica: MakeReplica) -> None:
    layout = make_replica().checkpoint.layout
    for count in (1, 2, 7):
        parts = [layout.fragment(index, count) for index in range(count)]
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == layout.num_elements


def test_layouts_tell_models_and_codecs_apart(make_replica: MakeReplica) -> None:
    assert make_replica(ALICE).checkpoint.layout.hash == make_replica(BOB).checkpoint.layout.hash
    assert make_replica(codec="int8").checkpoint.layout.hash != make_replica(codec="fp32").checkpoint.layout.hash
    assert len(make_replica().checkpoint.layout.hash) == 32

"""What holds for every outer rule that a run file may name."""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from farandole.protocol.run.rules import (
    AdaptersConfig,
    Codec,
    GuardConfig,
    Momentum,
    NoLoCoConfig,
    OuterConfig,
    OuterRules,
    PlainConfig,
    gamma_limit,
    required_bytes,
    required_vectors,
)
from farandole.training.base.parameters import Layout
from farandole.training.engine.learner import Learner
from farandole.training.outer.adapters import Factors, merged
from farandole.training.outer.outer_state import FastWeights
from farandole.training.outer.round_end import RoundEnd
from farandole.training.outer.rule import Meeting, OwnVectors, rule_of
from farandole.training.screening.rule import MIN_SHARE, Accept, Encounter, share_by_tokens

from ..conftest import ALICE, BOB, MakeReplica, exchange, sent, train

RULES: list[OuterConfig] = [rule() for rule in typing.get_args(OuterRules)]
every_rule = pytest.mark.parametrize("settings", RULES, ids=lambda settings: settings.kind)


def trained(make_replica: MakeReplica, author: bytes, settings: OuterConfig) -> Learner:
    """One that has taken an outer step alone, so that its rule has a state, and then inner steps."""
    replica = make_replica(author, rule=settings)
    train(replica)
    replica.round_end.apply(None)
    train(replica)
    return replica


def at_first(settings: OuterConfig, fast: Tensor, slow: Tensor) -> OwnVectors:
    """A replica with a state of its own, that its rule has not moved yet."""
    return OwnVectors(fast, slow.clone(), {name: torch.zeros_like(slow) for name in settings.vectors})


@every_rule
def test_partners_in_one_state_take_one_step_to_the_bit(settings: OuterConfig) -> None:
    rule = rule_of(settings)
    slow, *fast = torch.randn(3, 1_000, generator=torch.Generator().manual_seed(0))
    members = [at_first(settings, theta, slow) for theta in fast]
    contributions = [rule.contribution(own).clone() for own in members]

    for _ in range(3):
        for place, own in enumerate(members):
            rule.step(own, Meeting(contributions, [0.25, 0.75], place))

    assert torch.equal(members[0].slow, members[1].slow)
    assert not torch.equal(members[0].slow, slow)
    assert all(torch.equal(members[0].vectors[name], members[1].vectors[name]) for name in settings.vectors)


@every_rule
def test_pieces_do_not_show(settings: OuterConfig) -> None:
    rule = rule_of(settings)
    slow, *contributions = torch.randn(3, 1_000, generator=torch.Generator().manual_seed(1))
    whole, cut = (at_first(settings, contributions[0], slow) for _ in range(2))

    rule.step(whole, Meeting(contributions, [0.5, 0.5]))
    for piece in (slice(0, 100), slice(100, 733), slice(733, 1_000)):
        rule.step(cut.piece(piece), Meeting([flat[piece] for flat in contributions], [0.5, 0.5]))

    assert torch.equal(whole.slow, cut.slow)
    assert all(torch.equal(flat, cut.vectors[name]) for name, flat in whole.vectors.items())


@every_rule
def test_its_state_is_in_checkpoints_and_newcomers_get_it(
    make_replica: MakeReplica, settings: OuterConfig, tmp_path: Path
) -> None:
    alice, bob = trained(make_replica, ALICE, settings), trained(make_replica, BOB, settings)
    exchange(alice, bob)
    assert all(bool(alice.checkpoint.vectors()[name].any()) for name in required_vectors(settings))

    alice.checkpoint.save(tmp_path / "checkpoint")
    again = make_replica(ALICE, rule=settings)
    again.checkpoint.load(tmp_path / "checkpoint")

    for node in (alice, again):
        node.learn()
        node.round_end.apply(None)
    assert again.checkpoint.vectors().keys() == alice.checkpoint.vectors().keys() >= set(required_vectors(settings))
    assert all(torch.equal(flat, again.checkpoint.vectors()[name]) for name, flat in alice.checkpoint.vectors().items())


@every_rule
def test_progress_made_during_an_exchange_is_kept(make_replica: MakeReplica, settings: OuterConfig) -> None:
    alice, bob = trained(make_replica, ALICE, settings), trained(make_replica, BOB, settings)
    of_bob = sent(bob)
    sent(alice)
    before = alice.round_end.fast_weights()
    alice.learn()
    progress = alice.round_end.fast_weights() - before

    assert alice.round_end.apply(of_bob, Encounter(BOB, 1, 1)) == 1

    torch.testing.assert_close(
        alice.round_end.fast_weights(), alice.round_end.outer.slow.clone() + progress, rtol=1e-5, atol=1e-6
    )


@every_rule
def test_a_fragments_outer_step_moves_that_fragment_alone(make_replica: MakeReplica, settings: OuterConfig) -> None:
    settings = replace(settings, fragments=3, codec="int8")
    alice, bob = trained(make_replica, ALICE, settings), trained(make_replica, BOB, settings)
    before = {name: flat.clone() for name, flat in alice.checkpoint.vectors().items()}

    exchange(alice, bob, fragment=1)

    part = alice.checkpoint.layout.fragments(3)[1]
    for name in required_vectors(settings):
        moved = (alice.checkpoint.vectors()[name] != before[name]).nonzero().flatten()
        assert part.start <= int(moved.min()) <= int(moved.max()) < part.stop


def test_it_is_the_mean_and_noloco_without_momentum_to_the_bit_and_half_the_download() -> None:
    slow, *fast = torch.randn(3, 1_000, generator=torch.Generator().manual_seed(0))
    plain = OwnVectors(fast[0], slow.clone(), {})
    noloco = OwnVectors(fast[0], slow.clone(), {"momentum": torch.randn(1_000)})

    rule_of(PlainConfig()).step(plain, Meeting(fast, [0.5, 0.5]))
    rule_of(NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0)).step(noloco, Meeting(fast, [0.5, 0.5]))

    assert torch.equal(plain.slow, (fast[0] + fast[1]) / 2)
    assert torch.equal(plain.slow, noloco.slow)
    with_momentum = NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0)  # has the vector with any settings
    assert required_bytes(PlainConfig(), 1_000) == required_bytes(with_momentum, 1_000) / 2 == 4_000


# NoLoCo

MOMENTA: list[Momentum] = ["heavy_ball", "nesterov"]
constants = st.builds(
    NoLoCoConfig,
    alpha=st.floats(0, 0.95),
    beta=st.floats(0.1, 1.5),
    gamma=st.floats(0.1, 1.5),
    momentum=st.sampled_from(MOMENTA),
)
token_counts = st.integers(0, 2**50)


def vectors(seed: int) -> list[Tensor]:
    return list(torch.randn(6, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def contribution(theta: Tensor, phi: Tensor, outer: NoLoCoConfig) -> Tensor:
    return rule_of(outer).contribution(OwnVectors(theta, phi, {}))


def shares_of(first_tokens: int, second_tokens: int) -> tuple[float, float]:
    """Each as the other one computes it."""
    return share_by_tokens(second_tokens, first_tokens), share_by_tokens(first_tokens, second_tokens)


def outer_step(
    phi: Tensor, m: Tensor, contributions: Sequence[Tensor], weights: Sequence[float], outer: NoLoCoConfig
) -> tuple[Tensor, Tensor]:
    own = OwnVectors(phi, phi.clone(), {"momentum": m.clone()})
    rule_of(outer).step(own, Meeting(contributions, weights))
    return own.slow, own.vectors["momentum"]


def outer_step_of_two_vectors(
    phi: Tensor, momentum: Tensor, mean_gradient: Tensor, mean_phi: Tensor, outer: NoLoCoConfig
) -> tuple[Tensor, Tensor]:
    """New (phi, m) as the paper writes it, from the means of theta - phi and of phi."""
    pull = outer.beta * mean_gradient + outer.gamma * (mean_phi - phi)
    new_momentum = outer.alpha * momentum + pull
    step = new_momentum if outer.momentum == "heavy_ball" else pull + outer.alpha * new_momentum
    return phi + step, new_momentum


def test_nesterov_is_torchs_sgd_when_replicas_agree() -> None:
    outer = NoLoCoConfig(alpha=0.9, beta=0.3, gamma=0.3, momentum="nesterov")
    phi, _, _, *outer_gradients = vectors(1)
    oracle = torch.nn.Parameter(phi.clone())
    optimizer = torch.optim.SGD([oracle], lr=0.3, momentum=0.9, nesterov=True)
    m = torch.zeros_like(phi)

    for gradient in outer_gradients:
        oracle.grad = -gradient
        optimizer.step()
        phi, m = outer_step(phi, m, [phi + gradient], [1.0], outer)

        torch.testing.assert_close(phi, oracle.detach(), rtol=0, atol=1e-14)


@given(constants, token_counts, token_counts, st.integers(0, 1_000))
def test_one_vector_does_what_two_do(outer: NoLoCoConfig, first: int, second: int, seed: int) -> None:
    theta_1, phi_1, m_1, theta_2, phi_2, _ = vectors(seed)
    shares = shares_of(first, second)

    contributions = contribution(theta_1, phi_1, outer), contribution(theta_2, phi_2, outer)
    one = outer_step(phi_1, m_1, contributions, shares, outer)
    two = outer_step_of_two_vectors(
        phi_1,
        m_1,
        Meeting([theta_1 - phi_1, theta_2 - phi_2], shares).mean(),
        Meeting([phi_1, phi_2], shares).mean(),
        outer,
    )

    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@given(token_counts, token_counts)
def test_shares_are_a_mean_and_the_partners_mirror(first: int, second: int) -> None:
    share, other = shares_of(first, second)

    assert share + other == 1.0
    assert (1.0 - share, 1.0 - other) == (other, share)  # to the bit: each partner computes both from one
    assert min(share, other) >= MIN_SHARE  # a peer that claims all the tokens in the world does not get all the mean
    if min(first, second) >= MIN_SHARE * (first + second) > 0:
        assert share == pytest.approx(first / (first + second), abs=2.0**-24)  # shares are whole numbers of steps


def widest(outer: NoLoCoConfig, rounds: int = 400, replicas: int = 256) -> float:
    """Standard deviation, across replicas, after outer steps in random pairs with nothing learned in between."""
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(replicas, 8, generator=generator, dtype=torch.float64)
    m = torch.zeros_like(phi)
    for _ in range(rounds):
        order = torch.randperm(replicas, generator=generator)
        means = torch.empty_like(phi)
        means[order] = phi[order].view(-1, 2, 8).mean(1).repeat_interleave(2, 0)
        phi, m = outer_step(phi, m, [contribution(means, means, outer)], [1.0], outer)
    return float(phi.std())


@pytest.mark.parametrize(
    ("momentum", "alpha", "limit"),
    # 2 (1 - alpha^2), and for Nesterov (2 a^2 - 1 + sqrt(1 + 4a + 4a^2 - 4a^3 - 4a^4)) / (a (2a + 1)): where the
    # second moments of random pairs stop contracting.
    [("heavy_ball", 0.5, 1.5), ("heavy_ball", 0.9, 0.38), ("nesterov", 0.5, 1.3028), ("nesterov", 0.9, 0.8479)],
)
def test_pairs_are_stable_below_the_limit_of_gamma_only(momentum: Momentum, alpha: float, limit: float) -> None:
    def outer(gamma: float) -> NoLoCoConfig:
        return NoLoCoConfig(alpha=alpha, beta=gamma, gamma=gamma, momentum=momentum)

    assert gamma_limit(alpha, momentum) == pytest.approx(limit, rel=1e-3)
    assert widest(outer(0.9 * limit)) < 0.1
    assert widest(outer(1.15 * limit)) > 10.0


# Adapters

RANK, INPUTS, OUTPUTS = 3, 20, 12
LAYOUT = Layout(
    {
        "q.lora_A.default.weight": (RANK, INPUTS),
        "q.lora_B.default.weight": (OUTPUTS, RANK),
        "embed.lora_embedding_A.default": (RANK, INPUTS),
        "embed.lora_embedding_B.default": (OUTPUTS, RANK),
        "head.bias": (OUTPUTS,),
    },
    "fp32",
)


def two_members(apart: float = 0.1) -> list[Factors]:
    """Two that began with the same A and B, and have trained since."""
    drawn = torch.randn(3, RANK, INPUTS + OUTPUTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [((drawn[0] + apart * each)[:, :INPUTS], (drawn[0] + apart * each)[:, INPUTS:].T) for each in drawn[1:]]


def best_of_rank(wanted: Tensor) -> Tensor:
    left, sizes, right = torch.linalg.svd(wanted, full_matrices=False)
    best: Tensor = (left[:, :RANK] * sizes[:RANK]) @ right[:RANK]
    return best


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_merged_adapters_are_the_best_of_their_rank_and_where_apart_is_exact_nothing_else(share: float) -> None:
    (a, b), (other_a, other_b) = members = two_members()
    wanted = share * b @ a + (1 - share) * other_b @ other_a
    found_a, found_b = merged(members, [share, 1 - share])
    torch.testing.assert_close(found_b @ found_a, best_of_rank(wanted))
    apart = (share * b + (1 - share) * other_b) @ (share * a + (1 - share) * other_a)
    assert (wanted - found_b @ found_a).norm() < (wanted - apart).norm()
    rank_1, nothing = torch.cat([b[:, :1], torch.zeros(OUTPUTS, RANK - 1)], 1), torch.zeros_like(b)
    for one, other in (
        ((a, b), (a, other_b)),
        ((a, b), (a, b)),
        ((a, nothing), (other_a, nothing)),  # at first, B is zero
        ((a, rank_1), (a, rank_1)),
        ((0.0 * a, b), (0.0 * a, b)),
    ):
        for found, mine, yours in zip(merged([one, other], [share, 1 - share]), one, other, strict=True):
            torch.testing.assert_close(found, share * mine + (1 - share) * yours)


@pytest.mark.parametrize("size", [0.0, 1.0, 1e6, 2.0**63, 2.0**126, math.inf, math.nan])
def test_whatever_a_liar_sends_moves_adapters_no_further_than_twice_as_far_as_apart(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, b), (drawn_a, drawn_b) = two_members(1.0)
    shapes = [(size * drawn_a, size * drawn_b), (-a, size * b), (size * a, b), (drawn_a, size * drawn_b), (-a, -b)]
    for liar, weight in itertools.product(shapes, (0.5, 1e-3)):
        found = merged([(a, b), liar], [1 - weight, weight])
        moved, apart = (math.hypot(float((one[0] - a).norm()), float((one[1] - b).norm())) for one in (found, liar))
        assert moved <= 2.01 * weight * apart + 1e-9 or not math.isfinite(apart)

    def fail(*args: object, **named: object) -> None:
        raise RuntimeError("the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "svd", fail)
    torch.testing.assert_close(merged([(a, b), (a, -b)], [0.5, 0.5]), (a, 0.0 * b))


class Member:
    """A replica of adapters and a bias; ``tried`` has the weights whose loss its guard has asked for."""

    def __init__(self, seed: int, outer: OuterConfig) -> None:
        generators = (torch.Generator().manual_seed(each) for each in (9, seed))
        self.theta, own = (torch.randn(LAYOUT.num_elements, generator=each) for each in generators)
        self.tried = list[Tensor]()
        self.end = RoundEnd(FastWeights(self.theta), LAYOUT, outer, GuardConfig(), self.measure)
        self.theta += 0.1 * own
        self.end.count_step(1)

    def measure(self, num_windows: int, key: bytes) -> float:
        self.tried.append(self.theta.clone())
        return 1.0

    def sends(self, fragment: int = 0) -> bytearray:
        out = bytearray(self.end.contribution_bytes)
        return out[: self.end.contribute(out, fragment)[0]]


def products(flat: Tensor) -> list[Tensor]:
    views = LAYOUT.views(flat)
    return [views[name.replace("_A", "_B")] @ views[name] for name in views if "_A" in name]


@pytest.mark.parametrize(("codec", "is_late"), [("fp32", False), ("fp32", True), ("int8", True)])
def test_partners_get_one_mean_of_adapters_and_the_guard_measures_it(codec: Codec, is_late: bool) -> None:
    alice, bob = (Member(seed, AdaptersConfig(codec=codec)) for seed in (1, 2))
    before = [each.theta.clone() for each in (alice, bob)]
    of_alice, of_bob = alice.sends(), bob.sends()
    met = Encounter(BOB, 1, 1, chance=0.5)
    assert alice.end.screen(of_bob, met) == Accept()
    if is_late:
        alice.theta += 0.01
        alice.end.count_step(1)

    alice.end.apply(of_bob, met, own_first=True)
    bob.end.apply(of_alice, Encounter(ALICE, 1, 1, chance=0.5), own_first=False)

    mine, yours, near = alice.end.outer.slow, bob.end.outer.slow, 1e-4 if codec == "fp32" else 0.2
    assert torch.equal(mine, yours) if codec == "fp32" else torch.allclose(mine, yours, atol=0.05)
    for found, *each in zip(products(mine), *map(products, before), strict=True):
        torch.testing.assert_close(found, best_of_rank((each[0] + each[1]) / 2), rtol=1e-4, atol=near)
    bias = LAYOUT.places()["head.bias"]
    torch.testing.assert_close(mine[bias], (before[0] + before[1])[bias] / 2, rtol=1e-4, atol=near)
    assert any(torch.allclose(each, mine, atol=1e-5) for each in alice.tried), "it judges what it applies"
    torch.testing.assert_close(alice.theta, mine + 0.01 * is_late)


def test_an_adapter_in_two_fragments_is_averaged_apart() -> None:
    assert LAYOUT.places()["embed.lora_embedding_A.default"].stop > LAYOUT.fragments(2)[0].stop
    results = []
    for outer in (AdaptersConfig(fragments=2), PlainConfig(fragments=2)):
        alice, bob = Member(1, outer), Member(2, outer)
        for fragment in range(2):
            of_alice, of_bob = alice.sends(fragment), bob.sends(fragment)
            alice.end.apply(of_bob, Encounter(BOB, 1, 1))
            bob.end.apply(of_alice, Encounter(ALICE, 1, 1), own_first=False)
        assert torch.equal(alice.theta, bob.theta)
        results.append(products(alice.theta))
    assert [torch.equal(*each) for each in zip(*results, strict=True)] == [False, True]

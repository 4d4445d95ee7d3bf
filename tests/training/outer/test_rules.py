"""What holds for every outer rule that a run file may name."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from farandole.protocol.run.rules import (
    NoLoCoConfig,
    OuterConfig,
    OuterRules,
    PlainConfig,
    required_bytes,
    required_vectors,
)
from farandole.training.engine.learner import Learner
from farandole.training.outer.rule import Meeting, OwnVectors, rule_of
from farandole.training.screening.rule import Encounter

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
        alice.round_end.fast_weights(), alice.round_end.slow_weights() + progress, rtol=1e-5, atol=1e-6
    )


@every_rule
def test_a_fragments_outer_step_moves_that_fragment_alone(make_replica: MakeReplica, settings: OuterConfig) -> None:
    settings = replace(settings, fragments=3, codec="topk")
    alice, bob = trained(make_replica, ALICE, settings), trained(make_replica, BOB, settings)
    before = {name: flat.clone() for name, flat in alice.checkpoint.vectors().items()}

    exchange(alice, bob, fragment=1)

    part = alice.checkpoint.layout.fragment(1, 3)
    for name in ("sent", *required_vectors(settings)):
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

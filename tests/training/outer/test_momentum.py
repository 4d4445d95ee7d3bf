"""Momenta that travel behind the weights: what partners make of each other's, and what a liar can make of one's own."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from farandole.protocol.run.manifest import InnerConfig
from farandole.protocol.run.rules import DEFAULT_SCREENING, PlainConfig, ScreeningRules, encoded_bytes
from farandole.training.engine.learner import Learner
from farandole.training.inner.optimizer import matrices_of
from farandole.training.outer import codec
from farandole.training.outer.momentum import MAX_DISTANCE
from farandole.training.screening.rule import Encounter

from ...tolerance import TOLERANT
from ..conftest import ALICE, BOB, MakeReplica, copy_without, exchange, refusal, sent, train

KEEP = 0.9


@pytest.fixture
def pair(make_replica: MakeReplica, inner: InnerConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Learner, Learner]:
    monkeypatch.setattr(codec, "_SLICE", 512)
    return make_pair(make_replica, inner)


def make_pair(
    make_replica: MakeReplica, inner: InnerConfig, fragments: int = 1, screening: ScreeningRules = TOLERANT
) -> tuple[Learner, Learner]:
    muon = msgspec.structs.replace(inner, optimizer="muon", momentum=KEEP)
    outer = PlainConfig(codec="int8", momentum_codec="int4", fragments=fragments)
    alice, bob = (make_replica(author, inner_settings=muon, rule=outer, screening=screening) for author in (ALICE, BOB))
    for node in (alice, bob):
        train(node)
    return alice, bob


def momentum(node: Learner, part: slice | None = None) -> Tensor:
    """What Muon keeps of gradients, (m,), as it is now."""
    mean, places = node.replica.optimizer.mean, node.replica.optimizer.muon_places
    part = part or slice(0, len(mean))
    return torch.cat([mean[max(place.start, part.start) : min(place.stop, part.stop)] for place in places])


def decoded(own: Tensor) -> Tensor:
    size = encoded_bytes("int4", len(own))
    codec.encode("int4", own, encoded := bytearray(size))
    return codec.decode("int4", encoded, len(own))


def with_momentum(contribution: bytearray, forged: Tensor) -> bytearray:
    """Return a contribution of honest weights, and a forged momentum behind them."""
    size = encoded_bytes("int4", len(forged))
    codec.encode("int4", forged, encoded := bytearray(size))
    return contribution[:-size] + encoded


def test_partners_move_towards_each_other_and_keep_their_own_exact(pair: tuple[Learner, Learner]) -> None:
    alice, bob = pair
    before = {node: momentum(node) for node in pair}
    others = {node: node.replica.optimizer.mean.clone() for node in pair}
    difference = decoded(before[bob]) - decoded(before[alice])

    of_alice, of_bob = sent(alice), sent(bob)
    alice.round_end.apply(of_bob, Encounter(BOB, 300, 100), own_first=True)
    bob.round_end.apply(of_alice, Encounter(ALICE, 100, 300), own_first=False)

    torch.testing.assert_close(momentum(alice), before[alice] + 0.25 * difference)
    torch.testing.assert_close(momentum(bob), before[bob] - 0.75 * difference)
    for node in pair:  # AdamW's first moments stay at home
        is_muon = torch.zeros_like(others[node], dtype=torch.bool)
        for place in node.replica.optimizer.muon_places:
            is_muon[place] = True
        assert torch.equal(node.replica.optimizer.mean[~is_muon], others[node][~is_muon])


def test_what_comes_late_has_faded(pair: tuple[Learner, Learner]) -> None:
    alice, bob = pair
    difference = decoded(momentum(bob)) - decoded(momentum(alice))
    of_bob = sent(bob)
    sent(alice)
    train(alice, 2)
    before = momentum(alice)

    alice.round_end.apply(of_bob, Encounter(BOB, 1, 1))

    torch.testing.assert_close(momentum(alice) - before, 0.5 * KEEP**2 * difference)


def test_a_round_alone_leaves_it(pair: tuple[Learner, Learner]) -> None:
    alice, _ = pair
    before = momentum(alice)
    sent(alice)
    alice.round_end.apply(None)
    assert torch.equal(momentum(alice), before)


def test_fragments_have_their_own(make_replica: MakeReplica, inner: InnerConfig) -> None:
    alice, bob = make_pair(make_replica, inner, fragments=3)
    parts = alice.checkpoint.layout.fragments(3)
    before = [momentum(alice, part) for part in parts]
    difference = decoded(momentum(bob, parts[1])) - decoded(momentum(alice, parts[1]))

    of_bob = sent(bob, 1)
    sent(alice, 1)
    alice.round_end.apply(of_bob, Encounter(BOB, 1, 1))

    after = [momentum(alice, part) for part in parts]
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    torch.testing.assert_close(after[1], before[1] + 0.5 * difference)


def test_a_newcomer_gets_its_partners_at_their_first_meeting_and_spoils_none(
    make_replica: MakeReplica, inner: InnerConfig, tmp_path: Path
) -> None:
    """It downloads none with its weights: that would double the download, and nothing of it is left soon."""
    alice, bob = make_pair(make_replica, inner, screening=DEFAULT_SCREENING)
    exchange(alice, bob)
    alice.checkpoint.save(tmp_path / "whole")
    newcomer, _ = make_pair(make_replica, inner, screening=DEFAULT_SCREENING)
    newcomer.checkpoint.load(copy_without(tmp_path / "whole", ("mean", "square"), tmp_path / "fetched"))
    newcomer.round_end.catch_up(newcomer.totals.round + 2)
    assert not momentum(newcomer).any()
    train(newcomer)
    train(bob)
    before, of_bob = momentum(newcomer), momentum(bob)

    exchange(newcomer, bob, (newcomer.round_end.tokens_claimed, 300))

    length = float(before.norm() * of_bob.norm())
    assert float(momentum(newcomer) @ of_bob) > float(before @ of_bob) + 0.1 * length
    assert torch.equal(momentum(bob), of_bob)


@pytest.mark.parametrize("lie", [-1.0, -100.0, 1e30])
def test_a_lie_moves_it_by_no_more_than_its_own_length(pair: tuple[Learner, Learner], lie: float) -> None:
    """Whoever turns or scales its momentum is clipped: the next steps have this node's own direction, or are short."""
    alice, bob = pair
    before = momentum(alice)
    of_bob = with_momentum(sent(bob), lie * before)
    sent(alice)

    alice.round_end.apply(of_bob, Encounter(BOB, 1, 1))

    moved = float((momentum(alice) - before).norm()) / float(before.norm())
    assert moved <= 0.5 * MAX_DISTANCE * 1.1
    assert float(momentum(alice) @ before) > 0.0


def test_small_singular_values_that_are_turned_are_seen_by_looking_ahead(pair: tuple[Learner, Learner]) -> None:
    """They are near in distance, and as large in a step as all others."""
    alice, bob = pair
    train(alice, 15)
    before = momentum(alice)
    forged = []
    for name, matrix in alice.checkpoint.layout.views(alice.replica.optimizer.mean).items():
        if name not in matrices_of(alice.replica.module):
            continue
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        values[2:] *= -3
        forged.append((left * values @ right).flatten())
    of_bob = with_momentum(sent(bob), torch.cat(forged))
    sent(alice)

    alice.round_end.apply(of_bob, Encounter(BOB, 1, 1))

    torch.testing.assert_close(momentum(alice), before)


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0])
def test_bytes_that_are_no_momentum_are_refused(pair: tuple[Learner, Learner], scale: float) -> None:
    alice, bob = pair
    of_bob = sent(bob)
    size = encoded_bytes("int4", len(momentum(bob)))
    of_bob[-size : 4 - size] = torch.tensor([scale]).numpy().tobytes()
    sent(alice)
    before = momentum(alice)

    assert "a scale received" in refusal(alice, of_bob)
    assert "bytes" in refusal(alice, of_bob[:-1])
    assert "bytes" in refusal(alice, of_bob[:-size])
    alice.round_end.apply(of_bob, Encounter(BOB, 1, 1))
    assert torch.equal(momentum(alice), before)

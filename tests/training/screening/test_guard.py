"""The guard: what honest partners do is never touched, and what a liar gains is bounded by what honest ones do."""

from __future__ import annotations

import dataclasses
import math
import struct
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farandole.protocol.run.rules import GuardConfig, ScreeningConfig, ScreeningRules
from farandole.training.engine.learner import HeldOutLoss
from farandole.training.outer import contribution
from farandole.training.outer.codec import CODECS
from farandole.training.screening.guard import (
    CHECKED_RADIUS,
    LEAST_WORTH,
    MAX_APART,
    MIN_KNOWN,
    MOST_LEAD,
    MOST_NOISE,
    WINDOW,
)
from farandole.training.screening.rule import (
    MAX_NUMBERS,
    MAX_PEERS,
    MAX_SERIES,
    Accept,
    Encounter,
    Histories,
    History,
    Partner,
    Refuse,
    Verdict,
    rule_of,
)

from ..conftest import ALICE, BOB, Asking, MakeReplica, exchange, refusal, sent, train

OWN = torch.randn(1_000, generator=torch.Generator().manual_seed(0))
MOVEMENT = 1.0
PEER = b"p" * 32
LOSS = 2.0
NOISE = MOST_NOISE * LOSS
# A round began with this loss: that of one's own weights now.
NO_GAIN = -1.0


def away(distance: float) -> Tensor:
    """A contribution at this distance from one's own."""
    direction = torch.randn(1_000, generator=torch.Generator().manual_seed(1))
    return OWN + direction * float(distance / direction.norm())


def no_loss(share: float) -> None:
    return None


class Node:
    """What a node remembers, and the rule that it asks."""

    def __init__(self, settings: GuardConfig | None = None) -> None:
        self.rule = rule_of(settings or GuardConfig())
        self.everybody, self.of_peer = History(), History()
        self.remark = ""
        self.asked: list[float] = []
        """Shares whose loss was asked for in the last judgement."""

    def meets(
        self,
        contribution: Tensor,
        *,
        tokens: tuple[int, int] = (100, 100),
        movement: float = MOVEMENT,
        partner_movement: float = MOVEMENT,
        fragment: int = 0,
        loss: Callable[[float], float | None] = no_loss,
        has_loss: bool | None = None,
        began: float | None = NO_GAIN,
        is_suspected: bool = False,
        shares_text: bool = True,
        as_sent: float | None = None,
    ) -> Verdict:
        self.asked = []
        self.rule.begin()
        for piece in (slice(0, 300), slice(300, 1_000)):
            self.rule.feed(OWN[piece], contribution[piece])

        def evaluate(share: float) -> float | None:
            self.asked.append(share)
            return loss(share)

        partner = Partner(
            Encounter(PEER, *tokens, is_suspected=is_suspected),
            OWN,
            contribution,
            self.of_peer,
            self.everybody,
            fragment,
            movement=lambda: movement,
            partner_movement=lambda: partner_movement,
            shares_text=shares_text,
            has_loss=lambda: loss is not no_loss if has_loss is None else has_loss,
            evaluate=evaluate,
            loss_before=lambda: loss(0.0) if began == NO_GAIN else began,
            loss_as_sent=lambda: as_sent,
        )
        verdict = self.rule.judge(partner)
        self.rule.remember(partner, verdict)
        if isinstance(verdict, Refuse):
            return verdict
        self.remark = verdict.remark
        return dataclasses.replace(verdict, remark="")


def sloping(slope: float) -> Callable[[float], float]:
    """From a share of the difference to a loss."""
    return lambda share: LOSS + slope * share


def costing(loss: float) -> Callable[[float], float]:
    """A mean with half of the contribution costs so much."""
    return sloping(2 * loss)


def bent(mean: float, partner: float = LOSS) -> Callable[[float], float]:
    """A parabola through one's own loss, that of the mean and the partner's."""
    curve = 2 * (LOSS + partner - 2 * mean)
    return lambda share: LOSS + (partner - LOSS - curve) * share + curve * share**2


def counts(verdict: Verdict) -> bool:
    """Whether anything of the contribution is averaged."""
    return isinstance(verdict, Accept) and verdict.clip > 0.0


def clip(verdict: Verdict) -> float:
    assert isinstance(verdict, Accept)
    return verdict.clip


# One contribution at a distance -> how far it counts, for a node that remembers nothing.
REFUSED, NOTHING, HALF, ALL = -1.0, 0.0, 0.5, 1.0
FAR = CHECKED_RADIUS * GuardConfig().first_radius * MOVEMENT
GAIN = 0.2
BEGAN = LOSS + GAIN
BEHIND = {0.0: LOSS, 0.5: LOSS + 0.02}
CASES: dict[str, tuple[float, dict[str, Any], float]] = {
    "one's own movement is the yardstick": (1.9, {}, ALL),
    "further away it is clipped": (4.0, {}, HALF),
    "far away for a node that has taken one small step": (1.0, {"movement": 1e-4}, 2e-4),
    "as near as honest ones with a good loss": (FAR, {"loss": bent(1.9)}, ALL),
    "a faster partner may be further away if it helps": (2 * FAR, {"loss": bent(1.9)}, HALF),
    "there is no time to measure": (1.0, {"has_loss": True}, HALF),
    "there is no time to measure the mean": (1.0, {"loss": lambda share: None if share else LOSS}, HALF),
    "in a stage no loss is ever known": (1.0, {"has_loss": False}, ALL),
    "the mean costs what noise explains": (1.0, {"loss": costing(0.9 * NOISE)}, ALL),
    "the mean costs more than that": (1.0, {"loss": costing(1.1 * NOISE)}, NOTHING),
    "half as far away as inner steps lead": (1.0, {"loss": costing(0.5 * NOISE)}, ALL),
    "what is nearer than inner steps lead may cost as much less": (0.2, {"loss": costing(0.5 * NOISE)}, NOTHING),
    "a share of what inner steps have gained": (1.0, {"loss": costing(0.9 * GAIN), "began": BEGAN}, ALL),
    "more than that share": (1.0, {"loss": costing(1.1 * GAIN), "began": BEGAN}, NOTHING),
    "of a peer that is not suspected": (1.0, {"loss": costing(0.02), "began": BEGAN}, ALL),
    "of one that is suspected": (1.0, {"loss": costing(0.02), "began": BEGAN, "is_suspected": True}, NOTHING),
    "of a suspected peer that helps, as liars suspect anyone": (1.0, {"loss": bent(1.99), "is_suspected": True}, ALL),
    "its own fault": (1.0, {"loss": costing(0.015)}, NOTHING),
    "what the codec costs is nobody's fault": (1.0, {"loss": costing(0.015), "as_sent": LOSS + 0.02}, ALL),
    "a partner that is behind is worth something": (1.0, {"loss": {**BEHIND, 0.25: LOSS - 0.001}.get}, HALF),
    "up to a point": (1.0, {"loss": {**BEHIND, 0.25: LOSS + 0.001}.get}, NOTHING),
    "straight ahead of this node's own way": (1.0, {"partner_movement": 2.0}, 2 * (MOST_LEAD - 1)),
    "that helps now, and who knows what it costs later": (
        1.0,
        {"partner_movement": 2.0, "loss": bent(1.5)},
        2 * (MOST_LEAD - 1),
    ),
    "back where the round began": (1.0, {"partner_movement": 0.0}, ALL),
    "across it": (1.0, {"partner_movement": math.sqrt(2.0)}, ALL),
    "a newcomer's partner is ahead": (1.0, {"partner_movement": 2.0, "tokens": (0, 100)}, ALL),
    "it is infinitely far away": (math.inf, {}, REFUSED),
    "it is no number": (math.nan, {}, REFUSED),
    "it overflows": (1e30, {}, REFUSED),
}


@pytest.mark.parametrize("case", CASES)
def test_of_a_first_contribution_as_much_counts_as_movement_and_loss_say(case: str) -> None:
    distance, options, expected = CASES[case]
    verdict = Node().meets(away(distance), **options)
    assert (verdict.clip if isinstance(verdict, Accept) else REFUSED) == pytest.approx(expected, rel=1e-3)


def test_later_it_is_what_was_accepted_and_a_round_in_which_this_node_hardly_moved_clips_nobody() -> None:
    node = Node()
    for _ in range(MIN_KNOWN):
        assert clip(node.meets(away(1.5))) == 1.0
    assert clip(node.meets(away(5.9))) == 1.0
    assert clip(node.meets(away(12.0))) == pytest.approx(0.5, rel=1e-3)
    node = Node()
    for _ in range(MIN_KNOWN):
        node.meets(away(1.5))
    assert clip(node.meets(away(1.5), movement=1e-6)) == 1.0


def test_what_is_ahead_counts_in_full_once_a_node_knows_how_far_others_are() -> None:
    """Of a node that is slower than the others, all are."""
    node = Node()
    for _ in range(MIN_KNOWN):
        assert clip(node.meets(away(1.5), partner_movement=2.5, loss=bent(1.9))) < 1.0
        assert "away from mine" in node.remark
    assert clip(node.meets(away(1.5), partner_movement=2.5, loss=bent(1.9))) == 1.0


def test_a_slow_node_knows_it_by_what_others_claim_and_one_that_claims_much_at_first_gains_nothing() -> None:
    node = Node()
    ahead: dict[str, Any] = {"partner_movement": 2.1, "loss": bent(1.9)}
    for claimed in (10**12, 10**12, 100, 10**12):
        assert clip(node.meets(away(1.0), tokens=(100, claimed), **ahead)) < 1.0
    slow = Node()
    for claimed in (400, 300):
        assert clip(slow.meets(away(1.0), tokens=(100, claimed), **ahead)) < 1.0
    assert clip(slow.meets(away(1.0), tokens=(100, 500), **ahead)) == 1.0


def test_a_node_that_has_not_moved_yet_refuses_nobody_averages_nothing_and_learns_nothing_from_it() -> None:
    node = Node()
    for _ in range(MIN_KNOWN + 1):
        assert 0.0 < clip(node.meets(away(1.5), movement=0.0)) < 1e-9  # no fault of the partner's
    assert not node.everybody.series
    assert clip(node.meets(away(1.9))) == 1.0
    assert clip(node.meets(away(4.0))) == pytest.approx(0.5, rel=1e-3)


def test_in_a_round_without_inner_steps_what_this_node_moved_before_is_the_yardstick() -> None:
    node = Node()
    assert clip(node.meets(away(1.5))) == 1.0
    assert clip(node.meets(away(1.9), movement=0.0)) == 1.0
    assert clip(node.meets(away(4.0), movement=0.0)) == pytest.approx(0.5, rel=1e-3)
    assert isinstance(node.meets(away(1_000.0), movement=0.0), Refuse)


def test_each_fragment_has_distances_of_its_own() -> None:
    node = Node()
    for _ in range(MIN_KNOWN):
        node.meets(away(1.9), fragment=1)
    assert clip(node.meets(away(5.0), fragment=1)) == 1.0
    assert clip(node.meets(away(5.0), fragment=0)) < 1.0


def test_an_attacker_that_is_met_always_widens_the_limit_to_its_cap_and_no_further() -> None:
    node, settings = Node(), GuardConfig()
    for _ in range(20 * WINDOW):
        node.meets(away(90.0))
    assert clip(node.meets(away(90.0))) <= settings.max_radius * MOVEMENT / 90.0 * 1.001


def test_a_clipped_contribution_counts_as_far_as_it_was_taken_and_what_was_not_averaged_not_at_all() -> None:
    node = Node()
    node.meets(away(50.0))
    assert node.everybody["distance 0"][0] == pytest.approx(2.0, rel=1e-3)
    node = Node()
    for _ in range(WINDOW):
        node.meets(away(1.9), loss=sloping(1.0))
    assert not node.everybody["distance 0"]


def test_every_contribution_is_judged_and_usually_by_two_losses() -> None:
    node = Node()
    for number in range(2 * WINDOW):
        assert clip(node.meets(away(1.0), loss=bent(1.99))) == 1.0
        assert node.asked == ([0.0, 0.5] if number >= MIN_KNOWN else [0.0, 0.5, 1.0])


def test_where_every_mean_costs_something_that_is_usual_if_the_partner_is_as_good() -> None:
    """At a large learning rate honest weights are as good, and far apart."""
    for partner, is_taken in ((LOSS, True), (LOSS + 2 * NOISE, False)):
        node = Node()
        verdicts = [node.meets(away(1.0), loss=bent(LOSS + 0.02, partner)) for _ in range(2 * MIN_KNOWN)]
        assert not counts(verdicts[0])
        assert all(counts(verdict) == is_taken for verdict in verdicts[MIN_KNOWN:])


def test_where_members_texts_differ_a_partner_is_worse_on_this_nodes() -> None:
    node = Node()
    clips = [clip(node.meets(away(1.0), loss=sloping(0.04), shares_text=False)) for _ in range(2 * MIN_KNOWN)]
    assert clips[:MIN_KNOWN] == [0.125] * MIN_KNOWN
    assert clips[MIN_KNOWN:] == [1.0] * MIN_KNOWN


@pytest.mark.parametrize(("cost", "part"), [(1.5, 0.25), (3.0, 0.125), (7.0, 0.0625), (40.0, 0.0)])
def test_where_members_texts_differ_as_much_counts_as_costs_half_of_noise(cost: float, part: float) -> None:
    """A member whose text is unlike all others' would drift away if nothing of it counted."""
    assert clip(Node().meets(away(1.0), loss=sloping(2 * cost * NOISE), shares_text=False)) == part
    assert clip(Node().meets(away(1.0), loss=sloping(2 * cost * NOISE))) == 0.0


def test_fewer_than_half_of_liars_do_not_make_their_cost_usual() -> None:
    node = Node()
    for number in range(4 * WINDOW):
        is_liar = number % 5 > 2
        verdict = node.meets(away(1.0), loss=sloping(0.09 if is_liar else -0.001), shares_text=False)
        assert clip(verdict) == (1 / 16 if is_liar else 1.0)


def test_no_mean_may_cost_more_than_the_run_file_says() -> None:
    node = Node(GuardConfig(max_loss_increase=0.01))
    for _ in range(WINDOW):
        assert not counts(node.meets(away(1.0), loss=sloping(0.1), began=LOSS + 10.0))


def test_a_contribution_that_counts_for_nothing_is_suspected_and_never_refused_for_its_loss() -> None:
    """This node's own helps its sender, if that is honest."""
    node = Node()
    for _ in range(2 * WINDOW):
        assert node.meets(away(1.0), loss=lambda share: LOSS + (share > 0.0)) == Accept(0.5, 0.0, is_suspect=True)
        node.everybody = History()
    assert node.meets(away(1.0), loss=bent(1.99)) == Accept()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_counts_for_nothing_and_moves_no_yardstick(loss: float) -> None:
    node = Node()
    for _ in range(WINDOW):
        assert not counts(node.meets(away(1.0), loss=lambda share: loss if share else LOSS))
    assert all(math.isfinite(number) for series in node.everybody.series.values() for number in series)


def test_a_node_that_has_drifted_apart_takes_over_better_weights_and_one_that_meets_others_as_usual_none() -> None:
    """Both are good, and the mean is worse than either."""
    node = Node()
    for _ in range(MAX_APART):
        assert not counts(node.meets(away(1.0), loss=bent(2.5, 1.99)))
    assert not counts(node.meets(away(1.0), loss=bent(2.5, 2.001))), "the worse of two comes to the better one"
    assert node.meets(away(1.0), loss=bent(2.5, 1.99)) == Accept(1.0)
    assert not counts(node.meets(away(1.0), loss=bent(2.5, 1.99))), "and then it is to meet others as it is"
    node = Node()
    for _ in range(4 * MAX_APART):
        assert not counts(node.meets(away(1.0), loss=bent(2.5, 1.99)))
        assert counts(node.meets(away(1.0), loss=bent(1.99)))


@pytest.mark.parametrize(
    ("tokens", "share"), [((100, 100), 0.5), ((100, 150), 0.6), ((1, 10**15), 2 / 3), ((0, 0), 0.5)]
)
def test_tokens_move_the_shares_within_a_third_and_two_thirds(tokens: tuple[int, int], share: float) -> None:
    verdict, other = Node().meets(away(1.0), tokens=tokens), Node().meets(away(1.0), tokens=tokens[::-1])
    assert isinstance(verdict, Accept)
    assert isinstance(other, Accept)
    assert verdict.weight == pytest.approx(share, abs=1e-6)
    assert verdict.weight + other.weight == 1.0


MANY = (100, 10**12)
# How far a partner's own weights are behind, where the mean of both costs nothing -> what part of its share counts.
WORTHS: dict[str, tuple[float, dict[str, Any], float]] = {
    "it is ahead": (-0.1, {}, 1.0),
    "as far as noise explains": (NOISE, {}, 1.0),
    "half as far as inner steps gained": (NOISE + (GAIN + NOISE) / 2, {}, 0.5),
    "it sends what was there before them": (GAIN, {}, LEAST_WORTH),
    "and claims many tokens for it": (GAIN, {"tokens": MANY}, LEAST_WORTH),
    "further": (5 * GAIN, {}, LEAST_WORTH),
    "it has taken a fifth of the steps, and says so": (0.8 * GAIN, {"tokens": (100, 20)}, 1.0),
    "this node is the newcomer": (GAIN, {"tokens": (0, 100)}, 1.0),
    "the codec explains it": (GAIN, {"as_sent": LOSS + GAIN}, 1.0),
    "all members' texts differ": (GAIN, {"shares_text": False}, 1.0),
    "inner steps have gained nothing": (2 * NOISE, {"began": LOSS}, LEAST_WORTH),
}


@pytest.mark.parametrize("case", WORTHS)
def test_a_partner_that_is_behind_has_less_of_a_share_however_good_the_mean(case: str) -> None:
    behind, options, part = WORTHS[case]
    verdict = Node().meets(away(1.0), loss=bent(LOSS, LOSS + behind), **{"began": BEGAN, **options})
    assert isinstance(verdict, Accept)
    share = {MANY: 2 / 3, (100, 20): 1 / 3}.get(options.get("tokens", ()), 0.5)
    assert verdict.weight == pytest.approx(share * part, rel=1e-3)
    assert (verdict.clip, verdict.is_suspect) == (1.0, False)


def test_a_run_that_allows_for_no_noise_judges_after_a_round_that_gained_nothing() -> None:
    node = Node(GuardConfig(least_loss_increase=0.0))
    verdict = node.meets(away(1.0), loss=bent(LOSS, LOSS + 0.1), began=LOSS)
    assert isinstance(verdict, Accept)
    assert verdict.weight == LEAST_WORTH / 2


def test_who_claims_no_tokens_takes_half_gives_nothing_and_is_remembered_for_nothing() -> None:
    assert Node().meets(away(1.0), tokens=(100, 0)) == Accept(0.0)
    assert Node().meets(away(1.0), tokens=(0, 100)) == Accept(0.5)
    node = Node()
    for distance in (1.0, 1e6):
        assert node.meets(away(distance), tokens=(100, 0), loss=sloping(1.0)) == Accept(0.0)
    assert not node.everybody.series


def test_what_is_far_beyond_all_that_was_accepted_is_refused_without_asking_for_a_loss() -> None:
    node = Node()
    verdict = node.meets(away(1_000.0), loss=bent(1.9))
    assert isinstance(verdict, Refuse)
    assert not node.asked
    assert "away from mine" in verdict.reason


@pytest.mark.parametrize("codec", CODECS)
def test_honest_pairs_are_never_clipped_whatever_the_codec(make_replica: MakeReplica, codec: str) -> None:
    alice, bob = (make_replica(author, screening=GuardConfig(), codec=codec) for author in (ALICE, BOB))
    for _ in range(2 * MIN_KNOWN):
        train(alice)
        train(bob)
        of_alice, of_bob = sent(alice), sent(bob)
        met = Encounter(BOB, 100, 100, chance=0.0), Encounter(ALICE, 100, 100, chance=0.0)
        for verdict in (alice.round_end.screen(of_bob, met[0]), bob.round_end.screen(of_alice, met[1])):
            assert isinstance(verdict, Accept)
            assert verdict.weight >= LEAST_WORTH / 2
            assert dataclasses.replace(verdict, weight=0.5) == Accept()
        alice.round_end.apply(of_bob, met[0])
        bob.round_end.apply(of_alice, met[1], own_first=False)


@pytest.mark.parametrize(("of_partner", "is_behind"), [(1.5, True), (1.99, False), (2.5, False)])
def test_a_newcomer_learns_whether_the_mean_is_still_worse_than_the_partners_weights(
    of_partner: float, is_behind: bool
) -> None:
    verdict = Node().meets(away(1.0), tokens=(0, 100), loss={0.0: LOSS, 0.5: 1.995, 1.0: of_partner}.get)
    assert isinstance(verdict, Accept)
    assert verdict.is_behind == is_behind


def test_a_remark_says_why_less_than_all_counts() -> None:
    node = Node()
    assert (clip(node.meets(away(1.0))), node.remark) == (1.0, "")
    cases: list[tuple[float, dict[str, Any], str]] = [
        (1.0, {"movement": 0.0}, "no inner step"),
        (4.0, {}, "away from mine"),
        (50.0, {"loss": bent(1.9)}, "away from mine"),
        (1.0, {"loss": sloping(1.0)}, "held-out text is 2.500 with it, and 2.000 of mine"),
        (1.0, {"has_loss": True}, "no time"),
    ]
    for distance, options, words in cases:
        node = Node()
        assert clip(node.meets(away(distance), **options)) < 1.0
        assert words in node.remark


# What holds for every screening rule that a run file may name, and for what they remember


# Of a context of 16 tokens.
MAX_WINDOWS = 2_048 // 16
RULES: list[ScreeningConfig] = [rule() for rule in typing.get_args(ScreeningRules) or (ScreeningRules,)]
every_rule = pytest.mark.parametrize("settings", RULES, ids=lambda settings: settings.kind)


@every_rule
def test_an_honest_partner_is_accepted_and_what_cannot_be_averaged_is_not(
    make_replica: MakeReplica, settings: ScreeningConfig
) -> None:
    alice, bob = (make_replica(author, screening=settings) for author in (ALICE, BOB))
    train(alice)
    train(bob)
    sent(alice)
    of_bob = sent(bob)
    values = np.frombuffer(of_bob, np.float32)

    assert isinstance(alice.round_end.screen(of_bob, Encounter(BOB, 1, 1)), Accept)
    assert refusal(alice, (1e6 * values).tobytes())
    assert refusal(alice, np.full_like(values, math.nan).tobytes())
    assert alice.round_end.screen(of_bob, Encounter(BOB, 1, 1)) == Accept(), "refusals leave nothing behind"


@every_rule
def test_honest_partners_get_the_same_mean_to_the_bit(make_replica: MakeReplica, settings: ScreeningConfig) -> None:
    averaging = {"alpha": 0.0, "beta": 1.0, "gamma": 1.0}
    alice, bob = (make_replica(author, screening=settings, **averaging) for author in (ALICE, BOB))
    alice.learn()
    bob.learn()

    exchange(alice, bob, tokens=(100, 300))

    assert torch.equal(alice.round_end.outer.slow, bob.round_end.outer.slow)


def test_a_verdicts_weight_and_clip_are_shares() -> None:
    assert Accept().shares == (0.5, 0.5)
    assert Accept(weight=0.25).shares == (0.75, 0.25)
    assert Accept(weight=0.5, clip=0.5).shares == (0.75, 0.25)
    assert Accept(clip=0.0).shares == (1.0, 0.0)


def test_the_loss_towards_a_partner_is_that_of_weights_moved_so_far(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contribution, "_MAX_SECONDS", math.inf)  # else a busy machine measures on less text
    alice, bob = make_replica(ALICE), make_replica(BOB)
    for node in (alice, bob):
        node.learn()
    of_bob = sent(bob)
    sent(alice)
    alice.learn()  # what has been learnt since is not moved by asking
    before = alice.round_end.fast_weights()
    losses: list[float | None] = []

    def judge(partner: Partner) -> Refuse:
        losses.extend(partner.evaluate(share) for share in (0.0, 1.0))
        losses.append(partner.loss_before())
        return Refuse("asked only")

    alice.round_end.partner._rule = Asking(judge)
    alice.round_end.screen(of_bob, Encounter(chance=0.25))

    assert torch.equal(alice.round_end.fast_weights(), before)
    start, contributed = make_replica(ALICE), make_replica(ALICE)
    contributed.learn()
    key = struct.pack("<d", 0.25)
    expected = [each._held_out.on_exam(MAX_WINDOWS, key) for each in (contributed, bob, start)]
    assert losses == pytest.approx(expected, rel=1e-6)


peers = st.binary(min_size=1, max_size=32)
numbers = st.floats(allow_nan=False)


@given(st.lists(st.tuples(peers, st.text(min_size=1, max_size=8), numbers), max_size=50))
def test_histories_survive_a_restart(entries: list[tuple[bytes, str, float]]) -> None:
    histories, names = Histories(), {name for _, name, _ in entries[:MAX_SERIES]}
    for peer, name, number in entries:
        if name in names:
            histories.of(peer).append(name, number)

    encoded = histories.encode()
    again = Histories.decode(encoded) if encoded else Histories()

    assert all(again.of(peer).series == histories.of(peer).series for peer, _, _ in entries)


def test_histories_are_bounded() -> None:
    histories = Histories()
    for number in range(MAX_PEERS + 10):
        histories.of(number.to_bytes(4, "little")).append("met", number)
    history = histories.of(bytes(4))
    assert not history.series, "the first peers are forgotten"
    for number in range(MAX_NUMBERS + 5):
        history.append("distance", number)
    assert history["distance"][0] == 5
    assert len(history["distance"]) == MAX_NUMBERS
    with pytest.raises(ValueError, match="would be another"):
        for number in range(MAX_SERIES):
            history.append(str(number), 0.0)


@pytest.mark.parametrize("raw", [b"", b"rubbish", msgspec.msgpack.encode([(b"p", {"a": [0.0] * (MAX_NUMBERS + 1)})])])
def test_a_damaged_file_of_histories_is_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        Histories.decode(raw)


@pytest.mark.parametrize(("seconds_left", "clip"), [(math.inf, 1.0), (0.0, 0.5)])
def test_where_there_is_no_time_half_of_a_contribution_counts(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, seconds_left: float, clip: float
) -> None:
    asked: list[tuple[int, bytes]] = []
    on_exam = HeldOutLoss.on_exam

    def counting(held_out: HeldOutLoss, num_windows: int, key: bytes) -> float:
        asked.append((num_windows, key))
        return on_exam(held_out, num_windows, key)

    monkeypatch.setattr(HeldOutLoss, "on_exam", counting)
    alice, bob = (make_replica(author, screening=GuardConfig()) for author in (ALICE, BOB))
    for each in (alice, bob):
        each.learn()
    sent(alice)
    of_bob = sent(bob)
    verdict = alice.round_end.screen(of_bob, Encounter(BOB, 1, 1, chance=0.25), seconds_left)
    assert isinstance(verdict, Accept)
    assert verdict.clip == clip
    _warm_up, _measured, *judged = asked
    assert len(judged) >= 2 * (clip == 1.0)
    assert len(set(judged)) == (clip == 1.0), "all losses of a judgement are of the same text"
    before = alice.round_end.outer.slow.clone()
    alice.round_end.apply(of_bob, Encounter(BOB, 1, 1, chance=0.25))
    assert len(asked) == len(judged) + 2, "it is not judged again"
    assert not torch.equal(before, alice.round_end.outer.slow)

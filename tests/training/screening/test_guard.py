"""The guard: what honest partners do is never touched, and what a liar gains is bounded by what honest ones do."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from farandole.protocol.run.rules import GuardConfig
from farandole.training.outer.codec import CODECS
from farandole.training.screening.guard import (
    COMPARED,
    LEAST_LAG,
    MAX_APART,
    MAX_OUTLIERS,
    MIN_CHANGES,
    MIN_KNOWN,
    MIN_LAGS,
    OUTLIER_WINDOW,
    WINDOW,
)
from farandole.training.screening.rule import Accept, Encounter, History, Partner, Refuse, Verdict, rule_of

from ..conftest import ALICE, BOB, MakeReplica

OWN = torch.randn(1_000, generator=torch.Generator().manual_seed(0))
MOVEMENT = 1.0
STRICT = GuardConfig(least_loss_increase=0.001, max_loss_increase=0.01)
PEER = b"p" * 32
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
        self.rule = rule_of(settings or STRICT)
        self.everybody, self.of_peer = History(), History()
        self.remark = ""

    def meets(
        self,
        contribution: Tensor,
        *,
        tokens: tuple[int, int] = (100, 100),
        chance: float = 1.0,
        movement: float = MOVEMENT,
        fragment: int = 0,
        loss: Callable[[float], float | None] = no_loss,
        began: float | None = NO_GAIN,
        is_suspected: bool = False,
        as_sent: float | None = None,
        alignment: float = -0.2,
    ) -> Verdict:
        self.rule.begin()
        for piece in (slice(0, 300), slice(300, 1_000)):
            self.rule.feed(OWN[piece], contribution[piece])
        met = Encounter(PEER, *tokens, chance, is_suspected)
        partner = Partner(
            met,
            OWN,
            contribution,
            self.of_peer,
            self.everybody,
            fragment,
            lambda: movement,
            lambda: alignment,
            loss,
            lambda: loss(0.0) if began == NO_GAIN else began,
            lambda: as_sent,
        )
        verdict = self.rule.judge(partner)
        self.rule.remember(partner, verdict)
        if isinstance(verdict, Refuse):
            return verdict
        self.remark = verdict.remark
        return dataclasses.replace(verdict, remark="")


def sloping(loss: float, slope: float) -> Callable[[float], float]:
    """From a share of the difference to a loss."""
    return lambda share: loss + slope * share


def counts(verdict: Verdict) -> bool:
    """Whether anything of the contribution is averaged."""
    return isinstance(verdict, Accept) and verdict.clip > 0.0


def stands_out(node: Node) -> bool:
    """Whether the last contribution did."""
    return node.of_peer["outlier"][-1] == 1.0


def clip(verdict: Verdict) -> float:
    assert isinstance(verdict, Accept)
    return verdict.clip


def test_before_anything_is_known_ones_own_movement_is_the_yardstick() -> None:
    assert clip(Node().meets(away(1.9))) == 1.0
    assert clip(Node().meets(away(4.0))) == pytest.approx(0.5, rel=1e-3)


def test_a_round_without_inner_steps_is_judged_by_the_usual_gain() -> None:
    """Without it, any difference between two honest members would be many rounds of progress."""
    node = Node()
    for _ in range(MIN_LAGS):
        node.meets(away(1.0), chance=0.0, loss=sloping(2.0, 0.0), began=2.2)
    for _ in range(OUTLIER_WINDOW):
        verdict = node.meets(away(0.5), tokens=(0, 0), chance=0.0, loss=sloping(2.0, 0.05), began=None, alignment=0.0)
        assert clip(verdict) == 1.0
    assert node.of_peer["evidence"][-1] == 0.0
    for _ in range(OUTLIER_WINDOW):  # the same loss in each round where a round's inner steps gain less
        verdict = node.meets(away(0.5), chance=0.0, loss=sloping(2.0, 0.05), began=2.001)
    assert not counts(verdict)


def test_a_member_that_never_trains_does_not_clear_itself_in_rounds_without_inner_steps() -> None:
    """It lacks the progress of each round with some, and is as good as others right after it has averaged."""
    node = known()
    for _ in range(OUTLIER_WINDOW):
        node.meets(away(1.0), chance=0.0, loss=sloping(2.0, 0.1), began=2.1)
        node.meets(away(1.0), tokens=(0, 0), chance=0.0, loss=sloping(2.0, 0.0), began=None, alignment=0.0)
    assert not counts(node.meets(away(1.0), chance=0.0, loss=sloping(2.0, 0.1), began=2.1))


def test_what_chance_adds_to_a_sum_in_rounds_without_inner_steps_such_rounds_take_away_again() -> None:
    """If they could only add, a member that is as often better would be harmful in the end."""
    node = known(GuardConfig())
    for _ in range(MIN_KNOWN):
        node.meets(away(1.0), chance=0.0, loss=sloping(2.0, 0.0), began=2.1)
    node.meets(away(1.0), chance=0.0, loss=sloping(2.0, 0.06), began=2.1)
    before = node.of_peer["evidence"][-1]
    for worse in (0.055, -0.055):
        node.meets(away(1.0), tokens=(1, 1), chance=0.0, loss=sloping(2.0, worse), began=None)
    worse, better = node.of_peer["evidence without steps"][-2:]
    assert worse > better == 0.0
    assert node.of_peer["evidence"][-1] == before > 0.0


def test_a_liar_that_lies_only_in_rounds_without_inner_steps_is_found() -> None:
    node = known()
    for _ in range(OUTLIER_WINDOW):
        node.meets(away(1.0), chance=0.0, loss=sloping(2.0, 0.0), began=2.1)
        node.meets(away(1.0), tokens=(1, 1), chance=0.0, loss=sloping(2.0, 0.1), began=None, alignment=0.0)
    assert not counts(node.meets(away(1.0), tokens=(1, 1), chance=0.0, loss=sloping(2.0, 0.1), began=None))


def test_later_it_is_what_was_accepted() -> None:
    node = Node()
    for _ in range(MIN_KNOWN):
        assert clip(node.meets(away(1.5))) == 1.0
    assert clip(node.meets(away(5.9))) == 1.0
    assert clip(node.meets(away(12.0))) == pytest.approx(0.5, rel=1e-3)


def test_a_round_in_which_this_node_hardly_moved_clips_nobody() -> None:
    node = Node()
    for _ in range(MIN_KNOWN):
        node.meets(away(1.5))
    assert clip(node.meets(away(1.5), movement=1e-6)) == 1.0


def test_a_node_that_has_not_moved_yet_refuses_nobody_averages_nothing_and_learns_nothing_from_it() -> None:
    node = Node()
    for _ in range(MIN_KNOWN + 1):
        assert clip(node.meets(away(1.5), movement=0.0)) == 0.0
    assert not node.of_peer["refused"]
    assert not node.of_peer["accepted"]
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


def test_a_clipped_contribution_counts_as_far_as_it_was_taken() -> None:
    node = Node()
    node.meets(away(50.0))
    assert node.everybody["distance 0"][0] == pytest.approx(2.0, rel=1e-3)


def known(settings: GuardConfig = STRICT) -> Node:
    """A node that has met the peer before."""
    node = Node(settings)
    for _ in range(MIN_LAGS):
        node.meets(away(1.0), loss=lambda share: 2.0, chance=0.0)
    return node


def test_who_stands_out_counts_for_nothing_and_is_refused_the_next_time() -> None:
    node = known()
    verdicts = [node.meets(away(1.0), loss=sloping(2.0, 1.0), chance=0.0) for _ in range(MAX_OUTLIERS + 2)]
    assert [clip(verdict) for verdict in verdicts[:MAX_OUTLIERS]] == [0.0] * MAX_OUTLIERS
    assert all(isinstance(verdict, Refuse) for verdict in verdicts[MAX_OUTLIERS:])
    assert node.of_peer["refused"] == (1.0, 1.0)
    assert len(node.everybody["distance 0"]) == MIN_LAGS, "what was not averaged moves no yardstick"


def test_a_peer_that_stood_out_is_asked_about_until_it_has_not_for_long() -> None:
    node = known()
    assert not counts(node.meets(away(1.0), loss=sloping(2.0, 1.0), chance=0.0))
    for _ in range(OUTLIER_WINDOW):
        assert counts(node.meets(away(1.0), loss=sloping(2.0, 0.0)))
    assert counts(node.meets(away(1.0), loss=sloping(2.0, 1.0))), "by chance alone, as anybody"


def test_a_peer_that_was_refused_is_always_asked_about() -> None:
    node = known()
    for _ in range(MAX_OUTLIERS + 1):
        verdict = node.meets(away(1.0), loss=sloping(2.0, 1.0), chance=0.0)
    assert isinstance(verdict, Refuse)
    verdicts = [node.meets(away(1.0), loss=sloping(2.0, 0.0)) for _ in range(2 * OUTLIER_WINDOW)]
    assert counts(verdicts[-1])
    assert not counts(node.meets(away(1.0), loss=sloping(2.0, 1.0)))


def test_what_makes_the_loss_worse_counts_for_nothing_where_it_is_asked() -> None:
    assert counts(known().meets(away(1.0), loss=sloping(2.0, 1.0))), "not every exchange is checked"
    stranger = known()
    stranger.of_peer = History()
    assert not counts(stranger.meets(away(1.0), loss=sloping(2.0, 1.0))), "the first ones with a peer are"
    assert not counts(known().meets(away(1.0), loss=sloping(2.0, 1.0), chance=0.0))
    assert not counts(Node().meets(away(10.0), loss=sloping(2.0, 10.0))), "what is clipped always is"
    assert counts(Node().meets(away(10.0), loss=sloping(2.0, 0.01))), "that is noise"
    assert isinstance(Node().meets(away(1.0), loss=lambda share: share and math.nan, chance=0.0), Refuse)
    assert isinstance(Node().meets(away(1.0), loss=lambda share: share and math.inf, chance=0.0), Refuse)


def test_a_mean_that_does_is_of_no_help_to_a_partner_that_is_worse_by_itself() -> None:
    """Half of a liar's weights may do little harm to the loss; all of them show it."""
    losses = {0.0: 2.0, 0.5: 2.0, 1.0: 2.0 + 2 * 2.0 * LEAST_LAG}
    node = known()
    for _ in range(MAX_OUTLIERS):
        assert counts(node.meets(away(1.0), loss=losses.get, chance=0.0)), "an honest one may be behind"
        assert stands_out(node)
    assert isinstance(node.meets(away(1.0), loss=losses.get, chance=0.0), Refuse)


def test_a_mean_that_is_better_counts_even_if_the_partner_is_worse_by_itself_and_suspected() -> None:
    """Where inner steps are noisy a mean may be much better than either of its two."""
    node = with_friends()
    for _ in range(OUTLIER_WINDOW):
        verdict = node.meets(away(1.0), loss={0.0: 2.0, 0.5: 2.0, 1.0: 2.02}.get, began=2.0, chance=0.0)
    assert not counts(verdict)
    assert counts(node.meets(away(1.0), loss={0.0: 2.0, 0.5: 1.99, 1.0: 2.02}.get, began=2.0, chance=0.0))
    assert counts(node.meets(away(1.0), loss={0.0: 2.0, 0.5: 1.99, 1.0: 2.1}.get, began=2.0, chance=0.0))
    assert not counts(node.meets(away(1.0), loss={0.0: 2.0, 0.5: 1.998, 1.0: 2.02}.get, began=2.0, chance=0.0))
    far = {0.0: 2.0, 1.0: 2.1}
    assert not counts(node.meets(away(7.0), loss=lambda share: far.get(share, 1.99), began=2.0, chance=0.0))


@pytest.mark.parametrize(("deviation", "counted"), [(0.02, 0.92), (0.002, 0.99)])
def test_how_far_honest_weights_differ_says_how_much_is_evidence(deviation: float, counted: float) -> None:
    """At a large learning rate members differ by more than a round's gain."""
    rng, node = random.Random(0), Node()
    verdicts = []
    for _ in range(300):
        worse = rng.gauss(0.0, deviation)
        losses = {0.0: 2.0, 0.5: 2.0 + worse / 2, 1.0: 2.0 + worse}
        verdicts.append(counts(node.meets(away(1.0), loss=losses.get, began=2.001, chance=0.0)))
    assert sum(verdicts) >= counted * len(verdicts)


def test_who_stands_out_and_costs_little_is_averaged_at_first() -> None:
    """What inner steps gain in a round and a quarter is little; in the first rounds, in two and a half."""
    for is_early, rounds in ((False, 1.25), (True, 2.5)):
        for part, is_little in ((0.95, True), (1.05, False)):
            losses = {0.0: 2.0, 0.5: 2.0 + part * rounds * 0.05, 1.0: 2.5}
            node = known(GuardConfig()) if is_early else with_friends()
            assert counts(node.meets(away(1.0), loss=losses.get, began=2.05, chance=0.0)) == is_little
            assert stands_out(node)


@pytest.mark.parametrize(("tokens", "reach"), [((100, 100), 2.0), ((100, 150), 3.0), ((100, 10_000), 4.0)])
def test_a_faster_partner_may_be_further_away_if_it_makes_the_loss_better(
    tokens: tuple[int, int], reach: float
) -> None:
    """A liar that claims many tokens gains twice the distance, and must improve the loss."""
    for cost in (-0.1, 0.2):
        node = with_friends()
        usual = 4.0  # four medians of 1
        verdict = node.meets(away(2.0 * reach * usual), tokens=tokens, loss=sloping(2.0, cost), chance=0.0)
        assert clip(verdict) == (pytest.approx(0.5, rel=1e-3) if cost < 0 else 0.0)


@pytest.mark.parametrize(("distance", "cost", "is_taken"), [(5.0, -0.1, True), (5.0, 0.02, False), (3.0, 0.02, True)])
def test_what_is_far_away_counts_if_it_makes_the_loss_better_and_at_first_if_it_is_not_too_far(
    distance: float, cost: float, is_taken: bool
) -> None:
    """Of a first exchange, in which a distance of 2 is usual."""
    losses = {0.0: 2.0, 0.5: 2.0 + cost, 1.0: 2.0 + cost}
    assert counts(Node(GuardConfig()).meets(away(distance), loss=losses.get, chance=0.0)) == is_taken


def with_friends(lag: float = 0.0) -> Node:
    """A node that has met another peer often, whose weights were worse by so much; and now meets a new one."""
    node = Node(GuardConfig())
    for _ in range(MIN_CHANGES):
        node.meets(away(1.0), loss=sloping(2.0, lag), chance=0.0)
    node.of_peer = History()
    return node


def test_what_the_codec_costs_with_every_peer_is_no_evidence() -> None:
    node, lag = with_friends(0.02), 0.02
    assert all(counts(node.meets(away(1.0), loss=sloping(2.0, lag), chance=0.0)) for _ in range(32))


def test_a_peer_that_is_a_little_worse_each_time_counts_for_nothing_in_the_end() -> None:
    """By less than what stands out."""
    node, lag = with_friends(), 2.0 * 0.75 * LEAST_LAG
    verdicts = [node.meets(away(1.0), loss=sloping(2.0, lag), chance=0.0) for _ in range(6)]
    assert all(counts(verdict) for verdict in verdicts[:2])
    assert verdicts[-1] == Accept(0.5, 0.0, is_suspect=True), "it may be honest, and is helped"
    assert not any(node.of_peer["outlier"])


def test_a_peer_that_claims_more_tokens_and_has_learned_less_gets_an_equal_share() -> None:
    honest, liar = with_friends(), with_friends()
    for node, lag in ((honest, -0.01), (liar, 0.02)):
        verdict = node.meets(away(1.0), tokens=(100, 10**12), loss=sloping(3.0, lag), began=3.02)
        assert isinstance(verdict, Accept)
        assert verdict.clip == 1.0
        assert verdict.weight == pytest.approx(0.5 if node is liar else 2 / 3)


def test_a_liar_whose_exchanges_are_all_compared_does_not_become_the_usual() -> None:
    """Others' are compared by chance alone."""
    node, lag = with_friends(), 2.0 * 0.75 * LEAST_LAG
    verdicts = [node.meets(away(1.0), loss=sloping(2.0, lag), chance=0.5) for _ in range(2 * COMPARED)]
    assert verdicts[COMPARED:] == [Accept(0.5, 0.0, is_suspect=True)] * COMPARED


def test_suspicion_of_others_counts_where_this_node_has_some_evidence_of_its_own() -> None:
    node, lag = with_friends(), 2.0 * 0.75 * LEAST_LAG
    assert counts(node.meets(away(1.0), loss=sloping(2.0, 0.0), chance=0.0, is_suspected=True)), "liars suspect anyone"
    verdict = node.meets(away(1.0), loss=sloping(2.0, lag), chance=0.0)
    assert verdict == Accept(0.5, is_suspect=True), "it tells the others"
    assert not counts(node.meets(away(1.0), loss=sloping(2.0, lag / 10), chance=0.0, is_suspected=True))
    assert counts(node.meets(away(1.0), loss=sloping(2.0, -lag), chance=0.0, is_suspected=True))


def test_a_member_that_never_trains_is_suspected_however_little_that_makes_its_weights_worse() -> None:
    node, gain = with_friends(), 0.01
    verdicts = [node.meets(away(1.0), loss=sloping(2.0, gain), began=2.0 + gain, chance=0.0) for _ in range(8)]
    assert not counts(verdicts[-1])
    assert not any(node.of_peer["outlier"])


def test_a_loss_that_is_no_number_moves_no_yardstick() -> None:
    node = with_friends()
    for _ in range(COMPARED):
        node.meets(away(1.0), loss=lambda share: share and math.nan, chance=0.0)
    assert all(math.isfinite(number) for series in node.everybody.series.values() for number in series)
    assert all(math.isfinite(number) for series in node.of_peer.series.values() for number in series)


def test_a_peer_that_is_as_often_better_counts_each_time() -> None:
    node = with_friends()
    for number in range(200):
        assert counts(node.meets(away(1.0), loss=sloping(2.0, 0.75 * LEAST_LAG * (-1) ** number), chance=0.0))


def test_a_peer_that_was_worse_each_time_is_taken_again_after_some_better_exchanges() -> None:
    node = with_friends()
    while counts(node.meets(away(1.0), loss=sloping(2.0, 1.5 * LEAST_LAG), chance=0.0)):
        pass
    verdicts = [node.meets(away(1.0), loss=sloping(2.0, 0.0), chance=0.0) for _ in range(3)]
    assert counts(verdicts[-1])


def test_how_far_honest_partners_are_apart_says_who_stands_out() -> None:
    node = Node(GuardConfig())
    for number in range(20):
        node.meets(away(1.0), loss=sloping(2.0, 0.01 * (-1) ** number), chance=0.0)
    assert counts(node.meets(away(1.0), loss=sloping(2.0, 0.05), chance=0.0))
    assert not counts(node.meets(away(1.0), loss=sloping(2.0, 0.15), chance=0.0))


def test_a_minority_of_liars_does_not_widen_it() -> None:
    node = Node(GuardConfig())
    for number in range(30):
        node.of_peer = History()
        lag = 0.3 if number % 3 == 2 else 0.01 * (-1) ** number
        assert counts(node.meets(away(1.0), loss=sloping(2.0, lag), chance=0.0)) == (lag < 0.3)


@pytest.mark.parametrize(("tokens", "lag"), [((100, 100), 0.5), ((100, 80), 1.0), ((100, 50), 1.75), ((100, 10), 2.75)])
def test_a_partner_may_lack_what_this_node_has_gained_in_the_round(tokens: tuple[int, int], lag: float) -> None:
    """Half of it, as their rounds may cross, and two and a half times what it says that it has not learned from."""
    gain, noise = 0.5, 2.0 * LEAST_LAG
    for slope, is_taken in ((lag * gain, True), (lag * gain + 2 * noise, False)):
        node = known()
        node.meets(away(1.0), tokens=tokens, loss=sloping(2.0, slope), began=2.0 + gain, chance=0.0)
        assert stands_out(node) != is_taken


def test_a_node_that_gains_nothing_bears_with_nobody() -> None:
    assert not counts(known().meets(away(1.0), tokens=(100, 1), loss=sloping(2.0, 0.1), began=1.9, chance=0.0))


def test_a_mean_that_is_worse_than_usual_stands_out() -> None:
    node = Node()
    for number in range(MIN_CHANGES):
        node.meets(away(1.0), loss=sloping(2.0, -0.01 * (1 + number / 10)), chance=0.0)
    for mean, is_usual in ((2.001, True), (2.02, False)):
        node.meets(away(1.0), loss={0.0: 2.0, 0.5: mean, 1.0: 2.0}.get, chance=0.0)
        assert stands_out(node) != is_usual


@pytest.mark.parametrize(
    ("tokens", "share"), [((100, 100), 0.5), ((100, 150), 0.6), ((1, 10**15), 2 / 3), ((0, 0), 0.5)]
)
def test_tokens_move_the_shares_within_a_third_and_two_thirds(tokens: tuple[int, int], share: float) -> None:
    verdict, other = Node().meets(away(1.0), tokens=tokens), Node().meets(away(1.0), tokens=tokens[::-1])
    assert isinstance(verdict, Accept)
    assert isinstance(other, Accept)
    assert verdict.weight == pytest.approx(share, abs=1e-6)
    assert verdict.weight + other.weight == 1.0


def test_a_newcomer_that_claims_no_tokens_takes_half_and_gives_nothing() -> None:
    assert Node().meets(away(1.0), tokens=(100, 0)) == Accept(0.0)
    assert Node().meets(away(1.0), tokens=(0, 100)) == Accept(0.5)


def test_a_liar_that_claims_no_tokens_moves_nothing_and_clears_none_of_its_record() -> None:
    node = Node()
    worse = sloping(2.0, 1.0)
    for _ in range(MAX_OUTLIERS):
        assert not counts(node.meets(away(1.0), loss=worse, chance=0.0))
    everything = dict(node.of_peer.series), dict(node.everybody.series)
    for distance in (1.0, 1e6):
        assert node.meets(away(distance), tokens=(100, 0), loss=worse, chance=0.0) == Accept(0.0)
    assert (node.of_peer.series, node.everybody.series) == everything
    assert isinstance(node.meets(away(1.0), loss=worse), Refuse)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30])
def test_what_is_infinitely_far_away_is_refused(value: float) -> None:
    assert isinstance(Node().meets(torch.full_like(OWN, value)), Refuse)


def test_what_is_far_beyond_all_that_was_accepted_is_refused_without_asking_for_a_loss() -> None:
    verdict = Node().meets(away(1_000.0))
    assert isinstance(verdict, Refuse)
    assert "away from mine" in verdict.reason


@pytest.mark.parametrize("codec", [*CODECS, "topk"])
def test_honest_pairs_are_never_clipped_whatever_the_codec(make_replica: MakeReplica, codec: str) -> None:
    alice, bob = (make_replica(author, screening=GuardConfig(), codec=codec) for author in (ALICE, BOB))
    for _ in range(2 * MIN_KNOWN):
        for node in (alice, bob):
            for _ in range(3):
                node.learn()
        of_alice, of_bob = (bytearray(node.round_end.contribution_bytes) for node in (alice, bob))
        alice.round_end.contribute(of_alice)
        bob.round_end.contribute(of_bob)
        met = Encounter(BOB, 100, 100, chance=0.0), Encounter(ALICE, 100, 100, chance=0.0)
        assert alice.round_end.screen(of_bob, met[0]) == bob.round_end.screen(of_alice, met[1]) == Accept()
        alice.round_end.apply(of_bob, met[0])
        bob.round_end.apply(of_alice, met[1], own_first=False)


def met_apart(node: Node, of_partner: float, *, distance: float = 5.0) -> Verdict:
    """What a node finds whose loss is 2.0, if the mean with a partner is worse than both."""
    return node.meets(away(distance), loss={0.0: 2.0, 0.5: 2.5, 1.0: of_partner}.get, chance=0.0)


def test_a_node_that_has_drifted_apart_from_others_takes_over_better_weights() -> None:
    node = Node(GuardConfig())
    for _ in range(MAX_APART):
        node.of_peer = History()
        assert met_apart(node, 1.99) == Accept(0.5, 0.0)
    node.of_peer = History()
    assert met_apart(node, 2.001) == Accept(0.5, 0.0), "the worse of two comes to the better one"
    assert met_apart(node, 1.99) == Accept(1.0)
    assert met_apart(node, 1.99) == Accept(0.5, 0.0), "and then it is to meet others as it is"


def test_a_partner_that_is_worse_by_itself_is_not_taken_over_and_is_refused_in_the_end() -> None:
    node = Node(GuardConfig())
    verdicts = [met_apart(node, 2.5) for _ in range(MAX_APART + MAX_OUTLIERS + 1)]
    assert not any(counts(verdict) for verdict in verdicts)
    assert isinstance(verdicts[-1], Refuse)


def test_who_meets_partners_as_usual_takes_nobody_over() -> None:
    """Among others, a liar with weights that are as good, and fit nobody's: this node's with its units exchanged."""
    node = Node(GuardConfig())
    for _ in range(4 * MAX_APART):
        assert not counts(met_apart(node, 1.99))
        assert counts(node.meets(away(1.0), loss=sloping(2.0, 0.0), chance=0.0))


def test_what_exaggerates_this_nodes_own_steps_counts_for_nothing_in_the_end() -> None:
    """Worse by so little that nothing else says so."""
    node = with_friends()
    verdicts = [
        node.meets(away(1.0), loss=sloping(2.0, 0.004), alignment=0.2, began=2.01, chance=0.0) for _ in range(6)
    ]
    assert counts(verdicts[0])
    assert verdicts[-1] == Accept(0.5, 0.0, is_suspect=True)


@pytest.mark.parametrize(("lag", "alignment"), [(-0.004, 0.2), (0.004, -0.2)])
def test_a_partner_that_has_come_further_is_better_and_one_that_has_not_lacks_what_is_peculiar_to_this_node(
    lag: float, alignment: float
) -> None:
    node = with_friends()
    for _ in range(32):
        assert counts(node.meets(away(1.0), loss=sloping(2.0, lag), alignment=alignment, began=2.01, chance=0.0))


def test_one_exaggeration_is_chance() -> None:
    node = with_friends()
    for number in range(4 * (OUTLIER_WINDOW + 1)):
        alignment = 0.2 if number % (OUTLIER_WINDOW + 1) == 0 else -0.2
        assert counts(node.meets(away(1.0), loss=sloping(2.0, 0.001), alignment=alignment, began=2.01, chance=0.0))


def test_by_default_the_mean_may_cost_a_tenth_of_the_loss() -> None:
    """What averaging small models costs, and inner steps gain back; the partner's own weights may not."""
    node = Node(GuardConfig())
    for _ in range(20):
        assert counts(node.meets(away(1.0), loss={0.0: 2.0, 0.5: 2.19, 1.0: 2.0}.get, chance=0.0))
    assert not counts(node.meets(away(1.0), loss={0.0: 2.0, 0.5: 2.21, 1.0: 2.0}.get, chance=0.0))
    node.meets(away(1.0), loss={0.0: 2.0, 0.5: 2.0, 1.0: 2.1}.get, chance=0.0)
    assert stands_out(node)


@pytest.mark.parametrize(("of_partner", "is_behind"), [(1.5, True), (1.99, False), (2.5, False)])
def test_a_newcomer_learns_whether_the_mean_is_still_worse_than_the_partners_weights(
    of_partner: float, is_behind: bool
) -> None:
    verdict = Node().meets(away(1.0), tokens=(0, 100), loss={0.0: 2.0, 0.5: 1.995, 1.0: of_partner}.get, chance=0.0)
    assert isinstance(verdict, Accept)
    assert verdict.is_behind == is_behind


def test_a_remark_says_why_less_than_all_counts() -> None:
    node = Node()
    assert (clip(node.meets(away(1.0))), node.remark) == (1.0, "")
    for contribution, options in (
        (away(1.0), {"movement": 0.0}),
        (away(4.0), {}),
        (away(50.0), {"loss": sloping(2.0, -0.1)}),
        (away(1.0), {"loss": sloping(2.0, 1.0), "chance": 0.0}),
    ):
        node = Node()
        assert clip(node.meets(contribution, **options)) < 1.0
        assert node.remark
    assert Node().meets(away(1.0), tokens=(100, 0)) == Accept(0.0)

"""A peer with which an exchange failed is met last, for longer each time, and never shut out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from farandole.protocol.rounds.pairing import PROPOSE_UNTIL, Pairing
from farandole.protocol.rounds.pairing_events import (
    ContributionReady,
    ExchangeEnded,
    GoAlone,
    PeersChanged,
    RoundStarted,
    SendMessage,
)
from farandole.protocol.rounds.pairing_messages import Agree, Busy, Decline, Propose
from farandole.protocol.rounds.pairing_order import (
    ENOUGH_PROVEN,
    FAILURES_OF_UNPROVEN,
    FAIR_BURST,
    FAIR_SHARE,
    FIRST_ROUNDS,
    FIRST_ROUNDS_AHEAD,
    MAX_FAILURES,
    MAX_PEERS,
    PUT_OFF,
    ROUNDS_OF_STRANGERS,
    PeerOrder,
)
from farandole.protocol.wire.timers import TimerFired

from .nodes import ALICE, BOB, BOXED, CAROL, MALLORY, MIDDLE, Node, matched, started

MAX_ROUNDS = FIRST_ROUNDS << (MAX_FAILURES - 1)
ROUNDS_OF_UNPROVEN = FIRST_ROUNDS << (FAILURES_OF_UNPROVEN - 1)


def refused_by_bob(*peers: bytes) -> Node:
    """Return Alice in round 8, after Bob refused their exchange in round 7."""
    alice = started(ALICE, BOXED, *peers)
    alice.hear(BOB, Propose(MIDDLE, 40.0), 1.0)
    alice.handle(ExchangeEnded(MIDDLE, BOB, committed=False), 41.0)
    alice.handle(RoundStarted(8), 100.0)
    return alice


@pytest.mark.parametrize("has_committed", [False, True])
def test_after_a_failure_or_a_contribution_that_counted_for_nothing_others_are_asked_first(has_committed: bool) -> None:
    for seed in range(30):
        machine = Pairing(ALICE, BOXED, random.Random(seed))
        machine.handle(PeersChanged(frozenset((BOB, CAROL))), 0.0)
        machine.handle(RoundStarted(7), 0.0)
        machine.handle(ExchangeEnded(MIDDLE, BOB, has_committed, clip=0.0), 1.0)
        machine.handle(RoundStarted(8), 100.0)
        outputs = machine.handle(TimerFired(), 100.0 + 40 * PROPOSE_UNTIL)
        assert [out.peer for out in outputs if isinstance(out, SendMessage)] == [CAROL]


def test_its_proposals_wait_while_another_may_be_free() -> None:
    alice = refused_by_bob(BOB, CAROL)
    alice.hear(BOB, Propose(MIDDLE, 35.0), 101.0)
    ((peer, answer),) = alice.sent
    assert (peer, type(answer)) == (BOB, Busy)
    _, proposal = alice.propose(100.0 + 40 * PROPOSE_UNTIL)
    alice.hear(CAROL, Decline(proposal.session, "matched"), 131.0)
    assert [(peer, type(message)) for peer, message in alice.sent] == [(BOB, Propose)], "nobody else is free"


def test_the_only_peer_is_met_all_the_same() -> None:
    alice = refused_by_bob(BOB)
    alice.hear(BOB, Propose(MIDDLE, 35.0), 101.0)
    assert alice.sent == [(BOB, Agree(MIDDLE, 39.0))]
    assert refused_by_bob(BOB).propose(130.0)[0] == BOB


def test_a_partner_that_agreed_and_was_not_ready_in_time_is_put_off() -> None:
    alice, _ = matched()
    alice.handle(ContributionReady(7), 40.0)
    alone = [out for out in alice.handle(TimerFired(), 56.0) if isinstance(out, GoAlone)]
    assert alone == [GoAlone(7, "the partner was not ready in time")]
    alice.handle(PeersChanged(frozenset((BOB, CAROL))), 60.0)
    alice.handle(RoundStarted(8), 100.0)
    assert alice.propose(130.0)[0] == CAROL


def order_of(num_peers: int, *, own: bytes = ALICE, round_: int = 0) -> PeerOrder:
    """Return the order of a node with so many peers, Alice, Bob and Carol among them, in its first round."""
    order = PeerOrder(own)
    others = (number.to_bytes(32, "big") for number in range(1_000_000, 1_000_000 + num_peers - 2))
    order.set_peers(frozenset((*{ALICE, BOB, CAROL} - {own}, *others)))
    order.begin(round_)
    return order


def test_each_failure_puts_off_for_twice_as_long_and_a_success_forgives_half_of_them() -> None:
    order, round_ = order_of(2), 0
    order.note_success(BOB)
    for number in range(12):
        order.begin(round_)
        order.note_failure(BOB)
        rounds = min(FIRST_ROUNDS * 2**number, MAX_ROUNDS)
        order.begin(round_ + rounds)
        assert order.tier(BOB) == PUT_OFF + min(number + 1, MAX_FAILURES)
        assert CAROL not in order.put_off
        order.begin(round_ + rounds + 1)
        assert BOB not in order.put_off
        round_ += rounds
    order.begin(round_)
    for _ in range(4):  # of eight failures 4, 2, 1 and 0 are left
        order.note_success(BOB)
        assert BOB not in order.put_off
    order.note_failure(BOB)
    order.begin(round_ + FIRST_ROUNDS + 1)
    assert BOB not in order.put_off
    order = order_of(2)
    order.note_failure(BOB)
    order.begin(ROUNDS_OF_UNPROVEN)
    assert BOB in order.put_off
    order.begin(ROUNDS_OF_UNPROVEN + 1)
    assert BOB not in order.put_off


def beside_strangers() -> PeerOrder:
    """Return the order of a node that came with Bob, and before all others."""
    order = PeerOrder(ALICE)
    order.set_peers(frozenset((BOB,)))
    order.begin(0)
    order.begin(1)
    order.set_peers(frozenset((BOB, CAROL, MALLORY)))
    return order


def test_strangers_that_fail_are_put_off_together_until_one_has_exchanged() -> None:
    """Whoever changes its key after each failure is put off with all that came since."""
    order = beside_strangers()
    assert CAROL not in order.put_off
    order.note_failure(MALLORY)
    assert CAROL in order.put_off
    assert order.tier(CAROL) < order.tier(MALLORY)
    assert BOB not in order.put_off, "it was here before"
    order.begin(1 + ROUNDS_OF_STRANGERS)
    assert CAROL in order.put_off
    order.begin(1 + ROUNDS_OF_STRANGERS + 1)
    assert CAROL not in order.put_off
    order.note_success(CAROL)
    order.note_failure(MALLORY)
    assert CAROL not in order.put_off, "no stranger any more"
    order = beside_strangers()
    order.set_peers(frozenset((BOB, CAROL)))
    order.note_failure(MALLORY)
    assert CAROL in order.put_off, "a key may be left at the moment at which an exchange with it stalls"


def after_broken_agreements(num_proven: int) -> tuple[PeerOrder, list[bytes], list[bytes]]:
    """Return the order of a node that met so many of 18 peers, and two that never came; those two lists of peers."""
    order = order_of(20)
    *honest, liar, other = sorted(order.peers - {CAROL})
    for peer in honest[:num_proven]:
        order.note_success(peer)
    for peer in (liar, other):
        order.note_failure(peer)
    return order, honest[:num_proven], [liar, other]


def test_while_founders_break_agreements_those_that_kept_one_come_first() -> None:
    """However long ago the run began: whoever never comes may wait for that."""
    order, kept, liars = after_broken_agreements(ENOUGH_PROVEN)
    for round_ in (0, 30):
        order.begin(round_)
        assert order.is_wary
        assert CAROL in order.put_off
        assert order.tier(kept[0]) < order.tier(CAROL) < order.tier(liars[0])
        assert set(order.nearest(order.peers)[1]) <= set(kept)
    order.set_peers(order.peers - {CAROL})
    order.set_peers(order.peers | {CAROL, MALLORY})
    assert order.is_wary
    assert not order.put_off & {CAROL, MALLORY}, "neither a newcomer nor one that comes back"


def test_a_node_that_has_met_few_or_sees_failures_by_chance_puts_off_only_those_that_failed() -> None:
    order, _, liars = after_broken_agreements(ENOUGH_PROVEN - 1)
    assert order.has_doubts
    assert order.put_off == set(liars)
    order, *_ = after_broken_agreements(15)
    assert not order.has_doubts
    assert CAROL not in order.put_off


def test_a_peer_that_seldom_follows_through_is_put_off_in_most_rounds() -> None:
    def num_met(fails: Callable[[int], bool]) -> int:
        order, met = order_of(2), 0
        for round_ in range(200):
            order.begin(round_)
            if BOB not in order.put_off:
                met += 1
                if fails(met):
                    order.note_failure(BOB)
                else:
                    order.note_success(BOB)
        return met

    assert num_met(lambda number: number % 4 != 0) < 30
    assert num_met(lambda number: number % 20 == 0) > 170, "as over a bad line"


def test_what_is_remembered_is_bounded() -> None:
    order = order_of(100)
    for number in range(MAX_PEERS + 10):
        order.note_success(number.to_bytes(32, "big"))
        for _ in range(FAIR_BURST):
            order.note_meeting(number.to_bytes(32, "big"))
    order.begin(math.ceil(100 / FAIR_SHARE) - FIRST_ROUNDS_AHEAD)  # all never met before have had their turn
    first, last = bytes(32), (MAX_PEERS + 9).to_bytes(32, "big")
    assert not order.is_proven(first), "those that came first are forgotten"
    assert order.tier(first) == 0
    assert order.is_proven(last)
    assert order.tier(last) > 0


def test_a_peer_that_takes_every_chance_is_met_little_more_often_than_others_but_where_it_is_the_only_one() -> None:
    num_rounds, num_peers = 1_000, 20
    order, met = order_of(num_peers), 0
    for round_ in range(num_rounds):
        order.begin(round_)
        if order.tier(BOB) == 0:
            order.note_meeting(BOB)
            met += 1
    fair = num_rounds / num_peers
    assert fair - 1 <= met <= FAIR_SHARE * fair + FAIR_BURST
    order = PeerOrder(ALICE)
    order.set_peers(frozenset((BOB,)))
    for round_ in range(100):
        order.begin(round_)
        assert order.tier(BOB) == 0
        order.note_meeting(BOB)


def test_many_greedy_peers_of_a_large_run_get_little_more_than_their_share_of_the_first_rounds() -> None:
    num_rounds, num_peers = 100, 1_000
    order, met = order_of(num_peers, round_=7), 0
    greedy = [number.to_bytes(32, "big") for number in range(300)]
    for round_ in range(7, 7 + num_rounds):
        order.begin(round_)
        in_turn = [peer for peer in greedy if order.tier(peer) == 0]
        if in_turn:
            order.note_meeting(in_turn[0])
            met += 1
    fair = num_rounds * len(greedy) / num_peers
    assert 0.9 * fair < met < 1.5 * fair


def test_a_greedy_peer_that_is_met_early_has_used_its_turn() -> None:
    order = order_of(1_000)
    greedy = [number.to_bytes(32, "big") for number in range(300)]
    met = []
    for round_ in range(100):
        order.begin(round_)
        met.append(min(greedy, key=order.tier))
        order.note_meeting(met[-1])
    assert len(set(met)) == 100
    assert order.tier(met[0]) > 5


def test_two_peers_agree_on_when_they_may_first_meet() -> None:
    tiers = []
    for num_peers in (20, *range(100, 10_001, 900)):
        of_alice, of_bob = order_of(num_peers), order_of(num_peers, own=BOB)
        for order in (of_alice, of_bob):
            order.begin(50)
        assert of_alice.tier(BOB) == of_bob.tier(ALICE)
        tiers.append(of_alice.tier(BOB))
    assert tiers[0] == 0
    assert tiers[-1] > 0


def test_the_nearest_peers_are_those_of_the_lowest_tier_after_meetings_and_after_other_peers() -> None:
    rng = random.Random(3)
    everyone = [bytes([number]) * 32 for number in range(40)]
    order = PeerOrder(ALICE)
    order.set_peers(frozenset(everyone[:30]))
    for round_ in range(5, 60):
        order.begin(round_)
        if rng.random() < 0.2:
            order.set_peers(frozenset(rng.sample(everyone, rng.choice((29, 30, 30, 31)))))
        if rng.random() < 0.8:
            asked = frozenset(rng.sample(sorted(order.peers), 12))
            lowest, nearest = order.nearest(asked)
            assert lowest == min(map(order.tier, asked))
            assert {*nearest} == {peer for peer in asked if order.tier(peer) == lowest}
        order.note_meeting(rng.choice(sorted(order.peers)))
        if round_ == 20:  # a peer that is put off may have its turn amid others'
            for peer in everyone[::3]:
                order.note_success(peer)
                order.note_failure(peer)
        if round_ == 40:  # from now on all are put off, some for longer
            for peer in (*everyone, *everyone[::3]):
                order.note_failure(peer)

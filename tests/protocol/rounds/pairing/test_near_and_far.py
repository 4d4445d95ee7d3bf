"""Near peers are met in most rounds, far ones in the others."""

from __future__ import annotations

import pytest

from farandole.protocol.rounds.pairing import PROPOSE_UNTIL
from farandole.protocol.rounds.pairing_events import (
    ContributionReady,
    ExchangeEnded,
    GoAlone,
    PeersChanged,
    RoundStarted,
)
from farandole.protocol.rounds.pairing_messages import Agree, Decline, Propose
from farandole.protocol.rounds.pairing_order import PeerOrder
from farandole.protocol.trainer.trainer_messages import UseFragment

from .nodes import ALICE, BOB, CAROL, MALLORY, MIDDLE, TWO_LEVELS, Node, only_proposal

FAR_EVERY = TWO_LEVELS.far_every
NEAR, FAR = frozenset((BOB,)), frozenset((CAROL, MALLORY))


def alice_in(round_: int, peers: frozenset[bytes] = NEAR | FAR, num_fragments: int = 1) -> Node:
    """Return Alice in a round, after an exchange with a far peer in round 4. Bob is near her."""
    alice = Node(ALICE, TWO_LEVELS, num_fragments=num_fragments)
    alice.handle(PeersChanged(peers, NEAR & peers), 0.0)
    alice.handle(RoundStarted(4), 0.0)
    alice.handle(ExchangeEnded(MIDDLE, CAROL, committed=True), 1.0)
    alice.handle(RoundStarted(round_), 100.0)
    return alice


@pytest.mark.parametrize(("round_", "asked"), [(5, NEAR), (6, NEAR), (7, NEAR), (8, FAR), (9, NEAR), (12, FAR)])
def test_a_node_asks_near_peers_in_most_rounds_and_far_ones_in_the_others(round_: int, asked: frozenset[bytes]) -> None:
    peer, _ = alice_in(round_).propose(100.0 + 40 * PROPOSE_UNTIL)
    assert peer in asked


def test_near_peers_are_asked_in_a_round_for_far_ones_once_no_far_one_is_free() -> None:
    alice = alice_in(8)
    peer, proposal = alice.propose(100.0 + 40 * PROPOSE_UNTIL)
    asked = [peer]
    for _ in range(2):
        alice.hear(peer, Decline(proposal.session, "away"), 130.0)
        peer, proposal = only_proposal(alice)
        asked.append(peer)
    assert set(asked[:2]) == FAR
    assert asked[2] == BOB


@pytest.mark.parametrize(("round_", "is_met"), [(5, False), (6, True), (7, True)])
def test_a_far_peer_whose_rounds_have_other_numbers_is_met_if_the_last_one_was_long_ago(
    round_: int, is_met: bool
) -> None:
    alice = alice_in(round_)
    alice.hear(CAROL, Propose(MIDDLE, 35.0), 101.0)
    ((_, answer),) = alice.sent
    assert isinstance(answer, Agree if is_met else Decline)


def test_a_far_peer_is_sought_in_any_round_once_one_is_overdue() -> None:
    order = PeerOrder(ALICE, FAR_EVERY)
    order.set_peers(NEAR | FAR, NEAR)
    sought = []
    for round_ in range(4, 17):
        order.begin(round_)
        sought += [round_] if order.seeks_far else []
        if round_ == 5:  # of a far peer that proposed
            order.note_success(CAROL)
    assert sought == [4, 8, 12, 13, 14, 15, 16]


def test_a_node_without_near_peers_is_alone_in_rounds_for_near_ones() -> None:
    alice = alice_in(5, FAR)
    assert alice.handle(ContributionReady(5), 140.0) == [GoAlone(5, "no near peer is live")]
    assert alice_in(8, FAR).propose(140.0)[0] in FAR


@pytest.mark.parametrize("round_", range(5, 9))
def test_where_distance_is_ignored_a_near_peer_is_like_any_other(round_: int) -> None:
    order = PeerOrder(ALICE)
    order.set_peers(NEAR | FAR, NEAR)
    order.begin(round_)
    assert order.seeks_far
    assert not order.is_near(BOB)
    assert all(order.may_meet(peer) for peer in NEAR | FAR)


def test_near_and_far_peers_each_get_all_fragments_in_turn() -> None:
    alice, used = alice_in(5, FAR, num_fragments=FAR_EVERY), {True: [0], False: []}  # fragment 0 in round 4
    for round_ in range(5, 13):
        started = alice.handle(RoundStarted(round_), 100.0 * round_)
        (fragment,) = [output.fragment for output in started if isinstance(output, UseFragment)]
        used[round_ % FAR_EVERY == 0].append(fragment)
        alice.handle(ContributionReady(round_, fragment), 100.0 * round_ + 40)
        while alice.sent:  # in rounds for far peers, which all decline
            peer, proposal = only_proposal(alice)
            alice.hear(peer, Decline(proposal.session, "away"), 100.0 * round_ + 40)
    assert used == {True: [0, 0, 1], False: [0, 1, 2, 3, 0, 1]}


def test_a_far_peer_that_proposes_in_each_round_is_met_no_more_often_than_its_share() -> None:
    order, near, far = PeerOrder(ALICE, FAR_EVERY), frozenset((BOB,)), [bytes((index,)) * 32 for index in range(10)]
    order.set_peers(near | set(far), near)
    met = 0
    for round_ in range(400):
        order.begin(round_)
        if order.may_meet(far[0]) and order.tier(far[0]) == 0:
            order.note_meeting(far[0])
            order.note_success(far[0])
            met += 1
    fair = 400 / FAR_EVERY / len(far)
    assert fair - 1 <= met <= 1.05 * fair + 2

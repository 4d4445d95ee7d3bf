"""Proposals: which peer they go to, and how it answers."""

from __future__ import annotations

import random

import pytest

from farandole.protocol.rounds.pairing import MAX_PROPOSALS, PROPOSE_FROM, PROPOSE_UNTIL, SWAP_SHARE, Pairing
from farandole.protocol.rounds.pairing_events import (
    ContributionReady,
    GoAlone,
    MessageReceived,
    PeerLost,
    PeersChanged,
    RoundStarted,
    SendMessage,
    StartExchange,
    Stopped,
    TrafficSaved,
)
from farandole.protocol.rounds.pairing_messages import (
    Agree,
    Begin,
    Busy,
    Decline,
    Message,
    Propose,
    Ready,
    Withdraw,
    encode_message,
)
from farandole.protocol.rounds.pairing_order import PeerOrder
from farandole.protocol.run.rules import RoundConfig
from farandole.protocol.wire.timers import SetTimer, TimerFired

from .nodes import ALICE, BOB, BOXED, CAROL, HIGH, LOW, MALLORY, MIDDLE, STEPS, Node, matched, only_proposal, started


def test_a_node_proposes_within_its_window_and_never_to_itself() -> None:
    for seed in range(50):
        machine = Pairing(ALICE, BOXED, random.Random(seed))
        machine.handle(PeersChanged(frozenset((ALICE, BOB))), 0.0)
        outputs = machine.handle(RoundStarted(0), 100.0)
        (timer,) = [output for output in outputs if isinstance(output, SetTimer)]
        assert 100 + 40 * PROPOSE_FROM <= timer.at <= 100 + 40 * PROPOSE_UNTIL
        proposals = [out for out in machine.handle(TimerFired(), timer.at) if isinstance(out, SendMessage)]
        assert [proposal.peer for proposal in proposals] == [BOB]


def test_partners_are_drawn_uniformly() -> None:
    peers = frozenset(bytes([index]) * 32 for index in range(5))  # few enough for one round of turns
    rng = random.Random(5)
    counts = dict.fromkeys(peers, 0)
    for _ in range(4_000):
        machine = Pairing(ALICE, BOXED, rng)
        machine.handle(PeersChanged(peers), 0.0)
        machine.handle(RoundStarted(0), 0.0)
        (proposal,) = [out for out in machine.handle(TimerFired(), 30.0) if isinstance(out, SendMessage)]
        counts[proposal.peer] += 1
    assert sum((count - 800) ** 2 / 800 for count in counts.values()) < 18.5  # chi-square, 4 degrees, p = 0.001


def test_an_outstanding_proposal_gives_way_to_every_second_one_whatever_its_session() -> None:
    num_tries, num_accepted = 200, 0
    for seed in range(num_tries):
        alice = started()
        alice.machine = Pairing(ALICE, BOXED, random.Random(seed))
        alice.handle(PeersChanged(frozenset((BOB, CAROL))), 0.0)
        alice.handle(RoundStarted(7), 0.0)
        peer, proposal = alice.propose(30.0)
        other = CAROL if peer == BOB else BOB
        alice.hear(other, Propose(LOW, 10.0), 30.1)
        answers = [message for _, message in alice.sent]
        if isinstance(answers[-1], Agree):
            num_accepted += 1
            assert answers[0] == Withdraw(proposal.session)
            assert alice.machine.partner == other
        else:
            alice.hear(other, Propose(MIDDLE, 10.0), 30.2)
            ((_, answer),) = alice.sent
            assert isinstance(answer, Busy), "asking again changes nothing"
    assert 0.35 * num_tries < num_accepted < 0.65 * num_tries


def given_up_for_carol(*, now: float) -> Node:
    """Return Alice, partner of Bob, after Carol has proposed to her twice."""
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 39.0), 1.0)
    alice.hear(CAROL, Propose(LOW, 40.0 - now), now)
    assert alice.sent == [(CAROL, Decline(LOW, "matched"))]
    alice.hear(CAROL, Propose(HIGH, 40.0 - now), now)
    return alice


def test_a_partner_is_given_up_once_for_a_peer_that_finds_no_other() -> None:
    alice = given_up_for_carol(now=10.0)
    assert [(peer, type(message)) for peer, message in alice.sent] == [(BOB, Withdraw), (CAROL, Agree)]
    assert alice.machine.partner == CAROL
    for session in (LOW, MIDDLE):
        alice.hear(BOB, Propose(session, 30.0), 11.0)
        assert alice.sent == [(BOB, Decline(session, "matched"))]


def test_no_partner_is_given_up_late_or_once_it_is_ready() -> None:
    late = given_up_for_carol(now=40.0 * (1 - SWAP_SHARE) + 0.1)
    assert late.machine.partner == BOB
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 39.0), 1.0)
    alice.hear(BOB, Ready(MIDDLE), 2.0)
    for session in (LOW, HIGH):
        alice.hear(CAROL, Propose(session, 30.0), 3.0)
        assert alice.sent == [(CAROL, Decline(session, "matched"))]


def test_no_partner_is_given_up_for_a_peer_whose_turn_has_not_come() -> None:
    others = tuple(number.to_bytes(32, "big") for number in range(100))
    alice = started(ALICE, BOXED, *others)
    order = PeerOrder(ALICE)
    order.set_peers(frozenset(others))
    order.begin(7)
    waiting = [peer for peer in others if order.tier(peer) > 0]
    in_turn = next(peer for peer in others if peer not in waiting)
    alice.hear(in_turn, Propose(MIDDLE, 39.0), 1.0)
    for peer in waiting:
        for session in (LOW, HIGH):
            alice.hear(peer, Propose(session, 30.0), 10.0)
    assert alice.machine.partner == in_turn


def test_a_node_whose_peers_all_have_partners_asks_each_once_more_and_then_no_more() -> None:
    alice = started()
    asked = []
    peer, proposal = alice.propose(29.8)
    for _ in range(4):
        asked.append(peer)
        alice.hear(peer, Decline(proposal.session, "matched"), 29.9)
        if alice.sent:
            peer, proposal = only_proposal(alice)
    assert {*asked[:2]} == {*asked[2:]} == {BOB, CAROL}
    assert not alice.sent


def test_a_partner_that_withdraws_late_is_put_off() -> None:
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 39.0), 1.0)
    alice.hear(BOB, Withdraw(MIDDLE), 39.0)
    alice.handle(RoundStarted(8), 100.0)
    assert alice.propose(130.0)[0] == CAROL


def test_a_node_that_exchanges_declines_a_peer_that_would_wait_for_its_next_round() -> None:
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 39.0), 1.0)
    alice.handle(ContributionReady(7), 40.0)
    alice.hear(BOB, Ready(MIDDLE), 40.1)
    alice.hear(BOB, Begin(MIDDLE), 40.2)
    alice.hear(CAROL, Propose(LOW, 0.0), 40.3)
    assert alice.sent == [(CAROL, Decline(LOW, "matched"))]
    alice.hear(CAROL, Propose(HIGH, 20.0), 40.4)
    ((_, answer),) = alice.sent
    assert isinstance(answer, Busy)


@pytest.mark.parametrize("first", [ALICE, BOB])
def test_crossing_proposals_make_one_pair(first: bytes) -> None:
    nodes = {ALICE: started(ALICE, BOXED, BOB), BOB: started(BOB, BOXED, ALICE)}
    mail = []
    for name, node in nodes.items():
        peer, proposal = node.propose(30.0)
        mail.append((name, peer, proposal))
    mail.sort(key=lambda letter: letter[0] != first)
    queue: list[tuple[bytes, bytes, Message]] = list(mail)
    while queue:
        source, destination, message = queue.pop(0)
        nodes[destination].hear(source, message, 30.1)
        queue += [(destination, peer, answer) for peer, answer in nodes[destination].sent]
    assert nodes[ALICE].machine.partner == BOB
    assert nodes[BOB].machine.partner == ALICE


def test_a_busy_peer_is_asked_again_when_it_said() -> None:
    alice = started(ALICE, BOXED, BOB)
    _, proposal = alice.propose(30.0)
    outputs = alice.machine.handle(MessageReceived(BOB, encode_message(Busy(proposal.session, 3.0))), 30.0)
    assert outputs == [SetTimer(33.0)]
    assert alice.propose(33.0)[0] == BOB


def test_a_proposal_without_answer_and_an_acceptance_that_comes_too_late_are_withdrawn() -> None:
    alice = started()
    peer, proposal = alice.propose(30.0)
    alice.handle(TimerFired(), 35.0)
    assert alice.sent[0] == (peer, Withdraw(proposal.session))
    assert alice.sent[1][0] != peer
    alice = started(ALICE, BOXED, BOB)
    _, proposal = alice.propose(30.0)
    alice.handle(TimerFired(), 35.0)
    alice.hear(BOB, Agree(proposal.session, 3.0), 35.1)
    assert alice.sent == [(BOB, Withdraw(proposal.session))]
    assert alice.machine.partner is None


def test_peers_not_known_to_be_live_are_put_off_and_a_node_that_is_away_withdraws_what_it_agreed() -> None:
    alice = started()
    alice.hear(MALLORY, Propose(LOW, 10.0), 1.0)
    ((_, answer),) = alice.sent
    assert isinstance(answer, Busy)
    alice, session = matched()
    alice.handle(Stopped(), 31.0)
    assert alice.sent == [(BOB, Withdraw(session))]
    alice.hear(CAROL, Propose(LOW, 1.0), 32.0)
    assert alice.sent == [(CAROL, Decline(LOW, "away"))]


def test_proposals_of_a_round_are_bounded() -> None:
    peers = [index.to_bytes(32, "big") for index in range(2 * MAX_PROPOSALS)]
    alice = started(ALICE, BOXED, *peers)
    peer, proposal = alice.propose(30.0)
    num_proposals = 1
    while True:
        alice.hear(peer, Decline(proposal.session, "matched"), 30.0 + num_proposals)
        if not alice.sent:
            break
        peer, proposal = only_proposal(alice)
        num_proposals += 1
    assert num_proposals == MAX_PROPOSALS
    assert alice.handle(ContributionReady(7), 120.0) == [GoAlone(7, "no peer is free")]


def test_a_connection_that_breaks_once_may_be_made_again() -> None:
    alice, _ = matched()
    alice.handle(PeerLost(BOB), 31.0)
    assert alice.propose(33.5)[0] == BOB
    alice.handle(PeerLost(BOB), 34.0)
    assert alice.handle(ContributionReady(7), 40.0) == [GoAlone(7, "no peer is free")]


def test_a_partner_that_is_no_longer_live_is_let_go_and_one_that_was_restarted_may_propose_again() -> None:
    alice, session = matched()
    alice.handle(PeersChanged(frozenset((CAROL,))), 31.0)
    assert alice.sent[0] == (BOB, Withdraw(session))
    assert alice.sent[1][0] == CAROL
    alice, _ = matched()
    alice.hear(BOB, Propose(HIGH, 8.0), 33.0)
    assert isinstance(alice.sent[-1][1], Agree)
    assert alice.machine.partner == BOB


# A node with a limited traffic budget.


@pytest.mark.parametrize("config", [BOXED, STEPS])
def test_who_saves_traffic_meets_nobody_until_there_is_some(config: RoundConfig) -> None:
    alice = Node(ALICE, config, frozenset((BOB, CAROL)))
    alice.handle(TrafficSaved(True), 0.0)
    assert not alice.handle(RoundStarted(7), 0.0)
    alice.handle(TimerFired(), PROPOSE_UNTIL * 40.0)
    assert not alice.sent
    alice.hear(BOB, Propose(LOW, 0.0), 31.0)
    assert alice.sent == [(BOB, Decline(LOW, "away"))]
    assert alice.handle(ContributionReady(7), 39.0) == [GoAlone(7, "this node saves its traffic")]

    alice.handle(RoundStarted(8), 40.0)
    alice.handle(TrafficSaved(False), 41.0)
    alice.hear(BOB, Propose(LOW, None), 42.0)
    assert alice.machine.partner == BOB


def test_who_has_to_save_in_the_middle_of_a_round_meets_its_partner_all_the_same() -> None:
    alice, session = matched()
    assert not alice.handle(TrafficSaved(True), 31.0)
    alice.handle(ContributionReady(7), 39.0)
    alice.hear(BOB, Ready(session), 39.5)
    assert any(isinstance(output, StartExchange) for output in alice.outputs)

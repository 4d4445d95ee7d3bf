from __future__ import annotations

import contextlib
import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.manifest import RoundConfig
from farandole.protocol.pairing import (
    MAX_MESSAGES,
    MAX_PROPOSALS,
    MEETING_SHARE,
    PROPOSE_FROM,
    PROPOSE_UNTIL,
    WAIT_SHARE,
    Pairing,
)
from farandole.protocol.pairing_events import (
    TRANSITIONS,
    ContributionReady,
    Event,
    ExchangeEnded,
    FinishRound,
    GoAlone,
    MessageReceived,
    Output,
    PeerLost,
    PeersChanged,
    RoundStarted,
    SendMessage,
    SetTimer,
    StartExchange,
    State,
    Stopped,
    TimerFired,
    TrafficSaved,
    UseFragment,
)
from farandole.protocol.pairing_messages import (
    MAX_MESSAGE_BYTES,
    Accept,
    Begin,
    Busy,
    Message,
    Propose,
    Ready,
    Refuse,
    Withdraw,
    decode_message,
    encode_message,
)

ALICE, BOB, CAROL, MALLORY = b"a" * 32, b"b" * 32, b"c" * 32, b"m" * 32
LOW, MIDDLE, HIGH = bytes(16), b"\x80" + bytes(15), b"\xff" * 16
BOXED = RoundConfig(inner_steps=0, round_seconds=40.0, exchange_seconds=30.0)
STEPS = RoundConfig(inner_steps=50, round_seconds=0.0, exchange_seconds=30.0)


class Node:
    """A pairing machine whose outputs a test reads."""

    def __init__(
        self, own: bytes, config: RoundConfig = BOXED, peers: frozenset[bytes] = frozenset(), num_fragments: int = 1
    ) -> None:
        self.machine = Pairing(own, config, random.Random(own), num_fragments)
        self.outputs: list[Output] = []
        self.handle(PeersChanged(peers), 0.0)

    def handle(self, event: Event, now: float) -> list[Output]:
        self.outputs = [output for output in self.machine.handle(event, now) if not isinstance(output, SetTimer)]
        return self.outputs

    def hear(self, peer: bytes, message: Message, now: float) -> list[Output]:
        return self.handle(MessageReceived(peer, encode_message(message)), now)

    @property
    def sent(self) -> list[tuple[bytes, Message]]:
        return [(out.peer, decode_message(out.payload)) for out in self.outputs if isinstance(out, SendMessage)]

    def propose(self, now: float) -> tuple[bytes, Propose]:
        """Let time pass until the node proposes."""
        self.handle(TimerFired(), now)
        ((peer, message),) = self.sent
        assert isinstance(message, Propose)
        return peer, message


def started(own: bytes = ALICE, config: RoundConfig = BOXED, *peers: bytes) -> Node:
    node = Node(own, config, frozenset(peers or (BOB, CAROL)))
    node.handle(RoundStarted(7), 0.0)
    return node


def matched(config: RoundConfig = BOXED, *, seconds_left: float | None = None) -> tuple[Node, bytes]:
    """Alice, partner of Bob who accepted; and the session."""
    alice = started(ALICE, config, BOB)
    if config is STEPS:
        peer, proposal = _only_proposal(alice)
    else:
        peer, proposal = alice.propose(PROPOSE_UNTIL * 40.0)
    assert peer == BOB
    alice.hear(BOB, Accept(proposal.session, seconds_left), 30.0)
    assert alice.machine.partner == BOB
    return alice, proposal.session


def _only_proposal(node: Node) -> tuple[bytes, Propose]:
    ((peer, message),) = node.sent
    assert isinstance(message, Propose)
    return peer, message


# Traffic


@pytest.mark.parametrize("config", [BOXED, STEPS])
def test_who_saves_traffic_meets_nobody_until_there_is_some(config: RoundConfig) -> None:
    alice = Node(ALICE, config, frozenset((BOB, CAROL)))
    alice.handle(TrafficSaved(True), 0.0)
    assert not alice.handle(RoundStarted(7), 0.0)
    alice.handle(TimerFired(), PROPOSE_UNTIL * 40.0)
    assert not alice.sent
    alice.hear(BOB, Propose(LOW, 0.0), 31.0)
    assert alice.sent == [(BOB, Refuse(LOW, "away"))]
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


# Proposals


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
    peers = frozenset(bytes([index]) * 32 for index in range(8))
    rng = random.Random(5)
    counts = dict.fromkeys(peers, 0)
    for _ in range(4_000):
        machine = Pairing(ALICE, BOXED, rng)
        machine.handle(PeersChanged(peers), 0.0)
        machine.handle(RoundStarted(0), 0.0)
        (proposal,) = [out for out in machine.handle(TimerFired(), 30.0) if isinstance(out, SendMessage)]
        counts[proposal.peer] += 1
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 24.3  # chi-square, 7 degrees, p = 0.001


def test_a_proposal_to_a_seeking_node_is_accepted() -> None:
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 40.0), 1.0)
    assert alice.sent == [(BOB, Accept(MIDDLE, 39.0))]
    assert alice.machine.partner == BOB


def test_a_matched_node_refuses_others() -> None:
    alice, _ = matched()
    alice.hear(CAROL, Propose(LOW, 1.0), 31.0)
    assert alice.sent == [(CAROL, Refuse(LOW, "matched"))]


def test_an_outstanding_proposal_gives_way_to_a_smaller_session_alone() -> None:
    alice = started()
    peer, proposal = alice.propose(30.0)
    other = CAROL if peer == BOB else BOB
    alice.hear(other, Propose(HIGH, 10.0), 30.1)
    ((_, answer),) = alice.sent
    assert isinstance(answer, Busy)
    alice.hear(other, Propose(LOW, 10.0), 30.2)
    (_, withdrawal), (_, acceptance) = alice.sent
    assert withdrawal == Withdraw(proposal.session)
    assert isinstance(acceptance, Accept)
    assert alice.machine.partner == other


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


def test_who_is_refused_asks_another_at_once() -> None:
    alice = started()
    peer, proposal = alice.propose(30.0)
    alice.hear(peer, Refuse(proposal.session, "matched"), 30.1)
    ((second, message),) = alice.sent
    assert second == (CAROL if peer == BOB else BOB)
    assert isinstance(message, Propose)


def test_a_busy_peer_is_asked_again_when_it_said() -> None:
    alice = started(ALICE, BOXED, BOB)
    _, proposal = alice.propose(30.0)
    outputs = alice.machine.handle(MessageReceived(BOB, encode_message(Busy(proposal.session, 3.0))), 30.0)
    assert outputs == [SetTimer(33.0)]
    assert alice.propose(33.0)[0] == BOB


def test_a_proposal_without_answer_is_withdrawn() -> None:
    alice = started()
    peer, proposal = alice.propose(30.0)
    alice.handle(TimerFired(), 35.0)
    assert alice.sent[0] == (peer, Withdraw(proposal.session))
    assert alice.sent[1][0] != peer


def test_an_acceptance_that_comes_too_late_is_withdrawn() -> None:
    alice = started(ALICE, BOXED, BOB)
    _, proposal = alice.propose(30.0)
    alice.handle(TimerFired(), 35.0)
    alice.hear(BOB, Accept(proposal.session, 3.0), 35.1)
    assert alice.sent == [(BOB, Withdraw(proposal.session))]
    assert alice.machine.partner is None


def test_peers_not_known_to_be_live_are_put_off() -> None:
    alice = started()
    alice.hear(MALLORY, Propose(LOW, 10.0), 1.0)
    ((_, answer),) = alice.sent
    assert isinstance(answer, Busy)


def test_a_node_that_is_away_says_so_and_withdraws_what_it_agreed() -> None:
    alice, session = matched()
    alice.handle(Stopped(), 31.0)
    assert alice.sent == [(BOB, Withdraw(session))]
    alice.hear(CAROL, Propose(LOW, 1.0), 32.0)
    assert alice.sent == [(CAROL, Refuse(LOW, "away"))]


def test_proposals_of_a_round_are_bounded() -> None:
    peers = [index.to_bytes(32, "big") for index in range(2 * MAX_PROPOSALS)]
    alice = started(ALICE, BOXED, *peers)
    peer, proposal = alice.propose(30.0)
    num_proposals = 1
    while True:
        alice.hear(peer, Refuse(proposal.session, "matched"), 30.0 + num_proposals)
        if not alice.sent:
            break
        peer, proposal = _only_proposal(alice)
        num_proposals += 1
    assert num_proposals == MAX_PROPOSALS
    assert alice.handle(ContributionReady(7), 120.0) == [GoAlone(7, "no peer is free")]


# Boxes


def test_partners_meet_in_the_middle_of_their_boxes() -> None:
    alice, _ = matched(seconds_left=4.0)  # Alice's box ends at 40, Bob's at 34
    assert alice.machine.box_ends_at == pytest.approx(37.0)
    assert alice.handle(TimerFired(), 36.9) == []
    assert alice.handle(TimerFired(), 37.0) == [FinishRound(7)]
    assert alice.handle(TimerFired(), 38.0) == []


@pytest.mark.parametrize(("seconds_left", "end"), [(1_000.0, 60.0), (0.0, 35.0)])
def test_a_box_moves_by_half_its_length_at_most(seconds_left: float, end: float) -> None:
    alice, _ = matched(seconds_left=seconds_left)
    assert alice.machine.box_ends_at == end


def test_a_partner_that_is_ready_early_is_met_while_it_is_patient() -> None:
    config = msgspec.structs.replace(BOXED, exchange_seconds=8.0)
    alice, session = matched(config, seconds_left=10.0)
    alice.hear(BOB, Ready(session), 31.0)
    assert alice.machine.box_ends_at == 31.0 + MEETING_SHARE * 8.0


def test_without_boxes_ends_far_apart_do_not_pair() -> None:
    alice = started(ALICE, STEPS, BOB)
    peer, proposal = _only_proposal(alice)  # at once: it has no idea yet how long a round is
    alice.hear(peer, Refuse(proposal.session, "matched"), 0.1)
    alice.handle(ContributionReady(7), 100.0)
    alice.handle(RoundStarted(8), 101.0)
    alice.hear(BOB, Propose(LOW, 10.0), 102.0)  # Alice has 99 seconds left
    ((_, answer),) = alice.sent
    assert isinstance(answer, Busy)
    assert answer.retry_after == pytest.approx(99 - 10 - 15)
    alice.hear(BOB, Propose(LOW, 90.0), 103.0)
    assert alice.machine.partner == BOB


# Rounds that overlap with the exchange before


def test_a_round_that_began_before_its_partner_is_sought_ends_in_time() -> None:
    alice, session = matched()
    alice.handle(ContributionReady(7), 40.0)
    alice.hear(BOB, Ready(session), 48.0)
    alice.handle(RoundStarted(8, at=40.0), 48.0)
    assert alice.machine.box_ends_at == 80.0
    alice.handle(ExchangeEnded(session, committed=False), 60.0)  # followed by the caller: the machine is in round 8
    assert alice.outputs == []
    alice.hear(BOB, Propose(LOW, 10.0), 60.0)
    assert alice.machine.partner == BOB


# Fragments


def of_fragment(session: bytes, fragment: int) -> bytes:
    return session[:-1] + bytes((fragment,))


def with_fragments() -> Node:
    alice = Node(ALICE, BOXED, frozenset((BOB,)), num_fragments=3)
    alice.handle(RoundStarted(7), 0.0)
    return alice


def test_every_fragment_has_its_turn() -> None:
    alice = Node(ALICE, BOXED, num_fragments=3)
    used = []
    for index in range(6):
        (use,) = alice.handle(RoundStarted(index), 40.0 * index)
        assert isinstance(use, UseFragment)
        used.append(use.fragment)
        alice.handle(ContributionReady(index, use.fragment), 40.0 * index + 39.0)
    assert used == [0, 1, 2, 0, 1, 2]


def test_who_is_not_ready_takes_the_fragment_that_is_proposed() -> None:
    alice = with_fragments()
    session = of_fragment(LOW, 2)
    alice.hear(BOB, Propose(session, 20.0), 20.0)
    assert UseFragment(7, 2) in alice.outputs
    assert alice.machine.partner == BOB
    alice.handle(ContributionReady(7, 2), 40.0)
    assert alice.sent == [(BOB, Ready(session))]


def test_who_is_ready_refuses_another_fragment_and_proposes_its_own() -> None:
    alice = with_fragments()
    alice.handle(ContributionReady(7, 1), 10.0)
    ((_, proposal),) = alice.sent
    assert isinstance(proposal, Propose)
    assert proposal.session[-1] == 1
    alice.hear(BOB, Propose(of_fragment(LOW, 2), 0.0), 10.5)
    assert alice.sent == [(BOB, Refuse(of_fragment(LOW, 2), "fragment"))]
    alice.hear(BOB, Propose(of_fragment(LOW, 1), 0.0), 11.0)
    assert alice.machine.partner == BOB


def test_a_contribution_made_before_the_fragment_was_agreed_on_parts_the_partners() -> None:
    alice = with_fragments()
    session = of_fragment(LOW, 2)
    alice.hear(BOB, Propose(session, 0.5), 39.5)
    alice.handle(ContributionReady(7, 0), 39.6)
    assert (BOB, Withdraw(session)) in alice.sent
    assert alice.machine.partner is None


def test_a_proposal_for_a_fragment_that_there_is_not_breaks_the_protocol() -> None:
    alice = with_fragments()
    with pytest.raises(RemoteProtocolError, match="fragment 3 of 3"):
        alice.hear(BOB, Propose(of_fragment(LOW, 3), 20.0), 20.0)
    assert alice.machine.state is State.SEEKING


# The end of a round


def test_the_exchange_begins_when_both_are_ready() -> None:
    alice, session = matched()
    alice.handle(ContributionReady(7), 40.0)
    assert alice.sent == [(BOB, Ready(session))]
    alice.hear(BOB, Ready(session), 42.0)
    assert alice.sent == [(BOB, Begin(session))]
    assert alice.outputs[1:] == [StartExchange(session, BOB, 7, is_initiator=True, deadline=70.0)]
    assert alice.handle(ExchangeEnded(session, committed=True), 45.0) == []
    assert alice.machine.state is State.IDLE


def test_the_responder_begins_when_it_is_told_to() -> None:
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 40.0), 1.0)
    alice.hear(BOB, Ready(MIDDLE), 39.0)
    alice.handle(ContributionReady(7), 40.0)
    assert alice.outputs == [SendMessage(BOB, encode_message(Ready(MIDDLE)))]
    alice.hear(BOB, Begin(MIDDLE), 40.1)
    assert alice.outputs == [StartExchange(MIDDLE, BOB, 7, is_initiator=False, deadline=70.0)]


def test_a_failed_exchange_is_followed_by_a_step_alone() -> None:
    alice, session = matched()
    alice.handle(ContributionReady(7), 40.0)
    alice.hear(BOB, Ready(session), 40.0)
    assert alice.handle(ExchangeEnded(session, committed=False), 45.0) == [GoAlone(7, "the exchange failed")]


def exchanging() -> tuple[Node, bytes]:
    """Alice, ready at 40, in an exchange with Bob; Carol is there too."""
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 40.0), 1.0)
    alice.hear(BOB, Ready(MIDDLE), 39.0)
    alice.handle(ContributionReady(7), 40.0)
    alice.hear(BOB, Begin(MIDDLE), 40.1)
    assert alice.machine.state is State.EXCHANGING
    return alice, MIDDLE


def test_after_an_exchange_that_broke_another_partner_is_met_by_the_same_deadline() -> None:
    alice, session = exchanging()
    alice.handle(ExchangeEnded(session, committed=False, is_broken=True), 42.0)
    peer, proposal = _only_proposal(alice)
    assert (peer, proposal.seconds_left) == (CAROL, 0.0)
    alice.hear(CAROL, Accept(proposal.session, 0.0), 42.1)
    assert alice.sent == [(CAROL, Ready(proposal.session))]
    alice.hear(CAROL, Ready(proposal.session), 42.2)
    assert alice.outputs[1:] == [StartExchange(proposal.session, CAROL, 7, is_initiator=True, deadline=70.0)]
    assert alice.handle(ExchangeEnded(proposal.session, committed=True), 45.0) == []


def test_there_is_no_third_try() -> None:
    alice, session = exchanging()
    alice.handle(ExchangeEnded(session, committed=False, is_broken=True), 42.0)
    _, proposal = _only_proposal(alice)
    alice.hear(CAROL, Accept(proposal.session, 0.0), 42.1)
    alice.hear(CAROL, Ready(proposal.session), 42.2)
    ended = alice.handle(ExchangeEnded(proposal.session, committed=False, is_broken=True), 43.0)
    assert ended == [GoAlone(7, "the exchange failed")]


def test_an_exchange_that_was_refused_or_took_too_long_is_not_repeated() -> None:
    alice, session = exchanging()
    ended = alice.handle(ExchangeEnded(session, committed=False, is_broken=False), 42.0)
    assert ended == [GoAlone(7, "the exchange failed")]
    alice, session = exchanging()
    ended = alice.handle(ExchangeEnded(session, committed=False, is_broken=True), 40.0 + WAIT_SHARE * 30.0)
    assert ended == [GoAlone(7, "the exchange failed")]


def test_who_finds_nobody_for_a_second_try_goes_on_alone_when_its_waiting_is_over() -> None:
    alice, session = exchanging()
    alice.handle(ExchangeEnded(session, committed=False, is_broken=True), 42.0)
    _, proposal = _only_proposal(alice)
    alice.hear(CAROL, Busy(proposal.session, 100.0), 42.1)
    alice.hear(BOB, Propose(HIGH, 0.0), 42.2)  # the line broke, and he is still there
    assert alice.machine.partner == BOB
    ended = alice.handle(TimerFired(), 40.0 + WAIT_SHARE * 30.0)
    assert ended[1:] == [GoAlone(7, "the exchange failed, and the partner was not ready in time")]


def test_a_partner_known_to_be_gone_is_not_asked_again() -> None:
    alice, session = exchanging()
    alice.handle(PeerLost(BOB), 41.0)
    alice.handle(ExchangeEnded(session, committed=False, is_broken=True), 42.0)
    _, proposal = _only_proposal(alice)
    ended = alice.hear(CAROL, Refuse(proposal.session, "matched"), 42.1)
    assert ended == [GoAlone(7, "the exchange failed, and no peer is free")]


def test_a_fragment_whose_exchange_broke_keeps_its_turn() -> None:
    alice = with_fragments()
    alice.hear(BOB, Propose(of_fragment(LOW, 2), 20.0), 20.0)
    alice.handle(ContributionReady(7, 2), 40.0)
    alice.hear(BOB, Ready(of_fragment(LOW, 2)), 40.0)
    alice.hear(BOB, Begin(of_fragment(LOW, 2)), 40.0)
    alice.handle(ExchangeEnded(of_fragment(LOW, 2), committed=False, is_broken=True), 42.0)
    alice.handle(TimerFired(), 50.0)
    ((_, proposal),) = alice.sent
    assert isinstance(proposal, Propose)
    assert proposal.session[-1] == 2
    alice.handle(TimerFired(), 40.0 + WAIT_SHARE * 30.0)
    used = [output.fragment for output in alice.handle(RoundStarted(8), 60.0) if isinstance(output, UseFragment)]
    assert used == [0]
    assert alice.machine._num_exchanged == [0, 0, 1]


def test_a_partner_that_is_not_ready_is_left_when_the_share_of_waiting_is_over() -> None:
    alice, session = matched()
    alice.handle(ContributionReady(7), 40.0)
    assert alice.handle(TimerFired(), 40.0 + WAIT_SHARE * 30.0 - 0.1) == []
    alice.handle(TimerFired(), 40.0 + WAIT_SHARE * 30.0)
    assert alice.sent == [(BOB, Withdraw(session))]
    assert alice.outputs[1:] == [GoAlone(7, "the partner was not ready in time")]


@pytest.mark.parametrize("peers", [frozenset(), frozenset((ALICE,))])
def test_a_node_without_peers_goes_on_at_once(peers: frozenset[bytes]) -> None:
    alice = Node(ALICE, BOXED, peers)
    alice.handle(RoundStarted(7), 0.0)
    assert alice.handle(ContributionReady(7), 40.0) == [GoAlone(7, "no peer is live")]


def test_the_odd_node_out_goes_on_at_once() -> None:
    alice = started()
    for now in (30.0, 31.0):
        alice.handle(TimerFired(), now)
        if alice.sent:
            peer, proposal = _only_proposal(alice)
            alice.hear(peer, Refuse(proposal.session, "matched"), now)
            while alice.sent:
                peer, proposal = _only_proposal(alice)
                alice.hear(peer, Refuse(proposal.session, "matched"), now)
    assert alice.handle(ContributionReady(7), 40.0) == [GoAlone(7, "no peer is free")]


def test_a_partner_lost_early_is_replaced() -> None:
    alice = started()
    peer, proposal = alice.propose(30.0)
    alice.hear(peer, Accept(proposal.session, 10.0), 30.1)
    alice.handle(PeerLost(peer), 31.0)
    ((second, message),) = alice.sent
    assert second != peer
    assert isinstance(message, Propose)


def test_a_connection_that_breaks_once_may_be_made_again() -> None:
    alice, _ = matched()
    alice.handle(PeerLost(BOB), 31.0)
    assert alice.propose(33.5)[0] == BOB
    alice.handle(PeerLost(BOB), 34.0)
    assert alice.handle(ContributionReady(7), 40.0) == [GoAlone(7, "no peer is free")]


def test_a_partner_that_is_no_longer_live_is_let_go() -> None:
    alice, session = matched()
    alice.handle(PeersChanged(frozenset((CAROL,))), 31.0)
    assert alice.sent[0] == (BOB, Withdraw(session))
    assert alice.sent[1][0] == CAROL


def test_a_partner_that_was_restarted_may_propose_again() -> None:
    alice, _ = matched()
    alice.hear(BOB, Propose(HIGH, 8.0), 33.0)
    assert isinstance(alice.sent[-1][1], Accept)
    assert alice.machine.partner == BOB


def test_a_new_round_ends_what_was_agreed() -> None:
    alice, session = matched()
    alice.handle(RoundStarted(8), 35.0)
    assert alice.sent == [(BOB, Withdraw(session))]
    assert alice.handle(ExchangeEnded(session, committed=False), 36.0) == []
    assert alice.machine.round == 8


def test_readiness_for_an_unknown_session_is_answered_with_a_withdrawal() -> None:
    alice = started()
    alice.hear(BOB, Ready(LOW), 1.0)
    assert alice.sent == [(BOB, Withdraw(LOW))]
    alice.hear(BOB, Withdraw(LOW), 1.0)
    assert alice.sent == []


# Dishonest peers


def test_a_flood_is_cut_off() -> None:
    alice = started()
    for _ in range(MAX_MESSAGES):
        alice.hear(BOB, Withdraw(LOW), 1.0)
    with pytest.raises(RemoteProtocolError, match="more than"):
        alice.hear(BOB, Withdraw(LOW), 1.5)
    assert alice.hear(CAROL, Withdraw(LOW), 1.5) == []
    assert alice.hear(BOB, Withdraw(LOW), 2.1) == []


def test_a_session_of_two_others_is_none_of_ones_business() -> None:
    alice, session = matched()
    for message in (Withdraw(session), Ready(session), Accept(session, 1.0), Begin(session)):
        with pytest.raises(RemoteProtocolError):
            alice.hear(MALLORY, message, 31.0)
    assert alice.machine.partner == BOB


def test_nobody_begins_an_exchange_before_we_are_ready() -> None:
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 40.0), 1.0)
    with pytest.raises(RemoteProtocolError):
        alice.hear(BOB, Begin(MIDDLE), 2.0)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e9])
def test_durations_are_finite_and_bounded(seconds: float) -> None:
    for message in (Propose(LOW, seconds), Accept(LOW, seconds), Busy(LOW, seconds)):
        with pytest.raises(RemoteProtocolError):
            decode_message(encode_message(message))


SESSIONS = st.sampled_from([LOW, MIDDLE, HIGH])
SECONDS = st.one_of(st.none(), st.floats(0, 100))
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Propose, SESSIONS, SECONDS),
    st.builds(Accept, SESSIONS, SECONDS),
    st.builds(Refuse, SESSIONS, st.sampled_from(["matched", "away"])),
    st.builds(Busy, SESSIONS, st.floats(0, 100)),
    st.builds(Withdraw, SESSIONS),
    st.builds(Ready, SESSIONS),
    st.builds(Begin, SESSIONS),
)


@given(MESSAGES)
def test_messages_survive_the_wire_and_are_small(message: Message) -> None:
    payload = encode_message(message)
    assert len(payload) <= MAX_MESSAGE_BYTES
    assert decode_message(payload) == message


@given(st.one_of(st.binary(max_size=100), st.tuples(MESSAGES, st.integers(0, 200), st.integers(0, 255))))
def test_rubbish_raises_remote_protocol_errors_alone(rubbish: bytes | tuple[Message, int, int]) -> None:
    if isinstance(rubbish, tuple):
        message, position, value = rubbish
        payload = bytearray(encode_message(message))
        payload[position % len(payload)] = value
        rubbish = bytes(payload)
    node = started()
    with contextlib.suppress(RemoteProtocolError):
        node.handle(MessageReceived(BOB, rubbish), 1.0)


# A walk through everything: a peer that sends anything at any time, and a node that must keep its promises


def _random_message(rng: random.Random, sessions: list[bytes]) -> Message:
    session, seconds = rng.choice(sessions), rng.choice([0.0, rng.uniform(0, 100)])
    some: list[Message] = [
        Propose(session, rng.choice([seconds, None])),
        Accept(session, rng.choice([seconds, None])),
        Refuse(session, rng.choice(["matched", "away"])),
        Busy(session, seconds),
        Withdraw(session),
        Ready(session),
        Begin(session),
    ]
    return rng.choice(some)


@pytest.mark.parametrize("config", [BOXED, STEPS])
@pytest.mark.parametrize("seed", range(10))
def test_whatever_peers_do_a_round_ends_by_its_deadline(seed: int, config: RoundConfig) -> None:
    for walk in range(100):
        _walk(random.Random(100 * seed + walk), config)


def _walk(rng: random.Random, config: RoundConfig) -> None:
    machine = Pairing(ALICE, config, rng)
    now, timer, ready_at, outcomes, tries = 0.0, math.inf, math.inf, 0, 0
    sessions = [LOW, MIDDLE, HIGH]
    exchange: StartExchange | None = None

    def handle(event: Event) -> None:
        nonlocal timer, outcomes, exchange, tries
        before = machine.state
        try:
            outputs = machine.handle(event, now)
        except RemoteProtocolError:
            assert machine.state is before
            return
        assert machine.state is before or machine.state in _reachable(before)
        for output in outputs:
            match output:
                case SetTimer(at=at):
                    timer = at
                case SendMessage(payload=payload):
                    sessions.append(decode_message(payload).session)
                case StartExchange():
                    assert exchange is None
                    assert now <= ready_at + WAIT_SHARE * config.exchange_seconds
                    assert output.deadline == ready_at + config.exchange_seconds
                    exchange, tries = output, tries + 1
                case GoAlone():
                    in_time = now <= ready_at + WAIT_SHARE * config.exchange_seconds
                    assert exchange is None
                    assert in_time or isinstance(event, ExchangeEnded)
                    outcomes += 1
                case FinishRound():
                    assert ready_at == math.inf

    handle(PeersChanged(frozenset((BOB, CAROL))))
    handle(RoundStarted(0))
    for _ in range(rng.randrange(60)):
        now = min(now + rng.choice([0.0, rng.uniform(0, 5)]), timer)
        action = rng.randrange(10)
        if exchange is not None and rng.random() < 0.3:  # it ends, as it may
            ended, exchange = exchange, None
            is_committed = rng.random() < 0.3
            outcomes += is_committed
            handle(ExchangeEnded(ended.session, is_committed, is_broken=not is_committed and rng.random() < 0.8))
            continue
        if now >= timer:
            timer = math.inf
            handle(TimerFired())
        elif action == 0 and ready_at == math.inf:
            ready_at = now
            handle(ContributionReady(0))
        elif action == 1:
            handle(PeerLost(rng.choice([BOB, CAROL])))
        elif action == 2:
            handle(PeersChanged(frozenset(rng.sample([BOB, CAROL], rng.randrange(3)))))
        else:
            payload = encode_message(_random_message(rng, sessions))
            handle(MessageReceived(rng.choice([BOB, CAROL, MALLORY]), payload))
    if ready_at == math.inf:
        ready_at = now
        handle(ContributionReady(0))
    while not outcomes:  # from here on nobody says a word
        if exchange is not None:
            ended, exchange = exchange, None
            handle(ExchangeEnded(ended.session, committed=False, is_broken=True))
        else:
            assert timer < math.inf
            now, timer = max(now, timer), math.inf
            handle(TimerFired())
    assert outcomes == 1, "one outer step a round"
    assert tries <= 2
    assert machine.state is State.IDLE


def _reachable(state: State) -> set[State]:
    """The states that one event may lead to, through others."""
    reached = {state}
    while fresh := {after for step in reached for after in TRANSITIONS[step].values()} - reached:
        reached |= fresh
    return reached


def test_every_state_can_be_reached_and_left() -> None:
    assert _reachable(State.IDLE) == set(State)
    assert all(State.SEEKING in _reachable(state) for state in State)

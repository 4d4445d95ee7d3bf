"""The end of a round: an exchange, a second try, or an outer step alone."""

from __future__ import annotations

import msgspec
import pytest

from farandole.protocol.rounds.pairing import MAX_LATER_OFFER, OFFER_SHARE
from farandole.protocol.rounds.pairing_events import (
    ContributionReady,
    ExchangeEnded,
    GoAlone,
    Missed,
    PeersChanged,
    RoundStarted,
    SendMessage,
    StartExchange,
    State,
)
from farandole.protocol.rounds.pairing_messages import (
    Agree,
    Begin,
    Busy,
    Decline,
    Propose,
    Ready,
    Withdraw,
    encode_message,
)
from farandole.protocol.rounds.pairing_waits import ANSWER_SHARE, MEETING_SHARE, WAIT_SHARE
from farandole.protocol.trainer.trainer_messages import FinishRound
from farandole.protocol.wire.timers import TimerFired

from .nodes import (
    ALICE,
    BOB,
    BOXED,
    CAROL,
    DAVE,
    HIGH,
    LOW,
    MALLORY,
    MIDDLE,
    STEPS,
    Node,
    matched,
    only_proposal,
    started,
)


def begun(
    session: bytes, peer: bytes, at: float, *, is_initiator: bool = True, is_later: bool = False
) -> StartExchange:
    """Return the start of an exchange of round 7, the first or a later one, for which the node is ready at 40 s."""
    offer_by = at + (MAX_LATER_OFFER if is_later else OFFER_SHARE * (70.0 - at))
    return StartExchange(session, peer, 7, is_initiator, 70.0, offer_by)


def test_the_exchange_begins_when_both_are_ready() -> None:
    alice, session = matched()
    alice.handle(ContributionReady(7), 40.0)
    assert alice.sent == [(BOB, Ready(session))]
    alice.hear(BOB, Ready(session), 42.0)
    assert alice.sent == [(BOB, Begin(session))]
    assert alice.outputs[1:] == [begun(session, BOB, 42.0)]
    assert alice.handle(ExchangeEnded(session, BOB, committed=True), 45.0) == []
    assert alice.machine.state is State.IDLE


def test_the_responder_begins_when_it_is_told_to() -> None:
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 40.0), 1.0)
    alice.hear(BOB, Ready(MIDDLE), 39.0)
    alice.handle(ContributionReady(7), 40.0)
    assert alice.outputs == [SendMessage(BOB, encode_message(Ready(MIDDLE)))]
    alice.hear(BOB, Begin(MIDDLE), 40.1)
    assert alice.outputs == [begun(MIDDLE, BOB, 40.1, is_initiator=False)]


def test_a_step_alone_says_why_the_exchange_failed() -> None:
    alice, session = exchanging()
    ended = alice.handle(ExchangeEnded(session, BOB, committed=False, reason="127 MB did not fit into 30 s"), 69.0)
    assert ended == [GoAlone(7, "the exchange failed: 127 MB did not fit into 30 s")]


def exchanging() -> tuple[Node, bytes]:
    """Return Alice, ready at 40, in an exchange with Bob, while Carol is present; and the session."""
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 40.0), 1.0)
    alice.hear(BOB, Ready(MIDDLE), 39.0)
    alice.handle(ContributionReady(7), 40.0)
    alice.hear(BOB, Begin(MIDDLE), 40.1)
    assert alice.machine.state is State.EXCHANGING
    return alice, MIDDLE


@pytest.mark.parametrize("is_committed", [True, False])
def test_after_an_exchange_that_broke_one_other_partner_is_met_by_the_same_deadline(is_committed: bool) -> None:
    alice, session = exchanging()
    alice.handle(ExchangeEnded(session, BOB, committed=False, is_broken=True), 42.0)
    peer, proposal = only_proposal(alice)
    assert (peer, proposal.seconds_left) == (CAROL, 0.0)
    alice.hear(CAROL, Agree(proposal.session, 0.0), 42.1)
    assert alice.sent == [(CAROL, Ready(proposal.session))]
    alice.hear(CAROL, Ready(proposal.session), 42.2)
    assert alice.outputs[1:] == [begun(proposal.session, CAROL, 42.2, is_later=True)]
    ended = alice.handle(ExchangeEnded(proposal.session, CAROL, is_committed), 45.0)
    assert ended == ([] if is_committed else [GoAlone(7, "the exchange failed")])


def test_an_exchange_that_was_refused_or_took_too_long_is_not_repeated() -> None:
    alice, session = exchanging()
    ended = alice.handle(ExchangeEnded(session, BOB, committed=False, is_broken=False), 42.0)
    assert ended == [GoAlone(7, "the exchange failed")]
    alice, session = exchanging()
    ended = alice.handle(ExchangeEnded(session, BOB, committed=False, is_broken=True), 40.0 + WAIT_SHARE * 30.0)
    assert ended == [GoAlone(7, "the exchange failed")]


def test_who_finds_nobody_for_a_second_try_goes_on_alone_when_its_waiting_is_over() -> None:
    alice, session = exchanging()
    alice.handle(ExchangeEnded(session, BOB, committed=False, is_broken=True), 42.0)
    _, proposal = only_proposal(alice)
    alice.hear(CAROL, Busy(proposal.session, 100.0), 42.1)
    alice.hear(BOB, Propose(HIGH, 0.0), 42.2)  # the connection broke, and he is still present
    assert alice.machine.partner == BOB
    ended = alice.handle(TimerFired(), 40.0 + WAIT_SHARE * 30.0)
    assert ended[1:] == [Missed(BOB), GoAlone(7, "the exchange failed, and the partner was not ready in time")]


def test_a_partner_that_is_not_ready_is_left_when_the_share_of_waiting_is_over() -> None:
    alice, session = matched()
    alice.handle(ContributionReady(7), 40.0)
    assert alice.handle(TimerFired(), 40.0 + WAIT_SHARE * 30.0 - 0.1) == []
    alice.handle(TimerFired(), 40.0 + WAIT_SHARE * 30.0)
    assert alice.sent == [(BOB, Withdraw(session))]
    assert alice.outputs[1:] == [Missed(BOB), GoAlone(7, "the partner was not ready in time")]


def late_partner(seconds_left: float, *, has_exchanged: bool) -> tuple[Node, bytes]:
    """Return Alice, who is ready at 40 s, with a partner that agreed at 30 s, and another live peer."""
    alice, session = matched(seconds_left=seconds_left)
    if has_exchanged:
        alice.handle(ExchangeEnded(HIGH, BOB, committed=True), 30.5)
    alice.handle(PeersChanged(frozenset((BOB, CAROL))), 31.0)
    alice.handle(ContributionReady(7), 40.0)
    assert alice.sent == [(BOB, Ready(session))]
    return alice, session


def let_down(seconds_left: float = 0.0) -> tuple[Node, Propose]:
    """Return Alice, ready at 40 s, whom Bob has let down, and her proposal to Carol at 47.5 s."""
    alice, session = late_partner(seconds_left, has_exchanged=False)
    assert alice.handle(TimerFired(), 47.4) == []
    alice.handle(TimerFired(), 40.0 + MEETING_SHARE * 30.0)
    (withdrawn, (peer, proposal)) = alice.sent
    assert (withdrawn, peer) == ((BOB, Withdraw(session)), CAROL)
    assert isinstance(proposal, Propose)
    return alice, proposal


@pytest.mark.parametrize("seconds_left", [0.0, 14.0, 80_000.0])
def test_a_partner_that_is_late_and_never_came_is_left_for_another(seconds_left: float) -> None:
    alice, proposal = let_down(seconds_left)
    alice.hear(CAROL, Agree(proposal.session, 0.0), 47.5)
    alice.hear(CAROL, Ready(proposal.session), 47.5)
    assert alice.outputs[1:] == [begun(proposal.session, CAROL, 47.5, is_later=True)]


def test_a_second_partner_has_a_moment_to_show_that_it_is_ready_and_a_ready_peer_takes_its_place() -> None:
    alice, proposal = let_down()
    alice.handle(PeersChanged(frozenset((BOB, CAROL, MALLORY))), 47.5)
    alice.hear(MALLORY, Propose(LOW, 3.0), 47.5)
    assert [type(answer) for _, answer in alice.sent] == [Busy], "it has yet to end its inner steps"
    alice.hear(CAROL, Agree(proposal.session, 0.0), 47.6)
    assert alice.machine.partner == CAROL
    alice.handle(TimerFired(), 47.6 + ANSWER_SHARE * 40.0)
    (withdrawn, (peer, third)) = alice.sent
    assert (withdrawn, peer) == ((CAROL, Withdraw(proposal.session)), MALLORY)
    alice.hear(MALLORY, Agree(third.session, 0.0), 52.7)
    alice.handle(PeersChanged(frozenset((BOB, CAROL, MALLORY, DAVE))), 52.7)
    alice.hear(DAVE, Propose(LOW, 0.0), 52.8)
    assert alice.machine.partner == DAVE
    alice.hear(DAVE, Begin(LOW), 52.9)
    assert alice.machine.state is State.EXCHANGING


@pytest.mark.parametrize("lie", [11.0, 80_000.0])
def test_who_is_late_by_its_own_word_after_another_failed_is_left_at_once(lie: float) -> None:
    alice, proposal = let_down()
    alice.hear(CAROL, Agree(proposal.session, lie), 47.6)
    assert alice.sent == [(CAROL, Withdraw(proposal.session))]
    assert alice.machine.partner is None


def test_time_lost_on_a_partner_that_did_not_come_is_taken_off_the_next_box() -> None:
    alice, _ = let_down()
    alice.handle(TimerFired(), 55.0)
    assert alice.outputs[-1] == GoAlone(7, "the partner was not ready in time, and no peer is free")
    alice.handle(RoundStarted(8), 56.0)
    assert alice.machine.current.ends_at == 40.0 + 40.0


def test_a_partner_that_is_late_is_awaited_if_it_has_come_before_or_nobody_else_can_be_asked() -> None:
    alice, session = late_partner(10.0, has_exchanged=True)
    assert alice.handle(TimerFired(), 53.9) == []
    alice.hear(BOB, Ready(session), 54.0)
    assert alice.outputs[1:] == [begun(session, BOB, 54.0)]
    alice, session = matched()
    alice.handle(ContributionReady(7), 40.0)
    assert alice.handle(TimerFired(), 40.0 + MEETING_SHARE * 30.0) == []
    alice.hear(BOB, Ready(session), 54.0)
    assert alice.outputs[1:] == [begun(session, BOB, 54.0)]


def test_no_wait_is_longer_than_two_rounds_allow() -> None:
    """Otherwise a partner that never comes also takes the time in which the next one is found."""
    config = msgspec.structs.replace(BOXED, overlap=True, exchange_seconds=400.0)
    alice, _ = matched(config, seconds_left=80_000.0)
    alice.handle(ContributionReady(7), 40.0)
    assert alice.handle(TimerFired(), 40.0 + WAIT_SHARE * 80.0 - 0.1) == []
    alice.handle(TimerFired(), 40.0 + WAIT_SHARE * 80.0)
    assert alice.outputs[1:] == [Missed(BOB), GoAlone(7, "the partner was not ready in time")]
    alice, session = matched(config, seconds_left=10.0)
    alice.handle(ContributionReady(7), 40.0)
    alice.hear(BOB, Ready(session), 41.0)
    (start,) = [output for output in alice.outputs if isinstance(output, StartExchange)]
    assert (start.offer_by, start.deadline) == (41.0 + OFFER_SHARE * 80.0, 440.0)


def test_a_last_resort_is_given_up_for_a_better_peer_and_for_no_other() -> None:
    alice = started(ALICE, BOXED, BOB)
    alice.hear(BOB, Propose(MIDDLE, 40.0), 1.0)
    alice.handle(ExchangeEnded(MIDDLE, BOB, committed=False), 41.0)
    alice.handle(RoundStarted(8), 100.0)
    alice.hear(BOB, Propose(LOW, 35.0), 101.0)
    assert alice.machine.partner == BOB
    alice.handle(PeersChanged(frozenset((BOB, CAROL))), 102.0)
    alice.hear(CAROL, Propose(HIGH, 35.0), 103.0)
    assert alice.machine.partner == CAROL
    alice.hear(BOB, Propose(MIDDLE, 35.0), 104.0)
    assert alice.machine.partner == CAROL


@pytest.mark.parametrize("peers", [frozenset(), frozenset((ALICE,))])
def test_a_node_without_peers_goes_on_at_once(peers: frozenset[bytes]) -> None:
    alice = Node(ALICE, BOXED, peers)
    alice.handle(RoundStarted(7), 0.0)
    assert alice.handle(ContributionReady(7), 40.0) == [GoAlone(7, "no peer is live")]


def test_a_new_round_ends_what_was_agreed_and_unknown_sessions_are_withdrawn() -> None:
    alice, session = matched()
    alice.handle(RoundStarted(8), 35.0)
    assert alice.sent == [(BOB, Withdraw(session))]
    assert alice.machine.round == 8
    alice = started()
    alice.hear(BOB, Ready(LOW), 1.0)
    assert alice.sent == [(BOB, Withdraw(LOW))]
    alice.hear(BOB, Withdraw(LOW), 1.0)
    assert alice.sent == []


# The ends of partners' rounds: with boxes, without them, and when a round overlaps with the exchange before.


def test_partners_meet_in_the_middle_of_their_boxes_and_one_that_is_let_go_leaves_the_box_as_it_was() -> None:
    alice, _ = matched(seconds_left=4.0)  # Alice's box ends at 40, Bob's at 34
    assert alice.machine.current.ends_at == pytest.approx(37.0)
    assert alice.handle(TimerFired(), 36.9) == []
    assert alice.handle(TimerFired(), 37.0) == [FinishRound(7)]
    assert alice.handle(TimerFired(), 38.0) == []
    alice, session = matched(seconds_left=4.0)
    assert alice.machine.current.ends_at == pytest.approx(37.0)
    alice.hear(BOB, Withdraw(session), 31.0)
    assert alice.machine.current.ends_at == 40.0


@pytest.mark.parametrize(("seconds_left", "end"), [(1_000.0, 60.0), (0.0, 35.0)])
def test_a_box_moves_by_half_its_length_at_most(seconds_left: float, end: float) -> None:
    alice, _ = matched(seconds_left=seconds_left)
    assert alice.machine.current.ends_at == end


def test_a_partner_that_is_ready_early_is_met_while_it_is_patient() -> None:
    config = msgspec.structs.replace(BOXED, exchange_seconds=8.0)
    alice, session = matched(config, seconds_left=10.0)
    alice.hear(BOB, Ready(session), 31.0)
    assert alice.machine.current.ends_at == 31.0 + MEETING_SHARE * 8.0


def test_without_boxes_ends_far_apart_do_not_pair() -> None:
    alice = started(ALICE, STEPS, BOB)
    peer, proposal = only_proposal(alice)  # at once: it cannot estimate the length of a round yet
    alice.hear(peer, Decline(proposal.session, "matched"), 0.1)
    alice.handle(ContributionReady(7), 100.0)
    alice.handle(RoundStarted(8), 101.0)
    alice.hear(BOB, Propose(LOW, 10.0), 102.0)  # Alice has 99 seconds left
    ((_, answer),) = alice.sent
    assert isinstance(answer, Busy)
    assert answer.retry_after == pytest.approx(99 - 10 - 15 * 7 / 8)  # an eighth is kept for those that come late
    alice.hear(BOB, Propose(LOW, 90.0), 103.0)
    assert alice.machine.partner == BOB


def test_a_round_that_began_before_its_partner_is_sought_ends_in_time() -> None:
    alice, session = matched()
    alice.handle(ContributionReady(7), 40.0)
    alice.hear(BOB, Ready(session), 48.0)
    alice.handle(RoundStarted(8, at=40.0), 48.0)
    assert alice.machine.round == 7, "the partner's offer may still fail to come"
    alice.handle(TimerFired(), 48.0 + 1.25 * OFFER_SHARE * (70.0 - 48.0))
    assert (alice.machine.round, alice.machine.current.ends_at) == (8, 80.0)
    ended = alice.handle(ExchangeEnded(session, BOB, committed=False, is_broken=True, round=7), 60.0)
    assert ended == [GoAlone(7, "the exchange failed")]
    alice.hear(BOB, Propose(LOW, 10.0), 60.0)
    assert alice.machine.partner == BOB


def test_a_partner_that_offers_nothing_is_replaced_while_the_next_round_runs() -> None:
    alice, session = exchanging()
    alice.handle(RoundStarted(8, at=40.0), 40.1)
    alice.handle(ExchangeEnded(session, BOB, committed=False, is_broken=True, round=7), 47.6)
    peer, proposal = only_proposal(alice)
    assert peer == CAROL
    alice.hear(CAROL, Agree(proposal.session, 0.0), 47.7)
    alice.hear(CAROL, Ready(proposal.session), 47.7)
    assert alice.outputs[1:] == [begun(proposal.session, CAROL, 47.7, is_later=True)]
    assert alice.handle(ExchangeEnded(proposal.session, CAROL, committed=True, round=7), 49.0) == []
    assert alice.machine.round == 8

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from farandole.protocol.state.entries import Delta, Kind, Signed
from farandole.protocol.state.gossip import (
    AVOID_SECONDS,
    DISPLACING_BURST,
    DISPLACING_RATE,
    ENOUGH_CANDIDATES,
    FAULT_BURST,
    INBOUND_LIMITS,
    MAX_FORWARDED,
    SLICE_ITEMS,
    Gossip,
    InboundMeter,
    is_worth_forwarding,
    slices_of,
)
from farandole.protocol.state.liveness import PEERS_A_SECOND, PERIODS_OF_SILENCE, SUSPICION_SECONDS, Liveness
from farandole.protocol.state.push import (
    CHOICE_SECONDS,
    CHOOSER_SECONDS,
    MAX_CHOOSERS,
    MAX_ITEMS_A_TICK,
    MAX_PENDING,
    MAX_PUSH_BYTES,
    NUM_CHOSEN,
    QUIET_SECONDS,
    TICK_SECONDS,
    Batch,
    Push,
    decode_batch,
)
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.errors import FloodError, RemoteProtocolError

from ..authors import CREATOR, NOW, RUN_ID, author_of, beat, member, notice, tick_at

ME, ALICE, BOB = author_of(1), author_of(2), author_of(3)


def gossip_with(*items: Signed) -> Gossip:
    gossip = Gossip(RunState(RUN_ID, CREATOR), ME, random.Random(1), base_period=2.0)
    gossip.merge(Delta(items), ALICE, NOW, 0.0, forward=False)
    return gossip


def pushed(gossip: Gossip, now: float = 0.1) -> set[Signed]:
    messages = gossip.tick(NOW + now, now)
    return {entry for _, message in messages for entry in decode_batch(message).delta.entries}


def test_live_members_are_talked_to_and_nobody_else() -> None:
    gossip = gossip_with(member(2), beat(2), member(3), member(4, left=True), beat(4), beat(5), beat(1), member(1))
    assert gossip.candidates(1.0) == [ALICE]
    assert gossip.choose_partner(1.0) == ALICE
    assert {gossip.choose_silent(1.0) for _ in range(50)} == {BOB, None}
    assert gossip.candidates(7.0) == []
    assert gossip.choose_partner(7.0) is None
    assert {gossip.choose_silent(7.0) for _ in range(50)} == {ALICE, BOB}


def test_the_unreachable_are_left_alone_for_a_while() -> None:
    numbers = range(2, 2 + ENOUGH_CANDIDATES + 1)
    gossip = gossip_with(*map(member, numbers), *map(beat, numbers))
    for entry in map(beat, numbers):
        gossip.reached(entry.author)
    gossip.unreachable(ALICE, 0.5)
    assert ALICE not in gossip.candidates(1.0)
    assert gossip.liveness.is_live(ALICE, 1.0), "that is not a judgement of its life"
    gossip.reached(ALICE)
    assert ALICE in gossip.candidates(1.0)
    gossip.unreachable(ALICE, 1.0)
    later = 1.1 + AVOID_SECONDS
    newer = tuple(beat(number, tick_at(Kind.BEAT) + 40) for number in numbers)
    gossip.merge(Delta(newer), ALICE, NOW, later)
    assert ALICE not in gossip.candidates(later)
    gossip.tick(NOW, later)
    assert ALICE in gossip.candidates(later)


def test_in_a_run_of_few_nobody_falls_silent_towards_another() -> None:
    gossip = gossip_with(member(2), beat(2))
    gossip.unreachable(ALICE, 0.5)
    gossip.liveness.suspect(ALICE, 0.5)
    gossip.push.queue([notice(1)], None)
    assert pushed(gossip, 1.0) == {notice(1)}
    assert gossip.choose_partner(1.0) == ALICE


def test_peers_that_were_only_heard_of_never_outnumber_those_that_were_reached() -> None:
    numbers = range(2, 62)
    gossip = gossip_with(*map(member, numbers), *map(beat, numbers))
    assert len(gossip.candidates(0.5)) == 60, "none was reached yet"
    gossip.reached(ALICE)
    for _ in range(20):
        candidates = gossip.candidates(0.5)
        assert ALICE in candidates
        assert len(candidates) == 2


def test_news_is_pushed_on_and_the_rest_is_not() -> None:
    gossip = gossip_with(member(2), beat(2), member(3), beat(3))
    old = member(3, tick_at(Kind.MEMBER) - 1)
    batch = Batch(True, Delta((notice(3), member(2), old)))
    gossip.receive_push(ALICE, msgspec.msgpack.encode(batch), NOW, 0.1)
    assert pushed(gossip) == {notice(3)}
    assert pushed(gossip) == set()


def test_what_a_peer_crowds_in_is_pushed_on_within_limits_and_costs_no_other_peer_anything() -> None:
    """Otherwise authors that a liar has invented go round for ever between tables that cannot hold all of them."""
    gossip = Gossip(RunState(RUN_ID, CREATOR, max_authors=200), ME, random.Random(1), base_period=2.0)
    known = [*map(member, range(2, 201)), beat(2), beat(3), member(1)]
    gossip.merge(Delta(tuple(known)), ALICE, NOW, 0.0, forward=False, is_asked=True)
    assert gossip.state.places.is_full
    invented = [member(number) for number in range(1_000, 1_040)]
    gossip.merge(Delta(tuple(invented)), BOB, NOW, 0.1)
    assert all(entry.author in gossip.state for entry in invented), "the table is shared among who brings authors"
    assert len(pushed(gossip) & set(invented)) == DISPLACING_BURST
    honest = member(2_000)
    gossip.merge(Delta((honest,)), author_of(4), NOW, 0.2)
    assert pushed(gossip, 0.2) == {honest}
    news = beat(1_039)
    gossip.merge(Delta((news,)), BOB, NOW, 0.3)
    assert pushed(gossip, 0.3) == {news}, "of an author that is in the table"
    late = member(1_100)
    gossip.merge(Delta((late,)), BOB, NOW, 0.1 + 1 / DISPLACING_RATE)
    assert pushed(gossip, 3.0) == {late}


def test_faults_are_counted_and_a_flooder_is_cut_off() -> None:
    gossip = gossip_with()
    bad = Signed(BOB, member(2).body, bytes(64))
    gossip.merge(Delta((bad, notice(2))), ALICE, NOW, 0.0)
    assert gossip.state.get(ALICE, Kind.CHECKPOINT) is not None, "what is good among it is kept"
    with pytest.raises(RemoteProtocolError, match="too many"):
        gossip.merge(Delta((bad,) * FAULT_BURST), ALICE, NOW, 0.0)
    with pytest.raises(RemoteProtocolError, match="too many"):
        gossip.merge(Delta((notice(3),)), ALICE, NOW, 1.0)
    gossip.merge(Delta((notice(3),)), BOB, NOW, 1.0)
    gossip.merge(Delta((notice(3),)), ALICE, NOW, 60.0)


def test_honest_staleness_is_never_a_fault() -> None:
    gossip = gossip_with(member(2), member(3, device="a"), member(3, device="b"))
    stale = (member(2, 5), member(2, tick_at(Kind.MEMBER) + 500), notice(3), member(2))
    for _ in range(100):
        gossip.merge(Delta(stale), ALICE, NOW, 0.0)


def test_much_at_once_is_taken_in_slices_and_not_forwarded() -> None:
    much = Delta(tuple(notice(number, index) for number in range(1, 50) for index in range(8)))
    parts = list(slices_of(much))
    assert [entry for part in parts for entry in part.entries] == list(much.entries)
    assert all(len(part.entries) <= SLICE_ITEMS for part in parts)
    assert not is_worth_forwarding(much)
    assert is_worth_forwarding(Delta(much.entries[:MAX_FORWARDED]))


def test_the_dead_are_forgotten_when_their_heartbeat_expires() -> None:
    gossip = gossip_with(member(2), beat(2), beat(3))
    gossip.tick(NOW + 100, 100.0)
    assert gossip.liveness.seconds_since(BOB, 100.0) == 100.0
    gossip.tick(NOW + 121, 121.0)
    assert gossip.liveness.seconds_since(BOB, 121.0) is None


# The valid gossip that a peer may send: more than honest peers send, less than a flood.

PEER, OTHER = b"p" * 32, b"o" * 32
HEARTBEAT_BYTES = 130


def test_an_honest_peer_never_reaches_the_limits() -> None:
    """The most that a peer forwards, at the pace of its fastest ticks, for an hour; then a minute's worth at once."""
    meter, now = InboundMeter(), 0.0
    for _ in range(3_600):
        now += 0.75 * TICK_SECONDS
        meter.count(PEER, now, messages=2, bytes=MAX_ITEMS_A_TICK * HEARTBEAT_BYTES, entries=MAX_ITEMS_A_TICK)
    now += 60.0
    for _ in range(120):
        meter.count(PEER, now, messages=1, bytes=40 * HEARTBEAT_BYTES, entries=40)


@pytest.mark.parametrize("num_items", [0, 1, 20])
def test_a_flood_is_noticed_within_a_second_whatever_is_in_it(num_items: int) -> None:
    meter, now = InboundMeter(), 0.0
    with pytest.raises(FloodError):
        while now < 1.0:
            now += 1e-4
            meter.count(PEER, now, messages=1, bytes=20 + num_items * HEARTBEAT_BYTES, entries=num_items)
    meter.count(OTHER, now, messages=1, bytes=1_000, entries=8)


def test_large_messages_are_a_flood_too() -> None:
    meter = InboundMeter()
    with pytest.raises(FloodError, match="bytes"):
        for _ in range(int(INBOUND_LIMITS["messages"][0])):
            meter.count(PEER, 0.0, messages=1, bytes=16_000)
    with pytest.raises(FloodError, match="entries"):
        for _ in range(int(INBOUND_LIMITS["entries"][0])):
            meter.count(PEER, 0.0, entries=100)


def test_a_peer_lives_for_three_periods_after_the_last_heartbeat_that_advanced() -> None:
    liveness = Liveness(base_period=2.0)
    liveness.beat(ALICE, 100, now=0.0)
    liveness.beat(ALICE, 101, now=2.0)
    assert liveness.live(8.0) == [ALICE]
    assert not liveness.is_live(ALICE, 8.1)
    assert liveness.live(8.1) == []
    assert liveness.seconds_since(ALICE, 9.0) == 7.0
    assert liveness.seconds_since(BOB, 9.0) is None
    liveness = Liveness(base_period=2.0)
    liveness.beat(ALICE, 100, now=0.0)
    liveness.beat(ALICE, 100, now=5.0)
    liveness.beat(ALICE, 99, now=5.0)
    assert not liveness.is_live(ALICE, 6.1)
    liveness.beat(ALICE, 101, now=7.0)
    assert liveness.is_live(ALICE, 7.0)


def test_the_period_grows_with_the_run() -> None:
    liveness = Liveness()
    assert liveness.period == 10.0
    for number in range(999):
        liveness.beat(number.to_bytes(32, "big"), 1, now=0.0)
    assert liveness.period == 1_000 / PEERS_A_SECOND
    assert liveness.silence == PERIODS_OF_SILENCE * liveness.period


def test_a_suspect_is_cleared_by_contact_or_a_later_heartbeat() -> None:
    liveness = Liveness()
    liveness.suspect(BOB, 0.0)  # not known, so there is nothing to suspect
    assert not liveness.is_suspect(BOB)
    liveness.beat(ALICE, 1, now=0.0)
    liveness.suspect(ALICE, 1.0)
    liveness.beat(ALICE, 2, now=2.0)
    assert liveness.is_suspect(ALICE), "that heartbeat may have been under way"
    liveness.beat(ALICE, 3, now=1.0 + SUSPICION_SECONDS)
    assert not liveness.is_suspect(ALICE)
    liveness.suspect(ALICE, 10.0)
    liveness.trust(ALICE)
    assert not liveness.is_suspect(ALICE)


def test_only_who_was_reached_is_present_until_it_is_found_unreachable() -> None:
    liveness = Liveness(base_period=2.0)
    liveness.trust(BOB)
    liveness.beat(ALICE, 1, now=0.0)
    liveness.beat(BOB, 1, now=0.0)
    assert liveness.present(1.0) == set(), "a contact before the first heartbeat is not remembered"
    liveness.trust(ALICE)
    assert liveness.present(1.0) == {ALICE}
    liveness.suspect(ALICE, 1.0)
    liveness.beat(ALICE, 2, now=1.0 + SUSPICION_SECONDS)
    assert not liveness.is_suspect(ALICE)
    assert liveness.present(7.0) == set(), "a heartbeat is no contact"
    liveness.trust(ALICE)
    assert liveness.present(7.0) == {ALICE}
    assert liveness.present(100.0) == set(), "nor is a contact a heartbeat"
    liveness.forget_all_but({BOB})
    assert not liveness.is_reached(ALICE)


PEERS = [author_of(number) for number in range(1, 10)]


@pytest.fixture
def push() -> Push:
    return Push(random.Random(1))


def tick(push: Push, now: float = 0.0, candidates: Sequence[bytes] = PEERS) -> list[tuple[bytes, bytes]]:
    return push.tick(now, lambda peer: peer in candidates, lambda: candidates)


def sent_to(outputs: list[tuple[bytes, bytes]]) -> dict[bytes, list[Signed]]:
    return {peer: list(decode_batch(message).delta.entries) for peer, message in outputs}


def test_what_is_new_goes_once_to_a_few_neighbours_in_one_batch(push: Push) -> None:
    push.queue([member(1), notice(2)], source=None)
    outputs = tick(push)
    assert len(outputs) == NUM_CHOSEN
    assert all(entries == [member(1), notice(2)] for entries in sent_to(outputs).values())
    assert all(decode_batch(message).is_choice for _, message in outputs)
    assert tick(push) == []


def test_nothing_goes_back_to_who_has_it(push: Push) -> None:
    tick(push)
    first, second = sorted(push.neighbours)
    push.queue([member(1), notice(2)], source=first)
    push.heard(second, Batch(False, Delta((notice(2),))), 0.0)
    assert sent_to(tick(push)) == {second: [member(1)]}


def test_alone_nothing_is_lost_before_somebody_comes(push: Push) -> None:
    push.queue([member(1)], source=None)
    assert tick(push, candidates=[]) == []
    assert sent_to(tick(push, candidates=PEERS[:1])) == {PEERS[0]: [member(1)]}


def test_a_link_carries_both_ways_while_it_is_chosen(push: Push) -> None:
    stranger = author_of(99)
    push.heard(stranger, Batch(True, Delta()), now=0.0)
    push.queue([member(1)], source=None)
    outputs = {peer: decode_batch(message).is_choice for peer, message in tick(push, 1.0)}
    assert outputs[stranger] is False
    assert len(outputs) == NUM_CHOSEN + 1
    push.heard(author_of(98), Batch(False, Delta()), now=1.0)
    assert author_of(98) not in push.neighbours, "it answers, it has not chosen"
    push.queue([notice(1)], source=None)
    assert stranger not in sent_to(tick(push, CHOOSER_SECONDS + 1.0))


def test_neighbours_that_die_or_have_had_their_time_are_replaced(push: Push) -> None:
    tick(push)
    before = push.neighbours
    tick(push, 1.0)
    assert push.neighbours == before
    dead = min(before)
    tick(push, 2.0, [peer for peer in PEERS if peer != dead])
    assert dead not in push.neighbours
    assert len(push.neighbours) == NUM_CHOSEN
    push.drop(min(push.neighbours))
    assert len(push.neighbours) == NUM_CHOSEN - 1
    seen = set(before)
    for step in range(1, 40):
        tick(push, step * CHOICE_SECONDS)
        seen |= push.neighbours
    assert seen == set(PEERS)


def test_a_neighbour_that_does_not_answer_is_replaced(push: Push) -> None:
    tick(push)
    quiet, heard = sorted(push.neighbours)
    push.heard(heard, Batch(False, Delta()), now=10.0)
    tick(push, QUIET_SECONDS + 1.0)
    assert heard in push.neighbours
    assert len(push.neighbours) == NUM_CHOSEN
    push.heard(heard, Batch(False, Delta()), now=QUIET_SECONDS + 1.0)
    others = set[bytes]()
    for step in range(1, 60):
        push.heard(heard, Batch(False, Delta()), step * QUIET_SECONDS)
        tick(push, step * QUIET_SECONDS + 1.0)
        others |= push.neighbours
    assert quiet in others, "it may be chosen again"


def test_bounds_hold_whatever_floods_in(push: Push) -> None:
    flood = [Signed(bytes(32), index.to_bytes(8, "big"), bytes(64)) for index in range(MAX_PENDING + 100)]
    push.queue(flood, source=None)
    outputs = tick(push)
    assert all(len(message) <= MAX_PUSH_BYTES for _, message in outputs)
    first = outputs[0][0]
    items = [item for peer, message in outputs if peer == first for item in decode_batch(message).delta.entries]
    assert items == flood[100 : 100 + MAX_ITEMS_A_TICK], "the oldest are given up, and the rest waits for its tick"
    assert tick(push) != []
    for number in range(20, 60):
        push.heard(author_of(number), Batch(True, Delta()), now=0.0)
    assert len(push.neighbours) == NUM_CHOSEN + MAX_CHOOSERS
    with pytest.raises(RemoteProtocolError):
        decode_batch(bytes(MAX_PUSH_BYTES + 1))


def test_who_floods_delays_its_own_alone(push: Push) -> None:
    flood = [Signed(bytes(32), index.to_bytes(8, "big"), bytes(64)) for index in range(MAX_PENDING + 100)]
    quiet = [member(number) for number in range(1, 20)]
    push.queue(flood[:-100], source=author_of(98))
    push.queue(quiet, source=author_of(97))
    push.queue(flood[-100:], source=author_of(98))
    [first, *_] = sent_to(tick(push)).values()
    assert set(quiet) < set(first)
    assert len(first) == MAX_ITEMS_A_TICK

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from farandole.protocol.state.entries import Delta, Signed
from farandole.protocol.state.push import (
    CHOICE_SECONDS,
    CHOOSER_SECONDS,
    MAX_CHOOSERS,
    MAX_ITEMS_A_TICK,
    MAX_PENDING,
    MAX_PUSH_BYTES,
    NUM_CHOSEN,
    QUIET_SECONDS,
    Batch,
    Push,
    decode_batch,
)
from farandole.protocol.wire.errors import RemoteProtocolError

from ..authors import author_of, member, notice

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

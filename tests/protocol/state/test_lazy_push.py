from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from farandole.protocol.state.entries import Delta, Proof, Signed
from farandole.protocol.state.gossip import Gossip
from farandole.protocol.state.push import (
    HAVE_PROTOCOL,
    ID_BYTES,
    MAX_AWAITED,
    MAX_HAVE_BYTES,
    MAX_IDS,
    MAX_ITEMS_A_TICK,
    MAX_RECENT,
    MIN_REPEATED,
    PATIENCE_SECONDS,
    Batch,
    Have,
    Push,
    Recall,
    SendBatch,
    decode_batch,
    decode_have,
    id_of,
)
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.errors import FloodError, RemoteProtocolError
from farandole.protocol.wire.messagepack import encode

from ..authors import CREATOR, RUN_ID, author_of, member

ALICE, BOB, STRANGER = author_of(1), author_of(2), author_of(99)
ITEMS = [member(number) for number in range(10, 10 + MIN_REPEATED)]


def tick(push: Push, now: float = 0.0) -> tuple[dict[bytes, list[Signed]], dict[bytes, Have]]:
    """Return the items and the ids that go to each neighbour."""
    outputs: Sequence[SendBatch] = push.tick(now, lambda peer: True, lambda: [ALICE, BOB])
    items = {each.peer: decode_batch(each.payload).delta.entries for each in outputs if each.protocol != HAVE_PROTOCOL}
    ids = {each.peer: decode_have(each.payload) for each in outputs if each.protocol == HAVE_PROTOCOL}
    return {peer: list(entries) for peer, entries in items.items()}, ids


def joined(items: Sequence[Signed]) -> bytes:
    return b"".join(map(id_of, items))


def have(announced: Sequence[Signed] = (), wanted: Sequence[Signed] = (), *, is_refusal: bool = False) -> Have:
    return Have(True, is_refusal, joined(announced), joined(wanted))


@pytest.fixture
def push() -> Push:
    """Return a push with two neighbours."""
    made = Push(random.Random(1))
    tick(made)
    assert made.neighbours == {ALICE, BOB}
    return made


def receive(push: Push, peer: bytes, items: Sequence[Signed], now: float = 0.0, *, is_new: bool = True) -> None:
    push.heard(peer, Batch(False, Delta(tuple(items))), now)
    push.queue(items if is_new else (), [], peer)


def test_a_neighbour_that_repeats_what_came_before_is_refused_and_gets_ids(push: Push) -> None:
    receive(push, ALICE, ITEMS)
    tick(push)
    receive(push, BOB, ITEMS, is_new=False)
    _, ids = tick(push, 0.5)
    assert ids == {BOB: have(is_refusal=True)}
    push.queue([member(30)], [], None)
    assert tick(push, 1.0) == ({ALICE: [member(30)]}, {BOB: have([member(30)])})


def test_who_is_refused_sends_ids(push: Push) -> None:
    push.heard_ids(BOB, have(is_refusal=True), 0.0)
    push.queue(ITEMS, [], None)
    assert tick(push) == ({ALICE: ITEMS}, {BOB: have(ITEMS)})


def test_a_few_repeated_items_are_not_refused_nor_those_of_the_last_link(push: Push) -> None:
    receive(push, ALICE, ITEMS)
    receive(push, BOB, ITEMS[1:], is_new=False)
    receive(push, BOB, [*ITEMS, *(member(number) for number in range(30, 31 + len(ITEMS)))], is_new=False)
    assert tick(push)[1] == {}
    push.heard_ids(ALICE, have(is_refusal=True), 0.0)
    receive(push, BOB, ITEMS, is_new=False)
    assert not tick(push)[1].get(BOB, have()).is_refusal


def test_what_was_announced_and_does_not_arrive_is_requested_from_one_after_the_other(push: Push) -> None:
    for peer in (BOB, ALICE):
        push.heard_ids(peer, have(ITEMS, is_refusal=True), 0.0)
    receive(push, ALICE, ITEMS[:1])
    assert tick(push, 0.5) == ({}, {}), "both have what has arrived"
    assert tick(push, PATIENCE_SECONDS)[1] == {BOB: have(wanted=ITEMS[1:])}
    assert tick(push, 1.5 * PATIENCE_SECONDS)[1] == {}
    assert tick(push, 2.0 * PATIENCE_SECONDS)[1] == {ALICE: have(wanted=ITEMS[1:])}
    assert tick(push, 3.0 * PATIENCE_SECONDS)[1] == {}
    push.queue([member(30)], [], None)
    assert tick(push, 3.0 * PATIENCE_SECONDS)[0].keys() == {ALICE, BOB}, "both carry items again"


def test_what_is_not_accepted_is_not_requested_again_but_a_false_signature_hides_nothing(push: Push) -> None:
    refused, forged = member(40), Signed(ITEMS[0].author, ITEMS[0].body, bytes(64))
    push.heard(ALICE, Batch(False, Delta((refused, forged))), 0.0)
    push.heard_ids(BOB, have([refused, ITEMS[0]]), 0.0)
    assert tick(push, PATIENCE_SECONDS)[1] == {BOB: have(wanted=ITEMS[:1])}


def test_a_request_is_answered_and_the_link_carries_items_again(push: Push) -> None:
    push.heard_ids(BOB, have(is_refusal=True), 0.0)
    push.queue(ITEMS, [], None)
    tick(push)
    push.heard_ids(BOB, have(wanted=[*ITEMS[1:], member(50)]), 0.5)
    push.queue([member(30)], [], None)
    items, ids = tick(push, 0.5)
    assert items == {ALICE: [member(30)], BOB: [*ITEMS[1:], member(30)]}
    assert ids == {}
    assert tick(push, 1.0) == ({}, {}), "once"


def test_proofs_are_announced_and_requested_like_entries(push: Push) -> None:
    proof = Proof(member(1, device="a"), member(1, device="b"))
    push.heard_ids(BOB, have(is_refusal=True), 0.0)
    push.queue([], [proof], None)
    assert tick(push)[1][BOB].announced == id_of(proof)
    push.heard_ids(BOB, Have(False, False, b"", id_of(proof)), 0.5)
    [output] = push.tick(0.5, lambda peer: True, lambda: [ALICE, BOB])
    assert decode_batch(output.payload).delta.proofs == (proof,)


def test_a_release_that_knows_no_ids_gets_items() -> None:
    push = Push(random.Random(1), knows_ids=lambda peer: peer != BOB)
    tick(push)
    receive(push, ALICE, ITEMS)
    receive(push, BOB, ITEMS, is_new=False)
    assert tick(push)[1] == {}
    push.queue([member(30)], [], None)
    assert tick(push)[0].keys() == {ALICE, BOB}


def test_a_strangers_ids_have_no_effect(push: Push) -> None:
    push.heard_ids(STRANGER, Have(False, False, joined(ITEMS), joined(ITEMS)), 0.0)
    assert tick(push, PATIENCE_SECONDS) == ({}, {})


def test_an_ended_link_leaves_nothing(push: Push) -> None:
    push.heard_ids(BOB, have(ITEMS, is_refusal=True), 0.0)
    push.drop(BOB)
    tick(push)  # chooses BOB again
    push.queue([member(30)], [], None)
    items, ids = tick(push, PATIENCE_SECONDS)
    assert items.keys() == {ALICE, BOB}
    assert ids == {}


def test_who_announces_what_nobody_has_is_bounded_and_delays_nobody_else() -> None:
    recall = Recall()
    false = [index.to_bytes(ID_BYTES, "big") for index in range(4 * MAX_AWAITED)]
    recall.await_items(BOB, [id_of(ITEMS[0]), *false], 0.0)
    recall.await_items(ALICE, map(id_of, ITEMS), 0.0)
    first = recall.requests(PATIENCE_SECONDS)
    assert {peer: len(ids) for peer, ids in first.items()} == {BOB: MAX_IDS, ALICE: len(ITEMS) - 1}
    second = recall.requests(2.0 * PATIENCE_SECONDS)
    assert second[ALICE] == [id_of(ITEMS[0])], "its first announcer was asked, and had nothing"
    assert len(second[BOB]) == MAX_AWAITED - MAX_IDS
    recall.requests(3.0 * PATIENCE_SECONDS)
    assert recall.requests(4.0 * PATIENCE_SECONDS) == {}
    assert not recall._awaited
    assert not any(recall._num_awaited.values())


def test_who_asks_for_much_gets_no_more_than_a_tick_carries(push: Push) -> None:
    items = [Signed(bytes(32), index.to_bytes(8, "big"), bytes(64)) for index in range(MAX_IDS)]
    push.queue(items, [], ALICE)
    for now in range(3):
        tick(push, float(now))
    for _ in range(5):
        push.heard_ids(BOB, have(wanted=items), 3.0)
    outputs = push.tick(3.0, lambda peer: True, lambda: [ALICE, BOB])
    assert sum(len(decode_batch(output.payload).delta.entries) for output in outputs) == MAX_ITEMS_A_TICK


def test_requests_count_as_a_flood_like_items() -> None:
    gossip = Gossip(RunState(RUN_ID, CREATOR), ALICE, random.Random(1))
    many = encode(have(wanted=[Signed(bytes(32), index.to_bytes(8, "big"), bytes(64)) for index in range(MAX_IDS)]))
    with pytest.raises(FloodError):
        for _ in range(100):
            gossip.receive_ids(BOB, many, 0.0)


@pytest.mark.parametrize("raw", [bytes(MAX_HAVE_BYTES + 1), encode((False, False, b"1234567", b""))])
def test_malformed_messages_are_refused(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_have(raw)


def test_the_latest_items_are_remembered() -> None:
    recall = Recall()
    items = [Signed(bytes(32), index.to_bytes(8, "big"), bytes(64)) for index in range(MAX_RECENT + 1)]
    recall.add({id_of(item): item for item in items})
    assert recall.find(map(id_of, items)) == items[1:]

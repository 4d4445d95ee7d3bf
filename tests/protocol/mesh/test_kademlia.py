"""Kademlia without I/O: the routing table, the records of providers, and lookups in networks in memory."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.mesh import kademlia
from farandole.protocol.mesh.kademlia import (
    BUCKET_SIZE,
    MAX_QUERIES,
    RECORD_SECONDS,
    Lookup,
    ProviderRecords,
    RoutingTable,
    position_of,
    position_of_peer,
)


def peers_of(number: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(number)]


ADDRESSES = ["/ip4/192.0.2.1/tcp/1"]


# Records


def test_a_provider_that_announces_again_is_kept_before_older_ones_and_else_no_longer_than_three_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kademlia, "MAX_RECORDS", 2)
    records, provider = ProviderRecords(), bytes(32)
    for key in (b"old", b"faithful", b"old", b"faithful"):
        records.add(key, provider, ADDRESSES, now=0.0)
    records.add(b"new", provider, ADDRESSES, now=60.0)
    assert [key for key in (b"old", b"faithful", b"new") if records.of(key, now=60.0)] == [b"faithful", b"new"]
    records.forget_expired(now=RECORD_SECONDS)
    assert [key for key in (b"faithful", b"new") if records.of(key, now=RECORD_SECONDS)] == [b"new"]
    assert len(records) == 1


def test_the_newest_provider_of_a_key_takes_the_place_of_the_oldest() -> None:
    records = ProviderRecords()
    providers = [bytes([number]) * 32 for number in range(30)]
    for provider in (*providers, providers[-BUCKET_SIZE], *providers[:3]):  # one of them announces again
        records.add(b"key", provider, ADDRESSES, now=0.0)
    newest = {*providers[-BUCKET_SIZE + 4 :], providers[-BUCKET_SIZE], *providers[:3]}
    assert {peer for peer, _ in records.of(b"key", now=0.0)} == newest


# The table


def test_a_bucket_keeps_those_that_were_there_first_and_makes_room_for_none() -> None:
    own, *others = peers_of(3_000)
    table = RoutingTable(own)
    for peer in (own, *others):
        table.add(peer)
    far = [peer for peer in others if (position_of_peer(peer) ^ position_of_peer(own)).bit_length() == 256]
    assert set(far[:BUCKET_SIZE]) <= set(table.closest(0, count=3_000))
    assert far[BUCKET_SIZE] not in table.closest(0, count=3_000)
    assert own not in table.closest(position_of_peer(own), count=3_000)
    assert len(table) < 12 * BUCKET_SIZE
    table.remove(far[0])
    table.add(far[BUCKET_SIZE])
    assert far[BUCKET_SIZE] in table.closest(0, count=3_000)


@given(st.sets(st.binary(min_size=32, max_size=32), min_size=1, max_size=BUCKET_SIZE), st.binary(max_size=40))
def test_the_closest_are_the_closest(peers: set[bytes], key: bytes) -> None:
    table = RoutingTable(b"own")
    for peer in peers:
        table.add(peer)
    target = position_of(key)
    assert table.closest(target) == sorted(peers, key=lambda peer: position_of_peer(peer) ^ target)


# Lookups


def run(lookup: Lookup, tables: dict[bytes, RoutingTable], dead: set[bytes], target: int) -> int:
    """Answer all questions of a lookup; return the number of questions."""
    num_asked = 0
    while not lookup.is_over:
        asked = lookup.ask()
        assert asked
        num_asked += len(asked)
        for peer in asked:
            if peer in dead:
                lookup.note_failure(peer)
            else:
                lookup.note_answer(peer, tables[peer].closest(target))
    return num_asked


@pytest.mark.parametrize("share_dead", [0.0, 0.3])
def test_a_lookup_finds_the_closest_living_peers_of_a_large_network(share_dead: float) -> None:
    rng = random.Random(1)
    peers = peers_of(500)
    tables = {peer: RoutingTable(peer) for peer in peers}
    for peer in peers:
        for other in rng.sample(peers, 400):
            tables[peer].add(other)
    dead = set(rng.sample(peers[1:], int(share_dead * 500)))
    for number in range(10):
        target = position_of(bytes([number]))
        lookup = Lookup(target, tables[peers[0]].closest(target), peers[0])
        assert run(lookup, tables, dead, target) <= MAX_QUERIES
        living = sorted(set(peers[1:]) - dead, key=lambda peer: position_of_peer(peer) ^ target)
        assert set(living[:3]) <= set(lookup.closest)


def test_a_peer_that_names_others_without_end_costs_a_bounded_number_of_questions() -> None:
    rng = random.Random(2)
    lookup = Lookup(0, [bytes(32)], b"own")
    num_asked = 0
    while not lookup.is_over:
        for peer in lookup.ask():
            num_asked += 1
            lookup.note_answer(peer, [rng.randbytes(32) for _ in range(1_000)])
    assert num_asked <= MAX_QUERIES

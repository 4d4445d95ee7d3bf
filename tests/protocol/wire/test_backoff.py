"""How soon something may be done again: after failures with a peer, and by a token bucket."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from farandole.node.join.bootstrap import FIRST_REDIAL_PAUSE, MAX_REDIAL_PAUSE
from farandole.protocol.wire.bounds import MAX_PEERS, Backoff, TokenBucket, pauses

ALICE, BOB = b"a" * 32, b"b" * 32
PATH = ["/ip4/192.0.2.1/tcp/4001"]


def test_pauses_double_up_to_the_longest() -> None:
    backoff, now, pauses = Backoff(10.0, 600.0), 100.0, []
    for _ in range(9):
        assert backoff.is_due(ALICE, now, PATH)
        pause = backoff.note_failure(ALICE, now, PATH)
        assert not backoff.is_due(ALICE, now + pause - 0.001, PATH)
        now += pause
        pauses.append(pause)
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0]


def test_what_has_failed_is_known_until_it_succeeds_and_another_path_is_tried_at_once() -> None:
    backoff = Backoff(10.0, 600.0)
    other = [*PATH, "/ip4/192.0.2.2/tcp/4001"]
    assert not backoff.has_failed(ALICE, PATH)
    for now in (0.0, 10.0):
        backoff.note_failure(ALICE, now, PATH)
    assert backoff.has_failed(ALICE, PATH)
    assert not backoff.is_due(ALICE, 10.0, PATH)
    assert not backoff.has_failed(BOB, PATH)
    assert not backoff.has_failed(ALICE, other)
    assert backoff.is_due(ALICE, 10.0, other)
    assert backoff.note_failure(ALICE, 10.0, other) == 10.0
    backoff.note_success(ALICE)
    assert not backoff.has_failed(ALICE, other)


def test_only_so_many_peers_are_remembered() -> None:
    backoff = Backoff(10.0, 600.0)
    backoff.note_failure(ALICE, 0.0, PATH)
    for number in range(MAX_PEERS):
        backoff.note_failure(number.to_bytes(32), 0.0, PATH)
    assert backoff.is_due(ALICE, 0.0, PATH)
    assert not backoff.is_due(bytes(32), 0.0, PATH)


def test_a_thousand_who_lose_one_peer_come_back_at_different_times() -> None:
    first, longest = FIRST_REDIAL_PAUSE, MAX_REDIAL_PAUSE
    times = [
        list(itertools.accumulate(itertools.islice(pauses(first, longest, random.Random(node)), 6)))
        for node in range(1_000)
    ]
    assert max(Counter(int(at) for each in times for at in each).values()) <= 300
    assert all(0.5 * longest <= later - before <= 1.5 * longest for *_, before, later in times)


def test_it_gives_so_many_at_once_and_so_many_a_second() -> None:
    bucket = TokenBucket(capacity=3, rate=0.5, now=100.0)
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(101.0)
    assert bucket.take(102.0)
    assert bucket.available(1_000.0) == 3


def test_a_clock_that_is_set_back_refills_nothing_and_holds_nothing_up() -> None:
    bucket = TokenBucket(capacity=3, rate=0.5, now=3_700.0)
    assert bucket.take(3_700.0, 3)
    assert bucket.available(100.0) == 0
    assert bucket.take(102.0)
    assert not bucket.take(102.0)

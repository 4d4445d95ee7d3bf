"""Which neighbours are avoided, and for how long; what liars can achieve."""

from __future__ import annotations

import random

from farandole.protocol.stages.pipeline_links import (
    FIRST_SECONDS,
    FORGIVEN_AFTER,
    MAX_OUTLIERS,
    NUM_REMEMBERED,
    Avoidance,
)

ANN, BOB, EVE = b"ann", b"bob", b"eve"


def send_outliers(avoidance: Avoidance, now: float) -> float | None:
    """Report enough outliers of Eve; return the seconds for which she is avoided."""
    seconds = [avoidance.note_judged(EVE, True, now) for _ in range(MAX_OUTLIERS)]
    assert seconds[:-1] == [None] * (MAX_OUTLIERS - 1)
    return seconds[-1]


def test_a_peer_that_sends_outliers_is_avoided_for_longer_each_time() -> None:
    avoidance = Avoidance()
    assert send_outliers(avoidance, 0.0) == FIRST_SECONDS
    assert avoidance.is_avoided(EVE, FIRST_SECONDS - 1)
    assert avoidance.until(1.0) == [FIRST_SECONDS]
    assert not avoidance.is_avoided(EVE, FIRST_SECONDS)
    assert send_outliers(avoidance, FIRST_SECONDS) == 2 * FIRST_SECONDS
    assert not avoidance.is_avoided(BOB, FIRST_SECONDS)


def test_what_was_long_ago_is_forgiven() -> None:
    avoidance = Avoidance()
    send_outliers(avoidance, 0.0)
    later = FIRST_SECONDS * (2 + 2 * FORGIVEN_AFTER)
    assert send_outliers(avoidance, later) == FIRST_SECONDS


def test_outliers_that_are_rare_count_for_nothing() -> None:
    avoidance = Avoidance()
    for number in range(1_000):
        assert avoidance.note_judged(BOB, number % NUM_REMEMBERED == 0, float(number)) is None


def test_a_peer_that_loses_what_others_do_not_is_avoided() -> None:
    avoidance = Avoidance()
    ends = [avoidance.note_end(peer, peer != EVE, 0.0) for _ in range(NUM_REMEMBERED + 1) for peer in (ANN, BOB, EVE)]
    assert any(ends)
    assert [peer for peer in (ANN, BOB, EVE) if avoidance.is_avoided(peer, 1.0)] == [EVE]


def test_losses_that_hit_all_alike_count_against_none() -> None:
    avoidance = Avoidance()
    assert not any(avoidance.note_end(peer, False, 0.0) for _ in range(100) for peer in (ANN, BOB, EVE))


def test_a_minority_that_drops_what_goes_over_a_peer_does_not_have_it_avoided() -> None:
    """A third of the origins drop all microbatches that go over Bob, and keep all others."""
    avoidance, rng = Avoidance(), random.Random(1)
    for _ in range(10_000):
        peer = rng.choice((ANN, BOB))
        is_kept = peer != BOB or rng.random() > 1 / 3
        assert avoidance.note_end(peer, is_kept, 0.0) is None

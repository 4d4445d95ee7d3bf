from __future__ import annotations

from farandole.protocol.state.liveness import PEERS_A_SECOND, PERIODS_OF_SILENCE, SUSPICION_SECONDS, Liveness

ALICE, BOB = b"a" * 32, b"b" * 32


def test_a_peer_lives_for_three_periods_after_its_last_heartbeat() -> None:
    liveness = Liveness(base_period=2.0)
    liveness.beat(ALICE, 100, now=0.0)
    liveness.beat(ALICE, 101, now=2.0)
    assert liveness.live(8.0) == [ALICE]
    assert not liveness.is_live(ALICE, 8.1)
    assert liveness.live(8.1) == []
    assert liveness.seconds_since(ALICE, 9.0) == 7.0
    assert liveness.seconds_since(BOB, 9.0) is None


def test_only_a_heartbeat_that_advances_counts() -> None:
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

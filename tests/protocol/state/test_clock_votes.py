from __future__ import annotations

import pytest

from farandole.protocol.state.believing import MAX_FINE_SKEW, NUM_AGREEING, judge_clock, votes_of
from farandole.protocol.state.state import MAX_AHEAD

HOUR = 3_600.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_enough_votes_that_agree_show_that_this_clock_is_wrong(sign: float) -> None:
    skew = judge_clock([sign * (HOUR + error) for error in (0.0, 5.0, -5.0)])
    assert skew is not None
    assert (skew.seconds, skew.num_members) == (sign * HOUR, 3)
    assert skew.is_agreed
    assert skew.is_harmful


def test_fewer_votes_only_show_that_one_of_the_clocks_is_wrong() -> None:
    for number in range(1, NUM_AGREEING):
        skew = judge_clock([HOUR] * number)
        assert skew is not None
        assert (skew.is_agreed, skew.num_members) == (False, number)


@pytest.mark.parametrize(
    "votes",
    [
        [],
        [0.0],
        [1.0, -2.0, 3.0],
        [HOUR, 0.0],
        [HOUR, HOUR, 0.0],
        [HOUR, HOUR, HOUR, 0.0, 1.0, 2.0],  # liars are no more than half
        [HOUR, 2 * HOUR, 3 * HOUR, 0.0],  # they do not agree, and one member confirms the clock
        [MAX_FINE_SKEW - 1.0] * 5,
        [MAX_AHEAD - 1.0],
    ],
)
def test_a_clock_that_members_confirm_or_that_is_good_enough_is_not_reported(votes: list[float]) -> None:
    assert judge_clock(votes) is None


def test_members_that_lie_in_different_ways_do_not_agree() -> None:
    skew = judge_clock([HOUR, 2 * HOUR, 3 * HOUR])
    assert skew is not None
    assert (skew.is_agreed, skew.seconds) == (False, HOUR)


def test_a_drift_is_reported_before_it_harms() -> None:
    skew = judge_clock([MAX_FINE_SKEW + 5.0] * NUM_AGREEING)
    assert skew is not None
    assert (skew.is_agreed, skew.is_harmful) == (True, False)


def test_the_members_of_one_public_network_and_all_relayed_ones_have_one_vote() -> None:
    local = [(bytes([index]), "192.168.1.0/24", 1.0) for index in range(3)]
    public = [(bytes([index]), "5.1.1.0/24", HOUR + index) for index in range(3, 6)]
    wide = [(bytes([index]), "2a00:1::/48", 3.0) for index in range(6, 9)]
    relayed = [(bytes([index]), "", 4.0) for index in range(9, 12)]
    assert votes_of([*local, *public, *wide, *relayed]) == [1.0, 1.0, 1.0, HOUR + 4, 3.0, 4.0]

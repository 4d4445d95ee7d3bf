from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.node.loop.traffic_service import HEAD_START, LAST_BYTES, RESUME_SECONDS, WIRE_SHARE, Budget, Used

GB = 10**9
NOVEMBER = datetime(2026, 11, 1)
DECEMBER = datetime(2026, 12, 1)
HALF = NOVEMBER + (DECEMBER - NOVEMBER) / 2


def budget(limit: int = 100 * GB, used: int = 0) -> Budget:
    return Budget(limit, Used(2026, 11, used))


def test_the_budget_comes_in_as_the_month_goes_by() -> None:
    one = budget()
    assert one.come_in(NOVEMBER) == pytest.approx(HEAD_START * 100 * GB)
    assert one.come_in(HALF) == pytest.approx((1 + HEAD_START) / 2 * 100 * GB)
    assert one.come_in(DECEMBER - timedelta(seconds=1)) == pytest.approx(100 * GB, rel=1e-5)
    assert one.end == DECEMBER
    assert budget().end == DECEMBER
    assert Budget(GB, Used(2026, 12, 0)).end == datetime(2027, 1, 1)


def test_bulk_begins_when_what_it_costs_has_come_in() -> None:
    one = budget(used=50 * GB)
    assert not one.may_spend(6 * GB, HALF)
    assert one.may_spend(4 * GB, HALF)
    assert one.may_spend(6 * GB, HALF + timedelta(days=1))


def test_what_is_counted_is_what_the_provider_counts() -> None:
    one = budget()
    one.count(GB, HALF)
    assert one.used.num_bytes == pytest.approx(WIRE_SHARE * GB)


def test_a_new_month_begins_anew_and_an_earlier_one_does_not() -> None:
    one = budget(used=99 * GB)
    one.count(0, NOVEMBER - timedelta(days=40))  # the clock was set back
    assert one.used == Used(2026, 11, 99 * GB)
    one.count(1000, DECEMBER)
    assert one.used == Used(2026, 12, round(1000 * WIRE_SHARE))
    assert one.end == datetime(2027, 1, 1)


def test_at_the_end_of_the_budget_it_says_until_when() -> None:
    assert not budget(used=99 * GB).is_spent()
    spent = budget(used=100 * GB - LAST_BYTES)
    assert spent.is_spent()
    assert spent.resumes_at() == DECEMBER


def test_who_rests_until_there_is_some_has_an_hours_worth_then() -> None:
    one = budget(used=70 * GB)
    at = one.resumes_at()
    assert not one.may_spend(0, at - timedelta(seconds=1.1 * RESUME_SECONDS))
    hour = (1 - HEAD_START) * 100 * GB * RESUME_SECONDS / (DECEMBER - NOVEMBER).total_seconds()
    assert one.may_spend(round(0.99 * hour / WIRE_SHARE), at)
    assert not one.may_spend(round(1.01 * hour / WIRE_SHARE), at)


@given(
    st.integers(GB, 1000 * GB),
    st.lists(st.tuples(st.floats(1, 86_400), st.integers(0, 10 * GB), st.integers(0, 1000)), max_size=200),
)
def test_whoever_asks_first_never_moves_more_than_the_budget(limit: int, steps: list[tuple[float, int, int]]) -> None:
    """Bulk asks as greedily as possible; control does not ask, and takes less than its share."""
    one, now = budget(limit), NOVEMBER
    for seconds, bulk, control in steps:
        now = min(now + timedelta(seconds=seconds), DECEMBER - timedelta(seconds=1))
        if one.may_spend(bulk, now):
            one.count(bulk, now)
            assert one.used.num_bytes <= one.come_in(now) + 1
        one.count(control, now)
    assert one.used.num_bytes <= limit + len(steps) * 1_100

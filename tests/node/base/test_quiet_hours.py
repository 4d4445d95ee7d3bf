from __future__ import annotations

from datetime import datetime

import pytest

from farandole.node.base.quiet_hours import QuietHoursError, parse_quiet_hours, quiet_until

MONDAY = datetime(2026, 11, 23)


def until(texts: list[str], day: int, hour: int, minute: int = 0) -> str | None:
    """Return the end of the quiet hours, in a week that begins with Monday, day 0."""
    now = MONDAY.replace(day=23 + day, hour=hour, minute=minute)
    end = quiet_until([parse_quiet_hours(text) for text in texts], now)
    return None if end is None else end.strftime("%a %H:%M")


@pytest.mark.parametrize(
    ("hours", "day", "hour", "minute", "end"),
    [
        ("09:00-17:30", 0, 8, 59, None),
        ("09:00-17:30", 0, 9, 0, "Mon 17:30"),
        ("09:00-17:30", 0, 17, 30, None),
        ("22:00-07:00", 0, 23, 0, "Tue 07:00"),
        ("22:00-07:00", 0, 6, 59, "Mon 07:00"),
        ("22:00-07:00", 0, 7, 0, None),
        ("Fri 20:00-04:00", 5, 3, 0, "Sat 04:00"),
        ("Fri 20:00-04:00", 4, 3, 0, None),
        ("sat-sun 10:00-24:00", 5, 12, 0, "Sun 00:00"),
        ("Sun-Mon 10:00-11:00", 0, 10, 30, "Mon 11:00"),
        ("Sun-Mon 10:00-11:00", 2, 10, 30, None),
    ],
)
def test_hours_hold_on_their_days_and_past_midnight(hours: str, day: int, hour: int, minute: int, end: str) -> None:
    assert until([hours], day, hour, minute) == end


def test_hours_that_follow_each_other_are_one_rest() -> None:
    assert until(["20:00-23:00", "22:00-02:00", "Tue 02:00-05:00"], 0, 21) == "Tue 05:00"
    assert until([], 0, 21) is None


def test_who_is_always_quiet_gets_an_answer_too() -> None:
    assert until(["00:00-24:00"], 0, 12) is not None


@pytest.mark.parametrize("text", ["", "22-7", "25:00-03:00", "24:30-03:00", "10:60-11:00", "Foo 10:00-11:00", "10:00"])
def test_what_is_no_hours_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(QuietHoursError, match="no quiet hours"):
        parse_quiet_hours(text)

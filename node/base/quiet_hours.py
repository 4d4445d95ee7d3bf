"""Hours of the day in which a node rests: ``22:00-07:30``, ``Sat-Sun 09:00-18:00``; in the machine's local time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from farandole.protocol.wire.errors import FarandoleError

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_FORM: Final = re.compile(
    rf"(?:(?P<first>{'|'.join(_DAYS)})(?:-(?P<last>{'|'.join(_DAYS)}))?\s+)?"
    r"(?P<begin>\d{1,2}:\d{2})\s*-\s*(?P<end>\d{1,2}:\d{2})",
    re.IGNORECASE,
)
_DAY: Final = timedelta(days=1)


class QuietHoursError(FarandoleError):
    """The text is no quiet hours."""


@dataclass(frozen=True, slots=True)
class QuietHours:
    """Hours from ``begin`` to ``end``, in minutes after midnight, that begin on ``days`` (0: Monday).

    An ``end`` that is not after ``begin`` is on the next day.
    """

    days: frozenset[int]
    begin: int
    end: int

    def end_of(self, now: datetime) -> datetime | None:
        """Return the end of the hours that contain ``now``, or None if they do not contain it."""
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        length = timedelta(minutes=(self.end - self.begin) % (24 * 60) or 24 * 60)
        for day in (midnight - _DAY, midnight):
            begins_at = day + timedelta(minutes=self.begin)
            if day.weekday() in self.days and begins_at <= now < begins_at + length:
                return begins_at + length
        return None


def parse_quiet_hours(text: str) -> QuietHours:
    """Parse quiet hours. Raises `QuietHoursError`."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise QuietHoursError(f"{text!r} is no quiet hours: write 22:00-07:30, or Sat-Sun 09:00-18:00")
    begin, end = _minutes(match["begin"], text), _minutes(match["end"], text)
    if match["first"] is None:
        return QuietHours(frozenset(range(7)), begin, end)
    first = _DAYS.index(match["first"].capitalize())
    last = _DAYS.index((match["last"] or match["first"]).capitalize())
    return QuietHours(frozenset((first + day) % 7 for day in range((last - first) % 7 + 1)), begin, end)


def split_quiet_hours(texts: Sequence[str]) -> list[str]:
    """Split texts into one per hours: an environment variable is cut at every space. Raises `QuietHoursError`."""
    whole = " ".join(texts)
    found = [match.group() for match in _FORM.finditer(whole)]
    if _FORM.sub("", whole).strip():  # something else is in it: to be named as it was given
        found = list(texts)
    for text in found:
        parse_quiet_hours(text)
    return found


def _minutes(time: str, text: str) -> int:
    hour, minute = map(int, time.split(":"))
    if hour > 24 or minute > 59 or (hour == 24 and minute):
        raise QuietHoursError(f"{text!r} is no quiet hours: there is no {time} o'clock")
    return 60 * hour + minute


def quiet_until(hours: Sequence[QuietHours], now: datetime) -> datetime | None:
    """Return when this node trains again, or None if it may train now; adjacent hours are joined."""
    until = now
    while (end := max((end for span in hours if (end := span.end_of(until)) is not None), default=None)) is not None:
        until = end
        if until - now > 8 * _DAY:  # always quiet
            break
    return until if until > now else None

"""A month's traffic: how much is used, and whether there is enough for more, as a value without clock or disk.

A line that is paid by the gigabyte has a budget for each calendar month. A node that used its usual rate until nothing
is left would be of no use for the rest of the month. So the budget comes in over time (a token bucket: a tenth of it at
the month's beginning, the rest evenly until its end), and bulk transfers first check whether their cost has come in.
Rounds whose cost has not come in are not exchanged: the node trains on, and meets a partner when it can pay for it.
Control traffic never checks: almost its whole share for the time that is left remains in the budget. If even that
exceeds the budget, the node goes offline until the month is over.

A month is the calendar's, by the machine's local time. A clock that is set back into an earlier month starts no month.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

# The share of a month's budget at its beginning: for a newcomer's download, and the first exchanges.
HEAD_START: Final = 0.1
# What a provider counts for each byte that is counted here: headers of TCP, IP and Ethernet on packets of 1,448 bytes,
# acknowledgements the other way, handshakes, and some retransmitted packets.
WIRE_SHARE: Final = 1.06
# With less than this left the node says farewell and goes offline: the cost of closing its connections.
LAST_BYTES: Final = 256 * 1024
# A node that cannot train without traffic rests until this much time's budget has come in, to avoid rests of a minute.
RESUME_SECONDS: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class Used:
    """The traffic of one month."""

    year: int
    month: int
    num_bytes: int

    def count(self, num_bytes: int, now: datetime) -> Used:
        """Return the traffic after ``num_bytes`` more; the count restarts in a new month."""
        if (now.year, now.month) > (self.year, self.month):
            return Used(now.year, now.month, num_bytes)
        return replace(self, num_bytes=self.num_bytes + num_bytes)


class Budget:
    """The budget of a month; ``limit``: bytes, both ways together, as the line's provider counts them."""

    def __init__(self, limit: int, used: Used) -> None:
        self.limit = limit
        self.used = used

    def count(self, num_bytes: int, now: datetime) -> None:
        """Count ``num_bytes`` that have gone through the node's sockets."""
        self.used = self.used.count(math.ceil(num_bytes * WIRE_SHARE), now)

    @property
    def _begin(self) -> datetime:
        return datetime(self.used.year, self.used.month, 1)

    @property
    def end(self) -> datetime:
        """Return the time at which the next month begins."""
        return (self._begin + timedelta(days=31)).replace(day=1)

    def come_in(self, now: datetime) -> float:
        """Return the bytes of the budget that may have been used by now."""
        elapsed = (now - self._begin) / (self.end - self._begin)
        return self.limit * (HEAD_START + (1 - HEAD_START) * min(max(elapsed, 0.0), 1.0))

    def may_spend(self, num_bytes: int, now: datetime) -> bool:
        """Return whether bulk of ``num_bytes`` may begin."""
        return self.used.num_bytes + num_bytes * WIRE_SHARE <= self.come_in(now)

    def is_spent(self) -> bool:
        """Return whether no traffic at all is allowed until `end`."""
        return self.used.num_bytes >= self.limit - LAST_BYTES

    def resumes_at(self) -> datetime:
        """Return when, without more traffic, the budget that has come in exceeds the use by `RESUME_SECONDS` of it."""
        length = self.end - self._begin
        share = (self.used.num_bytes / self.limit - HEAD_START) / (1 - HEAD_START)
        return min(self._begin + max(share, 0.0) * length + timedelta(seconds=RESUME_SECONDS), self.end)

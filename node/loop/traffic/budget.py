"""A month's traffic: how much is used, and whether there is enough for more, as a value without clock or disk.

A line that is paid by the gigabyte has a budget for each calendar month. A node that moved at its usual rate until
nothing is left would be of no use for the rest of the month; so the budget comes in as time goes by (a token bucket: a
tenth of it at the month's beginning, the rest evenly until its end), and who moves bulk asks first whether what it
costs has come in yet. Rounds for which it has not are not exchanged: the node trains on, and meets a partner when it
can pay for it. Control traffic never asks, and there is always almost its share of the time left for it. If even that
is more than the budget, the node goes offline until the month is over.

A month is the calendar's, by the machine's local time. A clock that is set back into an earlier month begins none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

# Of a month's budget, what there is at its beginning: a newcomer's download, the first exchanges.
HEAD_START: Final = 0.1
# What a provider counts of each byte that is counted here: headers of TCP, IP and Ethernet on packets of 1,448 bytes,
# acknowledgements the other way, handshakes, and some packets twice.
WIRE_SHARE: Final = 1.06
# Below this much of the rest the node says farewell and goes: what its connections' ends take.
LAST_BYTES: Final = 256 * 1024
# A node that cannot train without traffic rests until so much time's budget has come in: no rest for a minute.
RESUME_SECONDS: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class Used:
    """What was moved in a month."""

    year: int
    month: int
    num_bytes: int

    def count(self, num_bytes: int, now: datetime) -> Used:
        """After so many bytes more, and in a month of its own if there is a new one."""
        if (now.year, now.month) > (self.year, self.month):
            return Used(now.year, now.month, num_bytes)
        return replace(self, num_bytes=self.num_bytes + num_bytes)


class Budget:
    """``limit``: bytes in a month, both ways together, as the line's provider counts them."""

    def __init__(self, limit: int, used: Used) -> None:
        self.limit = limit
        self.used = used

    def count(self, num_bytes: int, now: datetime) -> None:
        """So many bytes have gone through our sockets."""
        self.used = self.used.count(math.ceil(num_bytes * WIRE_SHARE), now)

    @property
    def _begin(self) -> datetime:
        return datetime(self.used.year, self.used.month, 1)

    @property
    def end(self) -> datetime:
        """When the next month begins."""
        return (self._begin + timedelta(days=31)).replace(day=1)

    def come_in(self, now: datetime) -> float:
        """Bytes of the budget that may have been used by now."""
        elapsed = (now - self._begin) / (self.end - self._begin)
        return self.limit * (HEAD_START + (1 - HEAD_START) * min(max(elapsed, 0.0), 1.0))

    def may_spend(self, num_bytes: int, now: datetime) -> bool:
        """Whether bulk of so many bytes may begin."""
        return self.used.num_bytes + num_bytes * WIRE_SHARE <= self.come_in(now)

    def is_spent(self) -> bool:
        """Whether nothing at all may move any more until `end`."""
        return self.used.num_bytes >= self.limit - LAST_BYTES

    def resumes_at(self) -> datetime:
        """When, if nothing more is used, `RESUME_SECONDS` of the budget have come in beyond what is used."""
        length = self.end - self._begin
        share = (self.used.num_bytes / self.limit - HEAD_START) / (1 - HEAD_START)
        return min(self._begin + max(share, 0.0) * length + timedelta(seconds=RESUME_SECONDS), self.end)

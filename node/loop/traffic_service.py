"""Counts a node's traffic, keeps the count over restarts, and decides what may be sent.

A line that is paid by the gigabyte has a budget for each calendar month. A node that used its usual rate until nothing
is left would be of no use for the rest of the month. So the budget comes in over time (a token bucket: a tenth of it at
the month's beginning, the rest evenly until its end), and bulk transfers first check whether their cost has come in.
Rounds whose cost has not come in are not exchanged: the node trains on, and meets a partner when it can pay for it.
Control traffic never checks: almost its whole share for the time that is left remains in the budget. If even that
exceeds the budget, the node goes offline until the month is over.

A month is the calendar's, by the machine's local time. A clock that is set back into an earlier month starts no month.

The count on disk is ahead of the real one (by `AHEAD_BYTES`, written before they are used). So a killed node has
counted too much by that at most, and too little only if more than half of it moved since the last look. A node that
exits cleanly writes the exact count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

import msgspec
import trio

from ..base.bandwidth import Shaping
from ..state.store import Store
from ..status.journal import Journal
from ..status.status import TrafficStatus
from .rest_service import Rest

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


class Budget:
    """The budget of a month; ``limit``: bytes, both ways together, as the line's provider counts them."""

    def __init__(self, limit: float, used: Used) -> None:
        self.limit = limit
        self.used = used

    def count(self, num_bytes: int, now: datetime) -> None:
        """Count ``num_bytes`` that have gone through the node's sockets; the count restarts in a new month."""
        if (now.year, now.month) > (self.used.year, self.used.month):
            self.used = Used(now.year, now.month, 0)
        self.used = replace(self.used, num_bytes=self.used.num_bytes + math.ceil(num_bytes * WIRE_SHARE))

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


TRAFFIC_FACT: Final = "traffic"
SPENT: Final = "traffic is spent"
SAVING: Final = "traffic is saved"
DAY: Final = "%a %d %b %H:%M"
# `AHEAD_BYTES` may move between two looks; on a line of 1 Gbit/s that is the traffic of one look.
LOOK_INTERVAL: Final = 0.5
AHEAD_BYTES: Final = 64 * 1024 * 1024
# With a small budget, no more than this share is counted ahead.
MAX_AHEAD_SHARE: Final = 0.002


@dataclass(eq=False)
class TrafficService:
    """One node's budget; without ``limit`` (bytes a month) it counts nothing and allows everything.

    ``clock`` gives the local time.
    """

    limit: int
    rest: Rest
    store: Store
    shaping: Shaping
    clock: Callable[[], datetime]
    journal: Journal
    needs_traffic: bool = False
    """Whether training is impossible without traffic: if the model is cut into stages."""
    _counted: int = 0  # of what the shapers have seen
    _stored: Used | None = None

    def __post_init__(self) -> None:
        now, limit = self.clock(), self.limit or math.inf
        self._ahead = int(min(AHEAD_BYTES, MAX_AHEAD_SHARE * limit))
        self._budget = Budget(limit, Used(now.year, now.month, 0))

    @property
    def is_spent(self) -> bool:
        """Return whether the node has to be offline."""
        return self._budget.is_spent()

    def status(self) -> TrafficStatus | None:
        """Return the state of the budget, for display; None without a budget."""
        budget = self._budget
        if not self.limit:
            return None
        self._count()
        resumes_at = budget.end if budget.is_spent() else budget.resumes_at()
        is_saved = not budget.may_spend(0, self.clock())
        return TrafficStatus(self.limit, budget.used.num_bytes, is_saved, resumes_at.timestamp())

    def may_spend(self, num_bytes: int) -> bool:
        """Return whether bulk of ``num_bytes``, both ways together, may begin."""
        self._count()
        return self._budget.may_spend(num_bytes, self.clock())

    async def begin(self) -> None:
        """Read what earlier lives have counted; call it before any traffic."""
        if not self.limit:
            return
        raw = await self.store.get_fact(TRAFFIC_FACT)
        try:
            self._budget.used = msgspec.msgpack.decode(raw, type=Used) if raw else self._budget.used
        except msgspec.MsgspecError as error:
            self.journal.warn(f"what this node knew of its traffic of this month cannot be read: {error}")
        await self.look()

    async def run(self) -> None:
        """Count until cancelled, then store the exact count."""
        if not self.limit:
            return
        try:
            while True:
                await self.look()
                await trio.sleep(LOOK_INTERVAL)
        finally:
            self._count()
            with trio.CancelScope(shield=True):
                await self._put(self._budget.used)

    async def wait_spent(self, is_spent: bool = True) -> None:
        """Wait until no traffic is allowed, or (False) until some is again."""
        while self.is_spent is not is_spent:
            await self.rest.changed.park()  # by `look`

    def _count(self) -> None:
        total = self.shaping.up.total + self.shaping.down.total
        self._budget.count(total - self._counted, self.clock())
        self._counted = total

    async def look(self) -> None:
        """Count, report what follows, and store the count if that is due."""
        budget = self._budget
        self._count()
        gigabytes, resumes_at, now = f"{budget.limit / 1e9:g} GB", budget.resumes_at(), self.clock()
        if budget.is_spent():
            self.rest.set(SPENT, f"{gigabytes} of traffic are used up until {budget.end:{DAY}}")
        else:
            self.rest.set(SPENT, "")
            if not self.needs_traffic or now >= resumes_at:
                self.rest.set(SAVING, "")
            elif not budget.may_spend(0, now):
                self.rest.set(SAVING, f"saving this month's {gigabytes} of traffic until {resumes_at:{DAY}}")
        stored, used = self._stored, budget.used
        is_new_month = stored is None or (stored.year, stored.month) != (used.year, used.month)
        if stored is None or is_new_month or used.num_bytes > stored.num_bytes - self._ahead // 2:
            await self._put(Used(used.year, used.month, used.num_bytes + self._ahead))

    async def _put(self, used: Used) -> None:
        loss = "after a restart this node does not know its traffic of this month"
        await self.store.remember(TRAFFIC_FACT, msgspec.msgpack.encode(used), self.journal, loss)
        self._stored = used  # otherwise each look would retry, and warn

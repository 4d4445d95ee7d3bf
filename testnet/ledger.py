"""Where a node's time went, as the launcher did it and saw it: what its throughput is measured against.

A node is given the time in which its machine lets it work. Absent and frozen seconds are not given; of a second in
which it is starved, its share of the processor is. All else is: the time of a partition, of a full disk, of a wrong
clock, and the time that it takes to come back after it was started again, which is what a fault costs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

Condition = Literal["absent", "starting", "returning", "working", "frozen", "starved", "finished"]
"""``absent``: not started, or dead. ``starting``: until its first inner step; ``returning``: the same, started again or
thawed. ``working``: from then on, whether it trains or waits. ``finished``: every round is done."""


@dataclass
class Ledger:
    """Times are of one monotonic clock, in seconds."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of each condition."""
    given: float = 0.0
    """Seconds, a starved one counted by its share."""
    condition: Condition = "absent"
    there_since: float = 0.0
    """When it was last started or thawed."""
    _share: float = 0.0
    _since: float | None = None

    def enter(self, condition: Condition, now: float, share: float = 1.0) -> None:
        """The node is in another condition from now on; ``share`` is what it gets of the processor."""
        self.settle(now)
        if condition in ("starting", "returning"):
            self.there_since = now
        self.condition = condition
        self._share = 0.0 if condition in ("absent", "frozen", "finished") else share

    def settle(self, now: float) -> None:
        """Count up to now."""
        if self._since is not None:
            self.seconds[self.condition] += now - self._since
            self.given += self._share * (now - self._since)
        self._since = now

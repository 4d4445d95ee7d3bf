"""Where a node's time went, as the launcher did it and saw it: what its throughput is measured against.

A node is given the time in which it is alive: all but absent and frozen seconds. So a fault costs what is not made in
the rest of the time: while it is starved of its processor, cut off, without room on its disk, by a wrong clock, and
above all while it comes back after it was started again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final, Literal

Condition = Literal["absent", "starting", "returning", "working", "frozen", "starved", "finished"]
"""``absent``: not started, or dead. ``starting``: until its first inner step; ``returning``: the same, started again or
thawed. ``working``: from then on, whether it trains or waits. ``finished``: every round is done."""


# Neither the node nor its partners can do anything about these.
NOT_GIVEN: Final = ("absent", "frozen", "finished")


@dataclass
class Ledger:
    """Times are of one monotonic clock, in seconds."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of each condition."""
    condition: Condition = "absent"
    there_since: float = 0.0
    """When it was last started or thawed."""
    _since: float | None = None

    @property
    def given(self) -> float:
        """Seconds in which it was alive, and not done."""
        return sum(seconds for condition, seconds in self.seconds.items() if condition not in NOT_GIVEN)

    def enter(self, condition: Condition, now: float) -> None:
        """The node is in another condition from now on."""
        self.settle(now)
        if condition in ("starting", "returning"):
            self.there_since = now
        self.condition = condition

    def settle(self, now: float) -> None:
        """Count up to now."""
        if self._since is not None:
            self.seconds[self.condition] += now - self._since
        self._since = now

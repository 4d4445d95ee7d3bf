"""The time that a node spent in each condition, as the launcher set and saw them: the base of its throughput.

The time given to a node is the time in which it is alive: all but absent and frozen seconds. So the cost of a fault is
the work missing in the rest of the time: while the node is starved of its processor, cut off, without room on its disk,
with a wrong clock, and above all while it recovers after a restart.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final, Literal

Condition = Literal["absent", "starting", "returning", "working", "frozen", "starved", "finished"]
"""``absent``: not started, or dead. ``starting``: until its first inner step; ``returning``: the same, started again or
thawed. ``working``: from then on, whether it trains or waits. ``finished``: every round is done."""


# Neither the node nor its partners can change these times.
NOT_GIVEN: Final = ("absent", "frozen", "finished")


@dataclass
class Ledger:
    """The seconds of one node by condition; times are of one monotonic clock."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each condition."""
    condition: Condition = "absent"
    there_since: float = 0.0
    """When the node was last started or thawed."""
    _since: float | None = None

    @property
    def given(self) -> float:
        """Return the seconds in which the node was alive, and not done."""
        return sum(seconds for condition, seconds in self.seconds.items() if condition not in NOT_GIVEN)

    def enter(self, condition: Condition, now: float) -> None:
        """Change the node's condition."""
        self.settle(now)
        if condition in ("starting", "returning"):
            self.there_since = now
        self.condition = condition

    def settle(self, now: float) -> None:
        """Count the time until now."""
        if self._since is not None:
            self.seconds[self.condition] += now - self._since
        self._since = now

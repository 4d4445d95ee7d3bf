"""Growth of a node's use of its machine: memory, descriptors and tasks over one life."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from farandole.node.status.status import Resources

# Caches fill and connections open in this time after the start; it does not predict the growth after it.
WARM_UP: Final = 600.0
# Seconds that a life must last in addition, for its growth to be more than chance.
LEAST_SPAN: Final = 900.0
SAMPLE_INTERVAL: Final = 20.0
# Samples of eight hours.
MAX_SAMPLES: Final = 1_440


class Growth(msgspec.Struct, frozen=True):
    """Growth from a life's first third to its last, by their medians, without the warm-up."""

    hours: float
    """Hours between the middles of the two."""
    memory: float
    """Share per hour: 0.01 is 1 %."""
    trainer_memory: float | None
    descriptors: float
    """Increase of their number."""
    tasks: float


@dataclass
class Samples:
    """The samples of one life; times are of one monotonic clock, in seconds."""

    taken: deque[tuple[float, Resources]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    _began_at: float | None = None

    def note(self, resources: Resources | None, now: float) -> None:
        """Keep a sample, if the last is old enough and the node is warm."""
        if self._began_at is None:
            self._began_at = now
        is_due = not self.taken or now - self.taken[-1][0] >= SAMPLE_INTERVAL
        if resources is not None and is_due and now - self._began_at >= WARM_UP:
            self.taken.append((now, resources))

    def growth(self) -> Growth | None:
        """Return the growth, or None if the life was too short to measure."""
        taken = [*self.taken]
        if not taken or taken[-1][0] - taken[0][0] < LEAST_SPAN:
            return None
        third = len(taken) // 3
        first, last = taken[:third], taken[-third:]
        hours = (statistics.median(at for at, _ in last) - statistics.median(at for at, _ in first)) / 3_600

        def medians(name: str) -> tuple[float, float]:
            before, after = ([getattr(resources, name) for _, resources in part] for part in (first, last))
            return _median(before), _median(after)

        def an_hour(name: str) -> float:
            before, after = medians(name)
            return (after / before - 1) / hours if before else 0.0

        # A node that has finished, or restarts its trainer, has no trainer for a while.
        has_trainer = all(any(resources.trainer_memory for _, resources in part) for part in (first, last))
        return Growth(
            hours=hours,
            memory=an_hour("memory"),
            trainer_memory=an_hour("trainer_memory") if has_trainer else None,
            descriptors=medians("descriptors")[1] - medians("descriptors")[0],
            tasks=medians("tasks")[1] - medians("tasks")[0],
        )


def _median(values: Sequence[float | None]) -> float:
    return float(statistics.median(value for value in values if value is not None))

"""The timer of a state machine: one at a time, set by an output, and due as an event."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Come back with `TimerFired` at this time (monotonic seconds). Replaces the timer that was set before."""

    at: float


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The timer of the newest `SetTimer` is due. Early or superfluous events do no harm."""

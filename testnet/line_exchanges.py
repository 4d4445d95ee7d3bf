"""Exchanges of the pairing simulator over home lines: both contributions at once, by `farandole.testnet.transfers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .simulation import SimulatedTimer, Simulation
from .transfers import SimulatedLine, Transfers


@dataclass(frozen=True, slots=True)
class SimulatedHome:
    """A member's line, and its speed."""

    line: SimulatedLine
    step_seconds: float


class LineExchanges:
    """Moves contributions between nodes whose lines are known."""

    def __init__(self, simulation: Simulation, size: float, draw_latency: Callable[[], float]) -> None:
        """``size`` of a contribution in bytes; ``draw_latency`` returns seconds for one message."""
        self.lines: dict[object, SimulatedLine] = {}
        self._simulation = simulation
        self._size = size
        self._draw_latency = draw_latency
        self._transfers = Transfers(self.lines)
        self._done: dict[bytes, Callable[[], None]] = {}
        self._num_left: dict[bytes, int] = {}
        self._timer: SimulatedTimer | None = None

    def begin(self, session: bytes, first: bytes, second: bytes, done: Callable[[], None]) -> None:
        """Send a contribution each way; call ``done`` when both have arrived."""
        self._done[session], self._num_left[session] = done, 2
        for source, destination in ((first, second), (second, first)):
            self._transfers.start((session, source), source, destination, self._size, self._simulation.now)
        self._set_timer()

    def cancel(self, session: bytes, first: bytes, second: bytes) -> None:
        """Send no more of a session; without effect if it is over."""
        if self._done.pop(session, None) is not None:
            for source in (first, second):
                self._transfers.cancel((session, source), self._simulation.now)
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = self._transfers.next_end()
        self._timer = None if at is None else self._simulation.call_at(at, self._end)

    def _end(self) -> None:
        for name in self._transfers.take_ended(self._simulation.now):
            assert isinstance(name, tuple)
            session: bytes = name[0]
            self._num_left[session] -= 1
            if not self._num_left[session] and (done := self._done.pop(session, None)) is not None:
                self._simulation.call_after(self._draw_latency(), done)
        self._set_timer()

"""A model of transfers over home lines: what bounds a flow, and how long averaging over all members takes.

A flow from one node to another gets an equal share of the sender's upload and of the receiver's download, and the
smaller of both is its rate (`Transfers`). A share that a flow cannot use is not given to others. A message arrives a
latency after its last byte was sent. Not modelled: slow start, loss, queues in routers, other traffic of the home. All
members send the same number of bytes as their contribution, whatever averages them.

Sans-IO: time is an argument. Sizes are in bytes, rates in bytes per second, times in seconds.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .simulation import SimulatedTimer, Simulation

Seconds = npt.NDArray[np.float64]
Latencies = Callable[[int], Seconds]
"""Draws the latencies of a number of messages."""

# Pieces into which a contribution is cut on its way through a tree. Deep trees gain from more: at depth 9, 64 pieces
# would save about a quarter of the transfer.
TREE_PIECES: Final = 16


@dataclass(frozen=True, slots=True)
class SimulatedLine:
    """A node's connection to the Internet, in bytes per second."""

    up: float
    down: float


@dataclass(slots=True)
class _Flow:
    source: Hashable
    destination: Hashable
    left: float
    at: float
    rate: float = 0.0

    def settle(self, now: float) -> None:
        self.left = max(0.0, self.left - self.rate * (now - self.at))
        self.at = now


class Transfers:
    """Flows between nodes that share their lines."""

    def __init__(self, lines: Mapping[Hashable, SimulatedLine]) -> None:
        """``lines``: by node; it may grow."""
        self._lines = lines
        self._flows: dict[Hashable, _Flow] = {}
        self._out: dict[Hashable, dict[Hashable, _Flow]] = defaultdict(dict)
        self._in: dict[Hashable, dict[Hashable, _Flow]] = defaultdict(dict)
        self._ends: list[tuple[float, int, Hashable, _Flow, float]] = []  # valid if the flow still has this rate
        self._num_pushed = 0

    def start(self, name: Hashable, source: Hashable, destination: Hashable, size: float, now: float) -> None:
        """Begin to send; ``name`` is of one flow at a time."""
        flow = _Flow(source, destination, size, now)
        self._flows[name] = self._out[source][name] = self._in[destination][name] = flow
        self._share(source, destination, now)

    def cancel(self, name: Hashable, now: float) -> None:
        """End a flow before its last byte; without effect if there is none of this name."""
        if name in self._flows:
            self._remove(name, now)

    def next_end(self) -> float | None:
        """Return when the next flow's last byte is sent, if no flow begins or is cancelled before; None without any."""
        while self._ends and not self._is_valid(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def take_ended(self, now: float) -> list[Hashable]:
        """Return the flows that have ended until ``now``, and forget them."""
        ended = []
        while (at := self.next_end()) is not None and at <= now:
            _, _, name, _, _ = heapq.heappop(self._ends)
            self._remove(name, at)
            ended.append(name)
        return ended

    def _is_valid(self, end: tuple[float, int, Hashable, _Flow, float]) -> bool:
        _, _, name, flow, rate = end
        return self._flows.get(name) is flow and flow.rate == rate

    def _remove(self, name: Hashable, now: float) -> None:
        flow = self._flows.pop(name)
        del self._out[flow.source][name], self._in[flow.destination][name]
        self._share(flow.source, flow.destination, now)

    def _share(self, source: Hashable, destination: Hashable, now: float) -> None:
        for name, flow in {**self._out[source], **self._in[destination]}.items():
            up = self._lines[flow.source].up / len(self._out[flow.source])
            down = self._lines[flow.destination].down / len(self._in[flow.destination])
            if (rate := min(up, down)) != flow.rate:
                flow.settle(now)
                flow.rate = rate
                self._num_pushed += 1
                heapq.heappush(self._ends, (now + flow.left / rate, self._num_pushed, name, flow, rate))


def ring_seconds(lines: Sequence[SimulatedLine], size: float, latencies: Latencies) -> float:
    """Return how long a ring all-reduce takes: reduce-scatter, then all-gather, 2 (n - 1) steps of size / n.

    With equal lines and latencies, 2 (n - 1) / n size / rate + 2 (n - 1) latency.
    """
    count = len(lines)
    ups, downs = _rates(lines)
    piece = size / count / np.minimum(ups, np.roll(downs, -1))
    sent = arrived = np.zeros(count)
    for _ in range(2 * (count - 1)):
        sent = np.maximum(sent, arrived) + piece
        arrived = np.roll(sent + latencies(count), 1)
    return float(arrived.max())


def tree_seconds(lines: Sequence[SimulatedLine], size: float, latencies: Latencies, pieces: int = TREE_PIECES) -> float:
    """Return how long an all-reduce over a binary tree takes: up to the root, then down from it, in pieces.

    With equal lines and a full tree of depth d, each direction takes (d + pieces - 1) 2 size / pieces / rate + d
    latency: a parent receives from two children at once, and sends to two.
    """
    count = len(lines)
    num_children = [min(max(count - 2 * node - 1, 0), 2) for node in range(count)]
    at_parent = np.zeros((count, pieces))  # when each piece of a node's sum is at its parent
    ready = np.zeros((count, pieces))
    for node in reversed(range(1, count)):
        parent = (node - 1) // 2
        seconds = size / pieces / min(lines[node].up, lines[parent].down / num_children[parent])
        at_parent[node] = _follow(ready[node], seconds) + latencies(1)
        ready[parent] = np.maximum(ready[parent], at_parent[node])
    received = np.full((count, pieces), ready[0].max())  # the way down begins when the root has the whole sum
    for node in range(1, count):
        parent = (node - 1) // 2
        seconds = size / pieces / min(lines[parent].up / num_children[parent], lines[node].down)
        received[node] = _follow(received[parent], seconds) + latencies(1)
    return float(received.max())


def _follow(ready: Seconds, seconds: float) -> Seconds:
    """Return when each piece is sent, one after the other, where ``ready`` are the times from which each may be."""
    sent, free = np.empty_like(ready), 0.0
    for index, at in enumerate(ready):
        free = sent[index] = max(float(at), free) + seconds
    return sent


def gathered_seconds(lines: Sequence[SimulatedLine], size: float, latencies: Latencies) -> float:
    """Return the least time in which a group averages part by part: each member sums one part and sends it to all.

    Each member sends (n - 1) / n of a contribution and receives as much, twice. This is a lower bound: all flows of a
    member together use its line fully. With equal lines and latencies, 2 (n - 1) / n size / rate + 2 latency.
    """
    count = len(lines)
    slowest = min(min(line.up, line.down) for line in lines)
    phases = (float(latencies(count * (count - 1)).max()) if count > 1 else 0.0 for _ in range(2))
    return 2 * (count - 1) / count * size / slowest + sum(phases)


def _rates(lines: Sequence[SimulatedLine]) -> tuple[Seconds, Seconds]:
    return np.array([line.up for line in lines]), np.array([line.down for line in lines])


# Exchanges of the pairing simulator over home lines: both contributions at once, by `farandole.testnet.simulate.lines`.


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

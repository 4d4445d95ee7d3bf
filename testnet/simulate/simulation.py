"""A seeded discrete-event simulator: a virtual clock and a network that delays, loses, duplicates and partitions.

Thousands of real state machines run under it in one process, and nothing in it depends on the machine: two runs of one
scenario with one seed make the same events in the same order, and `Simulation.trace`, a running hash of every delivery,
is equal in both. Messages over `Network` are bytes, so every message is really encoded and decoded.

    simulation = Simulation(seed=7)
    network = Network(simulation, latency=(0.02, 0.2), loss=0.05)
    network.attach(alice, lambda sender, payload: ...)
    network.attach(bob, lambda sender, payload: network.send(bob, sender, b"pong"))
    simulation.call_at(1.0, lambda: network.send(alice, bob, b"ping"))
    simulation.run_until(60.0)

`Network.kill` is a crash (messages on the way to or from the node are lost), `attach` a start or restart, `partition`
cuts the network into groups until `heal`. `Clock` is a node's own clock, wrong by an offset and a drift.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Receive = Callable[[bytes, bytes], None]
"""Called with (sender, payload)."""

RETRANSMISSION_SECONDS = 0.3
"""Until a stream sends again what was lost, the first time."""
MAX_RETRANSMISSIONS = 5
"""Nine seconds; a peer that waits on a stream has given up by then."""
UNIX_EPOCH = 1_750_000_000.0
"""What true clocks show at virtual second 0; any fixed moment would do."""


@dataclass(slots=True)
class SimulatedTimer:
    """A scheduled call."""

    at: float
    call: Callable[[], object] | None

    def cancel(self) -> None:
        """Cancel the call; has no effect after the call."""
        self.call = None


class Simulation:
    """The virtual clock, the queue of calls, and the only source of randomness."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.rng = random.Random(seed)
        self._queue: list[tuple[float, int, SimulatedTimer]] = []  # by time, then by the order of scheduling
        self._sequence = 0
        self._trace = hashlib.sha256()

    def call_at(self, at: float, call: Callable[[], object]) -> SimulatedTimer:
        """Call at virtual second ``at``, or at once (after what is due already) if that is past."""
        timer = SimulatedTimer(max(at, self.now), call)
        self._sequence += 1
        heapq.heappush(self._queue, (timer.at, self._sequence, timer))
        return timer

    def call_after(self, delay: float, call: Callable[[], object]) -> SimulatedTimer:
        """Call ``delay`` virtual seconds from now."""
        return self.call_at(self.now + delay, call)

    def call_every(self, period: float, call: Callable[[], bool], jitter: float = 0.0) -> None:
        """Call about every ``period`` seconds, first at a random point of one, until ``call`` returns False."""

        def repeat() -> None:
            if call():
                self.call_after(period * (1.0 + jitter * (2.0 * self.rng.random() - 1.0)), repeat)

        self.call_after(period * self.rng.random(), repeat)

    def record(self, *parts: bytes) -> None:
        """Add an event and its time to the trace."""
        self._trace.update(struct.pack("d", self.now))
        for part in parts:
            self._trace.update(len(part).to_bytes(4, "big") + part)

    @property
    def trace(self) -> str:
        """Return the hex hash of all recorded events; equal for equal runs."""
        return self._trace.hexdigest()

    def run_until(self, end: float, done: Callable[[], bool] = lambda: False, every: float = 0.0) -> bool:
        """Run all calls up to virtual second ``end``, or until ``done()`` is true; return whether it was.

        It is evaluated after each call; a slow one at most once in ``every`` seconds.
        """
        next_at = self.now
        while self._queue and self._queue[0][0] <= end:
            _, _, timer = heapq.heappop(self._queue)
            if timer.call is None:
                continue
            self.now = timer.at
            timer.call()
            if self.now >= next_at:
                next_at = self.now + every
                if done():
                    return True
        self.now = max(self.now, end)
        return False


@dataclass(slots=True)
class Traffic:
    """The messages that one node has sent, lost ones included."""

    messages: int = 0
    num_bytes: int = 0


@dataclass(eq=False)
class Network:
    """A network for datagrams between nodes that are named by bytes (in farandole, public keys)."""

    simulation: Simulation
    latency: tuple[float, float] = (0.02, 0.2)
    """Seconds, drawn for each message."""
    loss: float = 0.0
    """Like ``duplicates``, a share of the messages."""
    duplicates: float = 0.0
    ordered: bool = False
    """Messages from one node to another arrive in order, as over one stream; otherwise delays are independent."""

    def __post_init__(self) -> None:
        self.traffic: dict[bytes, Traffic] = {}
        self._rng = random.Random(f"network {self.simulation.seed}")
        self._receivers: dict[bytes, Receive] = {}
        self._lives: dict[bytes, int] = {}
        self._group_of: dict[bytes, int] = {}
        self._arrives_at: dict[tuple[bytes, bytes], float] = {}

    def attach(self, node: bytes, receive: Receive) -> None:
        """Start the node's life; ``receive`` gets its messages."""
        self._receivers[node] = receive
        self._lives[node] = self._lives.get(node, 0) + 1
        self.traffic.setdefault(node, Traffic())

    def kill(self, node: bytes) -> None:
        """End the node's life at once; messages on the way are lost. The owner must cancel the node's timers."""
        self._receivers.pop(node, None)

    def partition(self, groups: Iterable[Iterable[bytes]]) -> None:
        """Let only nodes of one group hear each other; nodes in no group form a group of their own together."""
        self._group_of = {node: index for index, group in enumerate(groups) for node in group}

    def heal(self) -> None:
        """Undo `partition`: all nodes hear each other again."""
        self._group_of = {}

    def can_hear(self, source: bytes, destination: bytes) -> bool:
        """Return whether both nodes live, on one side of every partition."""
        return (
            source in self._receivers
            and destination in self._receivers
            and self._group_of.get(source) == self._group_of.get(destination)
        )

    def send(self, source: bytes, destination: bytes, payload: bytes, is_stream: bool = False) -> None:
        """Send a message, without any notice of delivery to the sender.

        ``is_stream``: lost messages are sent again after a while, as on a stream; so loss mostly becomes delay.
        """
        traffic = self.traffic.setdefault(source, Traffic())
        traffic.messages += 1
        traffic.num_bytes += len(payload)
        num_lost = 0
        while self._rng.random() < self.loss:
            num_lost += 1
            if not is_stream or num_lost > MAX_RETRANSMISSIONS:
                return
        if not self.can_hear(source, destination):
            return
        # RFC 6298: the timeout doubles with each.
        delay = RETRANSMISSION_SECONDS * (2**num_lost - 1)
        copies = 2 if not is_stream and self._rng.random() < self.duplicates else 1
        lives = (self._lives[source], self._lives[destination])

        def deliver() -> None:
            """Deliver the message, if both nodes are still in the life in which it was sent."""
            if self.can_hear(source, destination) and lives == (self._lives[source], self._lives[destination]):
                self.simulation.record(source, destination, payload)
                self._receivers[destination](source, payload)

        for _ in range(copies):
            at = self.simulation.now + delay + self._rng.uniform(*self.latency)
            if self.ordered:
                at = max(at, self._arrives_at.get((source, destination), 0.0))
                self._arrives_at[source, destination] = at
            self.simulation.call_at(at, deliver)


class Clock:
    """A node's own clocks: ``unix()`` may be wrong by any offset, ``monotonic()`` only runs fast or slow."""

    def __init__(self, simulation: Simulation, offset: float = 0.0, drift: float = 0.0) -> None:
        """``offset`` in seconds; ``drift`` as a share (0.01: 1 % fast)."""
        self._simulation = simulation
        self.offset = offset
        self.drift = drift

    def monotonic(self) -> float:
        """Return the seconds since the simulation began, by this node's clock."""
        return self._simulation.now * (1.0 + self.drift)

    def unix(self) -> float:
        """Return the Unix time by this node's clock."""
        return UNIX_EPOCH + self.monotonic() + self.offset

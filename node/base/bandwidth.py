"""Bandwidth caps: bulk waits for them, control traffic only counts against them.

A volunteer's line is shared with other people, and its queues are long: data that is sent faster than the line's rate
queues there, control messages behind bulk. So bulk (contributions, checkpoints) asks a token bucket before each small
piece and is sent evenly. Control messages (gossip, pairing, DHT, pings) never wait: tokens that the bucket lacks for
them are a debt, which is paid from unused tokens and by the next bulk. A flood of them may exceed any cap, and
must not silence an exchange, whose partner would take that for a broken channel (`SILENT_FOR` in conversation.py). So
bulk pays in small amounts: it always keeps a share of the rate, whatever the debt is.

A reservation takes its tokens at once and returns the seconds to wait until they are there (Turner's leaky bucket as a
meter, by times instead of queues). So pieces leave in the order of their reservations: a flow with one outstanding
piece at a time gets its turn between the others', none starves, and no task has to wake a waiting one.
Reservations may come from several threads, so there is a lock, held for a few instructions.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from farandole.protocol.wire.record_layer import MAX_SEALED_BYTES

from .figures import BYTES_PER_MBIT

# Burst after an idle time: wakeups may be late by up to this time before the rate suffers, and a line that is as fast
# as the cap is busy for no longer before it takes a control message.
BURST_SECONDS = 0.05
# Size of one reservation: large enough that the machine wakes up at most 200 times a second, at least as many bytes as
# justify a record of their own on a bulk channel, and at most the longest record.
QUANTUM_SECONDS = 0.005
MIN_QUANTUM, MAX_QUANTUM = 4_096, MAX_SEALED_BYTES
# Control traffic over the cap slows bulk for at most this time; a flood does not slow a node's training for ever.
MAX_DEBT_SECONDS = 30.0
# Share of the rate that bulk keeps while it pays for control traffic. A piece then waits five times as long: 25 ms
# where it is `QUANTUM_SECONDS`, 0.3 s where it is `MIN_QUANTUM` at 0.5 Mbit/s. With one contribution and as many
# checkpoints as are served at once, that is far less than the 3 s of silence that an exchange of 30 s allows.
BULK_SHARE = 0.2
# Share of a capped rate that other peers' traffic through this node keeps while the node's own wants all of it: a tenth
# lets their pings and control messages through in time, and takes little from the node's owner.
OTHERS_SHARE = 0.1
# Interval at which other peers' traffic checks whether the node's own leaves it bandwidth.
OTHERS_PAUSE = 0.02
# The displayed rates are means over this number of seconds.
METER_SECONDS = 10
# Least limit of bytes written and not yet sent by the kernel: a record, as trio sets it for its own sockets.
MIN_UNSENT_BYTES = 16_384


class Shaper:
    """Shapes one direction of a node's traffic: a token bucket for bulk, with the debt of control traffic.

    Without a cap nothing waits.
    """

    def __init__(self, rate: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """``rate``: bytes a second, 0 for no cap; ``clock``: seconds, never backwards."""
        self.total = 0
        """Bytes so far."""
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: deque[tuple[int, int]] = deque(maxlen=METER_SECONDS)  # (second, bytes in it), oldest first
        self.set_rate(rate)

    def set_rate(self, rate: float) -> None:
        """Set the cap, from any thread. Who waits for a reservation waits as long as it required then."""
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"a rate of {rate} bytes a second")
        with self._lock:
            self.rate = rate
            self.quantum = round(min(max(QUANTUM_SECONDS * (rate or math.inf), MIN_QUANTUM), MAX_QUANTUM))
            """Most bytes to reserve at once."""
            self.burst = max(BURST_SECONDS * rate, self.quantum)
            """Most bytes that move at once after a rest."""
            self._tokens = self.burst  # negative: bulk has reserved future tokens
            self._debt = 0.0  # of control; there are no tokens then
            self._at = self._clock()

    def reserve(self, count: int) -> float:
        """Reserve ``count`` bytes (at most `quantum`) of bulk, from any thread; return the seconds to wait before.

        It pays debt as `BULK_SHARE` allows. A reservation stays even if the bytes then do not move; a flow has one
        reservation at a time.
        """
        with self._lock:
            self._add(count)
            if not self.rate:
                return 0.0
            paid = min(self._debt, count * (1 / BULK_SHARE - 1))
            self._debt -= paid
            self._tokens -= count + paid
            return max(0.0, -self._tokens / self.rate)

    def charge(self, count: int) -> None:
        """Count ``count`` bytes of control traffic that have moved or do so now, whatever the cap is.

        They take the available tokens; the rest becomes debt.
        """
        with self._lock:
            self._add(count)
            taken = min(max(self._tokens, 0.0), count)
            self._tokens -= taken
            self._debt = min(self._debt + count - taken, MAX_DEBT_SECONDS * self.rate)

    def has(self, count: int) -> bool:
        """Return whether ``count`` bytes could move at once: there are tokens that are neither reserved nor owed."""
        with self._lock:
            self._refill(self._clock())
            return not self.rate or (self._tokens >= count and not self._debt)

    def _add(self, count: int) -> None:
        now = self._clock()
        self.total += count
        if not self._seconds or self._seconds[-1][0] < math.floor(now):
            self._seconds.append((math.floor(now), 0))
        second, so_far = self._seconds[-1]
        self._seconds[-1] = second, so_far + count
        self._refill(now)

    def _refill(self, now: float) -> None:
        if now <= self._at:
            return
        self._tokens += (now - self._at) * self.rate
        self._at = now
        if self._tokens > 0:  # tokens for which no bulk waits
            paid = min(self._debt, self._tokens)
            self._debt -= paid
            self._tokens = min(self._tokens - paid, self.burst)

    async def wait(self, count: int) -> float:
        """`reserve` and wait; return the seconds that the reservation required, which are no peer's fault."""
        seconds = self.reserve(count)
        if seconds > 0:  # else whatever follows yields to other tasks
            await trio.sleep(seconds)
        return seconds

    def per_second(self) -> float:
        """Return the rate in bytes a second, bulk and control, of the last full seconds and the present one."""
        with self._lock:
            now = self._clock()
            total = sum(count for at, count in self._seconds if at > math.floor(now) - METER_SECONDS)
            return total / (METER_SECONDS - 1 + now - math.floor(now))


class Leftover:
    """The bandwidth that a node leaves to other peers' traffic in one direction: at least `OTHERS_SHARE` of a cap."""

    def __init__(self, shaper: Shaper) -> None:
        self._shaper = shaper
        self._share_due_at = -math.inf
        self._turns = trio.Lock()

    async def wait(self, count: int) -> None:
        """Wait until ``count`` bytes (at most the shaper's quantum) may move; first come, first served."""
        async with self._turns:
            while not self._shaper.has(count):
                left = self._share_due_at - trio.current_time()
                if left <= 0:
                    break
                await trio.sleep(min(left, OTHERS_PAUSE))
            if self._shaper.rate:
                self._share_due_at = trio.current_time() + count / (OTHERS_SHARE * self._shaper.rate)
            await self._shaper.wait(count)


@dataclass(frozen=True)
class Shaping:
    """Both directions of one node."""

    up: Shaper = field(default_factory=Shaper)
    down: Shaper = field(default_factory=Shaper)
    may_spend: Callable[[int], bool] = field(default=lambda num_bytes: True, kw_only=True)
    """Whether bulk of this number of bytes, both ways together, may begin now (`TrafficService`)."""

    @classmethod
    def of_mbit(cls, up: float, down: float) -> Shaping:
        """Make both shapers from caps in Mbit/s, 0 for none."""
        return cls(Shaper(up * BYTES_PER_MBIT), Shaper(down * BYTES_PER_MBIT))

    def fit_buffers(self, connection: socket.socket) -> None:
        """Keep the kernel's send buffer of a bulk connection small where there is a cap.

        The receive buffer needs no limit: for a reader that pauses, Linux keeps to 60 kB by itself.
        """
        if self.up.rate:
            limit_unsent(connection, max(MIN_UNSENT_BYTES, self.up.quantum))


def limit_unsent(connection: socket.socket, max_bytes: int) -> None:
    """Limit a connection's unsent bytes in the kernel to ``max_bytes``, where the system supports it."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, max_bytes)

"""How fast a node sends and receives: caps that bulk waits for, and that control traffic only counts against.

A volunteer's line is shared with other people, and its queues are long: whatever is sent faster than the line takes it
waits there, control messages behind bulk. So bulk (contributions, checkpoints) asks a token bucket before each small
piece, and leaves evenly. Control messages (gossip, pairing, DHT, pings) never wait: what the bucket has not for them is
a debt, which is paid from what nobody uses and by the bulk that comes next. A flood of them may exceed any cap, and
must not silence an exchange, whose partner would take that for a broken channel (`SILENT_FOR` in conversation.py). So
bulk pays in small coin: a share of the rate is always its own, whatever the debt is.

A reservation takes its tokens at once and is told how long to wait until they are there (Turner's leaky bucket as a
meter, by times instead of queues). So pieces leave in the order in which they were asked for: a flow that has one
piece at a time outstanding gets its turn between the others', none starves, and a wait needs nobody to wake it.
What reserves may run in threads; so there is a lock, held for a few instructions.
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

from farandole.protocol.record_layer import MAX_SEALED_BYTES

from .figures import BYTES_PER_MBIT

# What may leave at once after a rest: wakeups may be late by so much before the rate suffers, and a line that is as
# fast as the cap is busy for no longer before it takes a control message.
BURST_SECONDS = 0.05
# Reserved at once: so much of the rate that the machine wakes up 200 times a second at most, but no less than what is
# worth a record of its own on a bulk channel, and no more than the longest one.
QUANTUM_SECONDS = 0.005
MIN_QUANTUM, MAX_QUANTUM = 4_096, MAX_SEALED_BYTES
# Control traffic beyond the cap is bulk's loss for so long; whoever floods a node does not slow its training for ever.
MAX_DEBT_SECONDS = 30.0
# What bulk keeps of the rate while it pays for control traffic. A piece then waits five times as long as without: 25 ms
# where it is `QUANTUM_SECONDS`, 0.3 s where it is `MIN_QUANTUM` at 0.5 Mbit/s. With one contribution and as many
# checkpoints as are served at once, that is far less than the 3 s of silence that an exchange of 30 s allows.
BULK_SHARE = 0.2
# What others' traffic through this node keeps of a capped rate while the node's own wants all of it: a tenth lets their
# pings and control messages through in time, and takes little from who pays for the line.
OTHERS_SHARE = 0.1
# How often others' traffic looks whether the node's own leaves it something.
OTHERS_PAUSE = 0.02
# The rates that people see are means over so many seconds.
METER_SECONDS = 10
# Written by us and not yet sent by the kernel, at least: a record, as trio has it for its own sockets.
MIN_UNSENT_BYTES = 16_384


class Meter:
    """Counts over the last `METER_SECONDS`."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, int]] = deque(maxlen=METER_SECONDS)
        """(second, count in it), oldest first."""

    def add(self, count: int, now: float) -> None:
        """Count."""
        second = math.floor(now)
        if self._slots and self._slots[-1][0] >= second:
            last, so_far = self._slots.pop()
            self._slots.append((last, so_far + count))
        else:
            self._slots.append((second, count))

    def per_second(self, now: float) -> float:
        """The mean over the last full seconds and the one that has begun."""
        second = math.floor(now)
        total = sum(count for at, count in self._slots if at > second - METER_SECONDS)
        return total / (METER_SECONDS - 1 + now - second)


class _Account:
    """A token bucket that bulk empties in turn, and what control owes it. Not for several threads."""

    def __init__(self, capacity: float, rate: float, now: float) -> None:
        self._capacity = capacity
        self._rate = rate
        self._tokens = capacity  # less than none: bulk has reserved those to come
        self._debt = 0.0  # of control; there are no tokens then
        self._at = now

    def reserve(self, count: int, now: float) -> float:
        """Take tokens for bulk, and of the debt as many as `BULK_SHARE` says; the seconds until they are there."""
        self._refill(now)
        paid = min(self._debt, count * (1 / BULK_SHARE - 1))
        self._debt -= paid
        self._tokens -= count + paid
        return max(0.0, -self._tokens / self._rate)

    def charge(self, count: int, now: float) -> None:
        """Take the tokens there are for control; the rest is owed."""
        self._refill(now)
        taken = min(max(self._tokens, 0.0), count)
        self._tokens -= taken
        self._debt = min(self._debt + count - taken, MAX_DEBT_SECONDS * self._rate)

    def has(self, count: int, now: float) -> bool:
        """Whether so many tokens are there that nobody has reserved or is owed."""
        self._refill(now)
        return self._tokens >= count and not self._debt

    def _refill(self, now: float) -> None:
        if now <= self._at:
            return
        self._tokens += (now - self._at) * self._rate
        self._at = now
        if self._tokens > 0:  # that no bulk waits for
            paid = min(self._debt, self._tokens)
            self._debt -= paid
            self._tokens = min(self._tokens - paid, self._capacity)


class Shaper:
    """One direction of all that a node moves. Without a cap nothing waits."""

    def __init__(self, rate: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """``rate``: bytes a second, 0 for no cap; ``clock``: seconds, never backwards."""
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"a rate of {rate} bytes a second")
        self.rate = rate
        self.quantum = round(min(max(QUANTUM_SECONDS * (rate or math.inf), MIN_QUANTUM), MAX_QUANTUM))
        """Most bytes to reserve at once."""
        self.burst = max(BURST_SECONDS * rate, self.quantum)
        """Most bytes that move at once after a rest."""
        self.total = 0
        """Bytes so far."""
        self._clock = clock
        self._lock = threading.Lock()
        self._account = _Account(self.burst, rate, clock()) if rate else None
        self._meter = Meter()

    def reserve(self, count: int) -> float:
        """Bulk's way, from any thread: the seconds to wait before ``count`` bytes (at most `quantum`) may move.

        Reserved is reserved, even if they then do not move; a flow has one reservation at a time.
        """
        with self._lock:
            now = self._clock()
            self._add(count, now)
            return 0.0 if self._account is None else self._account.reserve(count, now)

    def charge(self, count: int) -> None:
        """Control's way: ``count`` bytes have moved or do so now, whatever the cap says."""
        with self._lock:
            now = self._clock()
            self._add(count, now)
            if self._account is not None:
                self._account.charge(count, now)

    def _add(self, count: int, now: float) -> None:
        self.total += count
        self._meter.add(count, now)

    def has(self, count: int) -> bool:
        """Whether so many bytes could move at once, and nobody waits for them."""
        with self._lock:
            return self._account is None or self._account.has(count, self._clock())

    async def wait(self, count: int) -> float:
        """`reserve` and wait; returns the seconds to be waited, which no peer is to blame for."""
        seconds = self.reserve(count)
        if seconds > 0:  # else whatever follows yields to other tasks
            await trio.sleep(seconds)
        return seconds

    def per_second(self) -> float:
        """Bytes a second of late, bulk and control."""
        with self._lock:
            return self._meter.per_second(self._clock())


class Leftover:
    """What a node leaves of one direction for the traffic of others, and at least `OTHERS_SHARE` of a cap."""

    def __init__(self, shaper: Shaper) -> None:
        self._shaper = shaper
        self._share_due_at = -math.inf
        self._turns = trio.Lock()

    async def wait(self, count: int) -> None:
        """Until ``count`` bytes (at most the shaper's quantum) may move; who asks first goes first."""
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
    """Whether bulk of so many bytes, both ways together, may begin now (`farandole.node.loop.traffic`)."""

    @classmethod
    def of_mbit(cls, up: float, down: float) -> Shaping:
        """By caps in Mbit/s, 0 for none."""
        return cls(Shaper(up * BYTES_PER_MBIT), Shaper(down * BYTES_PER_MBIT))

    def fit_buffers(self, connection: socket.socket) -> None:
        """Keep what waits to be sent in the kernel of a connection for bulk small where there is a cap.

        What waits to be read needs no help: for a reader that pauses, Linux keeps to 60 kB by itself.
        """
        if self.up.rate:
            limit_unsent(connection, max(MIN_UNSENT_BYTES, self.up.quantum))


def limit_unsent(connection: socket.socket, max_bytes: int) -> None:
    """Let no more wait in the kernel before it is sent, where the system can say so."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, max_bytes)

"""Keeps one node's run state equal to that held by all peers: push, anti-entropy and heartbeats, without I/O.

The trio driver (`node/state/gossip.py`) and the simulator (`testnet/simulate/state.py`) both drive a `Gossip`.
Its methods take what arrives and the time by two clocks: ``unix`` for the entries, ``now`` (monotonic) for the rest.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass
from typing import Final

from ..wire.bounds import PeerMeters
from ..wire.errors import FloodError, RemoteProtocolError
from .antientropy import Session
from .author_places import Introducer
from .entries import Delta, Entry, Kind
from .liveness import BASE_PERIOD, Liveness
from .push import NUM_CHOSEN, Push, decode_batch
from .state import MergeReport, RunState

# Limits on the valid gossip that a peer may send: more than any honest peer sends is a fault.
#
# An honest peer's worst case sets the bounds. In a run of 1,000 it forwards 33 heartbeats and up to 50 other entries a
# second, in two messages; a link that stalls holds up a minute of that, which then arrives at once. Whatever floods in,
# it forwards at most `farandole.protocol.state.push.MAX_ITEMS_A_TICK` a tick, so a flood from others never makes an
# honest peer a flooder. (Older releases send two messages of ids a second besides.)


INBOUND_LIMITS: Final[dict[str, tuple[float, float]]] = {
    # An honest peer sends a batch and ids a tick, four messages a second, or 14 if its entries have the largest size; a
    # stall of a minute holds up 240 of them. A message costs 50 us before its entries are looked at.
    "messages": (512, 20),
    # At once: what an honest peer queues for another (`farandole.node.state.messenger`). A second: more than
    # `MAX_ITEMS_A_TICK` of the longest entries.
    "bytes": (4 * 1024 * 1024, 256 * 1024),
    # A stall of a minute, 80 a second; and half more than `MAX_ITEMS_A_TICK` allows an honest peer. An entry costs
    # 0.1 ms if it is new, so a peer costs 4 % of a core in the long run.
    "entries": (6_000, 400),
}
"""What one peer may send at once, and per second."""


class InboundMeter:
    """Counts what each peer sends without being asked. ``now``: monotonic seconds."""

    def __init__(self) -> None:
        self._meters = {what: PeerMeters(burst, rate) for what, (burst, rate) in INBOUND_LIMITS.items()}

    def count(self, peer: bytes, now: float, **counts: int) -> None:
        """Count ``messages`` and ``bytes`` before they are parsed, and ``entries`` before they are verified.

        Raises `FloodError` if they are more than an honest peer sends.
        """
        for what, count in counts.items():
            if not self._meters[what].of(peer, now).take(now, count):
                burst, rate = INBOUND_LIMITS[what]
                raise FloodError(f"more than {burst:,.0f} {what} at once, or {rate:,.0f} a second")


MAX_FORWARDED = 64
"""Most items of an anti-entropy session that are pushed on. More means that this node was away, not its neighbours."""
FAULT_BURST = 8
FAULT_RATE = 0.1
"""Invalid items that a peer may send at once, and per second. Honest peers send none; a flooder is cut off here."""
DISPLACING_BURST = 32
DISPLACING_RATE = 0.5
"""How many authors that one peer brought, and that took another's place here, are pushed on: at once, and per second.
Four neighbours bring as many as join a run of 1,000 of which a tenth is replaced each minute. Where invented authors
fill all tables, each that is pushed on takes a place at the next node, and the author that loses it is news elsewhere:
they would circulate forever.
"""
AVOID_SECONDS = 30.0
"""Seconds without another attempt at a peer that could not be reached. Whether it is dead is not judged here."""
SYNC_PERIOD = 10.0
FIRST_SYNC_PERIODS = (1.0, 2.0, 4.0, 8.0)
"""A newcomer syncs more often at first: its neighbours may be as new as it is."""
JOIN_LEAD_SECONDS = 2.0
"""Time that the first of a newcomer's sessions has before the others begin. Each would bring the whole run state."""
ENOUGH_CANDIDATES = 2 * NUM_CHOSEN
SLICE_ITEMS = 64
"""Items merged at a time, 7 ms of verification; a driver lets other tasks run in between."""


@dataclass(eq=False)
class Gossip:
    """One node's part in the gossip of its run."""

    state: RunState
    author: bytes
    """This node's own key."""
    _rng: random.Random
    base_period: InitVar[float] = BASE_PERIOD
    """Seconds between heartbeats in a small run."""
    _network_of: Callable[[bytes], str] = lambda peer: ""
    """Where a connected peer is (`Introducer.network`)."""

    def __post_init__(self, base_period: float) -> None:
        self.state.places.protect(lambda other: other == self.author)
        self.inbound = InboundMeter()
        self.liveness = Liveness(base_period)
        self.push = Push(self._rng)
        self._faults = PeerMeters(FAULT_BURST, FAULT_RATE)
        self._displacing = PeerMeters(DISPLACING_BURST, DISPLACING_RATE)
        self._avoided: dict[bytes, float] = {}  # peer -> until when

    def publish(self, entry: Entry, unix: float) -> None:
        """Merge an entry that this node has written, and queue it for the push."""
        report = self.state.merge(Delta((entry.signed,)), unix)
        self.push.queue([*report.proofs, *(entry.signed for entry in report.new)], None)

    def receive_push(self, peer: bytes, payload: bytes, unix: float, now: float) -> MergeReport:
        """Take in a batch. Raises `RemoteProtocolError` if it is malformed, `FloodError` if the peer sends too much."""
        self.inbound.count(peer, now, messages=1, bytes=len(payload))
        batch = decode_batch(payload)
        self.inbound.count(peer, now, entries=len(batch.delta.entries) + len(batch.delta.proofs))
        self.push.heard(peer, batch, now)
        report = self.merge(batch.delta, peer, unix, now)
        self.reached(peer)
        return report

    def merge(
        self, delta: Delta, peer: bytes, unix: float, now: float, forward: bool = True, *, is_asked: bool = False
    ) -> MergeReport:
        """Take in what a peer sent. What is new is pushed on to the neighbours if ``forward``.

        ``is_asked``: received in a session that this node began. Raises `RemoteProtocolError` if the peer has sent more
        invalid items than could be an accident; the valid ones are merged nevertheless.
        """
        meter = self._faults.of(peer, now)
        if meter.available(now) < 1.0:
            raise RemoteProtocolError("too many invalid entries from this peer")
        report = self.state.merge(delta, unix, Introducer(peer, self._network_of(peer)), is_asked=is_asked)
        beats = [entry for entry in report.new if entry.kind is Kind.BEAT and entry.author != self.author]
        came_to_life = dict.fromkeys(beat.author for beat in beats if not self.liveness.is_live(beat.author, now))
        for beat in beats:
            self.liveness.beat(beat.author, beat.tick, now)
        num_live = len(self.liveness.live(now)) if came_to_life else 0
        for author in came_to_life:
            self.push.welcome(author, num_live, now)
        if forward:
            kept_back = {author for author in report.displacing if not self._displacing.of(peer, now).take(now)}
            report.num_too_many += len(kept_back)
            news = [entry.signed for entry in report.new if entry.author not in kept_back]
            self.push.queue([*report.proofs, *news], peer)
        if invalid := len(report.faults):
            meter.take(now, min(invalid, meter.available(now)))
            if meter.available(now) < 1.0:
                raise RemoteProtocolError(f"too many invalid entries from this peer: {report.faults[0]}")
        return report

    def tick(self, unix: float, now: float) -> list[tuple[bytes, bytes]]:
        """Drop what has expired, and return what to push to whom. Call this every half second."""
        if self.state.expire(unix):
            present = {entry.author for entry in self.state.entries(Kind.BEAT)}
            self.liveness.forget_all_but(present)
        self._avoided = {peer: until for peer, until in self._avoided.items() if until > now}
        self.state.fit_beat_ttl(self.liveness.silence)

        def is_candidate(peer: bytes) -> bool:
            return self.liveness.is_live(peer, now) and self.state.is_member(peer)

        return self.push.tick(now, is_candidate, lambda: self.candidates(now))

    def candidates(self, now: float) -> list[bytes]:
        """Return the peers to talk to: live members, without the recently unreachable ones if enough are left.

        A small run keeps the unreachable ones: a node that stops talking to the only other one would look dead to it.
        Peers that were only heard of are never more than the ones that were reached. Otherwise thousands of keys that
        no peer answers for could separate any two nodes.
        """
        members = [peer for peer in self.liveness.live(now) if self.state.is_member(peer)]
        fine = [peer for peer in members if peer not in self._avoided and not self.liveness.is_suspect(peer)]
        if present := [peer for peer in members if self.liveness.is_reached(peer)]:
            heard = [peer for peer in fine if not self.liveness.is_reached(peer)]
            well = [peer for peer in fine if self.liveness.is_reached(peer)]
            present = well if len(well) >= ENOUGH_CANDIDATES else present
            return present + self._rng.sample(heard, min(len(heard), len(present)))
        return fine if len(fine) >= ENOUGH_CANDIDATES else members

    def choose_partner(self, now: float) -> bytes | None:
        """Choose the peer to sync with next; None if no live member is known."""
        candidates = self.candidates(now)
        return self._rng.choice(candidates) if candidates else None

    def choose_silent(self, now: float) -> bytes | None:
        """Choose a silent member to try in addition to the partner, heartbeats included; often None.

        This is how two halves of a network rejoin. The chance is such that all nodes together try each silent member
        about once a period. It costs each node at most one failed dial a period, and finds a healed partition within a
        second or two.
        """
        live = self.liveness.live(now)
        silent = sorted(self.state.members().keys() - set(live) - {self.author} - self._avoided.keys())
        if not silent or self._rng.random() * (len(live) + 1) > len(silent):
            return None
        return self._rng.choice(silent)

    def open_session(self, unix: float, *, is_initiator: bool, with_beats: bool = False) -> Session:
        """Open a session of anti-entropy. Pass what it receives to `merge`."""
        return Session(self.state, self._rng, unix, is_initiator=is_initiator, with_beats=with_beats)

    def reached(self, peer: bytes) -> None:
        """Note that the peer was heard from directly."""
        self._avoided.pop(peer, None)
        self.liveness.trust(peer)

    def unreachable(self, peer: bytes, now: float) -> None:
        """Note that the peer could not be reached or broke the protocol; prefer others for `AVOID_SECONDS`."""
        self._avoided[peer] = now + AVOID_SECONDS
        self.push.drop(peer)


def sync_periods() -> Iterator[float]:
    """Return the seconds from each sync of a node's life to the next, before jitter."""
    return itertools.chain(FIRST_SYNC_PERIODS, itertools.repeat(SYNC_PERIOD))


def slices_of(delta: Delta) -> Iterator[Delta]:
    """Split a delta into parts of at most `SLICE_ITEMS` items."""
    for start in range(0, max(len(delta.entries), len(delta.proofs)), SLICE_ITEMS):
        part = slice(start, start + SLICE_ITEMS)
        yield Delta(delta.entries[part], delta.proofs[part])


def is_worth_forwarding(delta: Delta) -> bool:
    """Return whether a session brought few enough items that other peers may lack them too."""
    return len(delta.entries) + len(delta.proofs) <= MAX_FORWARDED

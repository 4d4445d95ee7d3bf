"""Eager push: a node sends what is new to it to a few neighbours within a tick, so it reaches all nodes in seconds.

Each node chooses two neighbours at random, for two minutes; a link carries both ways, so a node has four on average
and never fewer than two. Flooding such a graph reaches every node as long as it hangs together, which random 2-out
graphs do (Fenner and Frieze, 1982); with fresh random targets each time, three copies an entry reach 94 %. An entry is
not sent to a peer that is known to have it, and waiting for the tick saves most second copies. Batches are lost when
the network fails or a queue is full: anti-entropy brings the rest. A batch a tick costs the same at
any size of the run; gossipsub does not (docs/decisions.md).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from .entries import MAX_BODY_BYTES, Delta, Proof, Signed
from .errors import RemoteProtocolError
from .packing import deltas_of
from .wire import MessageDecoder, encode

PROTOCOL = "/farandole/push/2"
TICK_SECONDS = 0.5
NUM_CHOSEN = 2
MAX_CHOOSERS = 8
"""Links that others chose and that we answer. The mean is two, but the first nodes of a run are chosen by many."""
CHOICE_SECONDS = 120.0
"""After this time another neighbour is chosen, so that no unlucky graph lasts."""
QUIET_SECONDS = 15.0
"""A neighbour that sends nothing for this time does not answer our choice (too many have chosen it); choose another."""
CHOOSER_SECONDS = 60.0
"""A peer that chose us and sends nothing for this time has chosen another."""
MAX_PENDING = 8_192
"""Items that wait for their tick, 1 MB. Above it the oldest of the source with most are dropped; anti-entropy brings
them."""
MAX_ITEMS_A_TICK = 128
"""32 KB/s of heartbeats a link at most, however much arrives; three times the rate of a run of 1,000 nodes (80 entries
a second). Each source has an equal share, so that one that floods delays only its own items."""
MAX_BATCH_BYTES = 16 * 1024
"""One message: 130 heartbeats, 15 ms of verification at the receiver."""
MAX_PUSH_BYTES = MAX_BATCH_BYTES + 2 * (MAX_BODY_BYTES + 128)
"""A batch of one proof is as long as a proof is."""


class Batch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message of push."""

    is_choice: bool
    """Whether the sender has chosen this link; else it answers the receiver's choice."""
    delta: Delta


_decode = MessageDecoder[Batch](Batch, "a push")


def decode_batch(raw: bytes) -> Batch:
    """Parse a message; `RemoteProtocolError` if it is too long or malformed."""
    if len(raw) > MAX_PUSH_BYTES:
        raise RemoteProtocolError(f"a push of {len(raw)} bytes")
    return _decode(raw)


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Send this to a neighbour; losing it does no harm."""

    peer: bytes
    payload: bytes


@dataclass(slots=True)
class _Choice:
    """A neighbour that this node has chosen."""

    until: float
    heard_at: float


@dataclass(slots=True)
class _Pending:
    """An item that waits for the tick, and the peers that have it."""

    item: Signed | Proof
    known_to: set[bytes | None]


class Push:
    """Queues what is new, and returns at each tick which batch to send to which peer. ``now``: monotonic seconds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pending: dict[bytes | None, dict[bytes, _Pending]] = {}  # by source
        self._num_pending = 0
        self._chosen: dict[bytes, _Choice] = {}
        self._choosers: dict[bytes, float] = {}  # peer -> until when, if it sends nothing more

    @property
    def neighbours(self) -> set[bytes]:
        """Return the peers to which the next batch goes, as far as is known now."""
        return self._chosen.keys() | self._choosers.keys()

    def queue(self, entries: Iterable[Signed], proofs: Iterable[Proof], source: bytes | None) -> None:
        """Queue items that are new to this node; ``source`` has them already (None: written here)."""
        items: list[Signed | Proof] = [*proofs, *entries]
        for item in items:
            waiting = self._pending.setdefault(source, {})
            self._num_pending += _key(item) not in waiting
            waiting[_key(item)] = _Pending(item, {source})
            if self._num_pending > MAX_PENDING:
                self._pop(max(self._pending, key=lambda other: len(self._pending[other])))

    def _pop(self, source: bytes | None) -> _Pending:
        """Pop the oldest item of one source."""
        waiting = self._pending[source]
        pending = waiting.pop(next(iter(waiting)))
        self._num_pending -= 1
        if not waiting:
            del self._pending[source]
        return pending

    def _take_batch(self) -> list[_Pending]:
        """Take the oldest items, round-robin over the sources."""
        batch: list[_Pending] = []
        while self._pending and len(batch) < MAX_ITEMS_A_TICK:
            batch.extend(map(self._pop, list(self._pending)[: MAX_ITEMS_A_TICK - len(batch)]))
        return batch

    def heard(self, peer: bytes, batch: Batch, now: float) -> None:
        """Note a batch from a peer: the peer has what is in it, and may have chosen us."""
        if batch.is_choice and (peer in self._choosers or len(self._choosers) < MAX_CHOOSERS):
            self._choosers[peer] = now + CHOOSER_SECONDS
        if peer in self._chosen:
            self._chosen[peer].heard_at = now
        if self._pending:
            for key in map(_key, batch.delta.entries):
                for waiting in self._pending.values():
                    if key in waiting:
                        waiting[key].known_to.add(peer)

    def welcome(self, peer: bytes, num_live: int, now: float) -> None:
        """Choose a peer that has become live, with some probability, in place of another.

        Every node that sees it does so with a probability that gives it as many new neighbours as a node chooses.
        Without that, the halves of a network that rejoin would each keep their own neighbours until their time is over.
        """
        if peer in self._chosen or self._rng.random() * max(1, num_live) >= NUM_CHOSEN:
            return
        if len(self._chosen) >= NUM_CHOSEN:
            del self._chosen[self._rng.choice([*self._chosen])]
        self._chosen[peer] = _Choice(now + CHOICE_SECONDS * self._rng.uniform(0.5, 1.5), now)

    def drop(self, peer: bytes) -> None:
        """Drop a peer that cannot be reached, or misbehaves."""
        self._chosen.pop(peer, None)
        self._choosers.pop(peer, None)

    def tick(
        self, now: float, is_candidate: Callable[[bytes], bool], candidates: Callable[[], Sequence[bytes]]
    ) -> list[SendBatch]:
        """Return the batches to send now.

        ``is_candidate`` is called for each neighbour, ``candidates`` only when a neighbour is missing.
        """
        self._choose(now, is_candidate, candidates)
        neighbours = sorted(self.neighbours)
        if not neighbours:
            return []
        batch = self._take_batch()
        return [output for peer in neighbours for output in self._batches_for(peer, batch)]

    def _batches_for(self, peer: bytes, batch: list[_Pending]) -> list[SendBatch]:
        items = [pending.item for pending in batch if peer not in pending.known_to]
        entries = [item for item in items if isinstance(item, Signed)]
        proofs = [item for item in items if isinstance(item, Proof)]
        is_choice = peer in self._chosen
        return [
            SendBatch(peer, encode(Batch(is_choice, delta))) for delta in deltas_of(entries, proofs, MAX_BATCH_BYTES)
        ]

    def _choose(
        self, now: float, is_candidate: Callable[[bytes], bool], candidates: Callable[[], Sequence[bytes]]
    ) -> None:
        """Drop neighbours that are gone or whose time is over; choose others in their place."""
        self._chosen = {
            peer: choice
            for peer, choice in self._chosen.items()
            if choice.until > now and now - choice.heard_at <= QUIET_SECONDS and is_candidate(peer)
        }
        self._choosers = {peer: until for peer, until in self._choosers.items() if until > now}
        missing = NUM_CHOSEN - len(self._chosen)
        if missing <= 0:
            return
        free = [peer for peer in candidates() if peer not in self._chosen]
        for peer in self._rng.sample(free, min(missing, len(free))):
            self._chosen[peer] = _Choice(now + CHOICE_SECONDS * self._rng.uniform(0.5, 1.5), now)


def _key(item: Signed | Proof) -> bytes:
    return item.author + item.body if isinstance(item, Signed) else item.a.author + item.a.body + item.b.body

"""Push: a node sends what is new to it to a few neighbours within a tick, so it reaches all nodes in seconds.

Each node chooses two neighbours at random, for two minutes; a link carries both ways, so a node has four on average
and never fewer than two. Flooding such a graph reaches every node as long as it hangs together, which random 2-out
graphs do (Fenner and Frieze, 1982); with fresh random targets each time, three copies an entry reach 94 %. An entry is
not sent to a peer that is known to have it, and waiting for the tick saves many second copies. Batches are lost when
the network fails or a queue is full: anti-entropy brings the rest. A batch a tick costs the same at any size of the
run; gossipsub does not (docs/decisions.md).

An item arrives over more than one link, 2.3 times in a large run. Sending ids on the links that repeat (Leitão, Pereira
and Rodrigues, Epidemic Broadcast Trees, SRDS 2007) would save a quarter of the traffic there, and was given up for its
lines (docs/decisions.md).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from ..wire.messagepack import MessageDecoder, encode
from .entries import MAX_BODY_BYTES, Delta, Proof, Signed, deltas_of

PROTOCOL: Final = "/farandole/push/2"
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


decode_batch = MessageDecoder[Batch](Batch, "a push", MAX_PUSH_BYTES)
"""Parse a message; `RemoteProtocolError` if it is too long or malformed."""


class Push:
    """Queues what is new, and returns at each tick which batch to send to which peer. ``now``: monotonic seconds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pending: dict[bytes | None, dict[Signed | Proof, set[bytes]]] = {}
        """By source, the items that wait for the tick, the oldest first -> the peers that have them."""
        self._num_pending = 0
        self._chosen: dict[bytes, tuple[float, float]] = {}  # peer -> until when, and when it was heard last
        self._choosers: dict[bytes, float] = {}  # peer -> until when, if it sends nothing more

    @property
    def neighbours(self) -> set[bytes]:
        """Return the peers to which the next batch goes, as far as is known now."""
        return self._chosen.keys() | self._choosers.keys()

    def queue(self, items: Iterable[Signed | Proof], source: bytes | None) -> None:
        """Queue items that are new to this node; ``source`` has them already (None: written here)."""
        for item in items:
            waiting = self._pending.setdefault(source, {})
            self._num_pending += item not in waiting
            waiting.setdefault(item, set() if source is None else {source})
            if self._num_pending > MAX_PENDING:
                self._pop(max(self._pending, key=lambda other: len(self._pending[other])))

    def _pop(self, source: bytes | None) -> tuple[Signed | Proof, set[bytes]]:
        """Pop the oldest item of one source, and the peers that have it."""
        waiting = self._pending[source]
        item = next(iter(waiting))
        known_to = waiting.pop(item)
        self._num_pending -= 1
        if not waiting:
            del self._pending[source]
        return item, known_to

    def heard(self, peer: bytes, batch: Batch, now: float) -> None:
        """Note a batch from a peer, before it is merged: the peer has what is in it, and may have chosen us."""
        if batch.is_choice and (peer in self._choosers or len(self._choosers) < MAX_CHOOSERS):
            self._choosers[peer] = now + CHOOSER_SECONDS
        if peer in self._chosen:
            self._chosen[peer] = self._chosen[peer][0], now
        for waiting in self._pending.values():
            for item in (*batch.delta.proofs, *batch.delta.entries):
                if item in waiting:
                    waiting[item].add(peer)

    def welcome(self, peer: bytes, num_live: int, now: float) -> None:
        """Choose a peer that has become live, with some probability, in place of another.

        Every node that sees it does so with a probability that gives it as many new neighbours as a node chooses.
        Without that, the halves of a network that rejoin would each keep their own neighbours until their time is over.
        """
        if peer in self._chosen or self._rng.random() * max(1, num_live) >= NUM_CHOSEN:
            return
        if len(self._chosen) >= NUM_CHOSEN:
            del self._chosen[self._rng.choice([*self._chosen])]
        self._chosen[peer] = now + CHOICE_SECONDS * self._rng.uniform(0.5, 1.5), now

    def drop(self, peer: bytes) -> None:
        """Drop a peer that cannot be reached, or misbehaves."""
        self._chosen.pop(peer, None)
        self._choosers.pop(peer, None)

    def tick(
        self, now: float, is_candidate: Callable[[bytes], bool], candidates: Callable[[], Sequence[bytes]]
    ) -> list[tuple[bytes, bytes]]:
        """Return the messages to send now, each with its neighbour; losing one does no harm.

        ``is_candidate`` is called for each neighbour, ``candidates`` only when a neighbour is missing.
        """
        self._choose(now, is_candidate, candidates)
        neighbours = sorted(self.neighbours)
        if not neighbours:
            return []
        batch: dict[Signed | Proof, set[bytes]] = {}
        while self._pending and len(batch) < MAX_ITEMS_A_TICK:  # round-robin over the sources
            batch.update(map(self._pop, list(self._pending)[: MAX_ITEMS_A_TICK - len(batch)]))
        messages = []
        for peer in neighbours:
            items = [item for item, known_to in batch.items() if peer not in known_to]
            is_choice = peer in self._chosen
            messages += [(peer, encode(Batch(is_choice, delta))) for delta in deltas_of(items, MAX_BATCH_BYTES)]
        return messages

    def _choose(
        self, now: float, is_candidate: Callable[[bytes], bool], candidates: Callable[[], Sequence[bytes]]
    ) -> None:
        """Drop neighbours that are gone or whose time is over; choose others in their place."""
        self._chosen = {
            peer: choice
            for peer, choice in self._chosen.items()
            if choice[0] > now and now - choice[1] <= QUIET_SECONDS and is_candidate(peer)
        }
        self._choosers = {peer: until for peer, until in self._choosers.items() if until > now}
        missing = NUM_CHOSEN - len(self._chosen)
        if missing <= 0:
            return
        free = [peer for peer in candidates() if peer not in self._chosen]
        for peer in self._rng.sample(free, min(missing, len(free))):
            self._chosen[peer] = now + CHOICE_SECONDS * self._rng.uniform(0.5, 1.5), now

"""Push: a node sends what is new to it to a few neighbours within a tick, so it reaches all nodes in seconds.

Each node chooses two neighbours at random, for two minutes; a link carries both ways, so a node has four on average
and never fewer than two. Flooding such a graph reaches every node as long as it hangs together, which random 2-out
graphs do (Fenner and Frieze, 1982); with fresh random targets each time, three copies an entry reach 94 %. An entry is
not sent to a peer that is known to have it, and waiting for the tick saves many second copies; the others are saved by
links that carry ids (`lazy_push`). Batches are lost when the network fails or a queue is full: anti-entropy brings the
rest. A batch a tick costs the same at any size of the run; gossipsub does not (docs/decisions.md).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ..wire.errors import RemoteProtocolError
from ..wire.messagepack import MessageDecoder, encode
from .entries import MAX_BODY_BYTES, Delta, Proof, Signed
from .lazy_push import PROTOCOL as HAVE_PROTOCOL
from .lazy_push import Have, Recall, id_of, ids_in
from .packing import deltas_of

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
MIN_REPEATED = 4
"""Items that a neighbour repeats in a batch, and at least half of it, before this node refuses items from it. Small
runs stay below that: their entries take the shortest path, and their traffic is small."""
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
    protocol: str
    """`PROTOCOL`, or that of `lazy_push`."""
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

    def __init__(self, rng: random.Random, knows_ids: Callable[[bytes], bool] = lambda peer: True) -> None:
        """``knows_ids``: whether a connected peer has the protocol of `lazy_push`; older releases have not."""
        self._rng = rng
        self._knows_ids = knows_ids
        self._pending: dict[bytes | None, dict[bytes, _Pending]] = {}  # by source, then by id
        self._num_pending = 0
        self._chosen: dict[bytes, _Choice] = {}
        self._choosers: dict[bytes, float] = {}  # peer -> until when, if it sends nothing more
        self._recall = Recall()
        self._lazy: set[bytes] = set()
        """Neighbours that get ids."""
        self._refused: bytes | None = None
        """The neighbour that will be told so at the next tick: one at a time, so that not all links end at once."""
        self._asked: dict[bytes, tuple[bytes, ...]] = {}
        """Neighbour -> ids of items that it asked for."""

    @property
    def neighbours(self) -> set[bytes]:
        """Return the peers to which the next batch goes, as far as is known now."""
        return self._chosen.keys() | self._choosers.keys()

    def queue(self, entries: Iterable[Signed], proofs: Iterable[Proof], source: bytes | None) -> None:
        """Queue items that are new to this node; ``source`` has them already (None: written here)."""
        both: list[Signed | Proof] = [*proofs, *entries]
        items = {id_of(item): item for item in both}
        for id_, item in items.items():
            waiting = self._pending.setdefault(source, {})
            self._num_pending += id_ not in waiting
            waiting[id_] = _Pending(item, {source, *self._recall.announcers_of(id_)})
            if self._num_pending > MAX_PENDING:
                self._pop(max(self._pending, key=lambda other: len(self._pending[other])))
        self._recall.add(items)

    def _pop(self, source: bytes | None) -> tuple[bytes, _Pending]:
        """Pop the oldest item of one source, and its id."""
        waiting = self._pending[source]
        id_ = next(iter(waiting))
        pending = waiting.pop(id_)
        self._num_pending -= 1
        if not waiting:
            del self._pending[source]
        return id_, pending

    def _take_batch(self) -> dict[bytes, _Pending]:
        """Take the oldest items by their ids, round-robin over the sources."""
        batch: dict[bytes, _Pending] = {}
        while self._pending and len(batch) < MAX_ITEMS_A_TICK:
            batch.update(map(self._pop, list(self._pending)[: MAX_ITEMS_A_TICK - len(batch)]))
        return batch

    def heard(self, peer: bytes, batch: Batch, now: float) -> None:
        """Note a batch from a peer, before it is merged: the peer has what is in it, and may have chosen us."""
        self._note_sign(peer, batch.is_choice, now)
        ids = [*map(id_of, batch.delta.proofs), *map(id_of, batch.delta.entries)]
        self._note_known(peer, ids)
        repeated = self._recall.add_received(ids)
        others = self.neighbours - self._lazy - {peer}
        is_too_much = repeated >= MIN_REPEATED and 2 * repeated >= len(ids)
        if is_too_much and others and self._refused is None and self._knows_ids(peer):
            self._refused = peer

    def heard_ids(self, peer: bytes, have: Have, now: float) -> None:
        """Note a message of ids from a peer. Only a neighbour's has an effect."""
        self._note_sign(peer, have.is_choice, now)
        if peer not in self.neighbours:
            return
        announced = list(ids_in(have.announced))
        self._note_known(peer, announced)
        self._recall.await_items(peer, announced, now)
        if have.wanted:
            self._lazy.discard(peer)
            self._asked[peer] = (*self._asked.get(peer, ()), *ids_in(have.wanted))[:MAX_ITEMS_A_TICK]
        elif have.is_refusal:
            self._lazy.add(peer)

    def _note_sign(self, peer: bytes, is_choice: bool, now: float) -> None:
        if is_choice and (peer in self._choosers or len(self._choosers) < MAX_CHOOSERS):
            self._choosers[peer] = now + CHOOSER_SECONDS
        if peer in self._chosen:
            self._chosen[peer].heard_at = now

    def _note_known(self, peer: bytes, ids: Iterable[bytes]) -> None:
        if self._pending:
            for id_ in ids:
                for waiting in self._pending.values():
                    if id_ in waiting:
                        waiting[id_].known_to.add(peer)

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
        self._forget_link(peer)

    def _forget_link(self, peer: bytes) -> None:
        self._lazy.discard(peer)
        self._asked.pop(peer, None)
        self._recall.drop(peer)
        if self._refused == peer:
            self._refused = None

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
        batch, requests = self._take_batch(), self._recall.requests(now)
        if self._refused is not None:
            self._lazy.add(self._refused)
        self._lazy -= requests.keys()
        outputs = [output for peer in neighbours for output in self._outputs_for(peer, batch, requests.get(peer, []))]
        self._refused = None
        return outputs

    def _outputs_for(self, peer: bytes, batch: dict[bytes, _Pending], wanted: Sequence[bytes]) -> list[SendBatch]:
        news = {id_: pending.item for id_, pending in batch.items() if peer not in pending.known_to}
        items = self._recall.find(self._asked.pop(peer, ()))
        announced: list[bytes] = []
        if peer in self._lazy:
            announced = [*news]
        else:
            items += [item for id_, item in news.items() if item not in items]
        entries = [item for item in items if isinstance(item, Signed)]
        proofs = [item for item in items if isinstance(item, Proof)]
        is_choice = peer in self._chosen
        outputs = [
            SendBatch(peer, PROTOCOL, encode(Batch(is_choice, delta)))
            for delta in deltas_of(entries, proofs, MAX_BATCH_BYTES)
        ]
        if announced or wanted or peer == self._refused:
            have = Have(is_choice, peer == self._refused, b"".join(announced), b"".join(wanted))
            outputs.append(SendBatch(peer, HAVE_PROTOCOL, encode(have)))
        return outputs

    def _choose(
        self, now: float, is_candidate: Callable[[bytes], bool], candidates: Callable[[], Sequence[bytes]]
    ) -> None:
        """Drop neighbours that are gone or whose time is over; choose others in their place."""
        before = self.neighbours
        self._chosen = {
            peer: choice
            for peer, choice in self._chosen.items()
            if choice.until > now and now - choice.heard_at <= QUIET_SECONDS and is_candidate(peer)
        }
        self._choosers = {peer: until for peer, until in self._choosers.items() if until > now}
        for peer in before - self.neighbours:
            self._forget_link(peer)
        missing = NUM_CHOSEN - len(self._chosen)
        if missing <= 0:
            return
        free = [peer for peer in candidates() if peer not in self._chosen]
        for peer in self._rng.sample(free, min(missing, len(free))):
            self._chosen[peer] = _Choice(now + CHOICE_SECONDS * self._rng.uniform(0.5, 1.5), now)

"""Push: a node sends what is new to it to a few neighbours within a tick, so it reaches all nodes in seconds.

Each node chooses two neighbours at random, for two minutes; a link carries both ways, so a node has four on average
and never fewer than two. Flooding such a graph reaches every node as long as it hangs together, which random 2-out
graphs do (Fenner and Frieze, 1982); with fresh random targets each time, three copies an entry reach 94 %. An entry is
not sent to a peer that is known to have it, and waiting for the tick saves many second copies. Batches are lost when
the network fails or a queue is full: anti-entropy brings the rest. A batch a tick costs the same at any size of the
run; gossipsub does not (docs/decisions.md).

Flooding sends each item over every link, so a node receives it more than twice. A node whose neighbour repeats itself
refuses items on that link (PRUNE), and both ends go on with ids of 8 bytes (IHAVE). The links that still carry items
tend to a tree. Where an announced item does not arrive, the tree is broken: the node asks an announcer for it, and
the link carries items again (GRAFT). See Leitão, Pereira and Rodrigues, Epidemic Broadcast Trees (SRDS 2007).

What a lying neighbour gains: if it announces what it does not have, an item that other links announce too comes
`PATIENCE_SECONDS` later. If it refuses or asks, it gets ids or items, as neighbours do. If it sends everything first
and then withholds an item, the ids of the other links reveal that within `PATIENCE_SECONDS`.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from ..wire.errors import RemoteProtocolError
from ..wire.messagepack import MessageDecoder, encode
from .entries import MAX_BODY_BYTES, Delta, Proof, Signed, deltas_of

PROTOCOL: Final = "/farandole/push/2"
HAVE_PROTOCOL: Final = "/farandole/have/1"
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
ID_BYTES: Final = 8
"""Finding a second item with the id of a given one takes 2^64 hashes."""
MAX_IDS: Final = 256
"""Ids of each kind in a message: twice as many as the items that a node pushes in a tick."""
MAX_HAVE_BYTES: Final = 2 * MAX_IDS * ID_BYTES + 64
PATIENCE_SECONDS: Final = 1.0
"""From the announcement of an item to the request for it, and to the next announcer's turn. Two ticks: the announcement
may have come by a shorter path than the item."""
MAX_RECENT: Final = 8_192
"""Ids of the latest items, and the items, if they were accepted: 1 MB, and 100 s of a run of 1,000 nodes."""
MAX_AWAITED: Final = 512
"""Announced items per neighbour that this node lacks; it ignores more. Several seconds of a run of 1,000 nodes."""


class Batch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message of push."""

    is_choice: bool
    """Whether the sender has chosen this link; else it answers the receiver's choice."""
    delta: Delta


class Have(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message of lazy push."""

    is_choice: bool
    """Whether the sender has chosen this link, as in a batch of items."""
    is_refusal: bool
    """Whether the receiver is to send ids instead of items."""
    announced: Annotated[bytes, msgspec.Meta(max_length=MAX_IDS * ID_BYTES)]
    """Ids of items that are new to the sender."""
    wanted: Annotated[bytes, msgspec.Meta(max_length=MAX_IDS * ID_BYTES)]
    """Ids of items that the receiver is to send; it then sends items again, not ids."""


_read_batch = MessageDecoder[Batch](Batch, "a push")
_read_have = MessageDecoder[Have](Have, "announced ids")


def decode_batch(raw: bytes) -> Batch:
    """Parse a message; `RemoteProtocolError` if it is too long or malformed."""
    if len(raw) > MAX_PUSH_BYTES:
        raise RemoteProtocolError(f"a push of {len(raw)} bytes")
    return _read_batch(raw)


def decode_have(raw: bytes) -> Have:
    """Parse a message; `RemoteProtocolError` if it is too long or malformed."""
    if len(raw) > MAX_HAVE_BYTES:
        raise RemoteProtocolError(f"announced ids of {len(raw)} bytes")
    have = _read_have(raw)
    if len(have.announced) % ID_BYTES or len(have.wanted) % ID_BYTES:
        raise RemoteProtocolError("an announced id has not 8 bytes")
    return have


def ids_in(joined: bytes) -> Iterator[bytes]:
    """Split concatenated ids."""
    return (joined[at : at + ID_BYTES] for at in range(0, len(joined), ID_BYTES))


def id_of(item: Signed | Proof) -> bytes:
    """Return the id of an item: a hash of all its bytes, so that a false signature gives another id."""
    signed = (item,) if isinstance(item, Signed) else (item.a, item.b)
    parts = (part for each in signed for part in (each.author, each.body, each.signature))
    return hashlib.blake2b(b"".join(parts), digest_size=ID_BYTES).digest()


class SendBatch(NamedTuple):
    """Send this to a neighbour; losing it does no harm."""

    peer: bytes
    protocol: str
    """`PROTOCOL` or `HAVE_PROTOCOL`."""
    payload: bytes


class Recall:
    """The items that came in lately, and the announced ones that did not. ``now``: monotonic seconds.

    Items that the run state does not accept, as it rations new authors, are left to anti-entropy, and not asked for.
    """

    def __init__(self) -> None:
        self._recent: dict[bytes, Signed | Proof | None] = {}
        """None for an item that was not accepted, or is not merged yet."""
        self._awaited: dict[bytes, tuple[float, list[bytes]]] = {}
        """Item that this node lacks -> when to ask for it, and the neighbours that announced it and were not asked."""
        self._num_awaited: Counter[bytes] = Counter()
        """Per neighbour, the items in `_awaited` that it announced and was not asked for."""

    def add(self, items: Mapping[bytes, Signed | Proof]) -> None:
        """Note items that were accepted, and new, by their ids."""
        for id_, item in items.items():
            self._set(id_, item)
            self._forget(id_)

    def add_received(self, ids: Iterable[bytes]) -> int:
        """Note items that a neighbour has sent; return how many of them had come before."""
        num_known = 0
        for id_ in ids:
            num_known += id_ in self._recent
            if id_ not in self._recent:
                self._set(id_, None)
        return num_known

    def _set(self, id_: bytes, item: Signed | Proof | None) -> None:
        self._recent[id_] = item
        if len(self._recent) > MAX_RECENT:
            del self._recent[next(iter(self._recent))]

    def find(self, ids: Iterable[bytes]) -> list[Signed | Proof]:
        """Return those of the items that are still known."""
        return [item for id_ in ids if (item := self._recent.get(id_)) is not None]

    def announcers_of(self, id_: bytes) -> list[bytes]:
        """Return neighbours that announced an item which this node lacks, without those that were asked for it."""
        return self._awaited[id_][1] if id_ in self._awaited else []

    def await_items(self, peer: bytes, ids: Iterable[bytes], now: float) -> None:
        """Note what a neighbour announced."""
        for id_ in ids:
            if id_ in self._recent or self._num_awaited[peer] >= MAX_AWAITED:
                continue
            _, announcers = self._awaited.setdefault(id_, (now + PATIENCE_SECONDS, []))
            if peer not in announcers:
                announcers.append(peer)
                self._num_awaited[peer] += 1

    def requests(self, now: float) -> dict[bytes, list[bytes]]:
        """Return the ids to ask each neighbour for now: what is overdue, from the announcer that was first."""
        requests: dict[bytes, list[bytes]] = {}
        for id_, (due, announcers) in list(self._awaited.items()):
            if due > now:
                continue
            if id_ in self._recent or not announcers:  # not accepted; or all were asked, and sync brings it
                self._forget(id_)
                continue
            asked = next((peer for peer in announcers if len(requests.get(peer, ())) < MAX_IDS), None)
            if asked is None:
                continue
            announcers.remove(asked)
            self._num_awaited[asked] -= 1
            self._awaited[id_] = now + PATIENCE_SECONDS, announcers
            requests.setdefault(asked, []).append(id_)
        return requests

    def drop(self, peer: bytes) -> None:
        """Expect nothing more of a peer that is no neighbour any more."""
        if not self._num_awaited.pop(peer, 0):
            return
        for _, announcers in self._awaited.values():
            if peer in announcers:
                announcers.remove(peer)

    def _forget(self, id_: bytes) -> None:
        _, announcers = self._awaited.pop(id_, (0.0, []))
        self._num_awaited.subtract(announcers)


_Pending = tuple[Signed | Proof, set[bytes | None]]
"""An item that waits for the tick, and the peers that have it."""


class Push:
    """Queues what is new, and returns at each tick which batch to send to which peer. ``now``: monotonic seconds."""

    def __init__(self, rng: random.Random, knows_ids: Callable[[bytes], bool] = lambda peer: True) -> None:
        """``knows_ids``: whether a connected peer has `HAVE_PROTOCOL`; older releases have not."""
        self._rng = rng
        self._knows_ids = knows_ids
        self._pending: dict[bytes | None, dict[bytes, _Pending]] = {}  # by source, then by id; the oldest first
        self._num_pending = 0
        self._chosen: dict[bytes, tuple[float, float]] = {}  # peer -> until when, and when it was heard last
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
            waiting[id_] = item, {source, *self._recall.announcers_of(id_)}
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
            self._chosen[peer] = self._chosen[peer][0], now

    def _note_known(self, peer: bytes, ids: Iterable[bytes]) -> None:
        if self._pending:
            for id_ in ids:
                for waiting in self._pending.values():
                    if id_ in waiting:
                        waiting[id_][1].add(peer)

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
        batch: dict[bytes, _Pending] = {}
        while self._pending and len(batch) < MAX_ITEMS_A_TICK:  # round-robin over the sources
            batch.update(map(self._pop, list(self._pending)[: MAX_ITEMS_A_TICK - len(batch)]))
        requests = self._recall.requests(now)
        if self._refused is not None:
            self._lazy.add(self._refused)
        self._lazy -= requests.keys()
        outputs = [output for peer in neighbours for output in self._outputs_for(peer, batch, requests.get(peer, []))]
        self._refused = None
        return outputs

    def _outputs_for(self, peer: bytes, batch: dict[bytes, _Pending], wanted: Sequence[bytes]) -> list[SendBatch]:
        news = {id_: item for id_, (item, known_to) in batch.items() if peer not in known_to}
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
            if choice[0] > now and now - choice[1] <= QUIET_SECONDS and is_candidate(peer)
        }
        self._choosers = {peer: until for peer, until in self._choosers.items() if until > now}
        for peer in before - self.neighbours:
            self._forget_link(peer)
        missing = NUM_CHOSEN - len(self._chosen)
        if missing <= 0:
            return
        free = [peer for peer in candidates() if peer not in self._chosen]
        for peer in self._rng.sample(free, min(missing, len(free))):
            self._chosen[peer] = now + CHOICE_SECONDS * self._rng.uniform(0.5, 1.5), now

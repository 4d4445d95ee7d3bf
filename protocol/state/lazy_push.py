"""Lazy push: a peer that would send what this node has already sends ids instead, and this node asks for what it lacks.

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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from ..wire.errors import RemoteProtocolError
from ..wire.messagepack import MessageDecoder
from .entries import Proof, Signed

PROTOCOL: Final = "/farandole/have/1"
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


_decode = MessageDecoder[Have](Have, "announced ids")


def decode_have(raw: bytes) -> Have:
    """Parse a message; `RemoteProtocolError` if it is too long or malformed."""
    if len(raw) > MAX_HAVE_BYTES:
        raise RemoteProtocolError(f"announced ids of {len(raw)} bytes")
    have = _decode(raw)
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


@dataclass(slots=True)
class _Awaited:
    """An item that neighbours announced and this node lacks."""

    due: float
    announcers: list[bytes]
    """Those that were not asked yet, in the order of their announcements."""


class Recall:
    """The items that came in lately, and the announced ones that did not. ``now``: monotonic seconds.

    Items that the run state does not accept, as it rations new authors, are left to anti-entropy, and not asked for.
    """

    def __init__(self) -> None:
        self._recent: dict[bytes, Signed | Proof | None] = {}
        """None for an item that was not accepted, or is not merged yet."""
        self._awaited: dict[bytes, _Awaited] = {}
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
        return self._awaited[id_].announcers if id_ in self._awaited else []

    def await_items(self, peer: bytes, ids: Iterable[bytes], now: float) -> None:
        """Note what a neighbour announced."""
        for id_ in ids:
            if id_ in self._recent or self._num_awaited[peer] >= MAX_AWAITED:
                continue
            awaited = self._awaited.setdefault(id_, _Awaited(now + PATIENCE_SECONDS, []))
            if peer not in awaited.announcers:
                awaited.announcers.append(peer)
                self._num_awaited[peer] += 1

    def requests(self, now: float) -> dict[bytes, list[bytes]]:
        """Return the ids to ask each neighbour for now: what is overdue, from the announcer that was first."""
        requests: dict[bytes, list[bytes]] = {}
        for id_, awaited in list(self._awaited.items()):
            if awaited.due > now:
                continue
            if id_ in self._recent or not awaited.announcers:  # not accepted; or all were asked, and sync brings it
                self._forget(id_)
                continue
            asked = next((peer for peer in awaited.announcers if len(requests.get(peer, ())) < MAX_IDS), None)
            if asked is None:
                continue
            awaited.announcers.remove(asked)
            self._num_awaited[asked] -= 1
            awaited.due = now + PATIENCE_SECONDS
            requests.setdefault(asked, []).append(id_)
        return requests

    def drop(self, peer: bytes) -> None:
        """Expect nothing more of a peer that is no neighbour any more."""
        if not self._num_awaited.pop(peer, 0):
            return
        for awaited in self._awaited.values():
            if peer in awaited.announcers:
                awaited.announcers.remove(peer)

    def _forget(self, id_: bytes) -> None:
        awaited = self._awaited.pop(id_, None)
        if awaited is not None:
            self._num_awaited.subtract(awaited.announcers)

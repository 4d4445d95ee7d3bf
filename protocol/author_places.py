"""Which authors a node keeps in its run state once its table is full.

Keys are free, so no order of keys can decide: whatever it is, keys can be ground for it, or bought. What an attacker
cannot have for free is connections, from many networks, to every node. So places are shared among *introducers*: the
connected peers that this node hears of authors from. Each author counts for one of them: of all that have spoken of it,
the one with fewest authors. So the authors of a run, of whom every honest peer speaks, spread over all of these, and
those that one peer has invented stay with it. When the table is full, the network with most authors gives way, in it
the peer with most, and of that peer's authors the one that fewest networks have spoken of, and then the newest. A
newcomer that would have to give way itself is not let in. Authors that the node needs (`AuthorPlaces.protect`) stay.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_VOUCHERS = 4
"""Networks that are remembered for an author: enough to tell whom one peer speaks of from whom many do."""


class Introducer(NamedTuple):
    """A connected peer that speaks of authors."""

    peer: bytes
    network: str = ""
    """Where it is, an IPv4 /24 or an IPv6 /48; empty if that is not known, since a relay leads there."""


_NONE = Introducer(b"")
"""Introduces what was loaded from disk: it gives way last, as it was let in when it came."""


@dataclass(slots=True)
class _Place:
    introducer: Introducer
    number: int
    """Later authors have larger ones."""
    vouchers: set[str] = field(default_factory=set)

    def key(self, author: bytes) -> tuple[int, int, bytes]:
        """Those that give way first come last."""
        return -len(self.vouchers), self.number, author


class AuthorPlaces:
    """A fixed number of places, and who introduced the author of each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._places: dict[bytes, _Place] = {}
        self._groups: dict[Introducer, list[tuple[int, int, bytes]]] = {}  # sorted
        self._networks: Counter[str] = Counter()
        self._num_added = 0
        self._needs: list[Callable[[bytes], bool]] = []

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, author: bytes) -> bool:
        return author in self._places

    def introducer_of(self, author: bytes) -> Introducer | None:
        """For whom an author counts; None: it came from disk."""
        introducer = self._places[author].introducer
        return None if introducer is _NONE else introducer

    def by_network(self) -> dict[str, int]:
        """How many authors count for the peers of each network."""
        return dict(self._networks)

    @property
    def is_full(self) -> bool:
        """Whether a newcomer costs another author its place."""
        return len(self._places) >= self.capacity

    def protect(self, is_needed: Callable[[bytes], bool]) -> None:
        """Let no author for which this is true give way. Each call adds authors."""
        self._needs.append(is_needed)

    def is_needed(self, author: bytes) -> bool:
        """Whether an author is protected."""
        return any(is_needed(author) for is_needed in self._needs)

    def vouch(self, author: bytes, introducer: Introducer | None) -> None:
        """A peer speaks of an author that has a place."""
        place = self._places.get(author)
        if place is None or introducer is None or introducer == place.introducer:
            return
        is_new = len(place.vouchers) < MAX_VOUCHERS and introducer.network not in place.vouchers
        is_lighter = self._is_lighter(introducer, place.introducer)
        if is_new or is_lighter:
            self._leave_group(author, place)
            if is_new:
                place.vouchers.add(introducer.network)
            if is_lighter:
                place.introducer = introducer
            self._enter_group(author, place)

    def rival(self, author: bytes, introducer: Introducer | None) -> bytes | None:
        """Whose place a newcomer would take in a full table; None: nobody gives way to it."""
        by_load = sorted(self._groups, key=self._load, reverse=True)
        is_needed = self.is_needed(author)
        for crowded in by_load:
            if not is_needed and introducer is not None and not self._is_lighter(introducer, crowded):
                return None
            for _, _, other in reversed(self._groups[crowded]):
                if not self.is_needed(other):
                    return other
        return None

    def add(self, author: bytes, introducer: Introducer | None) -> None:
        """Give a newcomer a place."""
        introducer = introducer or _NONE
        place = _Place(introducer, self._num_added)
        if introducer is not _NONE:
            place.vouchers.add(introducer.network)
        self._num_added += 1
        self._places[author] = place
        self._enter_group(author, place)

    def remove(self, author: bytes) -> None:
        """Free an author's place, if it has one."""
        place = self._places.pop(author, None)
        if place is not None:
            self._leave_group(author, place)

    def _enter_group(self, author: bytes, place: _Place) -> None:
        bisect.insort(self._groups.setdefault(place.introducer, []), place.key(author))
        self._networks[place.introducer.network] += place.introducer is not _NONE

    def _leave_group(self, author: bytes, place: _Place) -> None:
        group = self._groups[place.introducer]
        del group[bisect.bisect_left(group, place.key(author))]
        if not group:
            del self._groups[place.introducer]
        self._networks[place.introducer.network] -= place.introducer is not _NONE
        if not self._networks[place.introducer.network]:
            del self._networks[place.introducer.network]

    def _load(self, introducer: Introducer) -> tuple[int, int]:
        if introducer is _NONE:
            return -1, 0
        return self._networks[introducer.network], len(self._groups[introducer])

    def _is_lighter(self, introducer: Introducer, other: Introducer) -> bool:
        """Whether an introducer with one author more would still have fewer than another one."""
        if other is _NONE:
            return True
        if introducer.network != other.network:
            return self._networks[introducer.network] + 1 < self._networks[other.network]
        return len(self._groups.get(introducer, ())) + 1 < len(self._groups[other])

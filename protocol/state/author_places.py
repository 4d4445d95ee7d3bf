"""The authors that a node keeps in its run state once its table is full.

Keys are free, so no order of keys can decide: an attacker can grind keys for any order, or buy them. It cannot have
been there earlier than it was, and connections from many networks cost it something.

- Half of the places are for the authors that came first: they are *settled*, and never give way.
- The other places are shared among *introducers*: the connected peers from which this node first heard of the authors.
  When the table is full, the network with most of these authors gives way, in it the peer with most, and of that peer's
  authors the newest. A newcomer is not let in if its own introducer would have to give way for it.
- When a settled author goes, another takes its place: the oldest of the introducer with fewest.

Authors that the node needs (`AuthorPlaces.protect`) always get in, and stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple


class Introducer(NamedTuple):
    """A connected peer that passes on authors' entries."""

    peer: bytes
    network: str = ""
    """The peer's network, an IPv4 /24 or an IPv6 /48; empty if not known, since the connection goes over a relay."""


_DISK = Introducer(b"", "disk")
"""The introducer of the authors that this node has stored."""


class AuthorPlaces:
    """A fixed number of places, and the introducer of each place's author."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._settled: set[bytes] = set()
        self._introducers: dict[bytes, Introducer] = {}  # of the others
        self._groups: dict[Introducer, dict[bytes, None]] = {}  # the newest last
        self._networks: Counter[str] = Counter()
        self._needs: list[Callable[[bytes], bool]] = []

    def __len__(self) -> int:
        return len(self._settled) + len(self._introducers)

    def __contains__(self, author: bytes) -> bool:
        return author in self._settled or author in self._introducers

    @property
    def is_full(self) -> bool:
        """Return whether a newcomer costs another author its place."""
        return len(self) >= self.capacity

    def protect(self, is_needed: Callable[[bytes], bool]) -> None:
        """Let no author give way for which ``is_needed`` is true. Each call adds authors."""
        self._needs.append(is_needed)

    def is_needed(self, author: bytes) -> bool:
        """Return whether an author is protected."""
        return any(is_needed(author) for is_needed in self._needs)

    def rival(self, author: bytes, introducer: Introducer | None) -> bytes | None:
        """Return the author whose place a newcomer would take in a full table; None if no author gives way to it."""
        is_needed = introducer is None or self.is_needed(author)
        for crowded in sorted(self._groups, key=self._load, reverse=True):
            if not is_needed and introducer is not None:  # it must have fewer, even with one author more
                same = introducer.network == crowded.network
                own = len(self._groups.get(introducer, ())) if same else self._networks[introducer.network]
                if own + 1 >= (len(self._groups[crowded]) if same else self._networks[crowded.network]):
                    return None
            for other in reversed(self._groups[crowded]):
                if not self.is_needed(other):
                    return other
        return None

    def add(self, author: bytes, introducer: Introducer | None) -> None:
        """Give a newcomer a place."""
        if len(self._settled) < self.capacity // 2:
            self._settled.add(author)
            return
        introducer = introducer or _DISK
        self._introducers[author] = introducer
        self._groups.setdefault(introducer, {})[author] = None
        self._networks[introducer.network] += 1

    def remove(self, author: bytes) -> None:
        """Free an author's place, if it has one."""
        if author in self._introducers:
            self._leave_group(author)
        elif author in self._settled:
            self._settled.remove(author)
            if self._groups:
                heir = next(iter(self._groups[min(self._groups, key=self._load)]))
                self._leave_group(heir)
                self._settled.add(heir)

    def _leave_group(self, author: bytes) -> None:
        introducer = self._introducers.pop(author)
        group = self._groups[introducer]
        del group[author]
        if not group:
            del self._groups[introducer]
        self._networks[introducer.network] -= 1
        if not self._networks[introducer.network]:
            del self._networks[introducer.network]

    def _load(self, introducer: Introducer) -> tuple[int, int]:
        return self._networks[introducer.network], len(self._groups[introducer])

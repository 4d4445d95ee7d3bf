"""What other authors say of one epoch, and how much of it a node believes.

Nobody can see whether an author has trained on a slice, so its word counts within bounds that follow from what can be
checked, and what is beyond them is *doubted*: trained on again, after all else.

*Whose word.* Only that of *proven* members: those with whom this node has committed exchanges, or two of whose number
have (`farandole.protocol.acquaintance`). Keys are free, exchanges are not: each takes a round of one honest node.

*Leases.* What a proven author says to have done on its leases counts at its signed speed, with some slack; the speed
counts up to `FASTEST_RATIO` times a usual one, the median of what this node measures of itself and what proven members
sign. Not the fastest of them: a liar would be that. A bucket for each author holds what it may have done since it was
first heard to hold a lease.

*Bits*, of all that is done, count if most of the proven who live say so.

*The sample.* `SAMPLE_SHARE` of each epoch is trained again, split among the nodes; each draws its part by itself, and
nobody else knows which it is.

What a liar gains: without exchanges nothing; with exchanges the work of `FASTEST_RATIO` usual nodes; with most of those
whom a node has met, all. Sans-IO.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from .entries import Lease, LeasedSlices
from .identity import framed
from .slices import DoneSlices, part_mask, said_by

# A GPU of a data centre is about a hundred times as fast as a laptop: no honest node is hurt by this.
FASTEST_RATIO = 128.0
# A node signs the speed of its newest round. Others may be faster by so much: rounds differ, and the time that an
# exchange takes is not its trainer's.
SIGNED_SLACK = 4.0
# Entries may be late by so much before an author's bucket is full: a minute without a network, and a round's exchange.
BUCKET_SECONDS = 180.0
# So many proven members, or all there are if they are fewer, must be live before a node follows what most of them say.
QUORUM = 3
# Of an epoch, by all nodes together: the cost of it, in passes over the data.
SAMPLE_SHARE = 0.01
# A lease has one in sixteen of an epoch's sections at most: with two, a peer can keep an eighth from the others.
MAX_SHARE = 16
# Leases that are not finished, of one node: the one that it works on, and the next.
MAX_UNFINISHED = 2
# What an author says to have done, and is not believed yet: leases of two entries. Older ones wait for its bits.
MAX_OWED = 16


@dataclass(frozen=True, slots=True)
class Standing:
    """Who lives, and what there is to believe them by. Speeds are in slices a second."""

    live: frozenset[bytes] = frozenset()
    """The others that draw data."""
    proven: frozenset[bytes] = frozenset()
    signed_speeds: Mapping[bytes, float] = field(default_factory=dict)
    """Of live members, as each says of itself."""
    own_speed: float | None = None
    """As measured here; None: not known yet."""
    lease_seconds: float = 60.0
    """A lease is work for so long."""

    @property
    def voters(self) -> frozenset[bytes]:
        """Those whose majority is followed."""
        return self.live & self.proven

    @property
    def has_quorum(self) -> bool:
        """Whether these are enough."""
        return bool(self.live) and len(self.voters) >= min(QUORUM, len(self.live))

    @property
    def fastest(self) -> float:
        """Speed that no author is believed to exceed; 0: nothing is known."""
        signed = [self.signed_speeds.get(author, 0.0) for author in self.voters]
        known = sorted(speed for speed in (*signed, self.own_speed or 0.0) if speed > 0.0)
        return FASTEST_RATIO * max(self.own_speed or 0.0, statistics.median_low(known)) if known else 0.0

    def speed(self, author: bytes, fastest: float) -> float:
        """Speed at which an author's word counts. ``fastest``: the property, which takes a while."""
        return min(SIGNED_SLACK * self.signed_speeds.get(author, 0.0), fastest) if author in self.voters else 0.0


@dataclass(slots=True)
class Claimant:
    """What an author last said, of this epoch."""

    claims: tuple[LeasedSlices, ...] = ()
    """What it has not finished, as far as that is respected."""
    mask: int = 0
    """The sections of these."""
    told: int = 0
    """The sections that its bits say to be done."""
    owed: dict[int, int] = field(default_factory=dict)
    """First slice -> end of what it has done of a lease, as it says, and this node has not believed yet."""
    credit: float = 0.0
    """Slices that it may have done and that do not count yet."""


class Claims:
    """What others say of an epoch; what is believed goes into ``done``.

    ``salt``: of the sample, random bytes that nobody else knows; empty: there is no sample.
    """

    def __init__(self, done: DoneSlices, salt: bytes = b"") -> None:
        self._sample = range(0)  # slices of which this node believes nobody
        self._salt = salt
        self._done = done
        self._sections = done.sections
        self._claimants: dict[bytes, Claimant] = {}
        self._has_news = False
        self._voters: frozenset[bytes] = frozenset()

    def hear(self, author: bytes, index: int, lease: Lease, standing: Standing) -> None:
        """An entry of this epoch."""
        claimant = self._claimants.setdefault(author, Claimant())
        if index:
            claimant.told |= part_mask(index - 1, lease.done) & self._sections.all
            self._has_news = True
            return
        fit = [slices for slices in lease.leases if self._is_fit(slices)]
        for slices in fit:
            if slices.done:
                end = slices.first + slices.done
                claimant.owed[slices.first] = max(end, claimant.owed.pop(slices.first, 0))
        while len(claimant.owed) > MAX_OWED:
            del claimant.owed[next(iter(claimant.owed))]
        claimant.claims = tuple(slices for slices in fit if slices.done < slices.count)[:MAX_UNFINISHED]
        claimant.mask = self._held(claimant.claims, self._max_held(author, standing))

    def _is_fit(self, slices: LeasedSlices) -> bool:
        """Whether an honest node may have such a lease."""
        end = slices.first + slices.count
        if slices.done > slices.count or end > self._sections.num_slices or not slices.count:
            return False
        return self._sections.of(end - 1) - self._sections.of(slices.first) < max_sections(self._sections.count)

    def _max_held(self, author: bytes, standing: Standing) -> int:
        """Slices that an author may keep from the others at once.

        As many as it can train on before they are finished; and each as large a part of half an epoch as any other:
        that is what a node leases that does not know yet how fast it is.
        """
        share = -(-self._sections.count // (2 * (len(standing.live) + 1))) * self._sections.size
        plausible = MAX_UNFINISHED * standing.lease_seconds * standing.speed(author, standing.fastest)
        return max(share, int(plausible))

    def _held(self, claims: tuple[LeasedSlices, ...], most: int) -> int:
        mask = 0
        for slices in claims:
            first, end = slices.first + slices.done, slices.first + slices.count
            mask |= self._sections.mask(first, min(end, first + most))
            most = max(0, most - (end - first))
        return mask

    def release(self, author: bytes) -> None:
        """It holds nothing of this epoch any more."""
        if (claimant := self._claimants.get(author)) is not None:
            claimant.claims, claimant.mask = (), 0

    def forget(self, author: bytes) -> None:
        """The run state has nothing of it."""
        self._claimants.pop(author, None)

    # Belief

    def believe(self, standing: Standing, seconds: float) -> None:
        """What counts by now; ``seconds`` have passed since this was last asked."""
        if standing.live and self._salt:
            self._sample = self._draw_sample(self._salt, len(standing.live) + 1)
            self._salt = b""
        fastest = standing.fastest
        for author, claimant in self._claimants.items():
            speed = standing.speed(author, fastest)
            if speed and (claimant.claims or claimant.owed):
                claimant.credit = min(claimant.credit + speed * seconds, speed * BUCKET_SECONDS)
            if author in standing.proven:
                self._pay(claimant)
        voters = standing.voters
        if (self._has_news or voters != self._voters) and standing.has_quorum:
            self._has_news, self._voters = False, voters
            told = [self._claimants[author].told for author in voters if author in self._claimants]
            believed = said_by(told, len(voters) // 2 + 1)
            self._done.add_sections(believed & ~self._sections.mask(self._sample.start, self._sample.stop))

    def _draw_sample(self, salt: bytes, num_nodes: int) -> range:
        """A node's part of the sample: consecutive sections, so that they are one lease or two."""
        count = int(SAMPLE_SHARE * self._sections.count / num_nodes)
        if not count:
            return range(0)
        place = int.from_bytes(hashlib.sha256(framed(b"farandole/sample/1", salt)).digest()[:8], "big")
        first = place % (self._sections.count - count + 1)
        return range(self._sections.begin(first), self._sections.end(first + count - 1))

    def _pay(self, claimant: Claimant) -> None:
        """Believe what an author has credit for. A slice that is done already costs nothing."""
        for first, end in list(claimant.owed.items()):
            unpaid = [part for part in self._without_sample(first, end) if not self._pay_part(claimant, *part)]
            if not unpaid:
                del claimant.owed[first]

    def _pay_part(self, claimant: Claimant, first: int, end: int) -> bool:
        """Whether all of these count now.

        What precedes them in their section counts with them (`DoneSlices.add_lease`), so it is paid as well.
        """
        start = self._done.next(self._sections.begin(self._sections.of(first)))
        while start < end:
            stop = min(end, start + int(claimant.credit))
            if start == stop:
                return False
            claimant.credit -= stop - start
            self._done.add_lease(start, stop)
            start = self._done.next(stop)
        return True

    def _without_sample(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        if not self._sample:
            yield first, end
            return
        for a, b in ((first, min(end, self._sample.start)), (max(first, self._sample.stop), end)):
            if a < b:
                yield a, b

    # Where to lease

    @property
    def doubted(self) -> int:
        """The sections that somebody says to be done, whether it is believed or not; without the sample."""
        return self.claimed(self._claimants)

    def claimed(self, authors: Iterable[bytes]) -> int:
        """The sections that one of these says to be done; without the sample."""
        mask = 0
        for claimant in (self._claimants[author] for author in authors if author in self._claimants):
            mask |= claimant.told
            for first, end in claimant.owed.items():
                mask |= self._sections.mask(first, end)
        return mask & ~self._sections.mask(self._sample.start, self._sample.stop)

    def held(self, live: frozenset[bytes], overdue: frozenset[bytes]) -> Iterator[tuple[bytes, Claimant]]:
        """Those whose leases count."""
        for author, claimant in self._claimants.items():
            if claimant.mask and author in live and author not in overdue:
                yield author, claimant


def max_sections(count: int) -> int:
    """Sections of one lease at most, of so many of an epoch."""
    return max(1, count // MAX_SHARE)

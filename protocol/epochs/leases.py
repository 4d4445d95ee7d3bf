"""Leases of the data's slices, so that each slice is trained on once an epoch while nodes join and leave.

A node *leases* a run of consecutive sections (`farandole.protocol.run.slices`) with an entry in the run state, waits
until most other nodes have received it, and trains. The entry also reports the node's progress. Two nodes that lease
the same sections, because neither had heard of the other, both find out soon, and one of them gives way. Rendezvous
hashing (Thaler and Ravishankar, 1998) decides which, so both decide the same at any time. A lease lasts as long as its
holder: when the holder is dead, or has left, the slices that it has not reported done are free. So an epoch ends with
every slice done at least once. Slices are done more than once only if a node did them after its last report and died,
or while the network was partitioned.

Leases are sized for a few heartbeats' work, and become smaller towards the end of an epoch, so that all end at about
the same time (guided self-scheduling: Polychronopoulos and Kuck, 1987). The next epoch begins when all is done.

**What is remembered.** A node keeps what it believes to be done, and publishes it in its own entries, one bit per
section. So this knowledge outlives the entries of the nodes that did the work.

**Which authors are believed.** Members known from exchanges, and within bounds:
`farandole.protocol.epochs.lease_claims`. Claims beyond that only decide what is leased last. The majority of these
members decides which epoch the run is in. A node that has not met any of them yet begins in the epoch that the live
members report, and does not take it for certain. The others wait for an unfinished lease once, for `Leases.patience`;
then they do its work, like the backup tasks of MapReduce (Dean and Ghemawat, 2004). A node gives way to one author once
in `GIVE_WAY_SECONDS`, so keys that were chosen for their hashes do not drive it from place to place.

Sans-IO: `Leases.tick`, about once a second, returns what to publish and what to train on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..run.slices import DoneSlices, Sections, next_bit, part_mask, parts, run_length
from ..state.entries import Kind, Lease, LeasedSlices
from ..state.state import RunState
from ..trainer.trainer_messages import DrawSlices, SlicesTrained
from ..wire.identity import framed
from .lease_claims import MAX_UNFINISHED, SETTLE_SECONDS, Claimant, Claims, EpochVote, Standing, max_sections

Output = tuple[int, Lease] | DrawSlices
"""An entry to publish, after the index of its slot, or what the trainer draws from now on."""

# The next lease is claimed when the work left is for less than this.
CLAIM_AHEAD_SECONDS = 2 * SETTLE_SECONDS
# Finished leases that are still announced; older ones are in the bits.
MAX_FINISHED = 5
# Least interval at which a node announces what it knows to be done, if there is news. The interval is a second for each
# node of the run, so this costs each node a few kilobytes per second in a run of any size.
MIN_REFRESH_SECONDS = 10.0
# An entry lives for an hour, so three refreshes may be lost.
MAX_REFRESH_SECONDS = 900.0
# A node without a tick for longer than this was asleep, and others have its leases.
ASLEEP_SECONDS = 60.0
# A node announces its progress once a heartbeat, but not more often than its entries' ticks allow.
MIN_ANNOUNCE_SECONDS = 5.0
# A node gives way to one author once in this time. Two nodes that have settled a conflict collide again only by chance.
GIVE_WAY_SECONDS = 60.0


@dataclass(slots=True)
class _OwnLease:
    """A lease of the slices from ``first`` up to ``end``. `DoneSlices` has the ones that are done."""

    first: int
    end: int
    settled_at: float


@dataclass(slots=True)
class _Epoch:
    """State of one epoch, forgotten with it."""

    claims: Claims
    own: list[_OwnLease] = field(default_factory=list)
    finished: list[LeasedSlices] = field(default_factory=list)
    cursor: int | None = None
    completed_at: float | None = None
    idle_since: float | None = None
    waited_for: frozenset[bytes] = frozenset()
    overdue: frozenset[bytes] = frozenset()
    told_parts: dict[int, bytes] = field(default_factory=dict)
    gave_way_at: dict[bytes, float] = field(default_factory=dict)


class Leases:
    """One node's leases. ``corpus``: hash of its text. ``exchange_seconds``: as in the manifest."""

    def __init__(
        self, author: bytes, corpus: bytes, num_slices: int, num_epochs: int, *, exchange_seconds: float = 0.0
    ) -> None:
        self.corpus = corpus
        self.num_epochs = num_epochs
        self.epoch = 0
        """The current epoch; ``num_epochs`` if the last one is over."""
        self.sections = Sections(num_slices)
        self._author = author
        self._exchange_seconds = exchange_seconds
        self._heard: dict[bytes, dict[int, Lease]] = {}
        self._standing = Standing()
        self._vote = EpochVote()
        self._ticked_at: float | None = None
        self._has_left = False
        self._assigned: tuple[int, tuple[tuple[int, int], ...]] = (0, ())  # epoch, (first, end) of leases
        self._announced: Lease | None = None
        self._announced_at = self._parts_announced_at = 0.0
        self._is_outdated = True  # others must have the present lease soon
        self._current = _Epoch(Claims(self.sections))

    @property
    def done(self) -> DoneSlices:
        """Slices of the current epoch that any node has done, as far as this node believes it."""
        return self._current.claims.done

    @property
    def num_doubted(self) -> int:
        """Number of slices that others claim to be done and this node does not believe; whole sections."""
        return (self._current.claims.doubted & ~self.done.whole).bit_count() * self.sections.size

    # What is heard

    def follow(self, state: RunState) -> None:
        """Hear the lease entries that are new in the run state, at first this node's own of an earlier life as well."""
        is_first, present = self._ticked_at is None, {self._author}
        for entry in state.entries(Kind.LEASE):
            present.add(entry.author)
            is_heard = self._heard.get(entry.author, {}).get(entry.index) is entry.payload
            if not is_heard and (is_first or entry.author != self._author):
                self.hear(entry.author, entry.index, entry.payload)
        for author in self._heard.keys() - present:
            del self._heard[author]
            self._current.claims.forget(author)

    def hear(self, author: bytes, index: int, lease: Lease) -> None:
        """Take in an entry of any author, including this node in an earlier life."""
        self._heard.setdefault(author, {})[index] = lease
        if lease.corpus != self.corpus:
            return
        if lease.epoch == self.epoch:
            self._take_in(author, index, lease)
        elif lease.epoch > self.epoch and author != self._author:
            self._current.claims.release(author)
        elif author == self._author and self.epoch < lease.epoch <= self.num_epochs:
            self._vote.is_new = False
            self._begin_epoch(lease.epoch)

    def trained(self, report: SlicesTrained) -> None:
        """Note the slices that this node's trainer has trained on."""
        if report.epoch == self.epoch:
            self._vote.is_new = False
            for first, count in report.ranges:
                for index in range(first, first + count):
                    self.done.add(index)

    def leave(self) -> list[Output]:
        """Release the slices that are not done; return what to publish. There are no leases from now on."""
        self._has_left = True
        for own in self._current.own:
            self._put_aside(own.first, min(self.done.next(own.first), own.end))
        self._current.own.clear()
        parts_done = list(self._announce_parts(is_old=False))
        del self._current.finished[: -MAX_FINISHED - MAX_UNFINISHED]
        return [*parts_done, (0, self._entry())]

    # For people

    @property
    def is_over(self) -> bool:
        """Return whether all epochs are over."""
        return self.epoch >= self.num_epochs

    @property
    def num_leased(self) -> int:
        """Number of slices that this node has leased and not trained on yet."""
        return sum(self._left(lease) for lease in self._current.own)

    def _left(self, lease: _OwnLease) -> int:
        return max(0, lease.end - self.done.next(lease.first))

    @property
    def strangers(self) -> frozenset[bytes]:
        """Live members with another text. This node shares no slices with them."""
        found = ((author, self._heard.get(author, {}).get(0)) for author in self._standing.live)
        return frozenset(author for author, lease in found if lease is not None and lease.corpus != self.corpus)

    @property
    def patience(self) -> float:
        """Seconds that this node waits, with nothing left to lease, for the holders of the rest."""
        return 2 * self._standing.lease_seconds + 2 * self._exchange_seconds

    def _take_in(self, author: bytes, index: int, lease: Lease) -> None:
        if author != self._author:
            self._current.claims.hear(author, index, lease, self._standing)
            return
        # It is of this node's earlier life: no other node can have written it.
        self._vote.is_new = False
        if index:
            self.done.add_sections(part_mask(index - 1, lease.done))
            return
        for slices in lease.leases:
            self.done.add_lease(slices.first, slices.first + slices.done)
        if not self._current.own:
            self._current.own = [
                _OwnLease(slices.first + slices.done, slices.first + slices.count, 0.0)
                for slices in lease.leases
                if slices.done < slices.count and slices.first + slices.count <= self.sections.num_slices
            ][:MAX_UNFINISHED]

    def _respected(self) -> Iterator[tuple[bytes, Claimant]]:
        """Yield the authors whose leases count, with their claims."""
        return self._current.claims.held(self._standing.live, self._current.overdue)

    # Time

    def tick(self, standing: Standing, now: float) -> list[Output]:
        """Decide what to lease, about once a second."""
        self._standing = standing
        if self._has_left:
            return []
        seconds = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if seconds > ASLEEP_SECONDS:
            self._current.own.clear()
            self._is_outdated = True
        self._current.claims.believe(self._standing, seconds)
        for lease in list(self._current.own):  # the ones that other nodes have finished in part included
            if not self._left(lease):
                self._current.own.remove(lease)
                self._put_aside(lease.first, lease.end)
        self._follow_epoch(now)
        if not self.is_over:
            self._give_way(now)
            self._trim()
            self._claim(now)
        bounds = tuple((lease.first, lease.end) for lease in self._current.own if now >= lease.settled_at)
        if (self.epoch, bounds) == self._assigned:
            return list(self._announce(now))
        self._assigned = (self.epoch, bounds)
        return [self.assignment(), *self._announce(now)]

    def _follow_epoch(self, now: float) -> None:
        """Begin the next epoch when all is done and the others have heard of it, or else the others' epoch."""
        leases = ((author, entries.get(0)) for author, entries in self._heard.items())
        said = {author: lease.epoch for author, lease in leases if lease is not None and lease.corpus == self.corpus}
        epoch = self._vote.decide(self.epoch, said, self._standing, self.num_epochs)
        if epoch == self.epoch and self.done.whole == self.sections.all and not self.is_over:
            if self._current.completed_at is None:
                self._current.completed_at, self._is_outdated = now, True
            if now - self._current.completed_at >= SETTLE_SECONDS:
                epoch += 1
        if epoch != self.epoch:
            self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._is_outdated = True
        self._current = _Epoch(Claims(self.sections))
        for author, entries in self._heard.items():
            for index, lease in entries.items():
                if (lease.corpus, lease.epoch) == (self.corpus, epoch):
                    self._take_in(author, index, lease)

    # The own leases

    def _put_aside(self, first: int, end: int) -> None:
        if first < end:
            self._current.finished.append(LeasedSlices(first, end - first, end - first))

    def _give_way(self, now: float) -> None:
        """Give up leases of sections that another author has leased too, where that author's hash is less."""
        gave_way_at = self._current.gave_way_at
        for author, peer in self._respected():
            if now - gave_way_at.get(author, -GIVE_WAY_SECONDS) < GIVE_WAY_SECONDS:
                continue
            for lease in list(self._current.own):
                position = self.done.next(lease.first)
                contested = peer.mask & self.sections.mask(position, lease.end)
                last = contested.bit_length() - 1  # the first one changes while we work, and each of us sees that later
                if contested and self._rank(author, last) < self._rank(self._author, last):
                    self._current.own.remove(lease)
                    self._put_aside(lease.first, position)
                    gave_way_at[author], self._is_outdated = now, True

    def _rank(self, author: bytes, section: int) -> bytes:
        """Return a hash of the author, the epoch and ``section``: 32 bytes that no node chooses."""
        number = self.epoch.to_bytes(4, "big") + section.to_bytes(4, "big")
        return hashlib.sha256(framed(b"farandole/lease/1", author, number)).digest()

    def _trim(self) -> None:
        """Give back what is too much, once this node's speed is known."""
        pace = self._standing.own_speed
        if pace is None:
            return
        budget = int(2 * self._standing.lease_seconds * pace)
        for lease in self._current.own:
            last = self.done.next(lease.first) + budget
            if last < lease.end and (end := self.sections.end(self.sections.of(last))) < lease.end:
                lease.end = end
                self._is_outdated = True
            budget = max(0, budget - self._left(lease))

    def _claim(self, now: float) -> None:
        """Lease more, if this node will run out of work soon."""
        pace = self._standing.own_speed
        is_enough = self.num_leased > (0 if pace is None else CLAIM_AHEAD_SECONDS * pace)
        if is_enough or len(self._current.own) >= MAX_UNFINISHED:
            self._current.idle_since = None
            return
        taken = self.done.whole
        for lease in self._current.own:
            taken |= self.sections.mask(self.done.next(lease.first), lease.end)
        for _, peer in self._respected():
            taken |= peer.mask
        free = self.sections.all & ~taken  # what some author claims to be done comes last
        free = free & ~self._current.claims.doubted or free
        if not free:
            self._wait(now)
            return
        self._current.idle_since = None
        first = self._place(free)
        last = first + min(run_length(free, first), self._wanted(free)) - 1
        last = next((section - 1 for section in range(first + 1, last + 1) if section in self.done.fronts), last)
        self._current.cursor = last + 1
        begin = self.done.next(self.sections.begin(first))
        self._current.own.append(_OwnLease(begin, self.sections.end(last), now + SETTLE_SECONDS))
        self._is_outdated = True

    def _place(self, free: int) -> int:
        """Return the section to lease from: after the last lease, or else in this node's share of what is free.

        The live nodes share it by the order of their keys, so those that search at once begin in different places also
        at the end of an epoch, when little is free. A node begins before its share where it finds too little room in
        it.
        """
        if self._current.cursor is not None and free >> self._current.cursor & 1:
            return self._current.cursor
        nodes = sorted({self._author, *self._standing.live})
        skipped = free.bit_count() * nodes.index(self._author) // len(nodes)
        place = next_bit(free, 0)
        while place is not None:
            room = run_length(free, place)
            if skipped < room:
                return place + min(skipped, max(0, room - self._wanted(free)))
            skipped -= room
            place = next_bit(free, place + room)
        raise AssertionError("something is free")

    def _wanted(self, free: int) -> int:
        """Return the number of sections to lease next: some heartbeats' work, or a share of half of what is left."""
        share = -(-free.bit_count() // (2 * (len(self._standing.live) + 1)))
        pace = self._standing.own_speed
        if pace is None:
            return max(1, min(share, max_sections(self.sections.count)))
        least, most = (
            -(-int(seconds * pace) // self.sections.size)
            for seconds in (CLAIM_AHEAD_SECONDS, self._standing.lease_seconds)
        )
        return max(1, min(max(share, least), most, max_sections(self.sections.count)))

    def _wait(self, now: float) -> None:
        """Wait for the holders of what is left. The ones that do not finish it within `patience` are overdue."""
        if self._current.own:
            self._current.idle_since = None
        elif self._current.idle_since is None:
            self._current.idle_since = now
            self._current.waited_for = frozenset(author for author, _ in self._respected())
        elif now - self._current.idle_since > self.patience:
            self._current.overdue |= self._current.waited_for
            self._current.idle_since = None

    def assignment(self) -> DrawSlices:
        """Return what is left of the last assignment. A new trainer begins with it."""
        epoch, bounds = self._assigned
        left = [(self.done.next(first), end) for first, end in bounds] if epoch == self.epoch else []
        return DrawSlices(epoch, [(first, end - first) for first, end in left if first < end])

    # Announcements

    def _announce(self, now: float) -> Iterator[Output]:
        refresh_seconds = min(MAX_REFRESH_SECONDS, max(MIN_REFRESH_SECONDS, float(len(self._standing.live))))
        if now - self._parts_announced_at >= refresh_seconds or len(self._current.finished) > MAX_FINISHED:
            is_old = now - self._parts_announced_at >= MAX_REFRESH_SECONDS
            self._parts_announced_at = now
            yield from self._announce_parts(is_old=is_old)
        if len(self._current.finished) > MAX_FINISHED:
            del self._current.finished[:-2]
        lease = self._entry()
        age = now - self._announced_at
        is_due = self._is_outdated or age >= max(self._standing.period, MIN_ANNOUNCE_SECONDS)
        if (is_due and lease != self._announced) or age >= MAX_REFRESH_SECONDS:
            self._announced, self._announced_at, self._is_outdated = lease, now, False
            yield 0, lease

    def _announce_parts(self, *, is_old: bool) -> Iterator[Output]:
        for part, raw in enumerate(parts(self.done.whole)):
            if raw and (is_old or raw != self._current.told_parts.get(part)):
                self._current.told_parts[part] = raw
                yield part + 1, Lease(self.epoch, self.corpus, (), raw)

    def _entry(self) -> Lease:
        unfinished = tuple(
            LeasedSlices(lease.first, count := lease.end - lease.first, count - self._left(lease))
            for lease in self._current.own
        )
        return Lease(self.epoch, self.corpus, (*self._current.finished, *unfinished))

    def saved(self) -> list[tuple[int, Lease]]:
        """Return the index and lease of entries that restore this state by `Heard`, if the run state has lost them."""
        bits = [(part + 1, Lease(self.epoch, self.corpus, (), raw)) for part, raw in enumerate(parts(self.done.whole))]
        return [(0, self._entry()), *bits]

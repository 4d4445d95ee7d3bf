"""Who trains on which slices of the data, so that each slice is trained on once an epoch, whoever comes and goes.

A node *leases* a run of consecutive sections (`farandole.protocol.slices`) by an entry in the run state, waits until
the others have mostly heard of it, and trains; in the entry it says how far it is. Two that lease the same, because
neither had heard of the other, both know it soon, and one of them gives way: by rendezvous hashing (Thaler and
Ravishankar, 1998), so both judge alike, whatever time it is. A lease is as good as its holder: when it is dead, or has
left, what it has not said to have done is free. So an epoch ends with every slice done at least once, and more often
only what nodes have done since they last spoke when they died, or while the network was cut in two.

Leases are sized for a few heartbeats' work, and become smaller towards the end of an epoch, so that all end at about
the same time (guided self-scheduling: Polychronopoulos and Kuck, 1987). The next epoch begins when all is done.

**What is remembered.** What a node believes to be done, it keeps, and says it in entries of its own, a bit a section.
So it outlives the entries of those who did it.

**Whom to believe.** Members with whom there have been exchanges, and within bounds: `farandole.protocol.lease_claims`.
What others say beyond that decides only what is leased last. Where the run is, most of those members say; a node that
has not met any yet begins where the live say that the run is, and does not take that for certain. Of a lease that is
not finished the others wait for `Leases.patience`, once, and no more: then it is done by others, as by the backup tasks
of MapReduce (Dean and Ghemawat, 2004). A node gives way to one author once in `GIVE_WAY_SECONDS`, so keys that were
chosen for their hashes do not drive it from place to place.

Sans-IO: `handle(event, now)`, with `Ticked` once a second or so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .entries import Lease, LeasedSlices
from .epoch_vote import EpochVote
from .identity import framed
from .lease_claims import MAX_SHARE, MAX_UNFINISHED, Claimant, Claims, Standing, max_sections
from .lease_events import Announce, EpochBegan, Event, Forgotten, Heard, Left, Output, Ticked
from .pace import Pace
from .slices import DoneSlices, Sections, next_bit, part_mask, parts, run_length
from .trainer_messages import DrawSlices, SlicesTrained

# Until a lease has come to everybody: some pushes of the run state, a second apart at most.
SETTLE_SECONDS = 5.0
# A lease is work for so many heartbeats, so that there is little more to say of it than those say; and for so long at
# least, since the next one has to settle meanwhile.
LEASE_PERIODS = 6.0
MIN_LEASE_SECONDS = 3 * SETTLE_SECONDS
# The next lease is claimed when the work left is for less than this.
CLAIM_AHEAD_SECONDS = 2 * SETTLE_SECONDS
# Finished leases that are still told of; older ones are in the bits.
MAX_FINISHED = 5
# Each node tells what it knows to be done so often, if there is news: a second for each node of the run, so that this
# takes a few kilobytes a second of each at any size.
MIN_REFRESH_SECONDS = 10.0
# An entry lives for an hour: three may be lost.
MAX_REFRESH_SECONDS = 900.0
# Who was not asked anything for so long was asleep, and others have its leases.
ASLEEP_SECONDS = 60.0
# How far it is, a node says once a heartbeat, and not more often than its entries' ticks allow.
MIN_ANNOUNCE_SECONDS = 5.0
# A node gives way to one author so often. Two that have agreed who gives way are in each other's way again by chance.
GIVE_WAY_SECONDS = 60.0
# Of so many places for a lease, the one with the most room is taken: nodes that look at once look elsewhere.
NUM_PLACES = 4


@dataclass(slots=True)
class _OwnLease:
    """From ``first`` up to ``end``; what of it is done, `DoneSlices` knows."""

    first: int
    end: int
    settled_at: float


@dataclass(slots=True)
class _Epoch:
    """What is known of one epoch, and forgotten with it."""

    done: DoneSlices
    claims: Claims
    own: list[_OwnLease] = field(default_factory=list)
    finished: list[LeasedSlices] = field(default_factory=list)
    cursor: int | None = None
    num_claims: int = 0
    completed_at: float | None = None
    idle_since: float | None = None
    waited_for: frozenset[bytes] = frozenset()
    overdue: frozenset[bytes] = frozenset()
    told_parts: dict[int, bytes] = field(default_factory=dict)
    is_patient: bool = True
    gave_way_at: dict[bytes, float] = field(default_factory=dict)


class Leases:
    """One node's leases, see above.

    ``corpus``: hash of its text. ``exchange_seconds``: as in the manifest. ``salt``: 16 random bytes that nobody else
    knows; none: what others have done is not trained again as a sample.
    """

    def __init__(
        self,
        author: bytes,
        corpus: bytes,
        num_slices: int,
        num_epochs: int,
        *,
        exchange_seconds: float = 0.0,
        salt: bytes = b"",
    ) -> None:
        self.corpus = corpus
        self.num_epochs = num_epochs
        self.epoch = 0
        self.sections = Sections(num_slices)
        self._author = author
        self._exchange_seconds = exchange_seconds
        self._heard: dict[bytes, dict[int, Lease]] = {}
        self._corpora: dict[bytes, bytes] = {}  # of those whose text is another
        self._standing = Standing()
        self._salt = salt
        self._vote = EpochVote()
        self._period = 10.0
        self._ticked_at: float | None = None
        self._has_left = False
        self._pace = Pace()
        self._assigned: tuple[int, tuple[tuple[int, int], ...]] = (0, ())  # epoch, (first, end) of leases
        self._announced: Lease | None = None
        self._announced_at = self._refreshed_at = 0.0
        self._is_urgent = True
        self._current = self._epoch_of()

    def _epoch_of(self) -> _Epoch:
        done = DoneSlices(self.sections)
        return _Epoch(done, Claims(done, self._salt and self._salt + self.epoch.to_bytes(4, "big")))

    @property
    def done(self) -> DoneSlices:
        """Slices of the present epoch that are done, by any node, as far as this one believes it."""
        return self._current.done

    @property
    def num_doubted(self) -> int:
        """Slices of which others say that they are done, and this node does not believe it; whole sections."""
        return (self._current.claims.doubted & ~self.done.whole).bit_count() * self.sections.size

    def handle(self, event: Event, now: float) -> list[Output]:
        """What to do now."""
        match event:
            case Heard(author, index, lease):
                self._hear(author, index, lease)
            case Forgotten(author):
                self._heard.pop(author, None)
                self._corpora.pop(author, None)
                self._current.claims.forget(author)
            case SlicesTrained(epoch, ranges):
                self._note_trained(epoch, ranges, now)
            case Ticked(live, period, proven, speeds):
                self._period = period
                pace = self._pace.slices_per_second
                self._standing = Standing(live, proven, speeds, pace, self._lease_seconds)
                return [] if self._has_left else list(self._tick(now))
            case Left():
                return list(self._leave())
        return []

    # For people

    @property
    def is_over(self) -> bool:
        """Whether all epochs are."""
        return self.epoch >= self.num_epochs

    @property
    def num_leased(self) -> int:
        """Slices that this node has leased, and not trained on yet."""
        return sum(self._left(lease) for lease in self._current.own)

    def _left(self, lease: _OwnLease) -> int:
        return max(0, lease.end - self.done.next(lease.first))

    @property
    def strangers(self) -> frozenset[bytes]:
        """Live members whose text is another: slices are not shared with them."""
        return frozenset(self._corpora.keys() & self._standing.live)

    @property
    def patience(self) -> float:
        """Seconds that this node waits, with nothing left to lease, for those who hold the rest."""
        return 2 * self._lease_seconds + 2 * self._exchange_seconds

    @property
    def _lease_seconds(self) -> float:
        return max(MIN_LEASE_SECONDS, LEASE_PERIODS * self._period)

    # What others say

    def _hear(self, author: bytes, index: int, lease: Lease) -> None:
        if lease.corpus != self.corpus:
            if author != self._author and index == 0:
                self._corpora[author] = lease.corpus
            return
        self._corpora.pop(author, None)
        self._heard.setdefault(author, {})[index] = lease
        if lease.epoch == self.epoch:
            self._take_in(author, index, lease)
        elif lease.epoch > self.epoch and author != self._author:
            self._current.claims.release(author)
        elif author == self._author and self.epoch < lease.epoch <= self.num_epochs:
            self._vote.is_new = False
            self._begin_epoch(lease.epoch)

    def _take_in(self, author: bytes, index: int, lease: Lease) -> None:
        if author == self._author:
            self._take_in_own(index, lease)
        else:
            self._current.claims.hear(author, index, lease, self._standing)

    def _take_in_own(self, index: int, lease: Lease) -> None:
        """Of an earlier life: go on where that was. Nobody else can have written it."""
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
        """Those whose leases count."""
        return self._current.claims.held(self._standing.live, self._current.overdue)

    # Time

    def _tick(self, now: float) -> Iterator[Output]:
        seconds = 0.0 if self._ticked_at is None else now - self._ticked_at
        was_asleep = seconds > ASLEEP_SECONDS
        self._ticked_at = now
        if was_asleep:
            self._current.own.clear()
            self._is_urgent = True
        self._current.claims.believe(self._standing, seconds)
        self._finish_leases()
        yield from self._follow_epoch(now)
        if not self.is_over:
            self._give_way(now)
            self._trim()
            self._claim(now)
        yield from self._assign(now)
        yield from self._announce(now)

    def _follow_epoch(self, now: float) -> Iterator[Output]:
        """To the next one when all is done, and the others have heard it of our leases; or to where the others are."""
        said = {author: entries[0].epoch for author, entries in self._heard.items() if 0 in entries}
        epoch = self._vote.decide(self.epoch, said, self._standing, self.num_epochs)
        if epoch == self.epoch and self.done.is_complete and not self.is_over:
            if self._current.completed_at is None:
                self._current.completed_at, self._is_urgent = now, True
            if now - self._current.completed_at >= SETTLE_SECONDS:
                epoch += 1
        if epoch != self.epoch:
            self._begin_epoch(epoch)
            yield EpochBegan(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._is_urgent = True
        self._current = self._epoch_of()
        for author, entries in self._heard.items():
            for index, lease in entries.items():
                if lease.epoch == epoch:
                    self._take_in(author, index, lease)

    # The own leases

    def _note_trained(self, epoch: int, ranges: Iterable[tuple[int, int]], now: float) -> None:
        if epoch != self.epoch:
            return
        self._vote.is_new = False
        for first, count in ranges:
            for index in range(first, first + count):
                self.done.add(index)
            self._pace.note(count, now)

    def _finish_leases(self) -> None:
        """Put aside what is done; with what others have done of it meanwhile."""
        for lease in list(self._current.own):
            if not self._left(lease):
                self._current.own.remove(lease)
                self._put_aside(lease.first, lease.end)

    def _put_aside(self, first: int, end: int) -> None:
        if first < end:
            self._current.finished.append(LeasedSlices(first, end - first, end - first))

    def _give_way(self, now: float) -> None:
        """Where another one's lease is on the same sections, and its hash is less."""
        own_mask, gave_way_at = self._own_mask, self._current.gave_way_at
        for author, peer in self._respected():
            if not peer.mask & own_mask or now - gave_way_at.get(author, -GIVE_WAY_SECONDS) < GIVE_WAY_SECONDS:
                continue
            for lease in list(self._current.own):
                if self._give_way_to(author, peer, lease, now):
                    gave_way_at[author] = now

    @property
    def _own_mask(self) -> int:
        """The sections of which this node has leased something that is not done."""
        mask = 0
        for lease in self._current.own:
            mask |= self.sections.mask(self.done.next(lease.first), lease.end)
        return mask

    def _give_way_to(self, author: bytes, peer: Claimant, lease: _OwnLease, now: float) -> bool:
        """Whether it has done so."""
        sections, position = self.sections, self.done.next(lease.first)
        contested = peer.mask & sections.mask(position, lease.end)
        last = contested.bit_length() - 1  # the first one changes while we work, and each of us sees that later
        if not contested or self._rank(self._author, last) < self._rank(author, last):
            return False
        first = next_bit(contested, 0)
        assert first is not None
        begin, rest = max(position, sections.begin(first)), sections.end(last)
        place = self._current.own.index(lease)
        self._current.own.remove(lease)
        if begin > position:
            self._current.own.insert(place, _OwnLease(lease.first, begin, lease.settled_at))
            place += 1
        else:
            self._put_aside(lease.first, position)
        if rest < lease.end and len(self._current.own) < MAX_UNFINISHED:
            self._current.own.insert(place, _OwnLease(rest, lease.end, max(now, lease.settled_at)))
        self._is_urgent = True
        return True

    def _rank(self, author: bytes, section: int) -> bytes:
        """32 bytes that nobody chooses."""
        number = self.epoch.to_bytes(4, "big") + section.to_bytes(4, "big")
        return hashlib.sha256(framed(b"farandole/lease/1", author, number)).digest()

    def _trim(self) -> None:
        """Give back what is too much, now that it is known how fast this node is."""
        pace = self._pace.slices_per_second
        if pace is None:
            return
        budget = int(2 * self._lease_seconds * pace)
        for lease in self._current.own:
            last = self.done.next(lease.first) + budget
            if last < lease.end and (end := self.sections.end(self.sections.of(last))) < lease.end:
                lease.end = end
                self._is_urgent = True
            budget = max(0, budget - self._left(lease))

    def _claim(self, now: float) -> None:
        """Lease more, if there will be nothing left to do soon."""
        pace = self._pace.slices_per_second
        is_enough = self.num_leased > (0 if pace is None else CLAIM_AHEAD_SECONDS * pace)
        if is_enough or len(self._current.own) >= MAX_UNFINISHED:
            self._current.idle_since = None
            return
        free = self._worthwhile(self._free())
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
        self._is_urgent = True

    def _free(self) -> int:
        taken = self.done.whole | self._own_mask
        for _, peer in self._respected():
            taken |= peer.mask
        return self.sections.all & ~taken

    def _worthwhile(self, free: int) -> int:
        """What is free and not said to be done; where that is much and in pieces, or was waited for, the rest too.

        So a liar that says so of every second section cuts no leases short. At the end of an epoch, what members say
        whose word counts is waited for once: most of it will be believed when most of them have met its authors.
        """
        undoubted = free & ~self._current.claims.doubted
        if not undoubted:
            is_patient = self._current.is_patient
            return free & ~self._current.claims.claimed(self._standing.voters) if is_patient else free
        is_little = undoubted.bit_count() <= MAX_SHARE * (len(self._standing.live) + 1)
        num_runs = (undoubted & ~(undoubted << 1)).bit_count()
        return undoubted if is_little or undoubted.bit_count() >= num_runs * self._wanted(undoubted) // 2 else free

    def _place(self, free: int) -> int:
        """Where to lease: behind the last lease, or else where the hash says and there is much room."""
        if self._current.cursor is not None and free >> self._current.cursor & 1:
            return self._current.cursor
        best, most = 0, 0
        for _ in range(NUM_PLACES):
            self._current.num_claims += 1
            start = int.from_bytes(self._rank(self._author, self._current.num_claims)[:8], "big") % self.sections.count
            place = next_bit(free, start)
            if place is None:
                place = next_bit(free, 0)
            assert place is not None, "something is free"
            if (room := run_length(free, place)) > most:
                best, most = place, room
        return best

    def _wanted(self, free: int) -> int:
        """Sections of the next lease: some heartbeats' work, or this node's part of half of what is left."""
        share = -(-free.bit_count() // (2 * (len(self._standing.live) + 1)))
        pace = self._pace.slices_per_second
        if pace is None:
            return max(1, min(share, max_sections(self.sections.count)))
        least, most = (
            -(-int(seconds * pace) // self.sections.size) for seconds in (CLAIM_AHEAD_SECONDS, self._lease_seconds)
        )
        return max(1, min(max(share, least), most, max_sections(self.sections.count)))

    def _wait(self, now: float) -> None:
        """All is done, or leased by others. Who holds it and does not finish it is not waited for much longer."""
        if self._current.own:
            self._current.idle_since = None
        elif self._current.idle_since is None:
            self._current.idle_since = now
            self._current.waited_for = frozenset(author for author, _ in self._respected())
        elif now - self._current.idle_since > self.patience:
            self._current.overdue |= self._current.waited_for
            self._current.idle_since, self._current.is_patient = None, False

    def _assign(self, now: float) -> Iterator[Output]:
        bounds = tuple((lease.first, lease.end) for lease in self._current.own if now >= lease.settled_at)
        if (self.epoch, bounds) != self._assigned:
            self._assigned = (self.epoch, bounds)
            if bounds:
                self._pace.go_on(now)
            else:
                self._pace.pause()
            yield self.assignment()

    def assignment(self) -> DrawSlices:
        """What is left of that which was last assigned: a new trainer begins with it."""
        epoch, bounds = self._assigned
        left = [(self.done.next(first), end) for first, end in bounds] if epoch == self.epoch else []
        return DrawSlices(epoch, [(first, end - first) for first, end in left if first < end])

    # What this node says

    def _announce(self, now: float) -> Iterator[Output]:
        refresh_seconds = min(MAX_REFRESH_SECONDS, max(MIN_REFRESH_SECONDS, float(len(self._standing.live))))
        if now - self._refreshed_at >= refresh_seconds or len(self._current.finished) > MAX_FINISHED:
            is_old = now - self._refreshed_at >= MAX_REFRESH_SECONDS
            self._refreshed_at = now
            yield from self._announce_parts(is_old=is_old)
        if len(self._current.finished) > MAX_FINISHED:
            del self._current.finished[:-2]
        lease = self._entry()
        age = now - self._announced_at
        is_due = self._is_urgent or age >= max(self._period, MIN_ANNOUNCE_SECONDS)
        if (is_due and lease != self._announced) or age >= MAX_REFRESH_SECONDS:
            self._announced, self._announced_at, self._is_urgent = lease, now, False
            yield Announce(0, lease)

    def _announce_parts(self, *, is_old: bool) -> Iterator[Output]:
        for part, raw in enumerate(parts(self.done.whole)):
            if raw and (is_old or raw != self._current.told_parts.get(part)):
                self._current.told_parts[part] = raw
                yield Announce(part + 1, Lease(self.epoch, self.corpus, (), raw))

    def _entry(self) -> Lease:
        unfinished = tuple(
            LeasedSlices(lease.first, count := lease.end - lease.first, count - self._left(lease))
            for lease in self._current.own
        )
        return Lease(self.epoch, self.corpus, (*self._current.finished, *unfinished))

    def _leave(self) -> Iterator[Output]:
        """Release what is not done."""
        self._has_left = True
        for lease in self._current.own:
            self._put_aside(lease.first, min(self.done.next(lease.first), lease.end))
        self._current.own.clear()
        yield from self._announce_parts(is_old=False)
        del self._current.finished[: -MAX_FINISHED - MAX_UNFINISHED]
        yield Announce(0, self._entry())

    def saved(self) -> list[tuple[int, Lease]]:
        """What `Heard` of this author would restore, in a life that begins when the run state has forgotten it."""
        bits = [(part + 1, Lease(self.epoch, self.corpus, (), raw)) for part, raw in enumerate(parts(self.done.whole))]
        return [(0, self._entry()), *bits]

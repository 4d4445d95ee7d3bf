"""Claims of other authors about one epoch, and how much of them a node believes.

No node can see whether an author has trained on a slice. So an author's claims count within bounds that follow from
what can be checked. Claims beyond them are *doubted*: their slices are trained on again, after all others.

*Authors.* Only the claims of *proven* members count. A member is proven if this node has committed exchanges with it,
or if enough members that this node has exchanged with have done so (`farandole.protocol.state.believing`). Keys are
free, exchanges are not: each takes a round of one honest node.

*Leases.* The slices that a proven author claims to have done on its leases count at its signed speed, with some slack.
The speed counts up to `FASTEST_RATIO` times a usual one: the median of this node's own measured speed and the speeds
that proven members sign. The usual speed is not the fastest of these, since a liar could set that. A bucket for each
author holds what it may have done since its first lease was heard of.

*Bits*, of all sections that are done, count if most of the live proven members set them.

What a liar gains: without exchanges, nothing; with exchanges, the work of `FASTEST_RATIO` usual nodes; with most of the
members that a node has met, everything. Sans-IO.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..run.slices import DoneSlices, Sections, part_mask, said_by
from ..state.entries import Kind, Lease, LeasedSlices
from ..state.state import RunState
from ..wire.bounds import Latest

# A data-centre GPU is about a hundred times as fast as a laptop, so this hurts no honest node.
FASTEST_RATIO = 128.0
# A node signs the speed of its newest round. Other rounds may be faster by this factor: rounds differ, and the time of
# an exchange is not its trainer's.
SIGNED_SLACK = 4.0
# Delay of entries at which an author's bucket is full: a minute without a network, and a round's exchange.
BUCKET_SECONDS = 180.0
# Proven members, or all live ones if they are fewer, that must be live before a node follows their majority.
QUORUM = 3
# A lease has at most 1/16 of an epoch's sections: with two leases, a peer can keep an eighth from the others.
MAX_SHARE = 16
# Unfinished leases of one node: the one that it works on, and the next.
MAX_UNFINISHED = 2
# Leases that an author claims to have done and that are not believed yet: two entries' worth. Older ones wait for its
# bits.
MAX_OWED = 16
# Time until a lease has reached all nodes: some pushes of the run state, at most a second apart.
SETTLE_SECONDS = 5.0
# A lease is work for this number of heartbeat periods, so its entries add little traffic to the heartbeats. It is work
# for at least `MIN_LEASE_SECONDS`, since the next lease has to settle in this time.
LEASE_PERIODS = 6.0
MIN_LEASE_SECONDS = 3 * SETTLE_SECONDS


@dataclass(frozen=True, slots=True)
class Standing:
    """The live authors, and what their claims are judged by. Speeds are in slices per second."""

    live: frozenset[bytes] = frozenset()
    """The other nodes that draw data."""
    proven: frozenset[bytes] = frozenset()
    """Authors whose claims count (`farandole.protocol.state.believing`), live or not."""
    signed_speeds: Mapping[bytes, float] = field(default_factory=dict)
    """Speeds of live members, as each signs its own."""
    period: float = 10.0
    """Seconds between heartbeats."""
    own_speed: float | None = None
    """As measured here; None: not known yet."""

    @property
    def lease_seconds(self) -> float:
        """Time that the work of a lease takes."""
        return max(MIN_LEASE_SECONDS, LEASE_PERIODS * self.period)

    @property
    def voters(self) -> frozenset[bytes]:
        """Members whose majority is followed."""
        return self.live & self.proven

    @property
    def has_quorum(self) -> bool:
        """Return whether there are enough voters."""
        return bool(self.live) and len(self.voters) >= min(QUORUM, len(self.live))

    @property
    def fastest(self) -> float:
        """Largest speed that any author is credited with; 0: nothing is known."""
        signed = [self.signed_speeds.get(author, 0.0) for author in self.voters]
        known = sorted(speed for speed in (*signed, self.own_speed or 0.0) if speed > 0.0)
        return FASTEST_RATIO * max(self.own_speed or 0.0, statistics.median_low(known)) if known else 0.0

    def speed(self, author: bytes, fastest: float) -> float:
        """Speed at which an author's claims count. ``fastest``: the property, which is slow to compute."""
        return min(SIGNED_SLACK * self.signed_speeds.get(author, 0.0), fastest) if author in self.voters else 0.0


@dataclass(slots=True)
class Claimant:
    """An author's newest claims about this epoch."""

    claims: tuple[LeasedSlices, ...] = ()
    """Its unfinished leases, as far as they are respected."""
    mask: int = 0
    """The sections of ``claims``."""
    told: int = 0
    """The sections that its bits mark as done."""
    owed: Latest[int, int] = field(default_factory=lambda: Latest(MAX_OWED))
    """First slice -> end of the part of a lease that it claims to have done and this node does not believe yet."""
    credit: float = 0.0
    """Slices that it may have done, and that do not count yet."""


class Claims:
    """The claims of other authors about an epoch. The believed ones go into ``done``."""

    def __init__(self, sections: Sections) -> None:
        self.done = DoneSlices(sections)
        """Slices that this node believes to be done."""
        self._sections = sections
        self._claimants: dict[bytes, Claimant] = {}
        self._has_news = False
        self._voters: frozenset[bytes] = frozenset()

    def hear(self, author: bytes, index: int, lease: Lease, standing: Standing) -> None:
        """Take in an author's entry of this epoch."""
        claimant = self._claimants.setdefault(author, Claimant())
        if index:
            claimant.told |= part_mask(index - 1, lease.done) & self._sections.all
            self._has_news = True
            return
        fit = [slices for slices in lease.leases if self._is_fit(slices)]
        for slices in fit:
            if slices.done:
                end = slices.first + slices.done
                claimant.owed[slices.first] = max(end, claimant.owed.get(slices.first, 0))
        claimant.claims = tuple(slices for slices in fit if slices.done < slices.count)[:MAX_UNFINISHED]
        # The most slices that an author may keep from the others at once: what it can train on in the time of
        # `MAX_UNFINISHED` leases, or an equal share of half an epoch, which a node leases before it knows its speed.
        share = -(-self._sections.count // (2 * (len(standing.live) + 1))) * self._sections.size
        plausible = MAX_UNFINISHED * standing.lease_seconds * standing.speed(author, standing.fastest)
        most, claimant.mask = max(share, int(plausible)), 0
        for slices in claimant.claims:
            first, end = slices.first + slices.done, slices.first + slices.count
            claimant.mask |= self._sections.mask(first, min(end, first + most))
            most = max(0, most - (end - first))

    def _is_fit(self, slices: LeasedSlices) -> bool:
        """Return whether an honest node may have such a lease."""
        end = slices.first + slices.count
        if slices.done > slices.count or end > self._sections.num_slices or not slices.count:
            return False
        return self._sections.of(end - 1) - self._sections.of(slices.first) < max_sections(self._sections.count)

    def release(self, author: bytes) -> None:
        """Drop an author's leases: it holds nothing of this epoch any more."""
        if (claimant := self._claimants.get(author)) is not None:
            claimant.claims, claimant.mask = (), 0

    def forget(self, author: bytes) -> None:
        """Forget an author that has no lease entries in the run state any more."""
        self._claimants.pop(author, None)

    # Belief

    def believe(self, standing: Standing, seconds: float) -> None:
        """Add to ``done`` what counts by now, ``seconds`` after the last call."""
        fastest = standing.fastest
        for author, claimant in self._claimants.items():
            speed = standing.speed(author, fastest)
            if speed and (claimant.claims or claimant.owed):
                claimant.credit = min(claimant.credit + speed * seconds, speed * BUCKET_SECONDS)
            if author in standing.proven:
                # A slice that is done already costs nothing.
                for first, end in list(claimant.owed.items()):
                    if self._pay(claimant, first, end):
                        del claimant.owed[first]
        voters = standing.voters
        if (self._has_news or voters != self._voters) and standing.has_quorum:
            self._has_news, self._voters = False, voters
            told = [self._claimants[author].told for author in voters if author in self._claimants]
            self.done.add_sections(said_by(told, len(voters) // 2 + 1))

    def _pay(self, claimant: Claimant, first: int, end: int) -> bool:
        """Pay for the slices from ``first`` to ``end``; return whether all of them count now.

        What precedes them in their section counts with them (`DoneSlices.add_lease`), so it is paid as well.
        """
        start = self.done.next(self._sections.begin(self._sections.of(first)))
        while start < end:
            stop = min(end, start + int(claimant.credit))
            if start == stop:
                return False
            claimant.credit -= stop - start
            self.done.add_lease(start, stop)
            start = self.done.next(stop)
        return True

    # Where to lease

    @property
    def doubted(self) -> int:
        """The sections that any author claims to be done, believed or not."""
        mask = 0
        for claimant in self._claimants.values():
            mask |= claimant.told
            for first, end in claimant.owed.items():
                mask |= self._sections.mask(first, end)
        return mask

    def held(self, live: frozenset[bytes], overdue: frozenset[bytes]) -> Iterator[tuple[bytes, Claimant]]:
        """Yield the authors whose leases count, with their claims."""
        for author, claimant in self._claimants.items():
            if claimant.mask and author in live and author not in overdue:
                yield author, claimant


def max_sections(count: int) -> int:
    """Return the most sections of one lease in an epoch of ``count`` sections."""
    return max(1, count // MAX_SHARE)


# Vote on the epoch that a node is in.
#
# The majority of the members whose claims count decides (`farandole.protocol.epochs.lease_claims`), and never moves a
# node back: a liar is outvoted by the members with which there have been exchanges. A newcomer that has met no peer
# starts at the epoch that the live members report, as a guess: the first majority corrects it, backwards as well. It
# believes that all epochs are over, which ends its training, only if all members say so.


class EpochVote:
    """One node's view of the current epoch."""

    def __init__(self) -> None:
        self.is_new = True
        """Whether the node has no knowledge of its own about the epochs."""
        self._is_guess = False  # the epoch comes from the live members' claims

    def decide(self, own: int, said: Mapping[bytes, int], standing: Standing, num_epochs: int) -> int:
        """Return the epoch to be in; ``num_epochs`` if all are over. ``said``: epochs of others, live or not."""
        if standing.has_quorum:
            votes = [said[author] for author in standing.voters if author in said]
            if not votes:
                return own
            epoch = min(int(statistics.median_low(votes)), num_epochs)
            is_guess, self._is_guess = self._is_guess, False
            return epoch if is_guess else max(epoch, own)
        claims = [said[author] for author in standing.live if author in said] if self.is_new else []
        if not claims:
            return own
        most = num_epochs if min(claims) >= num_epochs else num_epochs - 1
        guess = min(int(statistics.median_low(claims)), most)
        self._is_guess = self._is_guess or guess > own
        return max(guess, own)


# Progress of a run's epochs, from the entries of its authors.

# Authors that must report a section as done before a visitor believes it; half of the authors in smaller runs.
MAX_WITNESSES = 3


def epoch_progress(state: RunState, live: Iterable[bytes]) -> tuple[bytes, int, int] | None:
    """Return the most common text, its epoch and the mask of sections done, as live members report; None: none does.

    Sections done recently are missing, since members announce done sections at intervals.
    """
    said = {author: lease for author in live if (lease := state.payload(author, Lease)) is not None}
    if not said:
        return None
    [(corpus, num_authors)] = Counter(lease.corpus for lease in said.values()).most_common(1)
    epoch = median_epoch(lease for lease in said.values() if lease.corpus == corpus)
    assert epoch is not None, "somebody has this text"
    told = dict.fromkeys(said, 0)
    for author in said:
        for entry in state.entries_of(author):
            if entry.kind is Kind.LEASE and entry.index:
                section: Lease = entry.payload
                if (section.corpus, section.epoch) == (corpus, epoch):
                    told[author] |= part_mask(entry.index - 1, section.done)
    return corpus, epoch, said_by(list(told.values()), min(MAX_WITNESSES, -(-num_authors // 2)))


def median_epoch(said: Iterable[Lease]) -> int | None:
    """Return the run's epoch as its live members report it, the lower one of two; None if no member reports one."""
    epochs = [lease.epoch for lease in said]
    return int(statistics.median_low(epochs)) if epochs else None

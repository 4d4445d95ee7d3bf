"""Whom a node believes: about the run's progress, who has exchanged, whom to suspect, and the time.

A heartbeat names a round, and any key can name any round. A committed exchange is work: both sides judged the other's
weights. So a node takes the run's progress from its *partners*, the peers with which it has committed exchanges, and a
claim of other peers never makes it stop its trainer. Only a node that starts a trainer while no partner is present
believes the members that it has reached, since it has no other source.

A claim is tested when weights are fetched for it. If none arrive, or they are judged unfit, the peers that made the
claim, or gave the weights, lose their credit: they are not believed for a while, and for longer each time.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Set
from ipaddress import ip_network
from typing import Final

import msgspec

from ..wire.bounds import Backoff, Latest
from ..wire.identity import PUBLIC_KEY_BYTES
from .entries import MAX_SUSPECTS, PARTNER_BYTES, Suspects
from .state import MAX_AHEAD

# Rounds by which a claim may differ from what is known and still be accepted without a test: heartbeats are up to a
# minute old, and a trainer takes a minute to start, while rounds may take a second.
MAX_LEAP = 100
# The latest partners that are remembered: as many as a node meets in hours; 8 kB in its store.
MAX_PARTNERS = 256
# Seconds for which a peer is not believed after its first false claim: several times as long as the test of a claim
# takes. Twice as long after each further one, up to a day.
FIRST_DOUBT, MAX_DOUBT = 600.0, 86_400.0
# The latest peers whose false claims are remembered.
MAX_DOUBTED = 4_096


class Partners(Latest[bytes, None]):
    """Peers with which this node has committed exchanges, the latest last."""

    def __init__(self) -> None:
        super().__init__(MAX_PARTNERS)

    def note(self, peer: bytes) -> None:
        """Note that an exchange with a peer was committed."""
        self[peer] = None

    def restore(self, encoded: bytes) -> None:
        """Add the partners that an earlier process has stored, key after key."""
        for start in range(0, len(encoded) - PUBLIC_KEY_BYTES + 1, PUBLIC_KEY_BYTES):
            self.note(encoded[start : start + PUBLIC_KEY_BYTES])


class Credit:
    """A record of which peers are believed, by their number of false claims. ``now`` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._doubts = Backoff(FIRST_DOUBT, MAX_DOUBT, MAX_DOUBTED)

    def lose(self, peers: Iterable[bytes], now: float) -> None:
        """Note a false claim of each peer. A peer that is doubted already is skipped: this is the same claim again."""
        for peer in peers:
            if self.is_good(peer, now):
                self._doubts.note_failure(peer, now)

    def is_good(self, peer: bytes, now: float) -> bool:
        """Return whether a peer is believed."""
        return self._doubts.is_due(peer, now)


# Proven members: the ones whose claims count, because exchanges with them were committed.
#
# Keys are free, and so are heartbeats. An exchange that both sides commit takes a round of an honest node, which meets
# one peer a round, and each peer about equally often. So a node takes a member as *proven* if it has committed an
# exchange with it, or if `NUM_VOUCHERS` members with which it has done so report in their heartbeats an exchange with
# that member. In a run of a thousand members a node then knows most of them after about 75 rounds instead of a
# thousand.
#
# The gain from lying is bounded: `NUM_VOUCHERS` met members can make any key proven, but each of them must have been
# met by each node that believes them. Sans-IO.

# With three, neither one liar nor two can make a key proven.
NUM_VOUCHERS = 3


class Acquaintance:
    """The members that one node knows to be proven, and which members vouch for the others."""

    def __init__(self) -> None:
        self._vouchers: dict[bytes, set[bytes]] = {}  # of live members that are not met

    def proven(self, met: Set[bytes], partners: Mapping[bytes, bytes]) -> frozenset[bytes]:
        """Return the authors that are proven.

        ``met``: the members with which this node has committed exchanges. ``partners``: for each live member, the first
        bytes of the key of the peer that it averaged with in its last round; empty: none, or not reported.
        """
        unmet = {author[:PARTNER_BYTES]: author for author in partners.keys() - met}
        self._vouchers = {author: self._vouchers.get(author, set()) for author in unmet.values()}
        for author in partners.keys() & met:
            if (partner := unmet.get(partners[author])) is not None:
                self._vouchers[partner].add(author)
        vouched = (author for author, vouchers in self._vouchers.items() if len(vouchers) >= NUM_VOUCHERS)
        return frozenset((*met, *vouched))


# Members' suspicions of each other: which peers a node's screening suspects, and when other members' lists count.
#
# Two members of a run of hundreds meet rarely, so a peer that does a little harm each time is found late by any one of
# them. Each member publishes the peers that it suspects at present, and takes a peer off the list when later exchanges
# with it are good.
#
# Keys cost nothing, so a list counts only if this node has committed exchanges with its author, and enough such lists
# must name a peer. Even then the lists do not decide: they lower what the mean with its weights may cost
# (`farandole.training.screening.guard`). With false suspicions, liars can only make a node ignore an honest member
# while that node itself finds the mean worse than its own weights, for example after a long absence.

# Enough accusers: a third of the members whose lists count, which a quarter of liars cannot reach, within these bounds.
# The upper one is for large runs, in which few members have met the peer at all.
MIN_ACCUSERS: Final = 3
MAX_ACCUSERS: Final = 6


class OwnSuspects(Latest[bytes, None]):
    """The peers that this node suspects, the latest last."""

    def __init__(self) -> None:
        super().__init__(MAX_SUSPECTS)

    def note(self, peer: bytes, *, is_suspect: bool) -> bool:
        """Note the screening's latest result for a peer; return whether the list has changed."""
        has_changed = is_suspect != (peer in self)
        if is_suspect:
            self[peer] = None
        else:
            self.pop(peer, None)
        return has_changed

    @property
    def entry(self) -> Suspects:
        """Return the list as it is published."""
        return Suspects(tuple(sorted(peer[:PARTNER_BYTES] for peer in self)))


def is_suspected(peer: bytes, lists: Iterable[Suspects], num_believed: int) -> bool:
    """Return whether enough lists name a peer. ``lists`` are from ``num_believed`` members, without the peer's own."""
    enough = min(max(-(-num_believed // 3), MIN_ACCUSERS), MAX_ACCUSERS)
    return sum(peer[:PARTNER_BYTES] in told.peers for told in lists) >= enough


# This node's clock, judged by the clocks of members that it has reached. Entries carry the time of their writing, and a
# node accepts none from the future (`state.MAX_AHEAD`). So a node whose clock is wrong hears no member, or no member
# hears it, although its connections are fine: it must be able to report why.
#
# A member may lie about the time, to make an owner distrust a clock that is right, or to hide the real fault. So:
#
# - Only the answers in sessions that this node began count, and only while the member is connected.
# - Keys are free, so all members of one public network (IPv4 /24, IPv6 /48), and all that are reached over relays, have
#   one vote together. Members of local networks have one vote each.
# - The clock is reported as wrong only if `NUM_AGREEING` votes agree, and they are more than half of all votes.
# - With fewer votes, if none confirms the clock, the report is that two clocks differ, and does not say which is wrong.
# - The remedy is always NTP, never a member's time, and no decision of the node depends on the votes.

# Votes that must agree: one more than the two that a liar and a member with a wrong clock of its own have.
NUM_AGREEING: Final = 3
# Seconds by which votes that agree may differ from their median. Correct clocks are within
# `writer.CLOCK_ERROR` of the time, and a vote arrives late by the delay of a message.
AGREEMENT: Final = 30.0
# Seconds from which the clock is reported: half of what entries tolerate, so that a drift is noticed before it harms.
MAX_FINE_SKEW: Final = MAX_AHEAD / 2


class ClockSkew(msgspec.Struct, frozen=True):
    """A difference between this node's clock and those of the members that it has reached."""

    seconds: float
    """Seconds by which this node's clock is ahead of the members'; negative: behind."""
    num_members: int
    """Number of votes that say so."""
    is_agreed: bool
    """Enough votes agree that this node's clock is the wrong one. False: one of the clocks is wrong."""

    @property
    def is_harmful(self) -> bool:
        """Return whether the difference is larger than entries tolerate."""
        return abs(self.seconds) > MAX_AHEAD


def judge_clock(votes: Collection[float]) -> ClockSkew | None:
    """Return the difference that the votes show; None if there is none, or if the votes do not allow a judgement.

    ``votes``: seconds by which this node's clock is ahead of each voter's.
    """
    if not votes:
        return None
    middle = statistics.median(votes)
    agreeing = sum(abs(vote - middle) <= AGREEMENT for vote in votes)
    if agreeing >= NUM_AGREEING and 2 * agreeing > len(votes):
        return ClockSkew(middle, agreeing, is_agreed=True) if abs(middle) > MAX_FINE_SKEW else None
    nearest = min(votes, key=abs)
    return ClockSkew(nearest, len(votes), is_agreed=False) if abs(nearest) > MAX_AHEAD else None


def votes_of(answers: Iterable[tuple[bytes, str, float]]) -> list[float]:
    """Return a vote for each independent voter: the median of its answers.

    ``answers``: member, its network as `Introducer.network`, and seconds by which this node's clock is ahead.
    """
    voters: dict[bytes | str, list[float]] = {}
    for member, network, ahead in answers:
        voters.setdefault(member if network and not ip_network(network).is_global else network, []).append(ahead)
    return [statistics.median(each) for each in voters.values()]

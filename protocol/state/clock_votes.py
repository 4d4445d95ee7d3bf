"""Judges this node's clock by the clocks of members that it has reached.

Entries carry the time of their writing, and a node accepts none from the future (`state.MAX_AHEAD`). So a node whose
clock is wrong hears no member, or no member hears it, although its connections are fine: it must be able to report why.

A member may lie about the time, to make an owner distrust a clock that is right, or to hide the real fault. Therefore:

- Only the answers in sessions that this node began count, and only while the member is connected.
- Keys are free, so all members of one public network (IPv4 /24, IPv6 /48), and all that are reached over relays, have
  one vote together. Members of local networks have one vote each.
- The clock is reported as wrong only if `NUM_AGREEING` votes agree, and they are more than half of all votes.
- With fewer votes, if none confirms the clock, the report is that two clocks differ, and does not say which is wrong.
- The remedy is always NTP, never a member's time, and no decision of the node depends on the votes.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable
from ipaddress import ip_network
from typing import Final

import msgspec

from .state import MAX_AHEAD

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

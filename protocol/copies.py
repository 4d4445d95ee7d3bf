"""Which checkpoint of a stage has copies, who keeps them, and which one a newcomer takes.

Replicas of one stage differ, so a newcomer can take blocks from several peers only where these hold the very same
checkpoint. So that there is one, all agree on whose it is: the members of a stage are ranked by rendezvous hashing
(Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996), in which nobody has a word and few change
places when somebody comes or goes. The checkpoint of the first who has announced one is copied: by the two next where
the model is not cut; by the nodes of the stage before where it is, so that a stage outlives all its members.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .entries import CheckpointNotice
from .identity import framed

# Who copies, where the model is not cut: with the author that makes three donors, and one may die.
NUM_COPIERS = 2
# Donors that are worth waiting for less: a checkpoint that so many hold is taken, though there are newer ones.
MIN_HOLDERS = 2
# By how many rounds these may be newer: where rounds are short, copies lag, as checkpoints are as far apart as ever. As
# old may be what a single donor gives without saving anew; to copy more often would cost more than it saves.
MAX_ROUNDS_OLDER = 5
# Of those that are tried, one after the other: there is hardly ever more than one that is no lie.
MAX_CHOICES = 4


def ranked(run_id: bytes, stage: int, members: Iterable[bytes]) -> list[bytes]:
    """Members of a stage in the order of their ranks, the same at every node."""

    def rank(member: bytes) -> bytes:
        return hashlib.sha256(framed(b"farandole/copies/1", run_id, stage.to_bytes(2, "big"), member)).digest()

    return sorted(members, key=rank)


def copied_author(run_id: bytes, stage: int, announced: Iterable[bytes]) -> bytes | None:
    """Whose checkpoint is to be copied, of those who have announced one of their own; None if nobody has."""
    return next(iter(ranked(run_id, stage, announced)), None)


def is_copier(run_id: bytes, stage: int, members: Iterable[bytes], author: bytes, node: bytes) -> bool:
    """Whether a node is to copy the author's checkpoint of a stage, which is not cut, and whose members these are."""
    others = [member for member in ranked(run_id, stage, members) if member != author]
    return node in others[:NUM_COPIERS]


@dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint that can be had from these."""

    id: bytes
    round: int
    holders: tuple[bytes, ...]


def choose(
    notices: Mapping[bytes, Sequence[CheckpointNotice]], after_round: int, networks: Mapping[bytes, str] | None = None
) -> list[Choice]:
    """Checkpoints that several hold, the best first; none: what is near where the run is, is at one node each.

    ``notices``: what each member says that it holds, of one stage. Without those that are no newer than
    ``after_round``. Where the run is, is the median of the newest that each member holds: no few keys can move it, by
    whatever they announce. ``networks`` has the members that this node has reached, each with the network that it is
    in. Best is what several hold of these, in different networks rather than in one, then what is nearest to that
    median.
    """
    networks = networks or {}
    holders: dict[tuple[int, bytes], list[bytes]] = defaultdict(list)
    for member, held in notices.items():
        for notice in held:
            if notice.round > after_round:
                holders[notice.round, notice.id].append(member)
    newest = {member: max(each.round for each in held) for member, held in notices.items() if held}
    known = [round_index for member, round_index in newest.items() if member in networks]
    if not (known := known or list(newest.values())):
        return []
    middle = statistics.median_low(known)

    def rank(choice: Choice) -> tuple[int, int, int, int, bytes]:
        at = [networks[holder] for holder in choice.holders if holder in networks]
        several, apart = min(len(at), MIN_HOLDERS), min(len(set(at)), MIN_HOLDERS)
        return -several, -apart, abs(choice.round - middle), -choice.round, choice.id

    several = [
        Choice(checkpoint_id, round_index, tuple(sorted(members)))
        for (round_index, checkpoint_id), members in holders.items()
        if len(members) >= MIN_HOLDERS and abs(round_index - middle) <= MAX_ROUNDS_OLDER
    ]
    return sorted(several, key=rank)[:MAX_CHOICES]

"""Copies of checkpoints: which checkpoint of a stage is copied, by which nodes, and which one a newcomer takes.

Replicas of one stage differ, so a newcomer can take blocks from several peers only if these hold the same checkpoint.
To have such a checkpoint, all nodes agree on its author: the members of a stage are ranked by rendezvous hashing
(Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996), which no node can influence, and where few
members change places when a node comes or goes. The checkpoint of the first member that has announced one is copied:
by the next two members if the model is not cut; by the nodes of the stage before if it is, so that a stage outlives all
its members.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..state.entries import CheckpointNotice
from ..wire.identity import framed

# Copiers if the model is not cut: with the author that makes three donors, of which one may die.
NUM_COPIERS = 2
# A checkpoint with at least this number of holders is taken even if there are newer ones: the download is faster.
MIN_HOLDERS = 2
# Rounds by which these may be newer: where rounds are short, copies lag, as checkpoints are as far apart as otherwise.
# A single donor gives a checkpoint of this age without saving again; copying more often would cost more than it saves.
MAX_ROUNDS_OLDER = 5
# Checkpoints that are tried one after the other: there is hardly ever more than one that is not a lie.
MAX_CHOICES = 4


def ranked(run_id: bytes, stage: int, members: Iterable[bytes]) -> list[bytes]:
    """Return the members of a stage in the order of their ranks, which is the same at every node.

    The first one that has announced a checkpoint is the author of the one that is copied.
    """

    def rank(member: bytes) -> bytes:
        return hashlib.sha256(framed(b"farandole/copies/1", run_id, stage.to_bytes(2, "big"), member)).digest()

    return sorted(members, key=rank)


def is_copier(run_id: bytes, stage: int, members: Iterable[bytes], author: bytes, node: bytes) -> bool:
    """Return whether a node must copy the author's checkpoint of a stage, not cut, whose members are ``members``."""
    others = [member for member in ranked(run_id, stage, members) if member != author]
    return node in others[:NUM_COPIERS]


@dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint that can be downloaded from ``holders``."""

    id: bytes
    round: int
    holders: tuple[bytes, ...]


def choose(
    notices: Mapping[bytes, Sequence[CheckpointNotice]], after_round: int, networks: Mapping[bytes, str] | None = None
) -> list[Choice]:
    """Return checkpoints with several holders, the best first; none if no checkpoint near the run's round has several.

    ``notices``: the checkpoints of one stage that each member announces; any not newer than ``after_round`` are left
    out. The run's round is the median of the newest checkpoints that the members hold: a few keys cannot move it,
    whatever they announce. ``networks``: the members that this node has reached, each with its network. Best are
    checkpoints with several holders among these, in different networks rather than in one, then the ones nearest to
    that median.
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

"""Choose the stage that a node holds: where it begins, and when it moves.

A run with a model in S stages computes no faster than its weakest stage, and not at all while one is empty. There is no
coordinator: each node decides from the run state, and nodes with the same run state reach the same decision. (SWARM,
arXiv 2301.11913, section 3.2, moves peers from the least to the most loaded stage in the same way.)

- A newcomer takes the stage with the least throughput, `first_stage`. Nodes that begin at once do not see each other,
  so ties are broken by hash; until they train, when moving costs nothing yet, `even_stages` corrects the rest.
- Later a node moves to an empty stage at once, and to the weakest one when that is worth its download. It asks first,
  by a lease in the run state. Of two nodes that claim the same target, the later by hash gives way; so does the later
  of two that leave the same stage, unless its target is empty and a node stays. So several empty stages are filled at
  once.
- The best candidate moves first, the next one a little later, so that a frozen node does not keep a stage empty. A node
  whose owner has bound it to its stage announces this, and the others do not wait for it.

A node does not move if it is the last of its stage, or would be once the nodes before it have left. A move that makes
the weakest stage stronger leaves its source stronger than that stage was, so moving back gains nothing: without news
there are no further moves.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from ..state.entries import Member, StageLease
from ..wire.identity import framed

# Until every lease has reached every node: some pushes of the run state, a second apart at most.
LEASE_SECONDS = 5.0
# A stage counts as empty when it has been so for this long: news of live nodes arrives in parts.
EMPTY_SECONDS = 2.0
# Before a node has trained: for how long the same correction must be due.
EVEN_SECONDS = 2.0
# From one candidate's turn to the next one's, which has mostly received the first one's lease by then.
TURN_SECONDS = 4.0
# A move is worth it if the run becomes faster by this share: measured speeds fluctuate.
MIN_GAIN = 0.15
# The run is assumed to go on for this long; what a move gains in that time must exceed what its download costs.
HORIZON_SECONDS = 3_600.0


@dataclass(frozen=True)
class View:
    """A node's view of the run."""

    providers: Mapping[bytes, Member]
    """The live members that train, this node included once it has a stage; speed 0: unknown. ``is_bound``: its owner
    has chosen the stage, and it does not move."""
    num_stages: int
    leases: Mapping[bytes, StageLease] = field(default_factory=dict)
    """Leases of live members; without leases that were given back."""
    newcomers: frozenset[bytes] = frozenset()
    """The providers that have not taken an inner step yet."""
    download_seconds: float = 0.0
    """Seconds that this node needs to download a stage."""

    @functools.cached_property
    def usual(self) -> float:
        """Return the median of the known speeds; 1 if none is known."""
        known = [provider.speed for provider in self.providers.values() if provider.speed > 0]
        return statistics.median(known) if known else 1.0

    @functools.cached_property
    def speeds(self) -> Mapping[bytes, float]:
        """Return each provider's speed; unknown ones count as the usual one."""
        return {author: float(provider.speed or self.usual) for author, provider in self.providers.items()}

    @functools.cached_property
    def strengths(self) -> Sequence[float]:
        """Return the throughput of each stage."""
        return throughputs(self)


Decision = tuple[Literal["stay", "claim", "move", "give back"], int]
"""What a node does about its stage now, and the target.

``claim``: announce a lease to move there. ``move``: go there; a claimed lease is settled now, and given back there.
``give back``: our lease, as another one's is before it, or the reason for it is gone.
"""
STAY: Final[Decision] = "stay", 0
GIVE_BACK: Final[Decision] = "give back", 0


class StageChoice:
    """Decides whether a node changes its stage. Ask it about once a second; it remembers how long conditions have held.

    ``patience``: seconds for which a move must have been worth it before it is claimed: several heartbeats, so that
    speeds are measured again after each move.
    """

    def __init__(self, author: bytes, patience: float) -> None:
        self._author = author
        self._patience = patience
        self._empty_since: dict[int, float] = {}
        self._worth_since: dict[tuple[int, int], float] = {}
        self._uneven_since: dict[int, float] = {}
        self._claimed_at: float | None = None

    def decide(self, view: View, now: float) -> Decision:
        """Decide what to do at ``now``, in seconds on any monotonic clock."""
        own = view.providers[self._author].stage
        self._note(view, own, now)
        lease = view.leases.get(self._author)
        if lease is not None and self._claimed_at is not None:
            return self._hold(lease, view, now)
        if lease is not None and lease.is_settled:
            return STAY  # on the way
        if lease is not None:
            return GIVE_BACK  # of an earlier life
        wishes = self._wishes(view, now)
        target = next((wish for wish in wishes if not _is_contested(StageLease(own, wish), self._author, view)), None)
        if target is None:
            return STAY
        if target in self._uneven_since:
            return "move", target
        self._claimed_at = now
        return "claim", target

    def _note(self, view: View, own: int, now: float) -> None:
        """Note since when stages are empty, since when our move is worth it, and since when a correction is due."""
        empty = [stage for stage, strength in enumerate(view.strengths) if strength == 0.0]
        self._empty_since = {stage: self._empty_since.get(stage, now) for stage in empty}
        weakest = min(range(view.num_stages), key=lambda stage: (view.strengths[stage], stage))
        pair = (own, weakest)
        is_worth = not empty and is_worth_moving(view, self._author, weakest)
        self._worth_since = {pair: self._worth_since.get(pair, now)} if is_worth else {}
        due = even_stages(view).get(self._author, own)
        self._uneven_since = {due: self._uneven_since.get(due, now)} if due != own else {}

    def _wishes(self, view: View, now: float) -> Iterator[int]:
        """Yield the stages to which this node should go now, the most urgent first."""
        for stage, since in self._uneven_since.items():
            if now - since >= EVEN_SECONDS:
                yield stage
        for stage, order in candidates_of_all(view, self._empty_since).items():
            turn = _turn(order, self._author)
            if turn is not None and now - self._empty_since[stage] >= EMPTY_SECONDS + turn * TURN_SECONDS:
                yield stage
        for (_, stage), since in self._worth_since.items():
            turn = _turn(candidates(view, stage), self._author)
            if turn is not None and now - since >= self._patience + turn * TURN_SECONDS:
                yield stage

    def _hold(self, lease: StageLease, view: View, now: float) -> Decision:
        """Decide after a claim whether to go, to wait longer, or to give way."""
        assert self._claimed_at is not None
        is_needed = throughputs(view, without={self._author})[lease.target] == 0.0 or is_worth_moving(
            view, self._author, lease.target
        )
        if not is_needed or not _can_spare(view, lease.source) or _is_contested(lease, self._author, view):
            self._claimed_at = None
            return GIVE_BACK
        if now - self._claimed_at < LEASE_SECONDS:
            return STAY
        self._claimed_at = None
        return "move", lease.target


def first_stage(view: View, author: bytes) -> int:
    """Choose the stage where a newcomer begins: the one with the least throughput; ties are broken by its hash."""
    return min(range(view.num_stages), key=lambda stage: (view.strengths[stage], rank(author, stage)))


def even_stages(view: View) -> dict[bytes, int]:
    """Spread the newcomers over the stages, the weakest first, with the fewest moves: author -> target.

    Each newcomer counts with the usual speed. A move must make the weaker of both stages stronger by `MIN_GAIN` of it:
    the speeds of those that train fluctuate.
    """
    free: list[list[bytes]] = [[] for _ in range(view.num_stages)]
    for author in view.newcomers & view.providers.keys():
        if not view.providers[author].is_bound:
            free[view.providers[author].stage].append(author)
    moving = frozenset().union(*free)
    fixed = throughputs(view, without=moving)
    strengths = [strength + len(there) * view.usual for strength, there in zip(fixed, free, strict=True)]
    quotas = [0] * view.num_stages
    weakest_first = [(fixed[stage], -strengths[stage], stage) for stage in range(view.num_stages)]
    heapq.heapify(weakest_first)
    for _ in moving:
        strength, order, stage = weakest_first[0]
        quotas[stage] += 1
        heapq.heapreplace(weakest_first, (strength + view.usual, order, stage))
    wanting = [stage for stage in range(view.num_stages) for _ in range(quotas[stage] - len(free[stage]))]
    spare = [
        author
        for stage, there in enumerate(free)
        for author in sorted(there, key=lambda author: rank(author, stage))[quotas[stage] :]
    ]
    return {
        author: target
        for author, target in zip(spare, wanting, strict=True)
        if strengths[view.providers[author].stage] - strengths[target] > (1.0 + MIN_GAIN) * view.usual
    }


def throughputs(view: View, *, without: Collection[bytes] = ()) -> list[float]:
    """Return the sum of the providers' speeds for each stage; providers with a settled lease count at their target."""
    strengths = [0.0] * view.num_stages
    speeds = view.speeds
    for author, provider in view.providers.items():
        if author not in without:
            lease = view.leases.get(author)
            strengths[lease.target if lease is not None and lease.is_settled else provider.stage] += speeds[author]
    return strengths


def candidates(view: View, target: int) -> list[bytes]:
    """Return the nodes that could move to a stage, sorted by how strong the weaker of both stages is afterwards."""

    def is_leaving(author: bytes, stage: int) -> bool:
        return author in view.leases and view.leases[author].source == stage

    strengths, speeds, members = view.strengths, view.speeds, _members(view)
    scores = {
        author: min(strengths[stage] - speeds[author], strengths[target] + speeds[author])
        for stage in range(view.num_stages)
        if stage != target and sum(not is_leaving(author, stage) for author in members[stage]) > 1
        for author in members[stage]
        if author not in view.leases and not view.providers[author].is_bound
    }
    return sorted(scores, key=lambda author: (-scores[author], rank(author, target)))


def candidates_of_all(view: View, targets: Iterable[int]) -> dict[int, list[bytes]]:
    """Return the candidates for each stage to which no node is on the way, as if the first of each moved at once.

    So the first candidates for different stages can claim before they hear of each other.
    """
    orders: dict[int, list[bytes]] = {}
    leases = dict(view.leases)
    taken = {lease.target for lease in leases.values()}
    for target in sorted(set(targets) - taken):
        order = orders[target] = candidates(replace(view, leases=leases), target)
        if order:
            leases[order[0]] = StageLease(view.providers[order[0]].stage, target)
    return orders


def is_worth_moving(view: View, author: bytes, target: int) -> bool:
    """Return whether this node's move gains the run more than the work that the node loses during the download.

    Its source is the stronger stage even without it, so during the download only the node's own time is lost.
    """
    source, speed = view.providers[author].stage, view.speeds[author]
    if source == target or not _can_spare(view, source):
        return False
    before = throughputs(view, without={author})
    after = list(before)
    before[source] += speed
    after[target] += speed
    gain = min(after) - min(before)
    if gain < MIN_GAIN * min(before) or gain <= 0.0:
        return False
    return gain * (HORIZON_SECONDS - view.download_seconds) > speed * view.download_seconds


def rank(author: bytes, stage: int) -> bytes:
    """Return 32 bytes that order nodes for a stage and that no node can choose (rendezvous hashing)."""
    return hashlib.sha256(framed(b"farandole/stage/1", author, stage.to_bytes(2, "big"))).digest()


def _members(view: View) -> list[list[bytes]]:
    members: list[list[bytes]] = [[] for _ in range(view.num_stages)]
    for author, provider in view.providers.items():
        members[provider.stage].append(author)
    return members


def _can_spare(view: View, stage: int) -> bool:
    """Return whether the stage keeps a provider when one leaves."""
    return sum(provider.stage == stage for provider in view.providers.values()) > 1


def _turn(order: list[bytes], author: bytes) -> int | None:
    return order.index(author) if author in order else None


def _is_contested(lease: StageLease, author: bytes, view: View) -> bool:
    """Return whether leases before ours block it: one with the same target, or one that leaves the same stage.

    A lease that leaves the same stage does not block ours if our target is empty and another node stays.
    """

    def place(author: bytes, lease: StageLease) -> tuple[bool, bytes]:
        return not lease.is_settled, rank(author, lease.target)

    is_ours_announced = author in view.leases
    before = {
        peer: other
        for peer, other in view.leases.items()
        if peer != author and (not is_ours_announced or place(peer, other) < place(author, lease))
    }
    if any(other.target == lease.target for other in before.values()):
        return True
    leaving = {peer for peer, other in before.items() if other.source == lease.source}
    if not leaving:
        return False
    staying = _members(view)[lease.source]
    is_filling = throughputs(view, without={author})[lease.target] == 0.0
    return not (is_filling and any(peer != author and peer not in leaving for peer in staying))

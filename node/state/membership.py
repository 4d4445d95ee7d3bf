"""What this node tells the run of itself, and what it makes of what the others tell: who lives, and how far they are.

Liveness comes from heartbeats alone (`farandole.protocol.liveness`), with one short cut: when a connection breaks and
the peer cannot be dialled again, it is taken for dead until its heartbeat advances. So a killed process leaves the
live set of those who were connected to it within a dial, not within three heartbeats.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Callable

import trio

from farandole.protocol.blocks import Index
from farandole.protocol.entries import (
    RULES,
    Beat,
    CheckpointNotice,
    Kind,
    Member,
    Report,
    StageLease,
)
from farandole.protocol.errors import FarandoleError
from farandole.protocol.identity import short_name
from farandole.protocol.node_state import MAX_SMALL, beat_of, progress_of
from farandole.protocol.stage_choice import Provider
from farandole.protocol.state import RunState

from ..base.errors import PeerUnreachableError
from ..mesh.addresses import rank
from ..mesh.host import Host
from ..status.journal import Journal
from .gossip import GossipService

# MEMBER lives an hour: three announcements may be lost.
MEMBER_INTERVAL = 900.0
# The run state takes one a minute, the newest: so a young node is counted soon, and an old one as often as may be.
PROGRESS_INTERVAL = 10.0
# Between two looks at the own addresses: until a relay's is told, nobody reaches a node behind NAT.
ADDRESSES_INTERVAL = 1.0
# Members that a node keeps connections with: enough that no partition of a few cuts it off, few enough for a home
# router. Exchanges dial whom they need beside these.
TARGET_CONNECTIONS = 12
KEEP_INTERVAL = 5.0
# A peer whose connection broke is dialled once more before it is taken for dead. In a large run it may have had many
# connections: all together dial it about so often a second, which costs it a fifth of its time.
SUSPICION_DIAL_TIMEOUT = 3.0
PROBES_PER_SECOND = 100.0
# Slots of a node's notices: its own newest checkpoint, and the copy that it keeps of another's.
OWN_SLOT = 0
COPY_SLOT = 1
START_SLOT = 2  # what the run starts from, where it is not its seed
# A speed that has changed by this share is told anew.
SPEED_CHANGE = 0.25
# Reports wait for the next minute; more refusals in one are the same story.
MAX_ACCUSATIONS = 8
MAX_REASON_CHARS = 64
# Half of what the others tolerate (`farandole.protocol.state`).
MAX_CLOCK_SKEW = 30.0


class KeyMisusedError(FarandoleError):
    """This node's key has signed two stories; nobody listens to it any more."""


Nodes = tuple[frozenset[bytes], ...]
"""The live members of each stage."""


class Membership:
    """Publishes this node's entries, keeps connections with members, and knows who is live.

    ``on_peers`` is told of every change among the live members of this node's stage, ``on_nodes`` of every change of
    `nodes_of_stages`, ``on_lost`` of every peer that could not be reached again. ``is_bound``: this node keeps its
    stage, whatever the run needs. ``is_paused``: whether it has no trainer now, because its owner wants it so.
    ``first_step``: the inner step from which the run goes on where another ended.
    """

    def __init__(
        self,
        host: Host,
        state: RunState,
        gossip: GossipService,
        journal: Journal,
        rng: random.Random,
        *,
        incarnation: int,
        on_peers: Callable[[frozenset[bytes]], None],
        on_lost: Callable[[bytes], None],
        num_stages: int = 1,
        is_bound: bool = False,
        on_nodes: Callable[[Nodes], None] = lambda nodes: None,
        is_paused: Callable[[], bool] = lambda: False,
        first_step: int = 0,
    ) -> None:
        self._host = host
        self._state = state
        self._gossip = gossip
        self._liveness = gossip.liveness
        self._journal = journal
        self._rng = rng
        self._incarnation = incarnation
        self._on_peers = on_peers
        self._on_lost = on_lost
        self._on_nodes = on_nodes
        self._is_bound = is_bound
        self._is_paused = is_paused
        self._first_step = first_step
        self._stage = 0
        self._others: Nodes = (frozenset(),) * num_stages
        self._paused: frozenset[bytes] = frozenset()  # of the others
        self._told_live: frozenset[bytes] = frozenset()
        self._told_nodes: Nodes | None = None
        self._announced: tuple[list[str], str] = ([], "")
        self._announced_speed = 0.0
        self._told_paused = False
        self._unannounced: dict[int, CheckpointNotice] = {}
        self._accusations: deque[Report] = deque(maxlen=MAX_ACCUSATIONS)
        self._next_report = 0
        self._has_warned_of_clock = False

    @property
    def stage(self) -> int:
        """The one that this node holds."""
        return self._stage

    @property
    def num_stages(self) -> int:
        """Of the run's model; 1: every node holds it whole."""
        return len(self._others)

    @property
    def live(self) -> frozenset[bytes]:
        """Live members of this node's stage that train, itself excluded."""
        return self._others[self._stage] - self._paused

    @property
    def everyone(self) -> frozenset[bytes]:
        """Live members of all stages, this node excluded."""
        return frozenset().union(*self._others)

    def nodes_of_stages(self) -> Nodes:
        """Live members of each stage that train, this node among those of its own."""
        own = frozenset() if self._is_paused() else frozenset((self._host.author,))
        training = (peers - self._paused for peers in self._others)
        return tuple(peers | own if stage == self._stage else peers for stage, peers in enumerate(training))

    def providers(self) -> dict[bytes, Provider]:
        """Live members that train, with their stages and speeds, as far as they are known; this node excluded."""
        members = self._state.members()
        return {
            peer: Provider(stage, float(members[peer].speed), members[peer].is_bound)
            for stage, peers in enumerate(self._others)
            for peer in peers - self._paused
            if peer in members
        }

    def leases(self) -> dict[bytes, StageLease]:
        """Of live members, and of this node, who are moving between stages or about to."""
        found = ((peer, self._state.payload(peer, StageLease)) for peer in (*self.everyone, self._host.author))
        return {peer: lease for peer, lease in found if lease is not None and lease.source != lease.target}

    @property
    def is_young(self) -> bool:
        """Whether no live member has trained yet, as far as this node has heard; nor has it."""
        beats = (self._state.payload(peer, Beat) for peer in self.everyone)
        has_begun = any(beat is not None and (beat.round or beat.inner_steps > self._first_step) for beat in beats)
        return not has_begun and not self._journal.state.round and self._journal.state.inner_steps <= self._first_step

    def current_round(self) -> int:
        """The round that the others are in: the median of the live members' heartbeats, 0 if there are none.

        Newcomers that are still preparing say nothing about it: a crowd of them must not look like a run that begins.
        Nor do those that are paused, whose rounds stand still, unless nobody else has trained: the run is where they
        have left it.
        """
        for peers in (self.everyone - self._paused, self._paused):
            beats = [beat for peer in peers if (beat := self._state.payload(peer, Beat)) is not None]
            rounds = [beat.round for beat in beats if beat.round or beat.inner_steps > self._first_step]
            if rounds:
                return int(statistics.median_low(rounds))
        return 0

    def donors(self, after_round: int, stage: int | None = None) -> list[bytes]:
        """Live members of a stage (None: this node's) further than ``after_round``.

        Those who have announced a checkpoint of it come first, else the order is random.
        """
        stage = self._stage if stage is None else stage
        ahead = [
            peer
            for peer in self._others[stage]
            if (beat := self._state.payload(peer, Beat)) is not None and beat.round > after_round
        ]
        self._rng.shuffle(ahead)
        ahead.sort(key=lambda peer: self._notice(peer, OWN_SLOT, stage) is None)
        return ahead

    def announced(self, stage: int) -> dict[bytes, CheckpointNotice]:
        """What live members of a stage, this node included, say of their own newest checkpoints."""
        members = self.nodes_of_stages()[stage]
        return {peer: notice for peer in members if (notice := self._notice(peer, OWN_SLOT, stage)) is not None}

    def notices(self, stage: int) -> dict[bytes, list[CheckpointNotice]]:
        """What checkpoints of a stage the other live members say that they hold, their own or copies."""
        held = {
            peer: [notice for slot in (OWN_SLOT, COPY_SLOT) if (notice := self._notice(peer, slot, stage)) is not None]
            for peer in self.everyone
        }
        return {peer: notices for peer, notices in held.items() if notices}

    def holders(self, stage: int, checkpoint_id: bytes) -> list[bytes]:
        """Other live members that hold a checkpoint; those first with whom there is a connection, else at random."""
        holders = [
            peer
            for peer, notices in self.notices(stage).items()
            if any(notice.id == checkpoint_id for notice in notices)
        ]
        self._rng.shuffle(holders)
        return sorted(holders, key=lambda peer: peer not in self._host.connected)

    def told_checkpoints(self) -> frozenset[bytes]:
        """The checkpoints that the run knows this node to hold."""
        notices = (self._state.payload(self._host.author, CheckpointNotice, slot) for slot in (OWN_SLOT, COPY_SLOT))
        return frozenset(notice.id for notice in notices if notice is not None)

    def _notice(self, peer: bytes, slot: int, stage: int) -> CheckpointNotice | None:
        """What a peer says of its checkpoint of a stage."""
        notice = self._state.payload(peer, CheckpointNotice, slot)
        return notice if notice is not None and notice.stage == stage else None

    async def run(self) -> None:
        """Until cancelled."""
        self._host.protect(lambda peer: any(peer in peers for peers in self._others))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat)
            nursery.start_soon(self._report_progress)
            nursery.start_soon(self._announce_addresses)
            nursery.start_soon(self._keep_connected)
            nursery.start_soon(self._watch_connections)
            nursery.start_soon(self._watch_state)

    async def hold(self, stage: int) -> None:
        """This node has that stage from now on; told to the run."""
        self._stage = stage
        self._journal.update(stage=stage)
        self.refresh()
        await self.announce()

    async def announce(self, *, left: bool = False) -> None:
        """Tell the run that this node belongs to it, or has left."""
        addresses, device = self._announced = (self._host.addresses, self._journal.state.device)
        addresses = rank(addresses)
        self._announced_speed = self.speed
        self._told_paused = self._is_paused()
        member = Member(
            stage=self._stage,
            device=device[:48],
            speed=int(self._announced_speed),
            addresses=tuple(address.rpartition("/p2p/")[0] for address in addresses[:8]),
            left=left,
            incarnation=self._incarnation,
            is_bound=self._is_bound,
            is_paused=self._told_paused,
        )
        await self._gossip.publish(Kind.MEMBER, 0, member)

    @property
    def speed(self) -> float:
        """Tokens a second that this node could take through its stage; 0: not measured yet."""
        return self._journal.state.tokens_per_second if self.num_stages == 1 else self._journal.state.speed

    async def lease(self, target: int, *, is_settled: bool) -> None:
        """Tell the run that this node would move to a stage, or does; to its own: that it does not, or is there."""
        await self._gossip.publish(Kind.STAGE_LEASE, 0, StageLease(self._stage, target, is_settled))

    async def beat(self) -> None:
        """One heartbeat."""
        await self._gossip.publish(Kind.BEAT, 0, beat_of(self._journal.state))

    async def report_progress(self) -> None:
        """This node's part of the run's counters."""
        moved = self._journal.exchanges
        progress = progress_of(self._journal.state, moved.bytes_sent, moved.bytes_received)
        await self._gossip.publish(Kind.PROGRESS, 0, progress)
        while self._unannounced:
            slot, notice = self._unannounced.popitem()
            await self._gossip.publish(Kind.CHECKPOINT, slot, notice)
        while self._accusations:
            await self._gossip.publish(Kind.REPORT, self._next_report, self._accusations.popleft())
            self._next_report = (self._next_report + 1) % RULES[Kind.REPORT].slots

    def checkpoint_held(self, checkpoint_id: bytes, index: Index, *, is_copy: bool) -> None:
        """That this node gives a checkpoint, its own or a copy; announced with the next progress."""
        self._unannounced[COPY_SLOT if is_copy else OWN_SLOT] = CheckpointNotice(
            min(index.round, MAX_SMALL), index.stage, checkpoint_id, index.size, index.tokens, index.inner_steps
        )

    async def tell_start(self, notice: CheckpointNotice) -> None:
        """That this node has the checkpoint from which the run starts."""
        await self._gossip.publish(Kind.CHECKPOINT, START_SLOT, notice)

    def start_holders(self, checkpoint_id: bytes) -> list[bytes]:
        """Live members that say so of this one."""
        told = {peer: self._state.payload(peer, CheckpointNotice, START_SLOT) for peer in self.everyone}
        return [peer for peer, notice in told.items() if notice is not None and notice.id == checkpoint_id]

    def accuse(self, peer: bytes, reason: str, evidence: bytes) -> None:
        """That a peer's contribution was refused; told to the run with the next progress, a few at a time."""
        self._accusations.append(Report(peer, reason.encode("ascii", "replace").decode()[:MAX_REASON_CHARS], evidence))

    def refresh(self) -> None:
        """Work out anew who is live, and tell if that changed."""
        members = self._state.members()
        others: list[set[bytes]] = [set() for _ in range(self.num_stages)]
        paused: set[bytes] = set()
        for peer in self._liveness.live(trio.current_time()):
            member = members.get(peer)
            if member is not None and member.stage < self.num_stages and not self._liveness.is_suspect(peer):
                others[member.stage].add(peer)
                if member.is_paused:
                    paused.add(peer)
        before, self._others = self.everyone, tuple(frozenset(peers) for peers in others)
        self._paused = frozenset(paused)
        self._say_who_came(before, self.everyone)
        if self.live != self._told_live:
            self._told_live = self.live
            self._on_peers(self.live)
        nodes = self.nodes_of_stages()
        if nodes != self._told_nodes:
            self._told_nodes = nodes
            self._on_nodes(nodes)

    def _say_who_came(self, before: frozenset[bytes], now: frozenset[bytes]) -> None:
        for peer in now - before:
            self._journal.say(f"{short_name(peer)} is here ({len(now) + 1} live)")
        for peer in before - now:
            self._journal.say(f"{short_name(peer)} is gone ({len(now) + 1} live)")

    def _check_standing(self) -> None:
        """What would keep this node out of the run without its noticing."""
        if self._gossip.has_forked:
            raise KeyMisusedError(
                "two processes have signed with this node's key, and the run has barred it for good: find the copy of "
                "this folder, remove the key in both, and join again under a new one"
            )
        skew = self._gossip.clock_skew
        if abs(skew) > MAX_CLOCK_SKEW and not self._has_warned_of_clock:
            self._has_warned_of_clock = True
            direction = "behind" if skew > 0 else "ahead of"
            self._journal.warn(
                f"this machine's clock is {abs(skew):.0f} s {direction} the others': set it (NTP), or what this node "
                "says will be put off by them"
            )

    async def _beat(self) -> None:
        while True:
            await self.beat()
            await trio.sleep(self._liveness.period)

    async def _report_progress(self) -> None:
        announced_at = trio.current_time()
        while True:
            await trio.sleep(PROGRESS_INTERVAL)
            await self.report_progress()
            if self._has_changed() or trio.current_time() - announced_at >= MEMBER_INTERVAL:
                announced_at = trio.current_time()
                await self.announce()

    async def _announce_addresses(self) -> None:
        while True:
            await trio.sleep(ADDRESSES_INTERVAL)
            if self._told_paused != self._is_paused():
                await self.announce()
                self.refresh()
            elif self._announced[0] != self._host.addresses:
                await self.announce()

    def _has_changed(self) -> bool:
        """Whether others know another address or device of this node than it has, or where it matters another speed."""
        if self._announced != (self._host.addresses, self._journal.state.device):
            return True
        return self.num_stages > 1 and abs(self.speed - self._announced_speed) > SPEED_CHANGE * self._announced_speed

    async def _keep_connected(self) -> None:
        while True:
            await trio.sleep(KEEP_INTERVAL * self._rng.uniform(0.5, 1.5))
            connected, everyone = self._host.connected, self.everyone
            missing = [peer for peer in everyone if peer not in connected]
            wanted = min(TARGET_CONNECTIONS, len(everyone)) - len(connected & everyone)
            if wanted <= 0:
                continue
            async with trio.open_nursery() as nursery:
                for peer in self._rng.sample(missing, min(wanted, len(missing))):
                    nursery.start_soon(self._try_connect, peer)

    async def _try_connect(self, peer: bytes) -> bool:
        try:
            await self._host.connect(peer, timeout=SUSPICION_DIAL_TIMEOUT)
        except PeerUnreachableError:
            return False
        return True

    async def _watch_connections(self) -> None:
        async with trio.open_nursery() as nursery:
            with self._host.connection_events() as events:
                async for peer, is_connected in events:
                    if is_connected:
                        self._liveness.trust(peer)
                    elif peer in self.everyone:
                        nursery.start_soon(self._probe, peer)

    async def _probe(self, peer: bytes) -> None:
        """The connection to a live peer broke: find out whether it is the line, or the peer."""
        await trio.sleep(self._rng.uniform(0, len(self.everyone) / PROBES_PER_SECOND))
        if not await self._try_connect(peer):
            self._liveness.suspect(peer, trio.current_time())
            self._on_lost(peer)
            self.refresh()

    async def _watch_state(self) -> None:
        """Liveness changes with entries, and with time alone. Raises `KeyMisusedError` when this node is barred."""
        while True:
            self.refresh()
            self._check_standing()
            with trio.move_on_after(1.0):
                await self._gossip.changed()

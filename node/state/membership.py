"""Membership of a run: which members a node sees, with their stages and progress, and what it announces of itself.

Liveness comes from heartbeats (`farandole.protocol.state.liveness`), with one shortcut: when a connection breaks and
the peer cannot be dialled again, it is taken for dead until its heartbeat advances. So a killed process leaves the live
set of the peers that were connected to it within one dial, not within three heartbeats.

A heartbeat costs its sender nothing. So the decisions that this node makes alone (whom it pairs with, how many members
there are, how far the run is) count only the members that it has also *reached* (`reached`, `live`). Decisions that
must be the same on all nodes (who copies which checkpoint, which stage needs members) count all members that are heard
of (`everyone`), because each node has reached others.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import msgspec
import trio

from farandole.protocol.checkpoints.blocks import Index
from farandole.protocol.state.believing import Credit, OwnSuspects, Partners, is_suspected
from farandole.protocol.state.entries import (
    Beat,
    CheckpointNotice,
    Kind,
    Member,
    ProgramNotes,
    StageLease,
    Suspects,
    fit_member,
)
from farandole.protocol.state.node_state import MAX_SMALL, NodeState, beat_of, progress_of, speed_of
from farandole.protocol.state.state import PayloadType, RunState
from farandole.protocol.wire.errors import FarandoleError

from ..base.causes import clock_words
from ..base.project import VERSION
from ..mesh.addresses import rank
from ..mesh.host import Host
from ..status.journal import Journal
from .gossip import GossipService

# MEMBER and SUSPECTS live an hour: three announcements may be lost.
MEMBER_INTERVAL = 900.0
# The run state accepts one a minute, the newest: a young node is counted soon, and an old one as often as possible.
PROGRESS_INTERVAL = 10.0
# Between two looks at the own addresses: until a relay's address is announced, no peer reaches a node behind NAT.
ADDRESSES_INTERVAL = 1.0
# Slots of a node's notices: its own newest checkpoint, and the copy that it keeps of another node's.
OWN_SLOT = 0
COPY_SLOT = 1
START_SLOT = 2  # the checkpoint from which the run starts, if it does not start from its seed
# A speed that has changed by this share is announced again.
SPEED_CHANGE = 0.25


@dataclass(eq=False)
class Announcer:
    """Publishes this node's entries, from its state."""

    host: Host
    gossip: GossipService
    journal: Journal
    incarnation: int
    num_stages: int = 1
    is_bound: bool = False
    """Whether this node keeps its stage, whatever the run needs."""
    is_paused: Callable[[], bool] = lambda: False
    """Returns whether its owner has paused it, so that it has no trainer now."""
    name: str = ""
    _told: Member = field(default_factory=Member)
    _suspects: OwnSuspects = field(default_factory=OwnSuspects)
    _has_new_suspects: bool = False

    async def run(self) -> None:
        """Publish what changes, until cancelled."""

        async def beat() -> None:
            while True:
                await self.beat()
                await trio.sleep(self.gossip.liveness.period)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            reported_at = announced_at = trio.current_time()
            while True:
                await trio.sleep(ADDRESSES_INTERVAL)
                now = trio.current_time()
                # While a machine sleeps, intervals stand still, and what it has announced expires all the same.
                has_expired = self.gossip.state.payload(self.host.author, Member) is None
                is_due = has_expired or now - announced_at >= MEMBER_INTERVAL
                self._has_new_suspects |= is_due and bool(self._suspects)  # published again before the entry expires
                if now - reported_at >= PROGRESS_INTERVAL:
                    reported_at = now
                    await self.report_progress()
                # What was announced may be wrong by now; this node's speed matters where there are stages.
                member, told = self._member(), self._told
                is_other = msgspec.structs.replace(member, speed=told.speed) != told
                if self.num_stages > 1 and abs(member.speed - told.speed) > SPEED_CHANGE * told.speed:
                    is_other = True
                if is_due or (is_other and not told.left):
                    announced_at = now
                    await self.announce()

    async def announce(self, *, left: bool = False) -> None:
        """Announce to the run that this node belongs to it, or has left."""
        self._told = self._member(left=left)
        await self.gossip.publish(Kind.MEMBER, 0, self._told)

    def _member(self, *, left: bool = False) -> Member:
        """Return the member entry of this node as it is now."""
        state = self.journal.state
        member = Member(
            stage=state.stage,
            device=state.device[:48],
            speed=int(speed_of(state, self.num_stages)),
            addresses=tuple(address.rpartition("/p2p/")[0] for address in rank(self.host.addresses)[:8]),
            left=left,
            incarnation=self.incarnation,
            is_bound=self.is_bound,
            is_paused=self.is_paused(),
            version=VERSION,
            name=self.name,
        )
        return fit_member(member)

    async def beat(self) -> None:
        """Publish one heartbeat."""
        await self.gossip.publish(Kind.BEAT, 0, beat_of(self.journal.state))

    async def report_progress(self) -> None:
        """Publish this node's part of the run's counters."""
        moved = self.journal.history
        progress = progress_of(self.journal.state, moved.bytes_sent, moved.bytes_received)
        await self.gossip.publish(Kind.PROGRESS, 0, progress)
        if self._has_new_suspects:
            self._has_new_suspects = False
            await self.gossip.publish(Kind.SUSPECTS, 0, self._suspects.entry)

    async def tell_held(self, slot: int, checkpoint_id: bytes, index: Index) -> None:
        """Announce that this node gives a checkpoint."""
        notice = CheckpointNotice(
            min(index.round, MAX_SMALL), index.stage, checkpoint_id, index.size, index.tokens, index.inner_steps
        )
        await self.gossip.publish(Kind.CHECKPOINT, slot, notice)

    def note_suspicion(self, peer: bytes, is_suspect: bool) -> None:
        """Note whether the screening suspects a peer now; a change is published with the next progress."""
        self._has_new_suspects |= self._suspects.note(peer, is_suspect=is_suspect)


Nodes = tuple[frozenset[bytes], ...]
"""The live members of each stage."""


@dataclass(eq=False)
class Membership:
    """Knows which members are live, the stage of each, and what each publishes about itself.

    ``announcer`` publishes this node's own entries. ``partners``: the peers with which it committed exchanges, in
    earlier lives as well. ``first_step``: the inner step from which the run resumes another one.
    """

    _host: Host
    _state: RunState
    _gossip: GossipService
    _journal: Journal
    announcer: Announcer
    partners: Partners = field(default_factory=Partners)
    num_stages: int = 1
    """The number of the model's stages; 1: every node holds all of it."""
    first_step: int = 0

    def __post_init__(self) -> None:
        self.credit = Credit()
        """The members that are believed about their progress and their weights."""
        self._liveness = self._gossip.liveness
        self._others: Nodes = (frozenset(),) * self.num_stages
        self.reached: frozenset[bytes] = frozenset()
        """The live members of all stages that this node has reached, itself excluded."""
        self._paused: frozenset[bytes] = frozenset()  # of the others
        self._told: tuple[frozenset[bytes], Nodes] | None = None
        self.changed = trio.lowlevel.ParkingLot()
        """Where to wait until `live` or `nodes_of_stages` change."""
        self.apart: Callable[[], Collection[bytes]] = frozenset
        """Returns the peers whose release this node cannot average with."""
        self._clock_warnings: set[tuple[bool, bool]] = set()  # one of each kind, as a clock may drift around a limit

    @property
    def stage(self) -> int:
        """Return the stage that this node holds."""
        return self._journal.state.stage

    @property
    def live(self) -> frozenset[bytes]:
        """Return the live members of this node's stage that train and that it has reached, itself excluded.

        Without those whose release it cannot average with.
        """
        return ((self._others[self.stage] - self._paused) & self.reached).difference(self.apart())

    def networks(self) -> dict[bytes, str]:
        """Return the members that this node has reached, and the network that each is connected from, if known."""
        return {peer: self._host.connections.network_of(peer) for peer in self.reached}

    @property
    def everyone(self) -> frozenset[bytes]:
        """Return the live members of all stages, whether reached or only heard of, this node excluded."""
        return frozenset().union(*self._others)

    def nodes_of_stages(self) -> Nodes:
        """Return the live members of each stage that train, this node among the members of its own."""
        own = frozenset() if self.announcer.is_paused() else frozenset((self._host.author,))
        training = (peers - self._paused for peers in self._others)
        return tuple(peers | own if stage == self.stage else peers for stage, peers in enumerate(training))

    def providers(self) -> dict[bytes, Member]:
        """Return the live members that train, and what they announce of themselves; this node excluded."""
        training = self.everyone - self._paused
        return {peer: member for peer, member in self._state.members().items() if peer in training}

    def leases(self) -> dict[bytes, StageLease]:
        """Return the leases of live members, and of this node, that are moving between stages or about to."""
        leases = self._payloads((*self.everyone, self._host.author), StageLease)
        return {peer: lease for peer, lease in leases.items() if lease.source != lease.target}

    @property
    def is_newcomer(self) -> bool:
        """Return whether this node has not trained yet."""
        return not self._has_trained(self._journal.state)

    def newcomers(self) -> frozenset[bytes]:
        """Return the live members, perhaps this node among them, that have not trained yet as far as it has heard."""
        beats = self._payloads(self.everyone, Beat).items()
        own = frozenset((self._host.author,)) if self.is_newcomer else frozenset()
        return own | self.everyone.difference(peer for peer, beat in beats if self._has_trained(beat))

    def current_round(self) -> int:
        """Return the round that the others are in: the median of the rounds in their heartbeats, 0 if there are none.

        It counts the partners of this node's exchanges (`farandole.protocol.state.believing`); if none of them is here,
        all members that it has reached and believes. Newcomers that are still preparing state no round: a crowd of them
        must not look like a run that begins. Paused members, whose rounds stand still, do not count either, unless no
        other member has trained: the run is where they have left it.
        """
        believed = self._believed()
        return self.partners_round() or self._median(believed - self._paused) or self._median(believed)

    def partners_round(self) -> int:
        """Return the round of the partners of this node's exchanges that train now; 0: none is here."""
        return self._median(peer for peer in self._believed() - self._paused if peer in self.partners)

    def _median(self, peers: Iterable[bytes]) -> int:
        rounds = [beat.round for beat in self._payloads(peers, Beat).values() if self._has_trained(beat)]
        return int(statistics.median_low(rounds)) if rounds else 0

    def _believed(self) -> frozenset[bytes]:
        now = trio.current_time()
        return frozenset(peer for peer in self.reached if self.credit.is_good(peer, now))

    def is_suspected(self, peer: bytes) -> bool:
        """Return whether enough live partners of this node's exchanges suspect a peer."""
        now = trio.current_time()
        partners = (self.everyone & self.partners.keys()) - {peer}
        believed = [partner for partner in partners if self.credit.is_good(partner, now)]
        return is_suspected(peer, self._payloads(believed, Suspects).values(), len(believed))

    def awaits_contact(self) -> bool:
        """Return whether trained members (partners, if any) were heard of, and none of them was reached yet."""
        trained = {peer for peer, beat in self._payloads(self.everyone, Beat).items() if self._has_trained(beat)}
        wanted = {peer for peer in trained if peer in self.partners} or trained
        return bool(wanted) and wanted.isdisjoint(self.reached)

    def is_beginning(self) -> bool:
        """Return whether members that this node has reached and believes train in the run's first round."""
        return self._median(self._believed()) == 0 and any(
            self._has_trained(beat) for beat in self._payloads(self._believed(), Beat).values()
        )

    def doubt_those_ahead(self, after_round: int) -> None:
        """Take credit from members that claim to be beyond ``after_round``: they gave no weights, or bad ones."""
        beats = self._payloads(self.everyone, Beat).items()
        self.credit.lose((peer for peer, beat in beats if beat.round > after_round), trio.current_time())

    def _has_trained(self, node: Beat | NodeState) -> bool:
        return bool(node.round) or node.inner_steps > self.first_step

    def _payloads(self, peers: Iterable[bytes], kind: type[PayloadType]) -> dict[bytes, PayloadType]:
        """Return what these peers have published of a kind, without the peers that have published none."""
        found = ((peer, self._state.payload(peer, kind)) for peer in peers)
        return {peer: payload for peer, payload in found if payload is not None}

    def donors(self, after_round: int, stage: int) -> list[bytes]:
        """Return the live members of a stage beyond ``after_round``, without doubted ones.

        Members that were reached come first, partners before others; among these, members that have announced a
        checkpoint of the stage come first. The order is otherwise random.
        """
        now = trio.current_time()
        beats = self._payloads(self._others[stage], Beat).items()
        ahead = [peer for peer, beat in beats if beat.round > after_round and self.credit.is_good(peer, now)]
        random.shuffle(ahead)

        def rank(peer: bytes) -> tuple[bool, bool, bool]:
            has_none = all(notice.stage != stage for notice in self._notices(peer, OWN_SLOT))
            return peer not in self.reached, peer not in self.partners, has_none

        return sorted(ahead, key=rank)

    def announced(self, stage: int) -> dict[bytes, CheckpointNotice]:
        """Return the newest own checkpoints that live members of a stage, this node included, have announced."""
        members = self.nodes_of_stages()[stage]
        return {peer: notice for peer in members for notice in self._notices(peer, OWN_SLOT) if notice.stage == stage}

    def notices(self, stage: int) -> dict[bytes, list[CheckpointNotice]]:
        """Return the checkpoints of a stage, own ones or copies, that the other live members have announced.

        Doubted members are left out.
        """
        now = trio.current_time()
        held = {
            peer: [notice for notice in self._notices(peer, OWN_SLOT, COPY_SLOT) if notice.stage == stage]
            for peer in self.everyone
            if self.credit.is_good(peer, now)
        }
        return {peer: notices for peer, notices in held.items() if notices}

    def holders(self, stage: int, checkpoint_id: bytes) -> list[bytes]:
        """Return the other live members that hold a checkpoint: connected ones first, otherwise in random order."""
        holders = [
            peer
            for peer, notices in self.notices(stage).items()
            if any(notice.id == checkpoint_id for notice in notices)
        ]
        random.shuffle(holders)
        return sorted(holders, key=lambda peer: peer not in self._host.connected)

    def told_checkpoints(self) -> frozenset[bytes]:
        """Return the ids of the checkpoints that the run knows this node to hold."""
        return frozenset(notice.id for notice in self._notices(self._host.author, OWN_SLOT, COPY_SLOT))

    def _notices(self, peer: bytes, *slots: int) -> list[CheckpointNotice]:
        """Return a peer's announcements of its checkpoints."""
        found = (self._state.payload(peer, CheckpointNotice, slot) for slot in slots)
        return [notice for notice in found if notice is not None]

    async def run(self) -> None:
        """Keep the membership up to date until cancelled: liveness changes with entries, and with time.

        Raises `FarandoleError` when this node is barred.
        """
        self._host.connections.protect(lambda peer: any(peer in peers for peers in self._others))
        while True:
            self.refresh()
            if self._state.proof_of(self._host.author) is not None:
                raise FarandoleError(
                    "two processes have signed with this node's key, and the run has barred it for good: find the copy "
                    "of this folder, remove the key in both, and join again under a new one"
                )
            skew = self._gossip.clock_skew
            if skew is not None and not skew.is_agreed and self.reached:
                skew = None  # a dispute is reported only if no member is live, which it may explain
            self._journal.update(clock=skew)
            if skew is None:
                self._journal.over("clock")
            elif (kind := (skew.is_agreed, skew.is_harmful)) not in self._clock_warnings:
                self._clock_warnings.add(kind)
                self._journal.warn(": ".join(clock_words(skew)), "clock")
            with trio.move_on_after(1.0):
                await self._gossip.changed.park()

    async def hold(self, stage: int) -> None:
        """Set this node's stage, and announce it to the run."""
        self._journal.update(stage=stage)
        self.refresh()
        await self.announcer.announce()

    async def lease(self, target: int, *, is_settled: bool) -> None:
        """Publish a lease for a move to ``target``; for the own stage: that this node does not move, or is there."""
        await self._gossip.publish(Kind.STAGE_LEASE, 0, StageLease(self.stage, target, is_settled))

    @property
    def speed(self) -> float:
        """Return the tokens a second that this node could take through its stage; 0: not measured yet."""
        return speed_of(self._journal.state, self.num_stages)

    def notes(self) -> dict[bytes, dict[str, bytes]]:
        """Return the notes of the programs of the present members, and of this node's own."""
        found = self._payloads({*self.everyone, self._host.author}, ProgramNotes)
        return {author: dict(payload.notes) for author, payload in found.items()}

    def start_holders(self, checkpoint_id: bytes) -> list[bytes]:
        """Return the live members that have announced this starting checkpoint."""
        return [
            peer for peer in self.everyone for notice in self._notices(peer, START_SLOT) if notice.id == checkpoint_id
        ]

    def refresh(self) -> None:
        """Determine again which members are live, and notify if that changed."""
        now = trio.current_time()
        for peer in self._host.connected:
            self._liveness.trust(peer)
        heard = {peer for peer in self._liveness.live(now) if not self._liveness.is_suspect(peer)}
        live = {peer: member for peer, member in self._state.members().items() if peer in heard}
        before = self.reached
        self._others = tuple(
            frozenset(peer for peer, member in live.items() if member.stage == stage)
            for stage in range(self.num_stages)
        )
        self._paused = frozenset(peer for peer, member in live.items() if member.is_paused) & self.everyone
        self.reached = self.everyone & self._liveness.present(now)
        for peer in self.reached - before:
            self._journal.say(f"{self._journal.called(peer)} is here ({len(self.reached) + 1} live)")
        for peer in before - self.reached:
            why = "is here, but runs a release that does not fit" if peer in self.apart() else "is gone"
            self._journal.say(f"{self._journal.called(peer)} {why} ({len(self.reached) + 1} live)")
        told = self.live, self.nodes_of_stages()
        if told != self._told:
            self._told = told
            self.changed.unpark_all()

    def origins(self) -> frozenset[bytes]:
        """Return the live members that draw data, this node excluded."""
        return self.nodes_of_stages()[0] - {self._host.author}

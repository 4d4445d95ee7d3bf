"""Publishes this node's entries: heartbeats, addresses, progress, checkpoints, and the peers that it suspects."""

from __future__ import annotations

from collections.abc import Callable

import trio

from farandole.protocol.checkpoints.blocks import Index
from farandole.protocol.state.believing import OwnSuspects
from farandole.protocol.state.entries import CheckpointNotice, Kind, Member, fit_member
from farandole.protocol.state.node_state import MAX_SMALL, beat_of, progress_of, speed_of

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


class Announcer:
    """Publishes this node's entries, from its state.

    ``is_bound``: this node keeps its stage, whatever the run needs. ``is_paused`` returns whether its owner has paused
    it, so that it has no trainer now.
    """

    def __init__(
        self,
        host: Host,
        gossip: GossipService,
        journal: Journal,
        *,
        incarnation: int,
        num_stages: int = 1,
        is_bound: bool = False,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._host = host
        self._gossip = gossip
        self._journal = journal
        self._incarnation = incarnation
        self._num_stages = num_stages
        self._is_bound = is_bound
        self.is_paused = is_paused
        self._told = Member()
        self._unannounced: dict[int, CheckpointNotice] = {}
        self._suspects = OwnSuspects()
        self._has_new_suspects = False

    async def run(self) -> None:
        """Publish what changes, until cancelled."""

        async def beat() -> None:
            while True:
                await self.beat()
                await trio.sleep(self._gossip.liveness.period)

        async def report_progress() -> None:
            announced_at = trio.current_time()
            while True:
                await trio.sleep(PROGRESS_INTERVAL)
                await self.report_progress()
                if self.has_changed() or trio.current_time() - announced_at >= MEMBER_INTERVAL:
                    announced_at = trio.current_time()
                    self._has_new_suspects |= bool(self._suspects)  # published again before the entry expires
                    await self.announce()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            nursery.start_soon(report_progress)
            while True:
                await trio.sleep(ADDRESSES_INTERVAL)
                member, told = self._member(), self._told
                if (member.is_paused, member.addresses) != (told.is_paused, told.addresses):
                    await self.announce()

    async def announce(self, *, left: bool = False) -> None:
        """Announce to the run that this node belongs to it, or has left."""
        self._told = self._member(left=left)
        await self._gossip.publish(Kind.MEMBER, 0, self._told)

    def _member(self, *, left: bool = False) -> Member:
        """Return the member entry of this node as it is now."""
        state = self._journal.state
        member = Member(
            stage=state.stage,
            device=state.device[:48],
            speed=int(speed_of(state, self._num_stages)),
            addresses=tuple(address.rpartition("/p2p/")[0] for address in rank(self._host.addresses)[:8]),
            left=left,
            incarnation=self._incarnation,
            is_bound=self._is_bound,
            is_paused=self.is_paused(),
            version=VERSION,
        )
        return fit_member(member)

    async def beat(self) -> None:
        """Publish one heartbeat."""
        await self._gossip.publish(Kind.BEAT, 0, beat_of(self._journal.state))

    async def report_progress(self) -> None:
        """Publish this node's part of the run's counters."""
        moved = self._journal.exchanges
        progress = progress_of(self._journal.state, moved.bytes_sent, moved.bytes_received)
        await self._gossip.publish(Kind.PROGRESS, 0, progress)
        while self._unannounced:
            slot, notice = self._unannounced.popitem()
            await self._gossip.publish(Kind.CHECKPOINT, slot, notice)
        if self._has_new_suspects:
            self._has_new_suspects = False
            await self._gossip.publish(Kind.SUSPECTS, 0, self._suspects.entry)

    def checkpoint_held(self, checkpoint_id: bytes, index: Index, *, is_copy: bool) -> None:
        """Note that this node gives a checkpoint, its own or a copy; it is announced with the next progress."""
        self._unannounced[COPY_SLOT if is_copy else OWN_SLOT] = CheckpointNotice(
            min(index.round, MAX_SMALL), index.stage, checkpoint_id, index.size, index.tokens, index.inner_steps
        )

    async def tell_start(self, notice: CheckpointNotice) -> None:
        """Announce that this node has the checkpoint from which the run starts."""
        await self._gossip.publish(Kind.CHECKPOINT, START_SLOT, notice)

    def note_suspicion(self, peer: bytes, is_suspect: bool) -> None:
        """Note whether the screening suspects a peer now; a change is published with the next progress."""
        self._has_new_suspects |= self._suspects.note(peer, is_suspect=is_suspect)

    def has_changed(self) -> bool:
        """Return whether this node's addresses, device or (if it matters) speed differ from the announced ones."""
        member, told = self._member(), self._told
        if (member.addresses, member.device) != (told.addresses, told.device):
            return True
        return self._num_stages > 1 and abs(member.speed - told.speed) > SPEED_CHANGE * told.speed

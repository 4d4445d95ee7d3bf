"""What this node tells the run of itself, and what it makes of what the others tell: who lives, and how far they are.

Liveness comes from heartbeats alone (`farandole.protocol.liveness`), with one short cut: when a connection breaks and
the peer cannot be dialled again, it is taken for dead until its heartbeat advances. So a killed process leaves the
live set of those who were connected to it within a dial, not within three heartbeats.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Callable

import trio

from farandole.protocol.entries import RULES, Beat, CheckpointNotice, Kind, Member, Progress, Report
from farandole.protocol.errors import FarandoleError
from farandole.protocol.identity import short_name
from farandole.protocol.state import RunState

from . import trainer_messages as messages
from .board import Board
from .errors import PeerUnreachableError
from .gossip import GossipService
from .host import Host

# MEMBER lives an hour: three announcements may be lost.
MEMBER_INTERVAL = 900.0
# The run state takes one a minute, the newest: so a young node is counted soon, and an old one as often as may be.
PROGRESS_INTERVAL = 10.0
# Members that a node keeps connections with: enough that no partition of a few cuts it off, few enough for a home
# router. Exchanges dial whom they need beside these.
TARGET_CONNECTIONS = 12
KEEP_INTERVAL = 5.0
# A peer whose connection broke is dialled once more before it is taken for dead.
SUSPICION_DIAL_TIMEOUT = 3.0
LOSS_SCALE = 1e6
# What an entry can say of a round or of a loss (`farandole.protocol.entries.Small`); a peer's word may be beyond it.
MAX_SMALL = 2**31 - 1
STAGE = 0
# Reports wait for the next minute; more refusals in one are the same story.
MAX_ACCUSATIONS = 8
MAX_REASON_CHARS = 64
# Half of what the others tolerate (`farandole.protocol.state`).
MAX_CLOCK_SKEW = 30.0


class KeyMisusedError(FarandoleError):
    """This node's key has signed two stories; nobody listens to it any more."""


class Membership:
    """Publishes this node's entries, keeps connections with members, and knows who is live.

    ``on_peers`` is told of every change of the live set, ``on_lost`` of every peer that could not be reached again.
    """

    def __init__(
        self,
        host: Host,
        state: RunState,
        gossip: GossipService,
        board: Board,
        rng: random.Random,
        *,
        incarnation: int,
        on_peers: Callable[[frozenset[bytes]], None],
        on_lost: Callable[[bytes], None],
    ) -> None:
        self._host = host
        self._state = state
        self._gossip = gossip
        self._liveness = gossip.liveness
        self._board = board
        self._rng = rng
        self._incarnation = incarnation
        self._on_peers = on_peers
        self._on_lost = on_lost
        self._live: frozenset[bytes] = frozenset()
        self._announced: tuple[list[str], str] = ([], "")
        self._unannounced: messages.Saved | None = None
        self._accusations: deque[Report] = deque(maxlen=MAX_ACCUSATIONS)
        self._next_report = 0
        self._has_warned_of_clock = False

    @property
    def live(self) -> frozenset[bytes]:
        """Live members of this node's stage, itself excluded."""
        return self._live

    def current_round(self) -> int:
        """The round that the others are in: the median of the live members' heartbeats, 0 if there are none.

        Newcomers that are still preparing say nothing about it: a crowd of them must not look like a run that begins.
        """
        beats = [beat for peer in self._live if (beat := self._state.payload(peer, Beat)) is not None]
        rounds = [beat.round for beat in beats if beat.round or beat.inner_steps]
        return int(statistics.median_low(rounds)) if rounds else 0

    def donors(self, after_round: int) -> list[bytes]:
        """Live members further than ``after_round``: those who have announced a checkpoint first, else at random."""
        ahead = [
            peer
            for peer in self._live
            if (beat := self._state.payload(peer, Beat)) is not None and beat.round > after_round
        ]
        self._rng.shuffle(ahead)
        ahead.sort(key=lambda peer: self._state.get(peer, Kind.CHECKPOINT) is None)
        return ahead

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat)
            nursery.start_soon(self._report_progress)
            nursery.start_soon(self._keep_connected)
            nursery.start_soon(self._watch_connections)
            nursery.start_soon(self._watch_state)

    async def announce(self, *, left: bool = False) -> None:
        """Tell the run that this node belongs to it, or has left."""
        addresses, device = self._announced = (self._host.addresses, self._board.device)
        member = Member(
            stage=STAGE,
            device=device[:48],
            speed=int(self._board.tokens_per_second),
            addresses=tuple(address.rpartition("/p2p/")[0] for address in addresses[:8]),
            left=left,
            incarnation=self._incarnation,
        )
        await self._gossip.publish(Kind.MEMBER, 0, member)

    async def beat(self) -> None:
        """One heartbeat."""
        board = self._board
        loss = None
        if board.loss is not None and not math.isnan(board.loss):  # NaN while the replica diverges
            loss = int(min(board.loss * LOSS_SCALE, MAX_SMALL))
        await self._gossip.publish(
            Kind.BEAT, 0, Beat(board.inner_steps, min(board.round, MAX_SMALL), loss, int(board.tokens_per_second))
        )

    async def report_progress(self) -> None:
        """This node's part of the run's counters."""
        board = self._board
        await self._gossip.publish(
            Kind.PROGRESS,
            0,
            Progress(
                board.inner_steps, min(board.round, MAX_SMALL), board.tokens, board.bytes_sent, board.bytes_received
            ),
        )
        saved, self._unannounced = self._unannounced, None
        if saved is not None:
            round_index = min(saved.round, MAX_SMALL)
            notice = CheckpointNotice(round_index, STAGE, saved.sha256, saved.size, saved.tokens, saved.inner_steps)
            await self._gossip.publish(Kind.CHECKPOINT, 0, notice)
        while self._accusations:
            await self._gossip.publish(Kind.REPORT, self._next_report, self._accusations.popleft())
            self._next_report = (self._next_report + 1) % RULES[Kind.REPORT].slots

    def checkpoint_saved(self, saved: messages.Saved) -> None:
        """That this node can give its weights to newcomers; announced with the next progress."""
        self._unannounced = saved

    def accuse(self, peer: bytes, reason: str, evidence: bytes) -> None:
        """That a peer's contribution was refused; told to the run with the next progress, a few at a time."""
        self._accusations.append(Report(peer, reason.encode("ascii", "replace").decode()[:MAX_REASON_CHARS], evidence))

    def refresh(self) -> None:
        """Work out anew who is live, and tell if that changed."""
        members = self._state.members()
        now_live = frozenset(
            peer
            for peer in self._liveness.live(trio.current_time())
            if peer in members and members[peer].stage == STAGE and not self._liveness.is_suspect(peer)
        )
        if now_live == self._live:
            return
        for peer in now_live - self._live:
            self._board.say(f"{short_name(peer)} is here ({len(now_live) + 1} live)")
        for peer in self._live - now_live:
            self._board.say(f"{short_name(peer)} is gone ({len(now_live) + 1} live)")
        self._live = now_live
        self._on_peers(now_live)

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
            self._board.warn(
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

    def _has_changed(self) -> bool:
        """Whether others know another address or device of this node than it has."""
        return self._announced != (self._host.addresses, self._board.device)

    async def _keep_connected(self) -> None:
        while True:
            await trio.sleep(KEEP_INTERVAL * self._rng.uniform(0.5, 1.5))
            connected = self._host.connected
            missing = [peer for peer in self._live if peer not in connected]
            wanted = min(TARGET_CONNECTIONS, len(self._live)) - len(connected & self._live)
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
                    elif peer in self._live:
                        nursery.start_soon(self._probe, peer)

    async def _probe(self, peer: bytes) -> None:
        """The connection to a live peer broke: find out whether it is the line, or the peer."""
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

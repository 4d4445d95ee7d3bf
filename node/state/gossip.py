"""Keeps this node's run state equal to its peers': carries out what `farandole.protocol.state.gossip` decides.

Push uses the messenger, and anti-entropy has streams of its own. The dirty authors are written to the store every two
seconds. All waits for a peer have a deadline, and no failure of a peer or of the disk ends this service.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import InitVar, dataclass

import trio

from farandole.protocol.state.antientropy import PROTOCOL as SYNC_PROTOCOL
from farandole.protocol.state.antientropy import Session
from farandole.protocol.state.believing import ClockSkew, judge_clock, votes_of
from farandole.protocol.state.entries import Kind, Payload, decode_delta
from farandole.protocol.state.gossip import (
    JOIN_LEAD_SECONDS,
    Gossip,
    InboundMeter,
    is_worth_forwarding,
    slices_of,
    sync_periods,
)
from farandole.protocol.state.liveness import BASE_PERIOD
from farandole.protocol.state.push import MAX_PUSH_BYTES, TICK_SECONDS
from farandole.protocol.state.push import PROTOCOL as PUSH_PROTOCOL
from farandole.protocol.state.state import MergeReport, RunState
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.bounds import Latest, PeerMeters
from farandole.protocol.wire.errors import FloodError, RemoteProtocolError
from farandole.protocol.wire.identity import short_name

from ..base.errors import PeerUnreachableError
from ..base.streams import READ_BYTES, Stream, counted
from ..base.system.sockets import TaskStatus
from ..mesh.host import Host
from .messenger import Messenger
from .store import Store, StoreError

logger = logging.getLogger(__name__)

FLUSH_PERIOD = 2.0
RETRY_PERIOD = 1.0
"""The interval for retrying entries that came too soon after the last of their slot, or that the disk refused."""
SESSION_TIMEOUT = 30.0
"""The timeout of a whole session: 4 MB over a line of 1 Mbit/s."""
JOIN_TIMEOUT = 20.0
NUM_JOIN_SESSIONS = 3
FAREWELL_SECONDS = 0.5
"""Lets the messenger send the last push."""
SYNC_ATTEMPTS = 3
MAX_SERVED = 8
"""The sessions that other peers have with this node at a time: 16 MB of buffers."""
SERVED_BURST = 6
SERVED_RATE = 0.5
"""Sessions that one peer may begin at once, and a second: an honest one begins one in ten seconds, or two in small
testnets."""
SHUT_OUT_SECONDS = 300.0
"""How long a peer that flooded this node is kept out. It then costs this node 0.1 % of a core. An honest peer would
miss little, as others bring its entries."""
CROWD = 8
"""Authors beyond what a peer may bring, in one message, that are no accident: members that pass on what an attacker
brought exceed their share by one or two."""
MAX_CLOCKS = 31
"""The latest members whose clocks are compared with this node's: as many as it syncs with in five minutes."""

CLOCK_SET_SECONDS = 5.0
"""A jump of this machine's clock against trio's by which it was set; NTP corrects less by gradual changes in hours."""


@dataclass(eq=False)
class GossipService:
    """The run state of this node, kept up to date while `run` runs."""

    state: RunState
    _writer: Writer
    _host: Host
    _messenger: Messenger
    _store: Store
    _rng: random.Random
    base_period: InitVar[float] = BASE_PERIOD
    """Seconds between heartbeats in a small run."""
    unix: Callable[[], float] = time.time
    """This machine's clock."""

    def __post_init__(self, base_period: float) -> None:
        self._gossip = Gossip(
            self.state, self._writer.author, self._rng, base_period, self._host.connections.network_of
        )
        self.liveness = self._gossip.liveness
        """Which authors are live."""
        self.state.places.protect(lambda author: author in self._host.connections.connected)
        self._postponed: dict[tuple[Kind, int], Payload] = {}
        self._write_lock = trio.Lock()
        self.changed = trio.lowlevel.ParkingLot()
        """Where to wait for entries that were not there before."""
        self._served: Counter[bytes] = Counter()
        self._serving_meters = PeerMeters(SERVED_BURST, SERVED_RATE)
        self._served_inbound = InboundMeter()
        self.on_deed: Callable[[bytes, str], None] = lambda peer, deed: None
        """Called with a peer and what it has done to this node (`farandole.node.status.journal.DEEDS`)."""
        # Member -> seconds by which this clock was ahead of its clock, and by how much it was ahead of trio's then.
        self._clocks: Latest[bytes, tuple[float, float]] = Latest(MAX_CLOCKS)

    @property
    def clock_skew(self) -> ClockSkew | None:
        """Return how far this node's clock is off those of the connected members that it has synced with, if it is.

        No decision here depends on it. What was compared before this machine's clock was set, or before the machine
        slept, does not count.
        """
        lead, connected = self.unix() - trio.current_time(), self._host.connections.connected
        return judge_clock(
            votes_of(
                (peer, self._host.connections.network_of(peer), ahead)
                for peer, (ahead, lead_then) in self._clocks.items()
                if peer in connected and abs(lead - lead_then) < CLOCK_SET_SECONDS
            )
        )

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load what is stored, then gossip until cancelled."""
        await self._load()
        self._messenger.set_receiver(
            PUSH_PROTOCOL,
            MAX_PUSH_BYTES,
            self._receive_push,
            lambda peer: self._gossip.unreachable(peer, trio.current_time()),
        )
        self._host.set_handler(SYNC_PROTOCOL, self._serve)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._repeat, itertools.repeat(TICK_SECONDS), self._tick)
                nursery.start_soon(self._repeat, sync_periods(), self._sync)
                nursery.start_soon(self._repeat, itertools.repeat(FLUSH_PERIOD), self._save)
                nursery.start_soon(self._repeat, itertools.repeat(RETRY_PERIOD), self._write_postponed)
                task_status.started()
        finally:
            with trio.CancelScope(shield=True):
                await self._save()

    async def _repeat(self, periods: Iterator[float], do: Callable[[], Awaitable[None]]) -> None:
        for period in periods:
            await trio.sleep(period * self._rng.uniform(0.75, 1.25))
            await do()

    # writing

    async def publish(self, kind: Kind, index: int, payload: Payload) -> None:
        """Publish an entry to the run; it leaves with the next push.

        If the slot was written so recently that its tick has not passed (or the disk refuses the mark), the payload is
        kept and written when that is possible, unless a newer payload replaces it before.
        """
        self._postponed[kind, index] = payload
        await self._write_postponed()

    async def _write_postponed(self) -> None:
        async with self._write_lock:
            for (kind, index), payload in list(self._postponed.items()):
                try:
                    is_written = await self._write(kind, index, payload)
                except StoreError as error:
                    logger.warning("%s is not published yet: %s", kind.name, error)
                    return
                if is_written and self._postponed[kind, index] is payload:
                    del self._postponed[kind, index]

    async def _write(self, kind: Kind, index: int, payload: Payload) -> bool:
        """Write an entry now if its slot may be written; the mark goes to disk before anything is signed."""
        now = self.unix()
        if self._writer.delay(kind, index, now) > 0:
            return False
        while (mark := self._writer.mark_needed(kind, index, now)) is not None:
            await self._store.save_mark(mark)
            self._writer.marked(mark)
        if self._writer.delay(kind, index, now) > 0:
            return False  # an entry of a past life has come in during the wait
        self._gossip.publish(self._writer.write(kind, index, payload, now), now)
        self.changed.unpark_all()
        return True

    async def flush(self) -> None:
        """Push what is queued, before leaving."""
        await self._tick()
        await trio.sleep(FAREWELL_SECONDS)

    # push

    async def _tick(self) -> None:
        for peer, message in self._gossip.tick(self.unix(), trio.current_time()):
            self._messenger.send_nowait(peer, PUSH_PROTOCOL, message)

    def _receive_push(self, peer: bytes, payload: bytes) -> None:
        """Take in a push.

        Raises `RemoteProtocolError`, which costs the peer its stream, or for a flood its connections.
        """
        try:
            report = self._gossip.receive_push(peer, payload, self.unix(), trio.current_time())
        except RemoteProtocolError as error:
            self._gossip.unreachable(peer, trio.current_time())
            if isinstance(error, FloodError):
                self._host.connections.shut_out(peer, SHUT_OUT_SECONDS)
                self.on_deed(peer, "flooded")
            raise
        self._take_note(report)

    def _take_note(self, report: MergeReport) -> None:
        """React to new entries, from push, sync or the disk."""
        if report.introducer is not None and report.num_too_many >= CROWD:
            self.on_deed(report.introducer.peer, "crowded")
        if report.new:
            self.changed.unpark_all()
        for entry in report.new:
            if entry.author == self._writer.author:
                self._writer.observe(entry)
            elif entry.kind is Kind.MEMBER:
                self._host.dialler.add_addresses(entry.author, entry.payload.addresses, is_hearsay=True)

    # anti-entropy

    async def join(self) -> int:
        """Sync with three peers, heartbeats included; return with how many of them that succeeded.

        The second and third begin when the first is done, or after `JOIN_LEAD_SECONDS`, and bring what it has not.
        The connected peers come first; their entries lead to the others. It ends within `JOIN_TIMEOUT`, and at once
        without any connection: the first node of a run is alone. Each peer is asked once.
        """
        done: set[bytes] = set()
        asked: set[bytes] = set()

        async def join_with(peer: bytes, has_ended: trio.Event) -> None:
            if await self._sync_with(peer, with_beats=True):
                done.add(peer)
            has_ended.set()

        with trio.move_on_after(JOIN_TIMEOUT):
            while len(done) < NUM_JOIN_SESSIONS:
                known = self._host.connections.connected | set(self._gossip.candidates(trio.current_time()))
                fresh = sorted(known - asked)
                if not fresh:
                    break
                chosen = self._rng.sample(fresh, min(NUM_JOIN_SESSIONS - len(done), len(fresh)))
                asked.update(chosen)
                async with trio.open_nursery() as nursery:
                    for peer in chosen:
                        has_ended = trio.Event()
                        nursery.start_soon(join_with, peer, has_ended)
                        if not done:
                            with trio.move_on_after(JOIN_LEAD_SECONDS):
                                await has_ended.wait()
        return len(done)

    async def _sync(self) -> None:
        """Sync with a live member, or if none is known with any connected peer; at the same time, try a silent one.

        On failure try another.
        """
        async with trio.open_nursery() as nursery:
            if (silent := self._gossip.choose_silent(trio.current_time())) is not None:
                nursery.start_soon(self._sync_with, silent, True)
            for _ in range(SYNC_ATTEMPTS):
                partner = self._gossip.choose_partner(trio.current_time())
                connected = sorted(self._host.connections.connected)
                if partner is None and not connected:
                    break
                if await self._sync_with(partner or self._rng.choice(connected), with_beats=partner is None):
                    break

    async def _sync_with(self, peer: bytes, with_beats: bool) -> bool:
        """Run one session as the initiator; return whether it succeeded."""
        try:
            with trio.fail_after(SESSION_TIMEOUT):
                async with aclosing(await self._host.open_stream(peer, SYNC_PROTOCOL)) as stream:
                    unix, began_at = self.unix(), trio.current_time()
                    session = self._gossip.open_session(unix, is_initiator=True, with_beats=with_beats)
                    await stream.send_all(session.start())
                    await self._converse(stream, session)
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("no sync with %s: %s", short_name(peer), error)
            self._gossip.unreachable(peer, trio.current_time())
            return False
        self._gossip.reached(peer)
        if session.peer_now is not None:  # its clock when it answered, a moment later
            self._clocks[peer] = unix - session.peer_now, unix - began_at
        return True

    async def _serve(self, stream: Stream) -> None:
        """Serve a session that a peer has begun. Raises `RemoteProtocolError` if it does what no honest peer does."""
        peer, now = stream.peer, trio.current_time()
        if peer in self._served or len(self._served) >= MAX_SERVED or not self._serving_meters.of(peer, now).take(now):
            return
        with counted(self._served, peer), trio.fail_after(SESSION_TIMEOUT):
            await self._converse(stream, self._gossip.open_session(self.unix(), is_initiator=False))

    async def _converse(self, stream: Stream, session: Session) -> None:
        """Carry a session through to its end."""
        peer, is_asked = stream.peer, session.is_initiator
        while not session.is_done:
            data = await stream.receive_some(READ_BYTES)
            if not data:
                raise RemoteProtocolError("the stream ended in the middle of a session")
            if not is_asked:
                self._served_inbound.count(peer, trio.current_time(), bytes=len(data))
            deltas, to_send = session.receive_data(bytes(data))
            for delta in deltas:
                forward = is_worth_forwarding(delta)
                for part in slices_of(delta):
                    now = trio.current_time()
                    if not is_asked:
                        self._served_inbound.count(peer, now, entries=len(part.entries) + len(part.proofs))
                    self._take_note(self._gossip.merge(part, peer, self.unix(), now, forward, is_asked=is_asked))
                    await trio.lowlevel.checkpoint()
            if to_send:
                await stream.send_all(to_send)

    # disk

    async def _load(self) -> None:
        """Load the stored state, which is verified like a peer's. Raises `StoreError` if the mark is unreadable."""
        self._writer.resume(await self._store.load_mark())  # without the mark nothing may be written
        try:
            rows = await self._store.load_authors()
        except StoreError as error:
            logger.warning("starting without the stored run state: %s", error)
            return
        for author, row in rows.items():
            try:
                delta = decode_delta(row)
            except RemoteProtocolError as error:
                logger.warning("the stored entries of %s are damaged: %s", short_name(author), error)
                self.state.dirty.add(author)
                continue
            self._take_note(self.state.merge(delta, self.unix()))
            await trio.lowlevel.checkpoint()

    async def _save(self) -> None:
        """Write the dirty authors, only as many at a time as do not hold up the disk for long."""
        rows = self.state.take_dirty()
        if not rows:
            return
        try:
            await self._store.save_authors(rows)
        except StoreError as error:
            logger.warning("the run state is not on disk: %s", error)
            self.state.dirty.update(rows)
        except BaseException:  # also a cancellation: what is not written is written the next time
            self.state.dirty.update(rows)
            raise

"""A node's life in its run: it syncs, trains until it is asked to leave, and says farewell."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import trio

from farandole.protocol.mesh.kademlia import run_key
from farandole.protocol.rounds.pairing_events import PeerLost, PeersChanged
from farandole.protocol.rounds.training_events import Signal
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.state.entries import Progress
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.supervisor import Supervisor

from ..base.causes import release_words
from ..base.errors import JoinError
from ..base.project import VERSION
from ..join.address_book import keep_reconnecting
from ..join.bootstrap import JOIN_TIMEOUT, Target, sync_state
from ..loop.rest_service import NoticeBoard
from ..loop.stage_service import StageService, wait_quiet
from ..loop.training import Training
from ..mesh.host import Host
from ..state.connections import ConnectionKeeper, ReleaseWatch
from ..state.credentials import Credentials
from ..state.gossip import GossipService
from ..state.membership import Membership
from ..state.store import StoreError
from ..status.journal import DISK
from ..store.disk_space import save_seconds
from ..store.folder import shortage
from ..trainer.trainer import TrainerError, settings_of
from ..transfers.start import Start
from ..transfers.weights import Weights
from ..ui.reporting import Reporter
from .parts import Daemon, Mesh

# Leaving: the trainer ends its round and saves, the farewell is gossiped.
LEAVE_TIMEOUT: Final = 15.0
# With the save of a large model, in all no longer than `farandole leave` and service managers wait before they kill
# (`TimeoutStopSec` in docs/volunteer.md): at 100 MB/s enough for the 16 GB of a billion parameters.
MAX_LEAVE_TIMEOUT: Final = 240.0
FAREWELL_TIMEOUT: Final = 2.0
# Short, because a node that is killed soon after it began a run has no invite to rejoin with.
REMEMBER_INTERVAL: Final = 10.0
# What the store may take more: a run state of thousands of nodes.
STORE_BYTES: Final = 16 << 20
PARTNERS_FACT: Final = "partners"
TOKENS_FACT: Final = "tokens"
MICROBATCH_FACT: Final = "microbatch"


def leave_timeout(saved_bytes: int, rate: float | None = None) -> float:
    """Return the seconds that a trainer with checkpoints of ``saved_bytes`` may take to end.

    ``rate``: bytes a second at which a checkpoint was written, which may be less than the rate assumed of a disk.
    """
    return min(MAX_LEAVE_TIMEOUT, LEAVE_TIMEOUT + max(save_seconds(saved_bytes), save_seconds(saved_bytes, rate)))


@dataclass(frozen=True, slots=True)
class RunMember:
    """A node in its run; made by `farandole.node.member.assembly`."""

    daemon: Daemon
    mesh: Mesh
    manifest: Manifest
    gossip: GossipService
    membership: Membership
    weights: Weights
    start: Start | None
    """None where the run starts from its seed."""
    supervisor: Supervisor
    training: Training
    stages: StageService
    notices: NoticeBoard
    releases: ReleaseWatch
    credentials: Credentials | None
    """None where the run is open to all."""

    def show_in(self, reporter: Reporter) -> None:
        """Give the reporter what a node knows once it is in its run."""
        reporter.run_name = self.manifest.name
        reporter.state, reporter.liveness = self.gossip.state, self.gossip.liveness
        training = self.training
        reporter.pipeline, reporter.leases, reporter.audits = training.pipeline, training.leases, training.audits
        reporter.notices = self.notices
        reporter.nodes_of_stages, reporter.apart = self.membership.nodes_of_stages, self.membership.apart

    async def take_part(self, target: Target) -> None:
        """Join, train until asked to leave, and send a farewell. Raises `JoinError` or `TrainerError`."""
        host, membership, leases, audits = self.mesh.host, self.membership, self.training.leases, self.training.audits
        is_cut = membership.num_stages > 1
        async with trio.open_nursery() as nursery:
            if self.start is not None:
                await self.start.open()
                nursery.start_soon(self.start.run)
            nursery.start_soon(self.releases.run)
            await self.restore_counters(self.gossip.state.payload(host.author, Progress))
            await self._sync_state(may_begin=target.manifest is not None)
            membership.refresh()
            self.notices.look(is_training=False)
            if self.credentials is not None:
                await self.credentials.publish()
                nursery.start_soon(self.credentials.run)
            if is_cut:
                await self.stages.begin()
            else:
                await membership.announcer.announce()
            await membership.announcer.beat()
            if leases is not None:
                await leases.restore()
                nursery.start_soon(leases.run)
            if is_cut:
                nursery.start_soon(self.stages.run)
            connections = ConnectionKeeper(
                host, membership, self.gossip.liveness, lambda peer: self.training.handle(PeerLost(peer))
            )
            for service in (membership, membership.announcer, connections, self.weights.provider, self.notices):
                nursery.start_soon(service.run)
            book, journal = self.daemon.book, self.daemon.journal
            nursery.start_soon(keep_reconnecting, host, book, target, lambda: membership.everyone, journal)
            nursery.start_soon(host.dht.provide, run_key(target.run_id))
            nursery.start_soon(self._follow_members)
            if audits is not None:
                nursery.start_soon(audits.run)
                nursery.start_soon(self._call_after_each, audits.avoided_changed.park, self._set_peers)
            save = partial(self.training.handle, Signal.SAVE)
            nursery.start_soon(self._call_after_each, self.weights.provider.save_wanted, save)
            nursery.start_soon(remember, self.daemon, host, membership)
            failure = await self._train()
            with trio.move_on_after(FAREWELL_TIMEOUT):
                if leases is not None:
                    await leases.leave()
                await membership.announcer.report_progress()
                await membership.announcer.announce(left=True)
                await self.gossip.flush()
            self.daemon.journal.say("left the run")
            with contextlib.suppress(StoreError):
                await self.daemon.book.save()
            if failure is not None:
                raise failure
            nursery.cancel_scope.cancel()

    async def restore_counters(self, told: Progress | None) -> None:
        """Restore the counters of earlier starts: own tokens, as stored or as last reported to the run, and the round.

        The round goes into the first heartbeat: a peer that hears it must not think that the run is just beginning.
        """
        store, journal, supervisor = self.daemon.store, self.daemon.journal, self.supervisor
        stored = await store.get_fact(TOKENS_FACT)
        journal.update(tokens=max(int(stored or 0), told.tokens if told else 0))
        if not supervisor.microbatch:  # what fitted into memory on the same device; 0 if all did
            device, _, size = ((await store.get_fact(MICROBATCH_FACT)) or b"").rpartition(b" ")
            supervisor.microbatch = int(size) if device == self.daemon.settings.device.encode() else 0
        own_round, _ = await self.weights.rounds()
        journal.update(round=max(0, own_round or 0))

    async def prepare(self) -> messages.Prepare:
        """Put weights in place; return the next trainer's first command."""
        if self.membership.num_stages > 1:
            await wait_quiet(self.membership, self.daemon.journal)
        elif self.supervisor.microbatch:
            fact = f"{self.daemon.settings.device} {self.supervisor.microbatch}".encode()
            loss = "after a restart the trainer may run out of memory again"
            await self.daemon.store.remember(MICROBATCH_FACT, fact, self.daemon.journal, loss)
        await self.weights.obtain()
        while self.start is not None and await self.weights.rounds() == (None, None):
            if await self.start.obtain(self.membership.stage):
                break
            await self.weights.obtain()  # the run may have begun by now, at nodes that found its start
        files, stage = self.weights.files, self.membership.stage
        self.weights.provider.trainer_stage = stage
        return messages.Prepare(
            run_id=self.gossip.state.run_id,
            author=self.mesh.host.author,
            manifest=msgspec.msgpack.encode(self.manifest),
            settings=settings_of(self.daemon.settings, microbatch=self.supervisor.microbatch),
            fetched=str(files.fetched(stage)),
            start=str((self.start and self.start.path_of(stage)) or ""),
            stage=stage,
            disk=files.disk,
            checkpoint_bytes=files.max_bytes(stage),
        )

    async def _sync_state(self, may_begin: bool) -> None:
        """Get the run state from members. ``may_begin``: this node has the manifest from its owner, not from a member.

        Such a node may begin the run where it finds nobody. Raises `JoinError` if no member gives its state.
        """
        host, journal = self.mesh.host, self.daemon.journal
        journal.announce("joining", "syncing the run state", "three members' run state")
        if not await sync_state(self.gossip, journal, JOIN_TIMEOUT, may_begin=may_begin):
            refusal = f" They do not admit this node: {host.gate.refusal}." if host.gate.refusal else ""
            if conflict := self.releases.look():
                refusal += f" {'. Remedy: '.join(release_words(conflict, VERSION))}."
            raise JoinError(
                f"step 3, the run state: members were found, but none gave its run state within {JOIN_TIMEOUT:g} s."
                f"{refusal} Try again later, or with a newer invite."
            )
        if host.gate.roster is not None:
            host.gate.roster.settle()

    async def _follow_members(self) -> None:
        """Pass the live members to the training, the pipeline and the search for relays, whenever they change."""
        membership, told = self.membership, frozenset[bytes]()
        while True:
            if membership.live != told:
                told = membership.live
                self._set_peers()
            if self.training.pipeline is not None:
                self.training.pipeline.set_nodes(membership.nodes_of_stages())
            self.mesh.host.relays.members = membership.everyone
            await membership.changed.park()

    def _set_peers(self) -> None:
        """Set the possible partners: the live members, except the ones that audits have caught."""
        audits = self.training.audits
        avoided = frozenset() if audits is None else audits.avoided
        self.training.handle(PeersChanged(self.membership.live - avoided))

    async def _call_after_each(self, awaited: Callable[[], Awaitable[None]], call: Callable[[], None]) -> None:
        while True:
            await awaited()
            call()

    async def _train(self) -> TrainerError | None:
        """Train until asked to leave, or until no trainer can start; then return the error."""
        failure = None

        async def run_training() -> None:
            nonlocal failure
            try:
                await self.training.run(self.prepare)
            except TrainerError as error:
                failure = error
                self.daemon.is_leaving.set()
            if self.daemon.door is not None:
                await self.daemon.door.dismiss(self.daemon.journal.state.phase_detail)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_training)
            await self.daemon.is_leaving.wait()
            await self.end_training()
            nursery.cancel_scope.cancel()
        return failure

    async def end_training(self) -> None:
        """Make the trainer save and end, within the time that its checkpoint takes."""
        journal = self.daemon.journal
        journal.announce("leaving", "leaving: the trainer saves", "the trainer")
        if self.daemon.door is not None:
            self.daemon.door.dismissal = "the node leaves the run"
        size = self.weights.files.max_bytes(self.membership.stage)
        seconds = leave_timeout(size, self.weights.provider.save_rate)
        with trio.move_on_after(seconds) as patience:
            await self.training.leave()
        if patience.cancelled_caught:
            journal.warn(
                f"the trainer did not save within {seconds:.0f} s: what it has learnt since its last checkpoint is "
                "lost. A faster disk helps, or a shorter --checkpoint-seconds"
            )


async def remember(daemon: Daemon, host: Host, membership: Membership) -> None:
    """Store the data for the next start: this node's count and partners, and addresses to dial."""
    while True:
        for peer in host.connected & membership.everyone:
            daemon.book.note_reached(peer, host.dialler.known.to_keep(peer))
        try:
            await daemon.store.put_fact(TOKENS_FACT, b"%d" % daemon.journal.state.tokens)
            await daemon.store.put_fact(PARTNERS_FACT, b"".join(daemon.partners))
            await daemon.book.save()
        except StoreError as error:
            words = await trio.to_thread.run_sync(shortage, daemon.settings.home, STORE_BYTES)
            daemon.journal.warn(f"{error}; {words or 'trying again'}", f"{DISK}store")
        else:
            daemon.journal.over(f"{DISK}store")
        await trio.sleep(REMEMBER_INTERVAL)

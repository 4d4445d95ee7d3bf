"""A node that knows its run: its run state, its training, its service to newcomers, its farewell.

bulk channels -> gossip (run state) -> membership -> weights -> training (trainer, pairing, exchanges)
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol import trainer_messages as messages
from farandole.protocol.antientropy import PROTOCOL as SYNC_PROTOCOL
from farandole.protocol.believing import Partners
from farandole.protocol.block_transfer import Question
from farandole.protocol.entries import CheckpointNotice, Kind, Progress
from farandole.protocol.invitations import Roster
from farandole.protocol.manifest import Manifest, SignedManifest, decode_manifest
from farandole.protocol.pairing import Pairing
from farandole.protocol.push import PROTOCOL as PUSH_PROTOCOL
from farandole.protocol.records import run_key, shard_key
from farandole.protocol.state import RunState
from farandole.protocol.supervisor import Supervisor
from farandole.protocol.training_loop import LoopConfig, TrainingLoop
from farandole.protocol.writer import Writer

from .base.bandwidth import Shaping
from .base.errors import JoinError
from .base.nurseries import open_service_nursery
from .base.release import VERSION
from .base.release_words import release_words
from .base.settings import NodeSettings
from .bulk.exchange_service import EXCHANGE_PROTOCOL, ExchangeService
from .bulk.negotiation import open_bulk
from .bulk.transport import Channels
from .join.address_book import AddressBook
from .join.bootstrap import JOIN_TIMEOUT, Reconnector, Target, sync_state
from .join.downloads import Downloads
from .join.manifests import serve_manifest
from .join.start import Start
from .join.weights import Weights
from .loop.audit_service import AuditKeeper
from .loop.lease_service import LeaseKeeper
from .loop.notices import NoticeBoard
from .loop.pause.pause import Rest
from .loop.stages.links import ACTIVATIONS_PROTOCOL, Links
from .loop.stages.pipeline import PipelineService
from .loop.stages.stage_service import StageKeeper, wait_quiet
from .loop.traffic.traffic_service import TrafficKeeper
from .loop.training import PAIRING_PROTOCOL, Surroundings, Training
from .mesh.host import Host
from .mesh.reach.connectivity import Connectivity
from .state.announcer import Announcer
from .state.connections import ConnectionKeeper
from .state.credentials import Credentials
from .state.gossip import GossipService
from .state.membership import Membership
from .state.messenger import Messenger
from .state.release_watch import ReleaseWatch
from .state.store import Store, StoreError
from .status.journal import Journal
from .store.disk_space import Room, save_seconds
from .store.holdings import Holding
from .store.own_model import require_trainable_model
from .store.provider import Conditions
from .store.serve import BlockService
from .store.sketches import SketchService
from .store.starts import Starts
from .store.weight_files import WeightFiles
from .trainer.script import ScriptDoor
from .trainer.trainer import TrainerError

# Leaving: the trainer ends its round and saves, the farewell is gossiped.
LEAVE_TIMEOUT: Final = 15.0
# With the save of a large model, in all no longer than `farandole leave` and service managers wait before they kill
# (`farandole.node.app.service.service.STOP_SECONDS`): at 100 MB/s enough for the 16 GB of a billion parameters.
MAX_LEAVE_TIMEOUT: Final = 240.0
FAREWELL_TIMEOUT: Final = 2.0
# Short, because a node that is killed soon after it began a run has no invite to rejoin with.
REMEMBER_INTERVAL: Final = 10.0
TOKENS_FACT: Final = "tokens"
STAGE_FACT: Final = "stage"
MICROBATCH_FACT: Final = "microbatch"
PARTNERS_FACT: Final = "partners"


def leave_timeout(saved_bytes: int, rate: float | None = None) -> float:
    """Return the seconds that a trainer with checkpoints of ``saved_bytes`` may take to end.

    ``rate``: bytes a second at which a checkpoint was written, which may be less than the rate assumed of a disk.
    """
    return min(MAX_LEAVE_TIMEOUT, LEAVE_TIMEOUT + max(save_seconds(saved_bytes), save_seconds(saved_bytes, rate)))


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon's parts on this machine, before it knows a peer."""

    settings: NodeSettings
    key: Ed25519PrivateKey
    store: Store
    book: AddressBook
    partners: Partners
    journal: Journal
    is_leaving: trio.Event
    """Set when it is asked to leave."""
    rest: Rest
    door: ScriptDoor | None = None
    """The door at which the owner's loop attaches, if a loop trains."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A daemon among its peers; made by `open_mesh`."""

    host: Host
    connectivity: Connectivity
    shaping: Shaping
    traffic: TrafficKeeper


@dataclass(frozen=True, slots=True)
class Preparation:
    """The preparation of each trainer: it puts weights in place and makes the trainer's first command."""

    daemon: Daemon
    author: bytes
    run_id: bytes
    manifest: Manifest
    membership: Membership
    weights: Weights
    start: Start | None
    supervisor: Supervisor

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
            await self._remember_microbatch()
        await self.weights.obtain()
        while self.start is not None and await self.weights.rounds() == (None, None):
            if await self.start.obtain(self.membership.stage):
                break
            await self.weights.obtain()  # the run may have begun by now, at nodes that found its start
        settings, files, stage = self.daemon.settings, self.weights.files, self.membership.stage
        self.weights.giving.trainer_stage = stage
        return messages.Prepare(
            run_id=self.run_id,
            author=self.author,
            manifest=msgspec.msgpack.encode(self.manifest),
            data=[str(path) for path in settings.data],
            tokenizer=str(settings.tokenizer) if settings.tokenizer else None,
            device=settings.device,
            threads=settings.threads,
            disk=files.disk,
            checkpoint_bytes=files.max_bytes(stage),
            gpu_memory=round(settings.gpu_memory * 1e9),
            slow=settings.slow,
            step_seconds=settings.step_seconds,
            checkpoints=str(settings.checkpoints),
            fetched=str(files.fetched(stage)),
            start=str((self.start and self.start.path_of(stage)) or ""),
            stage=stage,
            microbatch=self.supervisor.microbatch,
            compile=settings.compile,
            average_on_gpu=settings.average_on_gpu,
            lean=settings.lean,
            recompute=settings.recompute,
            data_weights=settings.data_weight,
            data_field=settings.data_field,
            streams=settings.stream,
            cache=str(settings.tokens),
            allowed_models=settings.allow_model,
            outgoing=0,
            incoming=0,
        )

    async def _remember_microbatch(self) -> None:
        try:
            fact = f"{self.daemon.settings.device} {self.supervisor.microbatch}"
            await self.daemon.store.put_fact(MICROBATCH_FACT, fact.encode())
        except StoreError as error:
            self.daemon.journal.warn(f"{error}; a next life may run out of memory again")


class StageRecord:
    """The record of this node's stage: on its disk, for the next start of the node, and in the DHT."""

    def __init__(self, daemon: Daemon, host: Host, run_id: bytes, membership: Membership) -> None:
        self._daemon = daemon
        self._host = host
        self._run_id = run_id
        self._membership = membership
        self._moved = trio.Event()

    async def note(self, stage: int) -> None:
        """Record that this node has that stage now."""
        try:
            await self._daemon.store.put_fact(STAGE_FACT, b"%d" % stage)
        except StoreError as error:
            self._daemon.journal.warn(f"{error}; a next life may begin with another stage")
        for other in range(self._membership.num_stages):
            if other != stage:
                self._host.withdraw(shard_key(self._run_id, other))
        self._moved.set()

    async def run(self) -> None:
        """Announce the run and this node's shard in the DHT, until cancelled; the host announces them again."""
        await self._host.provide(run_key(self._run_id))
        while True:
            self._moved = trio.Event()
            await self._host.provide(shard_key(self._run_id, self._membership.stage))
            await self._moved.wait()


@dataclass(frozen=True, slots=True)
class RunMember:
    """A node in its run; made by `open_member`."""

    daemon: Daemon
    mesh: Mesh
    preparation: Preparation
    gossip: GossipService
    membership: Membership
    weights: Weights
    training: Training
    stages: StageKeeper
    stage_record: StageRecord
    pipeline: PipelineService | None
    leases: LeaseKeeper | None
    audits: AuditKeeper | None
    notices: NoticeBoard
    releases: ReleaseWatch
    credentials: Credentials | None
    """None where the run is open to all."""

    def checkpoint_notices(self) -> list[tuple[bytes, CheckpointNotice]]:
        """Return the checkpoints that this node and the live members report."""
        there = {*self.membership.everyone, self.mesh.host.author}
        notices = self.gossip.state.entries(Kind.CHECKPOINT)
        return [(entry.author, entry.payload) for entry in notices if entry.author in there]

    async def take_part(self, target: Target) -> None:
        """Join, train until asked to leave, and send a farewell. Raises `JoinError` or `TrainerError`."""
        host, journal, membership, preparation = self.mesh.host, self.daemon.journal, self.membership, self.preparation
        is_cut = membership.num_stages > 1
        async with trio.open_nursery() as nursery:
            if preparation.start is not None:
                await preparation.start.open()
                nursery.start_soon(preparation.start.run)
            nursery.start_soon(self.releases.run)
            await preparation.restore_counters(self.gossip.state.payload(host.author, Progress))
            journal.announce("joining", "syncing the run state", "three members' run state")
            # A node that brought the manifest may begin the run; one that got it from a member may not.
            if not await sync_state(self.gossip, journal, JOIN_TIMEOUT, may_begin=target.manifest is not None):
                refusal = f" They do not admit this node: {host.gate.refusal}." if host.gate.refusal else ""
                if conflict := self.releases.look():
                    refusal += f" {'. Remedy: '.join(release_words(conflict, VERSION))}."
                raise JoinError(
                    f"step 3, the run state: members were found, but none gave its run state within {JOIN_TIMEOUT:g} "
                    f"s.{refusal} Try again later, or with a newer invite."
                )
            host.gate.knows_members = True
            membership.refresh()
            self.notices.begin()
            if self.credentials is not None:
                await self.credentials.publish()
                nursery.start_soon(self.credentials.run)
            if is_cut:
                stored = await self.daemon.store.get_fact(STAGE_FACT)
                await self.stages.begin(None if stored is None else int(stored))
            else:
                await membership.announcer.announce()
            await membership.announcer.beat()
            if self.leases is not None:
                await self.leases.restore()
                nursery.start_soon(self.leases.run)
            if is_cut:
                nursery.start_soon(self.stages.run)
            connections = ConnectionKeeper(host, membership, self.gossip.liveness, self.training.lose_peer)
            reconnector = Reconnector(host, self.daemon.book, target, lambda: membership.everyone, journal)
            services = membership, membership.announcer, connections, reconnector, self.weights, self.stage_record
            for service in (*services, self.notices):
                nursery.start_soon(service.run)
            nursery.start_soon(self._follow_members)
            if self.audits is not None:
                nursery.start_soon(self.audits.run)
                nursery.start_soon(self._follow_audits, self.audits)
            nursery.start_soon(self._follow_wishes)
            nursery.start_soon(remember, self.daemon, host, membership)
            failure = await self._train()
            await self._say_farewell()
            with contextlib.suppress(StoreError):
                await self.daemon.book.save(is_last=True)
            if failure is not None:
                raise failure
            nursery.cancel_scope.cancel()

    async def _follow_members(self) -> None:
        """Pass the live members to the training, the pipeline and the search for relays, whenever they change."""
        membership, told = self.membership, None
        while True:
            if membership.live != told:
                told = membership.live
                self._set_peers()
            if self.pipeline is not None:
                self.pipeline.set_nodes(membership.nodes_of_stages())
            self.mesh.connectivity.members = membership.everyone
            await membership.changed()

    async def _follow_audits(self, audits: AuditKeeper) -> None:
        while True:
            await audits.avoided_changed()
            self._set_peers()

    def _set_peers(self) -> None:
        """Set the possible partners: the live members, except the ones that audits have caught."""
        avoided = frozenset() if self.audits is None else self.audits.avoided
        self.training.set_peers(self.membership.live - avoided)

    async def _follow_wishes(self) -> None:
        """Make the trainer save whenever a peer wants newer weights than the stored ones."""
        while True:
            await self.weights.giving.save_wanted()
            self.training.save_soon()

    async def _train(self) -> TrainerError | None:
        """Train until asked to leave, or until no trainer can start; then return the error."""
        failure = None

        async def run_training() -> None:
            nonlocal failure
            try:
                await self.training.run()
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
        seconds = leave_timeout(size, self.weights.giving.save_rate)
        with trio.move_on_after(seconds) as patience:
            await self.training.leave()
        if patience.cancelled_caught:
            journal.warn(
                f"the trainer did not save within {seconds:.0f} s: what it has learnt since its last checkpoint is "
                "lost. A faster disk helps, or a shorter --checkpoint-seconds"
            )

    async def _say_farewell(self) -> None:
        with trio.move_on_after(FAREWELL_TIMEOUT):
            if self.leases is not None:
                await self.leases.leave()
            await self.membership.announcer.report_progress()
            await self.membership.announcer.announce(left=True)
            await self.gossip.flush()
        self.daemon.journal.say("left the run")


async def remember(daemon: Daemon, host: Host, membership: Membership) -> None:
    """Store the data for the next start: this node's count and partners, and addresses to dial."""
    while True:
        for peer in host.connected & membership.everyone:
            daemon.book.note_reached(peer, host.addresses_to_keep(peer))
        try:
            await daemon.store.put_fact(TOKENS_FACT, b"%d" % daemon.journal.state.tokens)
            await daemon.store.put_fact(PARTNERS_FACT, daemon.partners.encode())
            await daemon.book.save()
        except StoreError as error:
            daemon.journal.warn(f"{error}; trying again")
        await trio.sleep(REMEMBER_INTERVAL)


@contextlib.asynccontextmanager
async def open_member(
    daemon: Daemon, mesh: Mesh, messenger: Messenger, raw_manifest: bytes
) -> AsyncIterator[RunMember]:
    """Keep the run state, and serve newcomers, for as long as the block runs; `RunMember.take_part` does the rest.

    Raises `JoinError` unless the owner allows the run's model.
    """
    run_id = decode_manifest(raw_manifest)[1].run_id
    async with (
        open_bulk(mesh.host, run_id, mesh.shaping, mesh.connectivity) as channels,
        open_service_nursery() as nursery,
    ):
        member = make_member(daemon, mesh, messenger, raw_manifest, channels)
        mesh.traffic.needs_traffic = member.membership.num_stages > 1
        if member.pipeline is not None:
            await nursery.start(member.pipeline.run)
        await nursery.start(member.gossip.run)
        yield member


def close_gate(host: Host, manifest: Manifest, signed: SignedManifest) -> Roster | None:
    """Serve members only from now on, unless the run is open to all; return the roster, which the host's gate holds."""
    if host.gate.roster is None and (roster := manifest.roster(signed.run_id, signed.creator)) is not None:
        host.gate.close(signed.run_id, roster)
    return host.gate.roster


def make_member(
    daemon: Daemon, mesh: Mesh, messenger: Messenger, raw_manifest: bytes, channels: Channels[Any] | None
) -> RunMember:
    """Assemble a member. Its services to peers are registered with the host; nothing runs yet."""
    settings = daemon.settings
    manifest, signed = decode_manifest(raw_manifest)
    require_trainable_model(manifest, settings.allow_model, by_loop=daemon.door is not None)
    if settings.start is not None and manifest.start is None:
        raise JoinError(f"--start {settings.start}: this run starts from its seed, not from a checkpoint")
    key, store, journal, host = daemon.key, daemon.store, daemon.journal, mesh.host
    run_id, author, shaping, rng = signed.run_id, host.author, mesh.shaping, random.Random()
    num_stages = manifest.model.num_stages
    roster = close_gate(host, manifest, signed)
    state = RunState(run_id, signed.creator, roster=roster)
    gossip = GossipService(
        state, Writer(key, run_id), host, messenger, store, rng, base_period=settings.heartbeat_seconds
    )

    credentials = None
    if roster is not None:
        credentials = Credentials(key, run_id, signed.creator, author, host.gate, roster, gossip, store, journal)
        credentials.admit_self()

    def is_paused() -> bool:
        return daemon.rest.is_on

    announcer = Announcer(
        host,
        gossip,
        journal,
        incarnation=time.time_ns() // 1_000_000,
        num_stages=num_stages,
        is_bound=settings.stage is not None,
        is_paused=is_paused,
    )
    membership = Membership(
        host,
        state,
        gossip,
        journal,
        announcer,
        daemon.partners,
        num_stages=num_stages,
        first_step=0 if manifest.start is None else manifest.start.inner_steps,
    )
    needed = [SYNC_PROTOCOL, PUSH_PROTOCOL, PAIRING_PROTOCOL, EXCHANGE_PROTOCOL]
    releases = ReleaseWatch(host, journal, [*needed, ACTIVATIONS_PROTOCOL] if num_stages > 1 else needed)
    membership.apart = lambda: releases.apart
    state.places.protect(membership.partners.__contains__)
    files = WeightFiles(settings, manifest)
    conditions = Conditions(host, run_id, shaping, channels, Room(settings.home, files.disk))
    downloads = Downloads(host, conditions, files, membership, journal)
    weights = Weights(key, downloads)
    start = None if manifest.start is None else Start(manifest.start, downloads)
    exchanges = ExchangeService(host, channels, shaping)

    audits = starts = None
    if manifest.audits:
        starts = Starts(settings.checkpoints / "replays", key, run_id)
        audits = AuditKeeper(author, manifest.audits, gossip, downloads, starts, daemon.rest)

    async def find(question: Question) -> Holding | None:
        found = (start and start.find(question)) or (starts and starts.find(question))
        return found or await weights.giving.find(question)

    serve_manifest(host, run_id, raw_manifest)
    BlockService(conditions, find, exchanges).register()
    SketchService(host, run_id, weights.giving.find_own).register()
    pipeline = leases = None
    if num_stages > 1:
        links = Links(host, manifest, run_id, shaping, is_neighbour=membership.is_in_stage, channels=channels)
        pipeline = PipelineService(links, messenger, manifest, author, rng, journal.warn)
    if manifest.data.epochs:
        leases = LeaseKeeper(
            manifest, author, state, gossip, store, journal, others=membership, liveness=gossip.liveness
        )
    supervisor = Supervisor(manifest.inner.batch_size, settings.microbatch, is_cut=num_stages > 1)
    preparation = Preparation(daemon, author, run_id, manifest, membership, weights, start, supervisor)
    config = LoopConfig(
        run_id=run_id,
        manifest=manifest,
        max_rounds=settings.max_rounds,
        checkpoint_seconds=settings.checkpoint_seconds,
        validate_every=settings.validate_every,
        hung_seconds=settings.hung_seconds if daemon.door is None else math.inf,  # a person may look at each step
    )
    notices = NoticeBoard(signed.creator, author, gossip, daemon.rest, journal, is_ignored=settings.ignore_notices)
    surroundings = Surroundings(
        prepare=preparation.prepare,
        on_saved=weights.giving.note_saved,
        is_suspected=membership.is_suspected,
        note_suspicion=announcer.note_suspicion,
        current_round=membership.current_round,
        partners_round=membership.partners_round,
        on_committed=membership.partners.note,
        audits=audits,
        door=daemon.door,
        stopped=notices.stopped,
        may_spend=shaping.may_spend,
    )
    loop = TrainingLoop(config, Pairing(author, manifest.rounds, rng, manifest.outer.fragments), supervisor)
    training = Training(loop, messenger, exchanges, journal, daemon.rest, surroundings, pipeline, leases)
    stage_record = StageRecord(daemon, host, run_id, membership)
    stages = StageKeeper(
        membership,
        weights,
        journal,
        author,
        wanted=settings.stage,
        heartbeat_seconds=settings.heartbeat_seconds,
        restart_trainer=training.restart_trainer,
        on_moved=stage_record.note,
    )
    return RunMember(
        daemon,
        mesh,
        preparation,
        gossip,
        membership,
        weights,
        training,
        stages,
        stage_record,
        pipeline,
        leases,
        audits,
        notices,
        releases,
        credentials,
    )

"""The assembly of a member: its parts are made here in the order in which they need each other; nothing runs yet.

gossip (run state) -> membership -> weights -> training (trainer, pairing, exchanges) -> stages
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.rounds.pairing import Pairing
from farandole.protocol.rounds.training_loop import LoopConfig, TrainingLoop
from farandole.protocol.run.invitations import Roster
from farandole.protocol.run.manifest import Manifest, SignedManifest, decode_manifest
from farandole.protocol.state.antientropy import PROTOCOL as SYNC_PROTOCOL
from farandole.protocol.state.push import PROTOCOL as PUSH_PROTOCOL
from farandole.protocol.state.state import RunState
from farandole.protocol.state.writer import Writer
from farandole.protocol.trainer.supervisor import Supervisor

from ..base.errors import JoinError
from ..base.nurseries import open_service_nursery
from ..bulk.exchange_service import EXCHANGE_PROTOCOL, ExchangeService
from ..bulk.negotiation import BulkService, open_bulk
from ..join.bootstrap import serve_manifest
from ..loop.activation_links import ACTIVATIONS_PROTOCOL, Links
from ..loop.audit_service import AuditService
from ..loop.lease_service import LeaseService
from ..loop.pipeline_service import PipelineService
from ..loop.rest_service import NoticeBoard
from ..loop.stage_service import StageService
from ..loop.training import PAIRING_PROTOCOL, Surroundings, Training
from ..mesh.host import Host
from ..state.connections import ReleaseWatch
from ..state.credentials import Credentials
from ..state.gossip import GossipService
from ..state.membership import Announcer, Membership
from ..state.messenger import Messenger
from ..store.disk_space import Room, WeightFiles
from ..store.run_file import require_trainable_model
from ..transfers.donor import Conditions
from ..transfers.fetch import Downloads
from ..transfers.holdings import Holding, Starts
from ..transfers.serve import BlockService
from ..transfers.sketches import SketchService
from ..transfers.start import Start
from ..transfers.weights import Weights
from .parts import Daemon, Mesh
from .preparation import Preparation
from .run_member import RunMember
from .stage_record import StageRecord


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
    daemon: Daemon, mesh: Mesh, messenger: Messenger, raw_manifest: bytes, channels: BulkService | None
) -> RunMember:
    """Assemble a member. Its services to peers are registered with the host; nothing runs yet."""
    manifest, signed = decode_manifest(raw_manifest)
    require_trainable_model(manifest, daemon.settings.allow_model, by_loop=daemon.door is not None)
    if daemon.settings.start is not None and manifest.start is None:
        raise JoinError(f"--start {daemon.settings.start}: this run starts from its seed, not from a checkpoint")
    assembly = _Assembly(daemon, mesh, messenger, channels, manifest, signed, random.Random())
    roster = close_gate(mesh.host, manifest, signed)
    gossip = assembly.gossip(roster)
    credentials = None if roster is None else assembly.credentials(roster, gossip)
    notices = NoticeBoard(
        signed.creator,
        mesh.host.author,
        gossip,
        daemon.rest,
        daemon.journal,
        is_ignored=daemon.settings.ignore_notices,
    )
    releases = assembly.releases()
    membership = assembly.membership(gossip, releases)
    store = assembly.store(membership)
    audits = assembly.audits(gossip, store)
    exchanges = ExchangeService(mesh.host, channels, mesh.shaping)
    serve_manifest(mesh.host, signed.run_id, raw_manifest)
    assembly.serve_blocks(store, audits, exchanges)
    pipeline = assembly.pipeline(membership) if membership.num_stages > 1 else None
    leases = assembly.leases(gossip, membership) if manifest.data.epochs else None
    preparation = assembly.preparation(membership, store)
    training = assembly.training(preparation, exchanges, notices, audits, pipeline, leases)
    stage_record = StageRecord(daemon, mesh.host, signed.run_id, membership)
    return RunMember(
        daemon=daemon,
        mesh=mesh,
        preparation=preparation,
        gossip=gossip,
        membership=membership,
        weights=store.weights,
        training=training,
        stages=assembly.stages(preparation, training, stage_record),
        stage_record=stage_record,
        pipeline=pipeline,
        leases=leases,
        audits=audits,
        notices=notices,
        releases=releases,
        credentials=credentials,
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where weights come from, and how they are moved."""

    conditions: Conditions
    downloads: Downloads
    weights: Weights
    start: Start | None


@dataclass(frozen=True, slots=True)
class _Assembly:
    """What all parts of a member need; each method makes one part from those before it."""

    daemon: Daemon
    mesh: Mesh
    messenger: Messenger
    channels: BulkService | None
    manifest: Manifest
    signed: SignedManifest
    rng: random.Random

    @property
    def _num_stages(self) -> int:
        return self.manifest.model.num_stages

    def gossip(self, roster: Roster | None) -> GossipService:
        state = RunState(self.signed.run_id, self.signed.creator, roster=roster)
        return GossipService(
            state,
            Writer(self.daemon.key, self.signed.run_id),
            self.mesh.host,
            self.messenger,
            self.daemon.store,
            self.rng,
            base_period=self.daemon.settings.heartbeat_seconds,
        )

    def credentials(self, roster: Roster, gossip: GossipService) -> Credentials:
        daemon, host, signed = self.daemon, self.mesh.host, self.signed
        made = Credentials(
            daemon.key,
            signed.run_id,
            signed.creator,
            host.author,
            host.gate,
            roster,
            gossip,
            daemon.store,
            daemon.journal,
        )
        made.admit_self()
        return made

    def releases(self) -> ReleaseWatch:
        needed = [SYNC_PROTOCOL, PUSH_PROTOCOL, PAIRING_PROTOCOL, EXCHANGE_PROTOCOL]
        if self._num_stages > 1:
            needed.append(ACTIVATIONS_PROTOCOL)
        return ReleaseWatch(self.mesh.host, self.daemon.journal, needed)

    def membership(self, gossip: GossipService, releases: ReleaseWatch) -> Membership:
        daemon, host, start = self.daemon, self.mesh.host, self.manifest.start
        announcer = Announcer(
            host,
            gossip,
            daemon.journal,
            incarnation=time.time_ns() // 1_000_000,
            num_stages=self._num_stages,
            is_bound=daemon.settings.stage is not None,
            is_paused=lambda: daemon.rest.is_on,
        )
        made = Membership(
            host,
            gossip.state,
            gossip,
            daemon.journal,
            announcer,
            daemon.partners,
            num_stages=self._num_stages,
            first_step=0 if start is None else start.inner_steps,
        )
        made.apart = lambda: releases.apart
        if (rounds := self.manifest.rounds).far_every > 1:
            made.is_near = partial(host.connections.is_within, seconds=rounds.near_ms / 1_000)
        gossip.state.places.protect(made.partners.__contains__)
        return made

    def store(self, membership: Membership) -> _Stored:
        host, settings = self.mesh.host, self.daemon.settings
        files = WeightFiles(settings, self.manifest)
        room = Room(settings.home, files.disk)
        conditions = Conditions(host, self.signed.run_id, self.mesh.shaping, self.channels, room)
        downloads = Downloads(host, conditions, files, membership, self.daemon.journal)
        start = None if self.manifest.start is None else Start(self.manifest.start, downloads)
        return _Stored(conditions, downloads, Weights(self.daemon.key, downloads), start)

    def audits(self, gossip: GossipService, store: _Stored) -> AuditService | None:
        if not self.manifest.audits:
            return None
        starts = Starts(self.daemon.settings.checkpoints / "replays", self.daemon.key, self.signed.run_id)
        author = self.mesh.host.author
        return AuditService(author, self.manifest.audits, gossip, store.downloads, starts, self.daemon.rest)

    def serve_blocks(self, store: _Stored, audits: AuditService | None, exchanges: ExchangeService) -> None:
        provider, start = store.weights.provider, store.start

        async def find(question: BlockQuestion) -> Holding | None:
            found = (start and start.find(question)) or (audits and audits.starts.find(question))
            return found or await provider.find(question)

        BlockService(store.conditions, find, exchanges).register()
        SketchService(self.mesh.host, self.signed.run_id, provider.find_own).register()

    def pipeline(self, membership: Membership) -> PipelineService:
        host = self.mesh.host
        links = Links(
            host,
            self.manifest,
            self.signed.run_id,
            self.mesh.shaping,
            is_neighbour=membership.is_in_stage,
            channels=self.channels,
        )
        return PipelineService(links, self.messenger, self.manifest, host.author, self.rng, self.daemon.journal.warn)

    def leases(self, gossip: GossipService, membership: Membership) -> LeaseService:
        return LeaseService(
            self.manifest,
            self.mesh.host.author,
            gossip.state,
            gossip,
            self.daemon.store,
            self.daemon.journal,
            others=membership,
            liveness=gossip.liveness,
        )

    def preparation(self, membership: Membership, store: _Stored) -> Preparation:
        supervisor = Supervisor(self.manifest.inner.batch_size, is_cut=self._num_stages > 1)
        return Preparation(
            self.daemon,
            self.mesh.host.author,
            self.signed.run_id,
            self.manifest,
            membership,
            store.weights,
            store.start,
            supervisor,
        )

    def training(
        self,
        preparation: Preparation,
        exchanges: ExchangeService,
        notices: NoticeBoard,
        audits: AuditService | None,
        pipeline: PipelineService | None,
        leases: LeaseService | None,
    ) -> Training:
        daemon, membership, provider = self.daemon, preparation.membership, preparation.weights.provider
        settings, manifest, by_person = daemon.settings, self.manifest, daemon.door is not None
        config = LoopConfig(
            run_id=self.signed.run_id,
            manifest=manifest,
            max_rounds=settings.max_rounds,
            checkpoint_seconds=settings.checkpoint_seconds,
            validate_every=settings.validate_every,
            hung_seconds=math.inf if by_person else settings.hung_seconds,  # a person may look at each step
        )
        surroundings = Surroundings(
            prepare=preparation.prepare,
            on_saved=provider.note_saved,
            is_suspected=membership.is_suspected,
            is_near=membership.is_near,
            note_suspicion=membership.announcer.note_suspicion,
            current_round=membership.current_round,
            partners_round=membership.partners_round,
            on_committed=membership.partners.note,
            audits=audits,
            door=daemon.door,
            stopped=notices.stopped,
            may_spend=self.mesh.shaping.may_spend,
        )
        pairing = Pairing(self.mesh.host.author, manifest.rounds, self.rng, manifest.outer.fragments)
        loop = TrainingLoop(config, pairing, preparation.supervisor)
        return Training(loop, self.messenger, exchanges, daemon.journal, daemon.rest, surroundings, pipeline, leases)

    def stages(self, preparation: Preparation, training: Training, record: StageRecord) -> StageService:
        settings = self.daemon.settings
        return StageService(
            preparation.membership,
            preparation.weights,
            self.daemon.journal,
            self.mesh.host.author,
            wanted=settings.stage,
            heartbeat_seconds=settings.heartbeat_seconds,
            restart_trainer=training.restart_trainer,
            on_moved=record.note,
        )

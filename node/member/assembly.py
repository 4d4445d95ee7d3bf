"""The assembly of a member: its parts are made here in the order in which they need each other; nothing runs yet.

gossip (run state) -> membership -> weights -> training (trainer, pairing, exchanges) -> stages
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import AsyncIterator

from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.rounds.pairing import Pairing
from farandole.protocol.rounds.trainer_rounds import LoopConfig
from farandole.protocol.rounds.training_loop import TrainingLoop
from farandole.protocol.run.manifest import Manifest, SignedManifest, decode_manifest
from farandole.protocol.run.roster import Roster
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
from ..loop.audit_service import AuditService
from ..loop.lease_service import LeaseService
from ..loop.pipeline_service import ACTIVATIONS_PROTOCOL, PipelineService
from ..loop.rest_service import NoticeBoard
from ..loop.stage_service import StageService
from ..loop.training import PAIRING_PROTOCOL, Training
from ..mesh.host import Host
from ..state.connections import ReleaseWatch
from ..state.credentials import Credentials
from ..state.gossip import GossipService
from ..state.membership import Announcer, Membership
from ..state.messenger import Messenger
from ..store.disk_space import Room, WeightFiles
from ..transfers.giver import BlockService, Holding
from ..transfers.receiver import Conditions, Downloads
from ..transfers.sketches import SketchService
from ..transfers.start import Start
from ..transfers.weights import Weights
from .parts import Daemon, Mesh
from .run_member import RunMember


@contextlib.asynccontextmanager
async def open_member(
    daemon: Daemon, mesh: Mesh, messenger: Messenger, raw_manifest: bytes
) -> AsyncIterator[RunMember]:
    """Keep the run state, and serve newcomers, for as long as the block runs; `RunMember.take_part` does the rest."""
    run_id = decode_manifest(raw_manifest)[1].run_id
    async with (
        open_bulk(mesh.host, run_id, mesh.shaping, mesh.connectivity) as channels,
        open_service_nursery() as nursery,
    ):
        member = make_member(daemon, mesh, messenger, raw_manifest, channels)
        mesh.traffic.needs_traffic = member.membership.num_stages > 1
        if member.training.pipeline is not None:
            await nursery.start(member.training.pipeline.run)
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
    settings, host, journal, run_id = daemon.settings, mesh.host, daemon.journal, signed.run_id
    if settings.start is not None and manifest.start is None:
        raise JoinError(f"--start {settings.start}: this run starts from its seed, not from a checkpoint")
    is_cut, rng = manifest.model.num_stages > 1, random.Random()
    serve_manifest(host, run_id, raw_manifest)
    roster = close_gate(host, manifest, signed)
    state = RunState(run_id, signed.creator, roster=roster)
    writer = Writer(daemon.key, run_id)
    gossip = GossipService(state, writer, host, messenger, daemon.store, rng, base_period=settings.heartbeat_seconds)
    gossip.on_deed = journal.blame
    journal.run = state
    credentials = None
    if roster is not None:
        credentials = Credentials(
            daemon.key, run_id, signed.creator, host.author, host.gate, roster, gossip, daemon.store, journal
        )
        credentials.admit_self()
    is_ignored = settings.ignore_notices
    notices = NoticeBoard(host.author, gossip, daemon.rest, journal, is_ignored=is_ignored)
    needed = [SYNC_PROTOCOL, PUSH_PROTOCOL, PAIRING_PROTOCOL, EXCHANGE_PROTOCOL, *([ACTIVATIONS_PROTOCOL] * is_cut)]
    releases = ReleaseWatch(host, journal, needed)
    announcer = Announcer(
        host,
        gossip,
        journal,
        incarnation=time.time_ns() // 1_000_000,
        num_stages=manifest.model.num_stages,
        is_bound=settings.stage is not None,
        is_paused=lambda: daemon.rest.is_on,
        name=settings.name or "",
    )
    membership = Membership(
        host,
        state,
        gossip,
        journal,
        announcer,
        daemon.partners,
        num_stages=manifest.model.num_stages,
        first_step=0 if manifest.start is None else manifest.start.inner_steps,
    )
    membership.apart = lambda: releases.apart
    state.places.protect(daemon.partners.__contains__)

    files = WeightFiles(settings, manifest)
    conditions = Conditions(host, run_id, mesh.shaping, channels, Room(settings.home, files.disk))
    downloads = Downloads(host, conditions, files, membership, journal)
    start = None if manifest.start is None else Start(manifest.start, downloads)
    weights = Weights(daemon.key, downloads)
    audits = None
    if manifest.audits:
        audits = AuditService(host.author, manifest.audits, gossip, downloads, weights.provider, daemon.rest)

    async def find(question: BlockQuestion) -> Holding | None:
        return (start and start.find(question)) or await weights.provider.find(question)

    exchanges = ExchangeService(host, channels, mesh.shaping)
    BlockService(conditions, find, exchanges)
    SketchService(host, run_id, weights.provider.find_own)

    supervisor = Supervisor(manifest.inner.batch_size, is_cut=is_cut)
    pipeline = leases = None
    if is_cut:
        pipeline = PipelineService(host, messenger, manifest, run_id, mesh.shaping, channels, rng, journal.warn)
    if manifest.data.epochs:
        leases = LeaseService(manifest, host.author, gossip, daemon.store, journal, membership)
    config = LoopConfig(
        run_id=run_id,
        manifest=manifest,
        max_rounds=settings.max_rounds,
        checkpoint_seconds=settings.checkpoint_seconds,
        validate_every=settings.validate_every,
        # A person may look at each step of their own loop.
        hung_seconds=settings.hung_seconds if daemon.door is None else math.inf,
    )
    loop = TrainingLoop(config, Pairing(host.author, manifest.rounds, rng, manifest.outer.fragments), supervisor)
    training = Training(
        loop,
        messenger,
        exchanges,
        journal,
        daemon.rest,
        membership,
        weights.provider,
        mesh.shaping,
        notices.stopped,
        pipeline,
        leases,
        audits,
        daemon.door,
    )
    return RunMember(
        daemon=daemon,
        mesh=mesh,
        manifest=manifest,
        gossip=gossip,
        membership=membership,
        weights=weights,
        start=start,
        supervisor=supervisor,
        training=training,
        stages=StageService(membership, weights, host.author, daemon.store, journal, settings, training),
        notices=notices,
        releases=releases,
        credentials=credentials,
    )

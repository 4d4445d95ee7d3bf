"""A node that knows its run: its run state, its training, its service to newcomers, its farewell."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from typing import Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol import trainer_messages as messages
from farandole.protocol.block_transfer import Question
from farandole.protocol.entries import CheckpointNotice, Kind, Progress
from farandole.protocol.identity import public_bytes
from farandole.protocol.manifest import decode_manifest
from farandole.protocol.pairing import Pairing
from farandole.protocol.records import run_key, shard_key
from farandole.protocol.state import RunState
from farandole.protocol.supervisor import Supervisor
from farandole.protocol.training_loop import LoopConfig, TrainingLoop
from farandole.protocol.writer import Writer

from .base.bandwidth import Shaping
from .base.errors import JoinError
from .base.settings import NodeSettings
from .bulk.exchange_service import ExchangeService
from .bulk.negotiation import open_bulk
from .join.address_book import AddressBook
from .join.bootstrap import JOIN_TIMEOUT, Target
from .join.manifests import ManifestService
from .join.reconnect import Reconnector
from .join.start import Start
from .join.weights import Weights
from .loop.lease_service import LeaseKeeper
from .loop.pause.pause import Rest
from .loop.stages.pipeline import PipelineService
from .loop.stages.stage_service import StageKeeper
from .loop.traffic.traffic_service import TrafficKeeper
from .loop.training import Surroundings, Training
from .mesh.host import Host
from .mesh.reach.connectivity import Connectivity
from .state.announcer import Announcer
from .state.connections import Connections
from .state.gossip import GossipService
from .state.membership import Membership
from .state.messenger import Messenger
from .state.store import Store, StoreError
from .status.journal import Journal
from .store.holdings import Holding
from .store.own_model import require_allowed_model
from .store.serve import BlockService
from .trainer.trainer import TrainerError
from .ui.reporting import Reporter

# Leaving: the trainer ends its round and saves, the farewell goes round.
LEAVE_TIMEOUT: Final = 15.0
# For the save of a large model, by a disk that writes so many bytes a second; in all no longer than service managers
# wait (`farandole.node.app.service.service.STOP_SECONDS`) before they kill.
SLOW_DISK: Final = 100e6
MAX_LEAVE_TIMEOUT: Final = 45.0
FAREWELL_TIMEOUT: Final = 2.0
# A member that has just begun serves its run state within a second.
SYNC_RETRY: Final = 1.0
# Short, because a node that is killed soon after it began a run has no invite to come back with.
REMEMBER_INTERVAL: Final = 10.0
TOKENS_FACT: Final = "tokens"
STAGE_FACT: Final = "stage"
MICROBATCH_FACT: Final = "microbatch"


def leave_timeout(saved_bytes: int) -> float:
    """How long a trainer whose checkpoints have so many bytes may take to end, in seconds."""
    return min(MAX_LEAVE_TIMEOUT, LEAVE_TIMEOUT + saved_bytes / SLOW_DISK)


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a node has before it knows its run."""

    key: Ed25519PrivateKey
    store: Store
    book: AddressBook
    journal: Journal
    host: Host
    messenger: Messenger
    shaping: Shaping
    rest: Rest


class RunMember:
    """This node in its run. Made once the manifest is known; raises `JoinError` unless its owner allows the model."""

    def __init__(self, settings: NodeSettings, parts: NodeParts, raw_manifest: bytes) -> None:
        manifest, signed = decode_manifest(raw_manifest)
        require_allowed_model(manifest, settings.allow_model)
        rng = random.Random()
        key, store, journal, host = parts.key, parts.store, parts.journal, parts.host
        messenger, shaping, rest = parts.messenger, parts.shaping, parts.rest
        author = public_bytes(key)
        self.run_id = signed.run_id
        self._settings = settings
        self._parts = parts
        self._journal = journal
        self._manifest = manifest
        self._state = RunState(self.run_id, signed.creator)
        self._moved = trio.Event()
        self._gossip = GossipService(
            self._state,
            Writer(key, self.run_id),
            host,
            messenger,
            store,
            rng,
            base_period=settings.heartbeat_seconds,
        )
        is_cut = manifest.model.num_stages > 1

        def is_paused() -> bool:
            return rest.is_on

        announcer = Announcer(
            host,
            self._gossip,
            journal,
            incarnation=time.time_ns() // 1_000_000,
            num_stages=manifest.model.num_stages,
            is_bound=settings.stage is not None,
            is_paused=is_paused,
        )
        self.membership = membership = Membership(
            host,
            self._state,
            self._gossip,
            journal,
            announcer,
            num_stages=manifest.model.num_stages,
            is_paused=is_paused,
            first_step=0 if manifest.start is None else manifest.start.inner_steps,
        )
        self.weights = Weights(settings, key, journal, host, membership, manifest, self.run_id, shaping)
        self._exchanges = ExchangeService(host, shaping=shaping)
        self._pipeline: PipelineService | None = None
        if is_cut:
            self._pipeline = PipelineService(
                host, messenger, manifest, self.run_id, author, shaping, rng, is_neighbour=membership.is_in_stage
            )
        self._leases: LeaseKeeper | None = None
        if manifest.data.epochs:
            self._leases = LeaseKeeper(
                manifest,
                author,
                self._state,
                self._gossip,
                store,
                journal,
                origins=membership.origins,
                liveness=self._gossip.liveness,
            )
        self._supervisor = Supervisor(manifest.inner.batch_size, settings.microbatch, is_cut=is_cut)
        loop_config = LoopConfig(
            run_id=self.run_id,
            manifest=manifest,
            max_rounds=settings.max_rounds,
            checkpoint_seconds=settings.checkpoint_seconds,
            validate_every=settings.validate_every,
            hung_seconds=settings.hung_seconds,
        )
        pairing = Pairing(author, manifest.rounds, rng, manifest.outer.fragments)
        self.training = Training(
            TrainingLoop(loop_config, pairing, self._supervisor),
            messenger,
            self._exchanges,
            journal,
            rest,
            Surroundings(
                prepare=self._prepare,
                on_saved=self.weights.note_saved,
                on_refused=announcer.accuse,
                current_round=membership.current_round,
                may_spend=shaping.may_spend,
            ),
            self._pipeline,
            self._leases,
        )
        self._connections = Connections(host, membership, self._gossip.liveness, self.training.lose_peer)
        self._keeper = StageKeeper(
            membership,
            self.weights,
            journal,
            author,
            wanted=settings.stage,
            heartbeat_seconds=settings.heartbeat_seconds,
            restart_trainer=self.training.restart_trainer,
            on_moved=self._note_stage,
        )
        ManifestService(self.run_id, raw_manifest).register(host)
        self._start: Start | None = None
        if manifest.start is not None:
            self._start = Start(settings, manifest, manifest.start, journal, host, self.weights, self.membership)
        elif settings.start is not None:
            raise JoinError(f"--start {settings.start}: this run starts from its seed, not from a checkpoint")
        self._blocks = BlockService(self.run_id, self._find, shaping, self._exchanges)
        self._blocks.register(host)

    async def _find(self, question: Question) -> Holding | None:
        """A checkpoint that is asked for."""
        found = None if self._start is None else self._start.find(question)
        return found or await self.weights.find(question)

    def peers(self) -> frozenset[bytes]:
        """The live members."""
        return self.membership.everyone

    def checkpoint_notices(self) -> list[tuple[bytes, CheckpointNotice]]:
        """What this node and the live members say that they hold."""
        there = {*self.peers(), self._parts.host.author}
        return [
            (entry.author, entry.payload) for entry in self._state.entries(Kind.CHECKPOINT) if entry.author in there
        ]

    def reporter(self, started_at: float, connectivity: Connectivity, traffic: TrafficKeeper) -> Reporter:
        """What makes this node's status from now on."""
        return Reporter(
            self._parts.host,
            self._journal,
            self.run_id,
            self._manifest.name,
            started_at,
            self._parts.shaping,
            connectivity,
            self._state,
            self._gossip.liveness,
            self._pipeline,
            self._leases,
            self.membership.nodes_of_stages,
            traffic,
        )

    async def run(self, target: Target, is_leaving: trio.Event) -> None:
        """Take part until told to leave. Raises `JoinError` or `TrainerError`."""
        async with open_bulk(self._parts.host, self._parts.shaping) as channels, trio.open_nursery() as nursery:
            self._exchanges.channels = self.weights.channels = self._blocks.channels = channels
            if self._pipeline is not None:
                self._pipeline.channels = channels
                await nursery.start(self._pipeline.run)
            await nursery.start(self._gossip.run)
            if self._start is not None:
                await self._start.open()
                nursery.start_soon(self._start.run)
            await self.restore_counters()
            await self._sync_state(may_begin=target.manifest is not None)
            self.membership.refresh()
            if self._is_cut:
                await self._keeper.begin(await self._stage_before())
            else:
                await self.membership.announcer.announce()
            await self.membership.announcer.beat()
            nursery.start_soon(self.membership.run)
            nursery.start_soon(self.membership.announcer.run)
            nursery.start_soon(self._connections.run)
            nursery.start_soon(self._follow_members)
            nursery.start_soon(self._follow_wishes)
            nursery.start_soon(self._provide)
            if self._leases is not None:
                await self._leases.restore()
                nursery.start_soon(self._leases.run)
            if self._is_cut:
                nursery.start_soon(self._keeper.run)
            nursery.start_soon(self.weights.run)
            reconnector = Reconnector(
                self._parts.host, self.run_id, self._parts.book, target, self.peers, self._journal
            )
            nursery.start_soon(reconnector.run)
            nursery.start_soon(self.remember)
            failure = await self._train(is_leaving)
            await self._say_farewell()
            with contextlib.suppress(StoreError):
                await self._parts.book.save(is_last=True)
            if failure is not None:
                raise failure
            nursery.cancel_scope.cancel()

    async def _follow_members(self) -> None:
        """Tell the training and the pipeline who is live, whenever that changes."""
        membership, told = self.membership, None
        while True:
            if membership.live != told:
                told = membership.live
                self.training.set_peers(told)
            if self._pipeline is not None:
                self._pipeline.set_nodes(membership.nodes_of_stages())
            await membership.changed()

    async def _follow_wishes(self) -> None:
        """Have the trainer save whenever a peer wants newer weights than there are."""
        while True:
            await self.weights.save_wanted()
            self.training.save_soon()

    async def _train(self, is_leaving: trio.Event) -> TrainerError | None:
        """Until told to leave, or until no trainer can be had: then why."""
        failure = None

        async def run_training() -> None:
            nonlocal failure
            try:
                await self.training.run()
            except TrainerError as error:
                failure = error
                is_leaving.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_training)
            await is_leaving.wait()
            await self.end_training()
            nursery.cancel_scope.cancel()
        return failure

    async def _sync_state(self, *, may_begin: bool) -> None:
        """Learn what the run is doing. Who brought the manifest may begin the run; who got it from a member may not.

        Raises `JoinError`.
        """
        self._journal.announce("joining", "syncing the run state", "three members' run state")
        with trio.move_on_after(JOIN_TIMEOUT):
            while await self._gossip.join() == 0 and not may_begin:
                self._journal.say("no member gave its run state; trying again")
                await trio.sleep(SYNC_RETRY)
            return
        raise JoinError(
            f"step 3, the run state: members were found, but none gave its run state within {JOIN_TIMEOUT:g} s. "
            "Try again later, or with a newer invite."
        )

    async def end_training(self) -> None:
        """Have the trainer save and end, in the time that its checkpoint takes."""
        self._journal.announce("leaving", "leaving: the trainer saves", "the trainer")
        seconds = leave_timeout(self.weights.max_bytes(self.membership.stage))
        with trio.move_on_after(seconds) as patience:
            await self.training.leave()
        if patience.cancelled_caught:
            self._journal.warn(
                f"the trainer did not save within {seconds:.0f} s: what it has learnt since its last checkpoint is "
                "lost. A faster disk helps, or a shorter --checkpoint-seconds"
            )

    async def _say_farewell(self) -> None:
        with trio.move_on_after(FAREWELL_TIMEOUT):
            if self._leases is not None:
                await self._leases.leave()
            await self.membership.announcer.report_progress()
            await self.membership.announcer.announce(left=True)
            await self._gossip.flush()
        self._journal.say("left the run")

    # Training

    async def _prepare(self) -> messages.Prepare:
        """Put weights in place; returns what the next trainer is told first."""
        await self._before_trainer()
        settings, stage = self._settings, self.membership.stage
        files = self.weights.file_stage(stage)
        self.weights.trainer_stage = stage
        return messages.Prepare(
            run_id=self.run_id,
            author=self._parts.host.author,
            manifest=msgspec.msgpack.encode(self._manifest),
            data=[str(path) for path in settings.data],
            tokenizer=str(settings.tokenizer) if settings.tokenizer else None,
            device=settings.device,
            threads=settings.threads,
            disk=round(settings.disk * 1e9),
            checkpoint_bytes=self.weights.max_bytes(stage),
            gpu_memory=round(settings.gpu_memory * 1e9),
            slow=settings.slow,
            step_seconds=settings.step_seconds,
            checkpoints=str(settings.checkpoints),
            fetched=str(settings.fetched(files)),
            start=str((self._start and self._start.path_of(stage)) or ""),
            stage=stage,
            microbatch=self._supervisor.microbatch,
            data_field=settings.data_field,
            streams=settings.stream,
            cache=str(settings.tokens),
            allowed_models=settings.allow_model,
            outgoing=0,
            incoming=0,
        )

    async def restore_counters(self) -> None:
        """Take up the counts of earlier lives: own tokens, as stored or as last told the run, and the round.

        The round goes into the first heartbeat: who hears it must not take the run for one that begins.
        """
        stored = await self._parts.store.get_fact(TOKENS_FACT)
        told = self._state.payload(self._parts.host.author, Progress)
        self._journal.update(tokens=max(int(stored or 0), told.tokens if told else 0))
        self._supervisor.microbatch = self._supervisor.microbatch or await self._microbatch_before()
        self._journal.update(round=max(0, await self.weights.own_round() or 0))

    async def _microbatch_before(self) -> int:
        """What fitted into memory in earlier lives, on the same device; 0 if all did."""
        device, _, size = ((await self._parts.store.get_fact(MICROBATCH_FACT)) or b"").rpartition(b" ")
        return int(size) if device == self._settings.device.encode() else 0

    async def _remember_microbatch(self) -> None:
        try:
            fact = f"{self._settings.device} {self._supervisor.microbatch}"
            await self._parts.store.put_fact(MICROBATCH_FACT, fact.encode())
        except StoreError as error:
            self._journal.warn(f"{error}; a next life may run out of memory again")

    # The stage, where the model is cut

    @property
    def _is_cut(self) -> bool:
        return self.membership.num_stages > 1

    async def _stage_before(self) -> int | None:
        """The stage of an earlier life."""
        stored = await self._parts.store.get_fact(STAGE_FACT)
        return None if stored is None else int(stored)

    async def _note_stage(self, stage: int) -> None:
        """This node has that stage now: its files and its DHT record follow."""
        try:
            await self._parts.store.put_fact(STAGE_FACT, b"%d" % stage)
        except StoreError as error:
            self._journal.warn(f"{error}; a next life may begin with another stage")
        for other in range(self.membership.num_stages):
            if other != stage:
                self._parts.host.withdraw(shard_key(self.run_id, other))
        self._moved.set()

    async def _before_trainer(self) -> None:
        if self._is_cut:
            await self._keeper.wait_quiet()
        elif self._supervisor.microbatch:
            await self._remember_microbatch()
        await self.weights.obtain()
        while self._start is not None and not await self.weights.is_at_hand():
            if await self._start.obtain(self.membership.stage):
                return
            await self.weights.obtain()  # it may have begun meanwhile, at nodes that have found what it starts from

    # Being found, and finding back

    async def _provide(self) -> None:
        """Announce the run and this node's shard in the DHT, until cancelled; the host announces them again."""
        await self._parts.host.provide(run_key(self.run_id))
        while True:
            self._moved = trio.Event()
            await self._parts.host.provide(shard_key(self.run_id, self.membership.stage))
            await self._moved.wait()

    async def remember(self) -> None:
        """Keep on disk what a next life needs: this node's count, and addresses for when no bootstrap peer answers."""
        while True:
            for peer in self._parts.host.connected & self.membership.everyone:
                self._parts.book.note_reached(peer, self._parts.host.addresses_of(peer))
            try:
                await self._parts.store.put_fact(TOKENS_FACT, b"%d" % self._journal.state.tokens)
                await self._parts.book.save()
            except StoreError as error:
                self._journal.warn(f"{error}; trying again")
            await trio.sleep(REMEMBER_INTERVAL)

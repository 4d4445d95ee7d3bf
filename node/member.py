"""A node that knows its run: its run state, its training, its service to newcomers, its farewell."""

from __future__ import annotations

import random
import time
from typing import Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.entries import Progress
from farandole.protocol.identity import public_bytes, short_name
from farandole.protocol.manifest import Manifest, decode_manifest
from farandole.protocol.pairing import Pairing
from farandole.protocol.records import run_key, shard_key
from farandole.protocol.state import RunState
from farandole.protocol.transfers import CheckpointHeader, max_checkpoint_bytes
from farandole.protocol.writer import Writer
from farandole.training.presets import num_parameters

from . import trainer_messages as messages
from .board import Board
from .bulk import open_bulk
from .conversion import training_configs
from .errors import PeerUnreachableError
from .exchange import ExchangeService
from .gossip import GossipService
from .host import Host
from .joining import JOIN_TIMEOUT, JoinError, Target, dial
from .membership import STAGE, Membership
from .messenger import Messenger
from .reporting import Reporter
from .round_session import MAX_ROUNDS_BEHIND, RoundsConfig
from .rounds import Rounds
from .settings import NodeSettings
from .shaping import Shaping
from .store import Store, StoreError
from .transfers import SavedCheckpoint, TransferService, fetch_checkpoint, saved_round

# Leaving: the trainer ends its round and saves, the farewell goes round.
LEAVE_TIMEOUT: Final = 15.0
FAREWELL_TIMEOUT: Final = 2.0
# How long a newcomer to a run that is under way looks for somebody who gives it weights.
WEIGHTS_TIMEOUT: Final = 120.0
WEIGHTS_RETRY: Final = 2.0
# A member that has just begun serves its run state within a second.
SYNC_RETRY: Final = 1.0
# A newcomer that asks for weights waits for the answer's header (`transfers.ANSWER_TIMEOUT`); a save must be shorter.
FRESH_SAVE_TIMEOUT: Final = 6.0
# A node without any connection dials whom it knows, ever less often.
ISOLATION_INTERVAL: Final = 5.0
MAX_ISOLATION_INTERVAL: Final = 60.0
# Short, because a node that is killed soon after it began a run has no invite to come back with.
REMEMBER_INTERVAL: Final = 10.0
TOKENS_FACT: Final = "tokens"


class RunMember:
    """This node in its run. Made once the manifest is known."""

    def __init__(
        self,
        settings: NodeSettings,
        key: Ed25519PrivateKey,
        store: Store,
        board: Board,
        host: Host,
        messenger: Messenger,
        manifest: Manifest,
        raw_manifest: bytes,
        shaping: Shaping,
    ) -> None:
        signed = decode_manifest(raw_manifest)[1]
        rng = random.Random()
        author = public_bytes(key)
        self.run_id = signed.run_id
        self._settings = settings
        self._store = store
        self._board = board
        self._host = host
        self._shaping = shaping
        self._manifest = manifest
        self._saved: SavedCheckpoint | None = None
        self._has_saved = trio.Event()
        self._donors_used: set[bytes] = set()
        self._state = RunState(self.run_id, signed.creator)
        self._gossip = GossipService(
            self._state,
            Writer(key, self.run_id),
            host,
            messenger,
            store,
            rng,
            base_period=settings.heartbeat_seconds,
        )
        self._exchanges = ExchangeService(host, shaping=shaping)
        self._rounds = Rounds(
            RoundsConfig(
                run_id=self.run_id,
                prepare=lambda: self._prepare_command(author),
                max_rounds=settings.max_rounds,
                checkpoint_seconds=settings.checkpoint_seconds,
                validate_every=settings.validate_every,
            ),
            manifest,
            Pairing(author, manifest.rounds, rng, manifest.outer.fragments),
            messenger,
            self._exchanges,
            board,
            before_trainer=self._obtain_weights,
            on_saved=self._note_saved,
            on_refused=lambda peer, reason, evidence: self._membership.accuse(peer, reason, evidence),
            current_round=lambda: self._membership.current_round(),
        )
        self._membership = Membership(
            host,
            self._state,
            self._gossip,
            board,
            rng,
            incarnation=time.time_ns() // 1_000_000,
            on_peers=self._rounds.set_peers,
            on_lost=self._rounds.lose_peer,
        )
        TransferService(self.run_id, raw_manifest, self._fresh_checkpoint, shaping.up).register(host)

    def reporter(self, started_at: float) -> Reporter:
        """What makes this node's status from now on."""
        return Reporter(
            self._host,
            self._board,
            self.run_id,
            self._manifest.name,
            started_at,
            self._shaping,
            self._state,
            self._gossip.liveness,
        )

    async def run(self, target: Target, is_leaving: trio.Event) -> None:
        """Take part until told to leave. Raises `JoinError` or `TrainerError`."""
        async with open_bulk(self._host, self._shaping) as self._exchanges.channels, trio.open_nursery() as nursery:
            await nursery.start(self._gossip.run)
            await self._restore_counters()
            await self._sync_state(may_begin=target.manifest is not None)
            await self._membership.announce()
            await self._membership.beat()
            self._membership.refresh()
            nursery.start_soon(self._membership.run)
            nursery.start_soon(self._provide)
            nursery.start_soon(self._end_isolation, target)
            nursery.start_soon(self._remember)
            async with trio.open_nursery() as training:
                training.start_soon(self._rounds.run)
                await is_leaving.wait()
                await self._end_training()
                training.cancel_scope.cancel()
            await self._say_farewell()
            nursery.cancel_scope.cancel()

    async def _sync_state(self, *, may_begin: bool) -> None:
        """Learn what the run is doing. Who brought the manifest may begin the run; who got it from a member may not.

        Raises `JoinError`.
        """
        self._board.announce("joining", "syncing the run state", "three members' run state")
        with trio.move_on_after(JOIN_TIMEOUT):
            while await self._gossip.join() == 0 and not may_begin:
                self._board.say("no member gave its run state; trying again")
                await trio.sleep(SYNC_RETRY)
            return
        raise JoinError(
            f"step 3, the run state: members were found, but none gave its run state within {JOIN_TIMEOUT:g} s. "
            "Try again later, or with a newer invite."
        )

    async def _end_training(self) -> None:
        self._board.announce("leaving", "leaving: the trainer saves", "the trainer")
        with trio.move_on_after(LEAVE_TIMEOUT):
            await self._rounds.leave()

    async def _say_farewell(self) -> None:
        with trio.move_on_after(FAREWELL_TIMEOUT):
            await self._membership.report_progress()
            await self._membership.announce(left=True)
            await self._gossip.flush()
        self._board.say("left the run")

    # Weights

    def _prepare_command(self, author: bytes) -> messages.Prepare:
        settings = self._settings
        return messages.Prepare(
            run_id=self.run_id,
            author=author,
            manifest=msgspec.msgpack.encode(self._manifest),
            data=[str(path) for path in settings.data],
            tokenizer=str(settings.tokenizer) if settings.tokenizer else None,
            device=settings.device,
            threads=settings.threads,
            slow=settings.slow,
            checkpoint=str(settings.checkpoint),
            fetched=str(settings.fetched),
            outgoing=0,
            incoming=0,
        )

    async def _obtain_weights(self) -> None:
        """Before each start of the trainer: where the run is under way, weights that are not too old for it.

        Raises `JoinError` if the run is under way, this node has none, and nobody gives any.
        """
        path, board = self._settings.checkpoint, self._board
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):  # of trainers that were killed while they saved
            leftover.unlink(missing_ok=True)
        own_round = await trio.to_thread.run_sync(saved_round, path)
        if self._membership.current_round() - (own_round or 0) <= (0 if own_round is None else MAX_ROUNDS_BEHIND):
            return
        board.announce("fetching weights", "the run is under way: fetching weights from a member", "a member's weights")
        give_up_at = trio.current_time() + WEIGHTS_TIMEOUT  # no download is cut short by it: each has its own limits
        while trio.current_time() < give_up_at:
            # Once more from one whose weights were not good only if there is nobody else.
            for donor in sorted(self._membership.donors(own_round or 0), key=self._donors_used.__contains__):
                if await self._fetch_from(donor):
                    return
            await trio.sleep(WEIGHTS_RETRY)
        if own_round is None:
            raise JoinError(
                "step 4, weights: the run is under way, but no member gave its weights within "
                f"{WEIGHTS_TIMEOUT:g} s. The last warning says why; try again later."
            )
        board.warn(f"nobody gave newer weights: going on with this node's own of round {own_round}")

    async def _fetch_from(self, donor: bytes) -> bool:
        board, name = self._board, short_name(donor)
        max_size = max_checkpoint_bytes(num_parameters(training_configs(self._manifest).model))

        def show(received: int, size: int) -> None:
            board.enter(
                "fetching weights",
                f"{received / 1e6:.1f} of {size / 1e6:.1f} MB from {name} ({received * 100 // size} %)",
                f"{name}'s checkpoint",
            )

        try:
            header = await fetch_checkpoint(
                self._host, donor, self.run_id, self._settings.fetched, max_size, show, self._shaping.down
            )
        except PeerUnreachableError as error:
            board.warn(f"no weights from {name}: {error}")
            return False
        self._donors_used.add(donor)
        self._saved = None  # what it describes is about to be replaced
        board.bytes_received += header.size
        board.say(f"weights of round {header.round} from {name}: {header.size / 1e6:.1f} MB, hash verified")
        return True

    async def _fresh_checkpoint(self) -> SavedCheckpoint | None:
        """What a newcomer gets: the newest file, saved anew when it is old; None if there is none yet."""
        if self._saved is None or self._board.round - self._saved.header.round > MAX_ROUNDS_BEHIND // 2:
            if self._has_saved.is_set():  # else another newcomer waits for the same
                self._has_saved = trio.Event()
            self._rounds.save_soon()
            with trio.move_on_after(FRESH_SAVE_TIMEOUT):
                await self._has_saved.wait()
        return self._saved

    def _note_saved(self, saved: messages.Saved) -> None:
        header = CheckpointHeader(saved.round, saved.inner_steps, saved.tokens, saved.size, saved.sha256)
        self._saved = SavedCheckpoint(self._settings.checkpoint, header)
        self._has_saved.set()
        self._membership.checkpoint_saved(saved)

    async def _restore_counters(self) -> None:
        """From earlier lives: this node's own tokens, as stored or as it last told the run, and its round.

        The round goes into the first heartbeat: who hears it must not take the run for one that begins.
        """
        stored = await self._store.get_fact(TOKENS_FACT)
        told = self._state.payload(self._host.author, Progress)
        self._board.tokens = max(int(stored or 0), told.tokens if told else 0)
        own_round = await trio.to_thread.run_sync(saved_round, self._settings.checkpoint)
        self._board.round = max(0, own_round or 0)

    # Being found, and finding back

    async def _provide(self) -> None:
        """Announce the run and this node's shard in the DHT, for as long as the host is open."""
        await self._host.provide(run_key(self.run_id))
        await self._host.provide(shard_key(self.run_id, STAGE))

    async def _end_isolation(self, target: Target) -> None:
        """Whenever every connection is gone, dial whom this node ever knew, with growing pauses."""
        pause = ISOLATION_INTERVAL
        while True:
            await trio.sleep(pause * random.uniform(0.75, 1.25))
            if self._host.connected:
                pause = ISOLATION_INTERVAL
                continue
            peers = dict(target.peers)
            try:
                peers |= await self._store.known_peers()
            except StoreError as error:
                self._board.warn(f"{error}; dialling those that the invite named")
            peers.pop(self._host.author, None)
            if peers:
                self._board.enter(self._board.phase, self._board.detail, "any peer: no connection is left")
                await dial(self._host, peers)
            pause = min(pause * 1.5, MAX_ISOLATION_INTERVAL)

    async def _remember(self) -> None:
        """Keep on disk what a next life needs: this node's count, and addresses for when no bootstrap peer answers."""
        while True:
            try:
                await self._store.put_fact(TOKENS_FACT, b"%d" % self._board.tokens)
                for peer in self._host.connected & self._membership.live:
                    await self._store.remember_peer(peer, self._host.addresses_of(peer))
            except StoreError as error:
                self._board.warn(f"{error}; trying again")
            await trio.sleep(REMEMBER_INTERVAL)

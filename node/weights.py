"""Checkpoints on this node's disk: fetched where it needs them, given to those who ask, kept for who may need them.

Where the model is cut into stages, each has checkpoints of its own. A stage whose members are all gone is lost with
them, unless others keep a copy: each node fetches, every so often, the newest checkpoint of the stage after its own,
announces it, and gives it to those who fill that stage again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from farandole.protocol.identity import short_name
from farandole.protocol.manifest import Manifest
from farandole.protocol.records import shard_key
from farandole.protocol.transfers import CheckpointHeader, max_checkpoint_bytes
from farandole.training.cut import stage_parameters

from . import trainer_messages as messages
from .board import Board
from .checkpoints.folder import CheckpointFolder
from .conversion import training_configs
from .errors import PeerUnreachableError
from .host import Host
from .joining import DHT_TIMEOUT, JoinError, dial
from .membership import Membership
from .round_session import MAX_ROUNDS_BEHIND
from .settings import NodeSettings
from .shaping import Shaping
from .store import Store, StoreError
from .transfers import SavedCheckpoint, fetch_checkpoint, saved_round

# How long a newcomer to a run that is under way looks for somebody who gives it weights.
WEIGHTS_TIMEOUT: Final = 120.0
WEIGHTS_RETRY: Final = 2.0
# A newcomer that asks for weights waits for the answer's header (`transfers.ANSWER_TIMEOUT`); a save must be shorter.
FRESH_SAVE_TIMEOUT: Final = 6.0
# A stage of which nobody says that he has weights begins from the run's seed after this: two announcements' time.
SEED_AFTER: Final = 20.0
# Backups take no more than this share of the time for downloads, however large the stage or slow the line.
BACKUP_SHARE: Final = 0.1
# What a line is taken to carry until a download has been measured, bytes a second: 10 Mbit/s.
USUAL_RATE: Final = 1.25e6

BACKUP_FACT: Final = "backup"

_Show = Callable[[bytes, int, int], None]


class Weights:
    """The checkpoints of one node. ``save_soon`` asks the trainer for a fresh one."""

    def __init__(
        self,
        settings: NodeSettings,
        board: Board,
        host: Host,
        membership: Membership,
        manifest: Manifest,
        run_id: bytes,
        shaping: Shaping,
        store: Store,
        save_soon: Callable[[], None],
    ) -> None:
        self.trainer_stage: int | None = None
        """Of the trainer that was last started."""
        self._settings = settings
        self._board = board
        self._host = host
        self._membership = membership
        self._model = training_configs(manifest).model
        self._run_id = run_id
        self._shaping = shaping
        self._store = store
        self._save_soon = save_soon
        self._saved: SavedCheckpoint | None = None
        self._has_saved = trio.Event()
        self._donors_used: set[bytes] = set()
        self._backup: tuple[int, SavedCheckpoint] | None = None
        self._measured_rate: float | None = None

    def file_stage(self, stage: int) -> int | None:
        """How the stage's files are named: None where the model is not cut."""
        return None if self._model.num_stages == 1 else stage

    def max_bytes(self, stage: int) -> int:
        """The most that a checkpoint of a stage takes."""
        return max_checkpoint_bytes(stage_parameters(self._model, stage))

    def download_seconds(self, stage: int) -> float:
        """What fetching a stage may take this node, by its last download, or else by its cap."""
        rate = self._measured_rate or self._shaping.down.rate or USUAL_RATE
        return self.max_bytes(stage) / rate

    async def own_round(self) -> int | None:
        """The round of this node's own checkpoint of its stage, if there is one."""
        files = CheckpointFolder(self._settings.checkpoints, self._membership.stage).files()
        return await trio.to_thread.run_sync(_newest_round, files)

    # For this node's trainer

    async def obtain(self) -> None:
        """Before each start of the trainer: where the run is under way, weights that are not too old for it.

        Raises `JoinError` if the run is under way, this node has none, and nobody gives any.
        """
        board, stage = self._board, self._membership.stage
        await trio.to_thread.run_sync(CheckpointFolder(self._settings.checkpoints, stage).clean)
        own_round = await self.own_round()
        fetched = await trio.to_thread.run_sync(saved_round, self._settings.fetched(self.file_stage(stage)))
        newest = own_round if fetched is None else max(fetched, own_round or 0)
        if self._membership.current_round() - (newest or 0) <= (0 if newest is None else MAX_ROUNDS_BEHIND):
            return
        board.announce("fetching weights", "the run is under way: fetching weights from a member", "a member's weights")
        began_at = trio.current_time()
        has_asked_dht = False
        while trio.current_time() < began_at + WEIGHTS_TIMEOUT:  # no download is cut short: each has its own limits
            if await self._fetch(stage, own_round, self._show):
                return
            if self._is_unheard_of(stage) and not has_asked_dht:
                has_asked_dht = True
                if await self._fetch_from_any(await self._ask_dht(stage), stage, self._show):
                    return
            if own_round is None and self._is_unheard_of(stage) and trio.current_time() >= began_at + SEED_AFTER:
                self._warn_of_seed(stage)
                return
            await trio.sleep(WEIGHTS_RETRY)
        if own_round is None:
            raise JoinError(
                "step 4, weights: the run is under way, but no member gave its weights within "
                f"{WEIGHTS_TIMEOUT:g} s. The last warning says why; try again later."
            )
        board.warn(f"nobody gave newer weights: going on with this node's own of round {own_round}")

    async def fetch_ahead(self, stage: int) -> bool:
        """Before a move, beside the training: whether weights of the stage are here now, or nobody has any."""
        return await self._fetch(stage, None, lambda donor, received, size: None) or (
            self._is_unheard_of(stage) and not self._membership.donors(0, stage)
        )

    async def _fetch(self, stage: int, after_round: int | None, show: _Show) -> bool:
        """From a live member of the stage, else from a backup; whether that went well."""
        membership = self._membership
        if await self._fetch_from_any(membership.donors(after_round or 0, stage), stage, show):
            return True
        if membership.num_stages == 1:
            return False
        holders = membership.backup_holders(stage, after_round or 0)
        return await self._fetch_from_any(holders, stage, show) or await self._take_own_backup(stage, after_round or 0)

    async def _fetch_from_any(self, donors: Iterable[bytes], stage: int, show: _Show) -> bool:
        # Once more from one whose weights were not good only if there is nobody else.
        for donor in sorted(donors, key=self._donors_used.__contains__):
            path = self._settings.fetched(self.file_stage(stage))
            header = await self._fetch_from(donor, stage, path, show)
            if header is not None:
                self._donors_used.add(donor)
                if stage == self._membership.stage:
                    self._saved = None  # what it describes is about to be replaced
                what = "weights" if self._membership.num_stages == 1 else f"weights of stage {stage},"
                self._board.say(
                    f"{what} of round {header.round} from {short_name(donor)}: {header.size / 1e6:.1f} MB, "
                    "hash verified"
                )
                return True
        return False

    async def _take_own_backup(self, stage: int, after_round: int) -> bool:
        backup = self._backup
        if backup is None or backup[0] != stage or backup[1].header.round <= after_round:
            return False
        self._backup = None
        await trio.to_thread.run_sync(backup[1].path.replace, self._settings.fetched(stage))
        self._board.say(f"weights of stage {stage}, of round {backup[1].header.round}: this node's own backup")
        return True

    def _is_unheard_of(self, stage: int) -> bool:
        """Whether nobody says that he has weights of this stage of a model that is cut."""
        membership = self._membership
        return membership.num_stages > 1 and not (membership.savers(stage) or membership.backup_holders(stage, 0))

    async def _ask_dht(self, stage: int) -> list[bytes]:
        """Who is said to hold a stage, where the run state knows of nobody; dialled."""
        providers = dict(await self._host.find_providers(shard_key(self._run_id, stage), DHT_TIMEOUT))
        providers.pop(self._host.author, None)
        failures = await dial(self._host, providers)
        return [peer for peer in providers if peer not in failures]

    def _warn_of_seed(self, stage: int) -> None:
        self._board.warn(
            f"NOBODY HAS THE WEIGHTS OF STAGE {stage}: its members are gone, and no backup is to be had. It begins "
            "again from the run's seed; what it had learnt is lost"
        )

    def _show(self, donor: bytes, received: int, size: int) -> None:
        name = short_name(donor)
        self._board.enter(
            "fetching weights",
            f"{received / 1e6:.1f} of {size / 1e6:.1f} MB from {name} ({received * 100 // size} %)",
            f"{name}'s checkpoint",
        )

    async def _fetch_from(self, donor: bytes, stage: int, path: Path, show: _Show) -> CheckpointHeader | None:
        began_at = trio.current_time()
        try:
            header = await fetch_checkpoint(
                self._host,
                donor,
                self._run_id,
                path,
                self.max_bytes(stage),
                partial(show, donor),
                self._shaping.down,
                stage,
            )
        except PeerUnreachableError as error:
            self._board.warn(f"no weights from {short_name(donor)}: {error}")
            return None
        self._board.bytes_received += header.size
        self._measured_rate = header.size / max(trio.current_time() - began_at, 1e-3)
        return header

    # For others

    async def give(self, stage: int) -> SavedCheckpoint | None:
        """What a newcomer gets: the newest file, saved anew when it is old; None if there is none of that stage."""
        if stage == self._membership.stage:
            return await self._fresh_checkpoint()
        return self._backup[1] if self._backup is not None and self._backup[0] == stage else None

    async def _fresh_checkpoint(self) -> SavedCheckpoint | None:
        if self._saved is None or self._board.round - self._saved.header.round > MAX_ROUNDS_BEHIND // 2:
            if self._has_saved.is_set():  # else another newcomer waits for the same
                self._has_saved = trio.Event()
            self._save_soon()
            with trio.move_on_after(FRESH_SAVE_TIMEOUT):
                await self._has_saved.wait()
        return self._saved

    def note_saved(self, saved: messages.Saved) -> None:
        """The trainer has written a checkpoint, or goes on from it."""
        stage = self._membership.stage
        if self.trainer_stage != stage:
            return  # it is about to end: this node has moved
        header = CheckpointHeader(saved.round, saved.inner_steps, saved.tokens, saved.size, saved.sha256)
        self._saved = SavedCheckpoint(Path(saved.path), header)
        self._has_saved.set()
        self._membership.checkpoint_saved(stage, header)

    def forget_saved(self) -> None:
        """This node has another stage now: what it saved is not of that."""
        self._saved = None

    # Backups

    async def keep_backups(self) -> None:
        """Fetch the next stage's newest weights every so often, until cancelled."""
        settings = self._settings
        usual = 2 * settings.checkpoint_seconds if settings.backup_seconds is None else settings.backup_seconds
        pause = usual
        await self._recall_backup()
        while True:
            await trio.sleep(pause * random.uniform(0.75, 1.25))
            began_at = trio.current_time()
            await self._back_up((self._membership.stage + 1) % self._membership.num_stages)
            pause = max(usual, (trio.current_time() - began_at) / BACKUP_SHARE)

    async def _back_up(self, stage: int) -> None:
        path = self._settings.backup(stage)
        known = -1 if self._backup is None or self._backup[0] != stage else self._backup[1].header.round
        for donor in self._membership.savers(stage, known):
            header = await self._fetch_from(donor, stage, path, lambda donor, received, size: None)
            if header is not None:
                self._keep(stage, header)
                try:
                    await self._store.put_fact(BACKUP_FACT, msgspec.msgpack.encode((stage, header)))
                except StoreError as error:
                    self._board.warn(f"{error}; a next life does not know of the backup of stage {stage}")
                for other in path.parent.glob("backup-*.safetensors"):
                    if other != path:
                        other.unlink(missing_ok=True)
                return

    def _keep(self, stage: int, header: CheckpointHeader) -> None:
        self._backup = stage, SavedCheckpoint(self._settings.backup(stage), header)
        self._membership.checkpoint_saved(stage, header, is_backup=True)

    async def _recall_backup(self) -> None:
        """What an earlier life kept; whoever fetches it checks its hash."""
        stored = await self._store.get_fact(BACKUP_FACT)
        if stored is None:
            return
        stage, header = msgspec.msgpack.decode(stored, type=tuple[int, CheckpointHeader])
        if stage != self._membership.stage and self._settings.backup(stage).exists():
            self._keep(stage, header)


def _newest_round(files: Iterable[Path]) -> int | None:
    """Of those that can be read; the newest come first."""
    return next((found for path in files if (found := saved_round(path)) is not None), None)

"""Checkpoints that this node can give: open files, each with its signed index.

They stay open so that an announced one remains readable when its file is replaced or removed: a trainer saves again,
and keeps two, long before all peers have heard of the newest. A node gives what its trainer saved (once more if it is
old), the copy that it keeps of another node's checkpoint (`Provider`), and the starts of its rounds (`Starts`).

`farandole.protocol.checkpoints.copies` decides which checkpoints are copied: one of every stage, at two more nodes, or,
if the model is cut, at the nodes of the stage before, so that a stage whose members are all gone is not lost. A copy
lies in the folder of the node's own checkpoints. It consists of the author's first blocks, up to the last that a
newcomer needs, and the author's index; so it survives a restart.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
from collections import deque
from functools import partial
from pathlib import Path
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.checkpoints import blocks
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import Index, SignedIndex
from farandole.protocol.checkpoints.copies import MAX_ROUNDS_OLDER, copied_author, is_copier
from farandole.protocol.mesh.kademlia import checkpoint_key
from farandole.protocol.trainer.trainer_messages import KEPT_STARTS, Saved
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import public_bytes, short_name
from farandole.training.base.durable import replacing

from ..base.errors import PeerUnreachableError
from ..store.consolidated.tensors import ConsolidatedError, open_tensors
from ..store.disk_space import save_seconds
from ..store.folder import index_of
from .fetch import DonorBusyError, Downloads, fresh_save_timeout
from .partial_file import PARTIAL_SUFFIX, BlockFile

logger = logging.getLogger(__name__)

# Starts of false rounds that are kept; each takes as much of the disk as a checkpoint.
KEPT_PROOFS: Final = 2


class Holding(BlockFile):
    """A checkpoint's first ``num_held`` blocks, as many as the file at ``path`` has."""

    def __init__(self, path: Path, signed: SignedIndex, index: Index) -> None:
        super().__init__(path, os.O_RDONLY)
        self.signed = signed
        self.index = index
        self.num_held = index.num_blocks if self.size >= index.size else self.size // blocks.BLOCK_BYTES
        if not self.num_held:
            raise OSError(f"{path.name} holds no block of its checkpoint")

    @property
    def id(self) -> bytes:
        """Return the checkpoint's id."""
        return self.signed.id

    def read(self, block: int) -> bytes:
        """Read one of the blocks that are held. Blocks; raises `OSError`."""
        return self.read_range(*blocks.block_range(self.index.size, block))


def open_own(saved: Saved, key: Ed25519PrivateKey, run_id: bytes, stage: int = 0, num_stages: int = 1) -> Holding:
    """Open a checkpoint that this node's trainer has written, and sign its index.

    Raises `OSError`, `ConsolidatedError` or `ValueError` if it is not there any more.
    """
    path = Path(saved.path)
    with open_tensors(path) as file:
        layout = bytes.fromhex(file.metadata.get("layout", ""))
    index = Index(
        run_id=run_id,
        author=public_bytes(key),
        stage=stage,
        num_stages=num_stages,
        round=saved.round,
        inner_steps=saved.inner_steps,
        tokens=saved.tokens,
        size=saved.size,
        layout=layout,
        hashes=saved.hashes,
    )
    holding = Holding(path, blocks.sign_index(key, index), index)
    if not index.is_block(0, holding.read(0)):  # which has the counters
        raise OSError(f"{path.name} has been replaced since")
    return holding


def write_index(path: Path, signed: SignedIndex) -> None:
    """Write the index of a checkpoint, durably. Raises `OSError`."""
    with replacing(path) as file:
        file.write(blocks.encode_signed_index(signed))


class Starts:
    """The starts of rounds that a node gives to peers that replay them: of its own newest rounds, and of false ones.

    They are ordinary checkpoints that no node announces: a peer learns the id from a commitment. No method raises
    `OSError`.
    """

    def __init__(self, folder: Path, key: Ed25519PrivateKey, run_id: bytes) -> None:
        self._folder = folder
        self._key = key
        self._run_id = run_id
        self._own = deque[Holding](maxlen=KEPT_STARTS)
        self._proofs = deque[Holding](maxlen=KEPT_PROOFS)

    async def open(self, saved: Saved) -> bytes | None:
        """Open the start of an own round, and close the oldest ones; return its id, or None if it is not there."""
        try:
            holding = await trio.to_thread.run_sync(open_own, saved, self._key, self._run_id)
        except (OSError, ConsolidatedError, ValueError) as error:
            logger.warning("the start of round %d cannot be given: %s", saved.round, error)
            return None
        self._own.append(holding)
        return holding.id

    def find(self, question: BlockQuestion) -> Holding | None:
        """Return the start that is asked for."""
        return next((holding for holding in (*self._own, *self._proofs) if holding.id == question.id), None)

    async def make_room(self, checkpoint_id: bytes) -> Path:
        """Return the path to fetch another node's start to; all other files but the proofs are removed."""
        path = self._folder / f"{checkpoint_id.hex()[:16]}.safetensors"

        def clear() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            kept = {path.name, *(f"{proof.id.hex()[:16]}.safetensors" for proof in self._proofs)}
            for other in self._folder.iterdir():
                if other.name not in kept:
                    other.unlink(missing_ok=True)

        with contextlib.suppress(OSError):  # the download says what is wrong
            await trio.to_thread.run_sync(clear)
        return path

    def keep_proof(self, path: Path, signed: SignedIndex, index: Index) -> None:
        """Open the start of a false round as well, and close the oldest ones."""
        with contextlib.suppress(OSError):
            self._proofs.append(Holding(path, signed, index))


# Own checkpoints that are kept open in addition to announced ones: the newest, and the one that is being announced.
NUM_OPEN: Final = 2
# A newcomer that asks for weights waits for the answer (`fetch.ANSWER_TIMEOUT`); a save must be shorter. For a large
# checkpoint both ends wait longer (`fetch.fresh_save_timeout`).
FRESH_SAVE_TIMEOUT: Final = 6.0
# An announcement of a held checkpoint lives for a day (`farandole.protocol.state.entries`), and a copy of a stage that
# no node holds any more may have to wait longer than that for a node.
TELL_INTERVAL: Final = 6 * 3_600.0

COPY_SUFFIX: Final = ".blocks"
# Copies take no more than this share of the time for downloads, however large the stage or slow the line.
COPY_SHARE: Final = 0.1
# An author that did not give the checkpoint to copy is skipped for this long: the next copy is another author's.
PASS_OVER_SECONDS: Final = 300.0
# The interval for announcing another one to the DHT: twenty peers keep each, for hours, and the run state has the
# newest.
PROVIDE_INTERVAL: Final = 600.0


class Provider:
    """The checkpoints that one node gives: its own, and a copy of another node's, which it keeps up to date.

    Methods raise no `OSError`: what cannot be opened is not provided.
    """

    def __init__(self, key: Ed25519PrivateKey, downloads: Downloads) -> None:
        self.copy: Holding | None = None
        """The copy that it keeps of another node's checkpoint."""
        self.trainer_stage: int | None = None
        """The stage of the trainer that was last started."""
        self.save_rate: float | None = None
        """Bytes a second at which the last checkpoint was written; None if none was measured."""
        self._key = key
        self._downloads = downloads
        self._files = downloads.files
        self._membership = downloads.membership
        self._own: list[Holding] = []
        self._unopened: tuple[Saved, int] | None = None  # the trainer's newest, and its stage
        self._has_unopened = trio.Event()
        self._has_saved = trio.Event()
        self._save_wanted = trio.Event()
        self._passed_over: dict[bytes, float] = {}  # until when

    @property
    def newest(self) -> Holding | None:
        """Return this node's own newest checkpoint."""
        return self._own[-1] if self._own else None

    # Questions of other nodes

    async def find(self, question: BlockQuestion) -> Holding | None:
        """Return what is asked for; the newest is saved again when it is old."""
        if question.id is None and question.stage == self._membership.stage:
            return await self.find_own(question.stage)
        held = [each for each in (*self._own, self.copy) if each is not None and each.id == question.id]
        found = self.copy if question.id is None else next(iter(held), None)
        return found if found is not None and found.index.stage == question.stage else None

    async def find_own(self, stage: int) -> Holding | None:
        """Return this node's own newest checkpoint of a stage, saved again when it is old."""
        if stage != self._membership.stage:
            return None
        if self.newest is None or self._downloads.journal.state.round - self.newest.index.round > MAX_ROUNDS_OLDER:
            if self._has_saved.is_set():  # otherwise another newcomer waits for the same save
                self._has_saved = trio.Event()
            self._save_wanted.set()
            # The trainer may take too long to save: then the newcomer gets the older one, and the next one the new one.
            size = self._files.max_bytes(stage)
            patience = FRESH_SAVE_TIMEOUT + fresh_save_timeout(size)
            is_in_vain = self.save_rate is not None and save_seconds(size, self.save_rate) > patience
            with trio.move_on_after(0.0 if is_in_vain and self.newest is not None else patience):
                await self._has_saved.wait()
        return self.newest if self.newest is not None and self.newest.index.stage == stage else None

    async def save_wanted(self) -> None:
        """Wait until a peer wants a newer checkpoint than there is."""
        await self._save_wanted.wait()
        self._save_wanted = trio.Event()

    # Its own checkpoints

    def note_saved(self, saved: Saved) -> None:
        """Note that the trainer has written a checkpoint, or resumes from it."""
        stage = self._membership.stage
        if saved.seconds > 0:
            self.save_rate = saved.size / saved.seconds
        if self.trainer_stage == stage:  # otherwise it is about to end, because this node has moved
            self._unopened = saved, stage
            self._has_unopened.set()

    def forget_own(self) -> None:
        """Close the checkpoints of the stage that this node has left."""
        self._own.clear()

    async def run(self) -> None:
        """Open what the trainer saves, keep a copy, and announce both before the run forgets them, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._open_saved)
            nursery.start_soon(self._keep_copy)
            while True:
                await trio.sleep(TELL_INTERVAL)
                for holding in (self.newest, self.copy):
                    if holding is not None:
                        self._announce(holding)

    def _announce(self, holding: Holding) -> None:
        self._membership.announcer.checkpoint_held(holding.id, holding.index, is_copy=holding is self.copy)

    async def _open_saved(self) -> None:
        while True:
            await self._has_unopened.wait()
            self._has_unopened = trio.Event()
            assert self._unopened is not None
            saved, stage = self._unopened
            if stage != self._membership.stage:
                continue
            try:
                holding = await trio.to_thread.run_sync(
                    open_own, saved, self._key, self._downloads.conditions.run_id, stage, self._files.num_stages
                )
            except (OSError, ConsolidatedError, ValueError) as error:
                logger.warning("the checkpoint of round %d cannot be given to others: %s", saved.round, error)
            else:
                try:
                    await trio.to_thread.run_sync(write_index, index_of(Path(saved.path)), holding.signed)
                except OSError as error:  # a full disk: the checkpoint is there all the same
                    logger.warning("the index of %s is not written: %s", saved.path, error)
                told = self._membership.told_checkpoints()
                older = [each for each in self._own[: 1 - NUM_OPEN] if each.id in told]
                self._own = [*older, *self._own[1 - NUM_OPEN :], holding]
                self._announce(holding)
            self._has_saved.set()

    # The copy of another node's

    def copy_path(self, stage: int, checkpoint_id: bytes) -> Path:
        """Return the path for a copy."""
        return self._files.settings.checkpoints / f"copy-{stage}-{checkpoint_id.hex()[:16]}{COPY_SUFFIX}"

    async def _keep_copy(self) -> None:
        """Take up an earlier life's copy of this run, and keep it new, until cancelled."""
        folder, run_id = self._files.settings.checkpoints, self._downloads.conditions.run_id
        max_size = max(map(self._files.max_bytes, range(self._files.num_stages)))

        def open_copy(path: Path) -> Holding:
            with index_of(path).open("rb") as file:
                raw = file.read(blocks.max_index_bytes(max_size) + 1)
            return Holding(path, *blocks.decode_signed_index(raw, run_id, max_size))

        if not self._has_room():
            await self._take(None)
        # One, unless that life was killed between making a new one and removing the old.
        for path in await trio.to_thread.run_sync(lambda: sorted(folder.glob(f"copy-*{COPY_SUFFIX}"))):
            with contextlib.suppress(OSError, RemoteProtocolError):
                await self._take(path, await trio.to_thread.run_sync(open_copy, path))
                break
        pause = interval = self._files.settings.backup_seconds
        provided, provide_after = None, -math.inf
        while True:
            await trio.sleep(pause * random.uniform(0.75, 1.25))
            began_at = trio.current_time()
            await self._copy_newest()
            pause = max(interval, (trio.current_time() - began_at) / COPY_SHARE)
            # The DHT may have more providers than the run state knows.
            newest, held, dht = self.newest, self.copy, self._downloads.host.dht
            if newest is not None and self._membership.holders(newest.index.stage, newest.id):
                held = newest  # others have copied this node's own
            if held is not None and held.id != provided and trio.current_time() >= provide_after:
                if provided is not None:
                    dht.withdraw(checkpoint_key(run_id, provided))
                provided, provide_after = held.id, trio.current_time() + PROVIDE_INTERVAL
                await dht.provide(checkpoint_key(run_id, provided))

    def _has_room(self) -> bool:
        return self._files.plan(self._membership.stage).has_copy

    async def _take(self, path: Path | None, holding: Holding | None = None) -> None:
        """Provide this copy, in this file, instead of older ones, and remove these; None: there is no room for any."""
        self.copy = holding
        if holding is not None:
            self._announce(holding)
        await trio.to_thread.run_sync(self._remove, path)

    def _remove(self, kept: Path | None, suffix: str = "*") -> None:
        """Remove the files of all copies but the one kept."""
        for path in self._files.settings.checkpoints.glob(f"copy-*{COPY_SUFFIX}{suffix}"):
            if kept is None or not path.name.startswith(kept.name):
                with contextlib.suppress(OSError):
                    path.unlink()

    async def _copy_newest(self) -> None:
        stage = self._files.copied_stage(self._membership.stage)
        if not self._has_room():
            if self.copy is not None:  # the text that was tokenised since needs its room
                await self._take(None)
            return
        conditions, own, membership = self._downloads.conditions, self._downloads.host.author, self._membership
        now, announced = trio.current_time(), membership.announced(stage)
        self._passed_over = {peer: until for peer, until in self._passed_over.items() if until > now}
        author = copied_author(conditions.run_id, stage, announced.keys() - self._passed_over.keys())
        if author is None or author == own or not conditions.shaping.may_spend(self._files.required_bytes(stage)):
            return
        members = membership.nodes_of_stages()[stage]
        if self._files.num_stages == 1 and not is_copier(conditions.run_id, stage, members, author, own):
            return
        notice = announced[author]
        if self.copy is not None and self.copy.id == notice.id:
            return
        try:
            signed, index = await self._downloads.ask(author, stage, notice.id)
        except DonorBusyError:
            return  # it serves others, and this node next time
        except PeerUnreachableError as error:
            self._downloads.journal.warn(f"no copy from {short_name(author)}: {error}")
            self._passed_over[author] = trio.current_time() + PASS_OVER_SECONDS
            return
        path = self.copy_path(stage, signed.id)

        def keep() -> Holding:
            write_index(index_of(path), signed)
            return Holding(path, signed, index)

        with contextlib.suppress(OSError):  # the download says what is wrong
            await trio.to_thread.run_sync(partial(path.parent.mkdir, exist_ok=True))
        # On a slow line newer ones may keep coming before one is complete.
        await trio.to_thread.run_sync(self._remove, path, f".*{PARTIAL_SUFFIX}")
        if await self._downloads.fetch(signed, index, (author,), path, lambda progress: None, is_copy=True) is not None:
            try:
                await self._take(path, await trio.to_thread.run_sync(keep))
            except OSError as error:
                logger.warning("the copy of round %d cannot be kept: %s", index.round, error)

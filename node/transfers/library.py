"""The checkpoints that this node can give: its own newest ones, and the copy that it keeps of another node's.

An own checkpoint is opened, and its index signed, when the trainer has written it. It stays open while the run knows
that this node holds it, however many times the trainer saves in that time. A copy lies in the same folder. It
consists of the author's first blocks, up to the last that a newcomer needs, and the author's index; so it survives a
restart.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.checkpoints import blocks
from farandole.protocol.trainer.trainer_messages import Saved
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import public_bytes
from farandole.training.base.durable import replacing

from ..state.membership import Membership
from ..store.consolidated.tensors import ConsolidatedError, open_tensors
from ..store.folder import index_of
from ..store.weight_files import WeightFiles
from .holdings import Holding
from .partial_file import PARTIAL_SUFFIX

logger = logging.getLogger(__name__)

# Own checkpoints that are kept open in addition to announced ones: the newest, and the one that is being announced.
NUM_OPEN: Final = 2
COPY_SUFFIX: Final = ".blocks"


class Library:
    """The open checkpoints of one node; each new one is announced in the run.

    Methods raise no `OSError`: what cannot be opened is not given.
    """

    def __init__(self, files: WeightFiles, key: Ed25519PrivateKey, run_id: bytes, membership: Membership) -> None:
        self.copy: Holding | None = None
        """The copy that it keeps of another node's checkpoint."""
        self._files = files
        self._key = key
        self._run_id = run_id
        self._membership = membership
        self._own: list[Holding] = []

    @property
    def newest(self) -> Holding | None:
        """Return this node's own newest checkpoint."""
        return self._own[-1] if self._own else None

    @property
    def max_bytes(self) -> int:
        """Return the maximum bytes of a checkpoint of this node's stage."""
        return self._files.max_bytes(self._membership.stage)

    def find(self, checkpoint_id: bytes) -> Holding | None:
        """Return the checkpoint with this id, None if it is not here."""
        return next((h for h in (*self._own, self.copy) if h is not None and h.id == checkpoint_id), None)

    def announce(self) -> None:
        """Announce to the run what this node holds."""
        for holding in (self.newest, self.copy):
            if holding is not None:
                self._announce(holding)

    def _announce(self, holding: Holding) -> None:
        self._membership.announcer.checkpoint_held(holding.id, holding.index, is_copy=holding is self.copy)

    async def note_saved(self, saved: Saved, stage: int) -> None:
        """Open and announce a checkpoint of a stage that the trainer has written."""
        try:
            holding = await trio.to_thread.run_sync(self._open_saved, saved, stage)
        except (OSError, ConsolidatedError, ValueError) as error:
            logger.warning("the checkpoint of round %d cannot be given to others: %s", saved.round, error)
            return
        told = self._membership.told_checkpoints()
        for older in self._own[: max(0, len(self._own) + 1 - NUM_OPEN)]:
            if older.id not in told:
                self._own.remove(older)
                older.let_go()
        self._own.append(holding)
        self._announce(holding)

    def forget_own(self) -> None:
        """Close this node's own checkpoints, because it has another stage now."""
        while self._own:
            self._own.pop().let_go()

    def _open_saved(self, saved: Saved, stage: int) -> Holding:
        path = Path(saved.path)
        holding = open_own(saved, self._key, self._run_id, stage, self._files.num_stages)
        try:
            _write_index(path, holding.signed)
        except OSError as error:  # a full disk: the checkpoint is there all the same
            logger.warning("the index of %s is not written: %s", path.name, error)
        return holding

    # The copy

    def copy_path(self, stage: int, checkpoint_id: bytes) -> Path:
        """Return the path for a copy."""
        return self._files.settings.checkpoints / f"copy-{stage}-{checkpoint_id.hex()[:16]}{COPY_SUFFIX}"

    async def forget_begun(self, path: Path) -> None:
        """Remove copies that were started and will not be completed, except the one at ``path``."""
        await trio.to_thread.run_sync(self._remove_copies, path, f".*{PARTIAL_SUFFIX}")

    async def keep_copy(self, path: Path, signed: blocks.SignedIndex, index: blocks.Index) -> None:
        """Make this file the copy, and remove older ones."""

        def keep() -> Holding:
            _write_index(path, signed)
            return Holding.open(path, signed, index)

        try:
            await self._take_copy(path, await trio.to_thread.run_sync(keep))
        except OSError as error:
            logger.warning("the copy of round %d cannot be kept: %s", index.round, error)

    async def recall_copy(self) -> None:
        """Open the copy that an earlier life kept, if there is one and it is of this run."""
        # One, unless that life was killed between making a new one and removing the old.
        folder = self._files.settings.checkpoints
        for path in await trio.to_thread.run_sync(lambda: sorted(folder.glob(f"copy-*{COPY_SUFFIX}"))):
            with contextlib.suppress(OSError, RemoteProtocolError):
                await self._take_copy(path, await trio.to_thread.run_sync(self._open_copy, path))
                return

    async def give_up_copies(self) -> None:
        """Remove all copies, because there is no room for any."""
        self._drop_copy()
        await trio.to_thread.run_sync(self._remove_copies)

    def _drop_copy(self) -> None:
        if self.copy is not None:
            self.copy.let_go()
            self.copy = None

    async def _take_copy(self, path: Path, holding: Holding) -> None:
        self._drop_copy()
        self.copy = holding
        self._announce(holding)
        await trio.to_thread.run_sync(self._remove_copies, path)

    def _open_copy(self, path: Path) -> Holding:
        max_size = max(map(self._files.max_bytes, range(self._files.num_stages)))
        with index_of(path).open("rb") as file:
            raw = file.read(blocks.max_index_bytes(max_size) + 1)
        return Holding.open(path, *blocks.decode_signed_index(raw, self._run_id, max_size))

    def _remove_copies(self, kept: Path | None = None, suffix: str = "*") -> None:
        """Remove the files of all copies but the one kept."""
        for path in self._files.settings.checkpoints.glob(f"copy-*{COPY_SUFFIX}{suffix}"):
            if kept is None or not path.name.startswith(kept.name):
                with contextlib.suppress(OSError):
                    path.unlink()


def open_own(saved: Saved, key: Ed25519PrivateKey, run_id: bytes, stage: int = 0, num_stages: int = 1) -> Holding:
    """Open a checkpoint that this node's trainer has written, and sign its index.

    Raises `OSError`, `ConsolidatedError` or `ValueError` if it is not there any more.
    """
    path = Path(saved.path)
    with open_tensors(path) as file:
        layout = bytes.fromhex(file.metadata.get("layout", ""))
    index = blocks.Index(
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
    holding = Holding.open(path, blocks.sign_index(key, index), index)
    with contextlib.ExitStack() as unless_it_is_right:
        unless_it_is_right.callback(holding.let_go)
        if not index.is_block(0, holding.read(0)):  # which has the counters
            raise OSError(f"{path.name} has been replaced since")
        unless_it_is_right.pop_all()
    return holding


def _write_index(path: Path, signed: blocks.SignedIndex) -> None:
    with replacing(index_of(path)) as file:
        file.write(blocks.encode_signed_index(signed))

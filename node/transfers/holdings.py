"""Checkpoints that this node can give: open files, each with its signed index.

They stay open so that an announced one remains readable when its file is replaced or removed: a trainer saves again,
and keeps two, long before all peers have heard of the newest.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.checkpoints import blocks
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import Index, SignedIndex
from farandole.protocol.trainer.trainer_messages import KEPT_STARTS, Saved
from farandole.protocol.wire.identity import public_bytes
from farandole.training.base.durable import replacing

from ..base.system.files import open_private
from ..store.consolidated.tensors import ConsolidatedError, open_tensors
from ..store.folder import index_of
from .partial_file import read

logger = logging.getLogger(__name__)

# Starts of false rounds that are kept; each takes as much of the disk as a checkpoint.
KEPT_PROOFS: Final = 2


@dataclass(eq=False)
class Holding:
    """A checkpoint's first ``num_held`` blocks in an open file; closed when its last holder lets go of it."""

    signed: SignedIndex
    index: Index
    num_held: int
    _descriptor: int
    _num_holders: int = 1

    @classmethod
    def open(cls, path: Path, signed: SignedIndex, index: Index) -> Holding:
        """Open as much of the checkpoint as the file has. Blocks for a moment; raises `OSError`."""
        descriptor = open_private(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            num_held = index.num_blocks if size >= index.size else size // blocks.BLOCK_BYTES
            if not num_held:
                raise OSError(f"{path.name} holds no block of its checkpoint")
        except BaseException:  # for any exception: no other code would close it
            os.close(descriptor)
            raise
        return cls(signed, index, num_held, descriptor)

    @property
    def id(self) -> bytes:
        """Return the checkpoint's id."""
        return self.signed.id

    def read(self, block: int) -> bytes:
        """Read one of the blocks that are held. Blocks; raises `OSError`."""
        return read(self._descriptor, *blocks.block_range(self.index.size, block))

    def read_range(self, start: int, end: int) -> bytes:
        """Read the file's bytes from ``start`` to ``end``. Blocks; raises `OSError`."""
        return read(self._descriptor, start, end)

    def hold(self) -> Holding:
        """Add a holder."""
        self._num_holders += 1
        return self

    def let_go(self) -> None:
        """Remove a holder; the last one closes the file."""
        self._num_holders -= 1
        if not self._num_holders:
            os.close(self._descriptor)


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
    holding = Holding.open(path, blocks.sign_index(key, index), index)
    with contextlib.ExitStack() as unless_it_is_right:
        unless_it_is_right.callback(holding.let_go)
        if not index.is_block(0, holding.read(0)):  # which has the counters
            raise OSError(f"{path.name} has been replaced since")
        unless_it_is_right.pop_all()
    return holding


def write_index(path: Path, signed: SignedIndex) -> None:
    """Write the index of a checkpoint next to it, durably. Raises `OSError`."""
    with replacing(index_of(path)) as file:
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
        self._own = deque[Holding]()
        self._proofs = deque[Holding]()

    async def open(self, saved: Saved) -> bytes | None:
        """Open the start of an own round, and close the oldest ones; return its id, or None if it is not there."""
        try:
            holding = await trio.to_thread.run_sync(open_own, saved, self._key, self._run_id)
        except (OSError, ConsolidatedError, ValueError) as error:
            logger.warning("the start of round %d cannot be given: %s", saved.round, error)
            return None
        _keep(self._own, holding, KEPT_STARTS)
        return holding.id

    def find(self, question: BlockQuestion) -> Holding | None:
        """Return the start that is asked for, held for the peer that asks."""
        found = next((holding for holding in (*self._own, *self._proofs) if holding.id == question.id), None)
        return None if found is None else found.hold()

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
            _keep(self._proofs, Holding.open(path, signed, index), KEPT_PROOFS)


def _keep(kept: deque[Holding], newest: Holding, count: int) -> None:
    kept.append(newest)
    while len(kept) > count:
        kept.popleft().let_go()

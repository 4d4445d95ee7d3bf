"""The starts of rounds that a node gives to peers that replay them: of its own newest rounds, and of false ones.

They are ordinary checkpoints that no node announces: a peer learns the id from a commitment.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from pathlib import Path
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.checkpoints import blocks
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.trainer.trainer_messages import KEPT_STARTS, Saved

from ..store.consolidated.tensors import ConsolidatedError
from .holdings import Holding
from .library import open_own

logger = logging.getLogger(__name__)

# Starts of false rounds; each takes as much of the disk as a checkpoint.
KEPT_PROOFS: Final = 2


class Starts:
    """Open files of starts; none of the methods raises `OSError`."""

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

    def keep_proof(self, path: Path, signed: blocks.SignedIndex, index: blocks.Index) -> None:
        """Open the start of a false round as well, and close the oldest ones."""
        with contextlib.suppress(OSError):
            _keep(self._proofs, Holding.open(path, signed, index), KEPT_PROOFS)


def _keep(kept: deque[Holding], newest: Holding, count: int) -> None:
    kept.append(newest)
    while len(kept) > count:
        kept.popleft().let_go()

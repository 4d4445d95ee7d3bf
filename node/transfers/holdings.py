"""The checkpoints that this node can give: open files, each with its signed index.

They stay open so that an announced one remains readable when its file is replaced or removed: a trainer saves again,
and keeps two, long before all peers have heard of the newest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from farandole.protocol.checkpoints.blocks import BLOCK_BYTES, Index, SignedIndex, block_range

from ..base.system.files import open_private
from .partial_file import read


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
            num_held = index.num_blocks if size >= index.size else size // BLOCK_BYTES
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
        return read(self._descriptor, *block_range(self.index.size, block))

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

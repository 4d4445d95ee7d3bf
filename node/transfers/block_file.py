"""Files of checkpoints: open ones of which blocks are read, and those that a fetch fills block by block.

A partly fetched checkpoint is a file in which each block lies at its place, and the rest is holes. Its progress is
recorded nowhere else. Opening it again, after a crash or a power cut, hashes what is there: valid blocks of the index
are kept, and the others are fetched again. Once all wanted blocks are there, it becomes a checkpoint of its own
(`PartialFile.make`), which gets its name only when it is durable.
"""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from typing import Final

from farandole.protocol.checkpoints.blocks import BLOCK_BYTES, Index, Selection, block_range, blocks_between, num_blocks
from farandole.training.base.durable import replacing, sync_file, sync_folder

from ..base.system.files import open_private
from ..store.disk_space import Room

PARTIAL_SUFFIX: Final = ".part"


class BlockFile:
    """An open file with a checkpoint's bytes, closed once nothing refers to it. Methods may block, raise `OSError`."""

    def __init__(self, path: Path, flags: int) -> None:
        """Open it; if it is created, it is readable and writable by its owner alone."""
        self._descriptor = open_private(path, flags)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def read_range(self, start: int, end: int) -> bytes:
        """Read the bytes from ``start`` to ``end``, which the file must have."""
        data = os.pread(self._descriptor, end - start, start)
        if len(data) < end - start:
            raise OSError(errno.EIO, f"the file ends before byte {end}")
        return data


class PartialFile(BlockFile):
    """The blocks of one checkpoint that are here."""

    def __init__(self, path: Path, index: Index) -> None:
        """Open it, or create it."""
        super().__init__(path, os.O_RDWR | os.O_CREAT)
        self.path = path
        self.index = index
        os.ftruncate(self._descriptor, index.size)

    def blocks(self) -> set[int]:
        """Return the blocks that are here and valid. Blocks that are entirely holes are skipped, not hashed."""
        found: set[int] = set()
        block = 0
        while block < num_blocks(self.index.size):
            try:
                block = os.lseek(self._descriptor, block * BLOCK_BYTES, os.SEEK_DATA) // BLOCK_BYTES
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    break
                raise
            if self.index.is_block(block, self.read_range(*block_range(self.index.size, block))):
                found.add(block)
            block += 1
        return found

    def write(self, block: int, data: memoryview) -> bool:
        """Write the data if it is that block; return whether it is."""
        if not self.index.is_block(block, data):
            return False
        position = block * BLOCK_BYTES
        while data:
            num_written = os.pwrite(self._descriptor, data, position)
            data, position = data[num_written:], position + num_written
        return True

    def make(self, selection: Selection, path: Path, *, is_prefix: bool) -> None:
        """Turn the selection into the file at ``path``, durably and atomically; this file cannot be used afterwards.

        ``is_prefix``: the checkpoint's own first blocks up to the selection's last one, instead.
        """
        if is_prefix or not selection.header:
            os.ftruncate(self._descriptor, block_range(self.index.size, selection.blocks[-1])[1])
            sync_file(self._descriptor)
            self.path.replace(path)
            sync_folder(path.parent)
            return
        Room().check(path.parent, selection.size)
        with replacing(path) as file:
            file.write(selection.header)
            for start, end in selection.pieces:
                for block in blocks_between(start, end):
                    first, last = block_range(self.index.size, block)
                    file.write(self.read_range(max(start, first), min(end, last)))
        self.path.unlink(missing_ok=True)


def partial_path(path: Path, checkpoint_id: bytes) -> Path:
    """Return the path of a checkpoint's blocks while it is fetched to ``path``."""
    return path.with_name(f"{path.name}.{checkpoint_id.hex()[:16]}{PARTIAL_SUFFIX}")


def has_begun(folder: Path, checkpoint_id: bytes) -> bool:
    """Return whether an earlier fetch to anywhere in a folder has begun with a checkpoint."""
    return any(folder.glob(f"*.{checkpoint_id.hex()[:16]}{PARTIAL_SUFFIX}"))


def remove_partials(path: Path, kept: bytes) -> None:
    """Remove what earlier fetches to ``path`` left, except the blocks of the checkpoint ``kept``."""
    for leftover in path.parent.glob(f"{path.name}.*{PARTIAL_SUFFIX}"):
        if leftover != partial_path(path, kept):
            leftover.unlink(missing_ok=True)

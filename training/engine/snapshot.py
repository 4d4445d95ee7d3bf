"""What a checkpoint holds, copied between two inner steps, so that it can be written while they go on.

Lazy snapshots between updates, as in DataStates-LLM (arXiv 2406.10707): training waits for a copy within memory, or on
CUDA not even for that, but for a place in the device's queue. The memory is obtained once, as getting it from the
system every time takes longer than filling it, and is page-locked where copies come from CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farandole.protocol.wire.safetensors import FP32_BYTES

from ..base.host_memory import available_bytes
from ..base.parameters import Layout
from ..outer.copying import Copier, Wait
from .blocks import Content
from .checkpoint import Counters, save_checkpoint


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine as it was."""

    counters: Counters
    state: Mapping[str, Tensor]
    """As `Engine.state`, in memory of the host, once ``copied`` says so."""
    layout: Layout
    run_id: bytes
    copied: Sequence[Wait]

    @property
    def num_bytes(self) -> int:
        """Return the size of a checkpoint without its header, in bytes."""
        return sum(FP32_BYTES * tensor.numel() for tensor in self.state.values())

    def save(self, path: Path) -> Content:
        """Write it as a checkpoint; raises `OSError`, as `farandole.training.base.durable` does. Any thread may."""
        for wait in self.copied:
            wait()
        return save_checkpoint(path, self.state, self.layout, self.run_id, self.counters)


# Memory for a snapshot is obtained in pieces of this size, and this much is left to everything else.
_PIECE_BYTES: Final = 256 << 20
_RESERVE_BYTES: Final = 512 << 20
_PAGE_BYTES: Final = 4_096


class SnapshotMemory:
    """Room for a copy of flat vectors like these (n,), fp32 or bf16. Raises `MemoryError` if this machine has none."""

    def __init__(self, vectors: Mapping[str, Tensor], copier: Copier) -> None:
        memory = _obtain(sum(flat.nbytes for flat in vectors.values()))
        copier.pin(memory.data)
        self._copier = copier
        aligned = dict(sorted(vectors.items(), key=lambda item: -item[1].itemsize))  # fp32 first
        places = torch.from_numpy(memory).split([flat.nbytes for flat in aligned.values()])
        copies = {name: place.view(flat.dtype) for (name, flat), place in zip(aligned.items(), places, strict=True)}
        self._copies = {name: copies[name] for name in vectors}

    def fill(self, vectors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Sequence[Wait]]:
        """Copy them; what was copied before is overwritten. The copies, and what waits for them."""
        copied = [self._copier.keep(flat, self._copies[name]) for name, flat in vectors.items()]
        return self._copies, copied


def _obtain(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory, uint8 (num_bytes,), of which the system has given every page. Raises `MemoryError`.

    A system promises what it may not have. The nodes of one machine often save at the same time, and each would see the
    memory that the other is about to use.
    """
    memory = np.empty(num_bytes, dtype=np.uint8)
    for start in range(0, num_bytes, _PIECE_BYTES):
        available, wanted = available_bytes(), num_bytes - start
        if available is not None and wanted + _RESERVE_BYTES > available:
            raise MemoryError(f"{wanted} bytes are wanted, {available} available")
        memory[start : start + _PIECE_BYTES : _PAGE_BYTES] = 0
    return memory

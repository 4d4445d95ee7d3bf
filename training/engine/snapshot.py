"""What an engine saves and loads: its flat vectors and counters, as a file, or as a copy to be written later.

A replica is copied between two inner steps, and written while they go on. Lazy snapshots between updates, as in
DataStates-LLM (arXiv 2406.10707): training waits for a copy within memory, or on CUDA not even for that, but for a
place in the device's queue. The memory is obtained once, as getting it from the system every time takes longer than
filling it, and is page-locked where copies come from CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from farandole.protocol.run.rules import FAST, OPTIMIZER_VECTORS, SLOW, required_vectors
from farandole.protocol.wire.safetensors import FP32_BYTES

from ..base.device import Device
from ..base.host_memory import available_bytes
from ..base.parameters import Layout
from ..inner.optimizer import InnerOptimizer
from ..outer.contribution import Copier, Wait, copier_for
from ..outer.round_end import RoundEnd
from .blocks import Content
from .checkpoint import Counters, load_checkpoint, load_start, save_checkpoint


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine as it was."""

    counters: Counters
    state: Mapping[str, Tensor]
    """As `Checkpoint.tensors`, in memory of the host, once ``copied`` says so."""
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
        num_bytes = sum(flat.nbytes for flat in vectors.values())
        memory = np.empty(num_bytes, dtype=np.uint8)
        # A system promises what it may not have. The nodes of one machine often save at the same time, and each would
        # see the memory that the other is about to use: so one number of each page is written.
        for start in range(0, num_bytes, _PIECE_BYTES):
            available, wanted = available_bytes(), num_bytes - start
            if available is not None and wanted + _RESERVE_BYTES > available:
                raise MemoryError(f"{wanted} bytes are wanted, {available} available")
            memory[start : start + _PIECE_BYTES : _PAGE_BYTES] = 0
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


@dataclass(eq=False)
class Checkpoint:
    """The checkpoint of a replica as it is: weights, the outer rule's vectors, the optimizer's means, and counters.

    ``optimizer``: None where inner steps are another's, as in a user's loop, and their means are not saved.
    ``schedule_tokens``: tokens of one step of the schedule by which inner steps are counted; 0: they count as they are.
    """

    _round_end: RoundEnd
    run_id: bytes
    device: InitVar[Device]
    _optimizer: InnerOptimizer | None = None
    schedule_tokens: int = 0

    def __post_init__(self, device: Device) -> None:
        self.layout = self._round_end.layout
        """Names and shapes of the parameters."""
        self._copier = copier_for(device.torch_device)
        self._begun = 0, 0  # steps and tokens at the last load
        self._snapshots: dict[str, SnapshotMemory] = {}

    @property
    def counters(self) -> Counters:
        """Return the steps taken, the tokens trained on, and where AdamW's means began.

        A built-in trainer that loads them continues its learning-rate schedule there. So the steps of a user's loop,
        which are of any size, are counted as the number of its steps that have as many tokens.
        """
        totals, steps = self._round_end.totals, self._round_end.totals.steps
        if self.schedule_tokens:
            steps = self._begun[0] + (totals.tokens - self._begun[1]) // self.schedule_tokens
        return Counters(totals.round, steps, totals.tokens, self._optimizer.begun_at if self._optimizer else 0)

    def vectors(self) -> dict[str, Tensor]:
        """Return everything in a checkpoint except the counters: flat vectors by name, most of them (n,)."""
        outer = self._round_end.outer
        vectors = outer.state() | self._means()
        if outer.settings.fragments > 1:
            vectors[FAST] = self._round_end.weights.flat
        return vectors

    def _means(self) -> dict[str, Tensor]:
        return {} if self._optimizer is None else self._optimizer.state()

    def tensors(self, vectors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the vectors' tensors by ``VECTOR/PARAMETER``, not copied; of all `vectors` by default.

        They are fp32, except for the bf16 means of `farandole.training.inner.lean`. VECTOR is one of
        `farandole.protocol.run.rules`, PARAMETER is a name of the layout. Muon keeps no mean of squares for
        matrices.
        """
        parts = {} if self._optimizer is None else self._optimizer.parts
        return {
            f"{vector}/{name}": view
            for vector, flat in (self.vectors() if vectors is None else vectors).items()
            for name, view in parts.get(vector, self.layout).views(flat).items()
        }

    @property
    def num_bytes(self) -> int:
        """Return the size of a checkpoint without its header, in bytes."""
        return sum(FP32_BYTES * tensor.numel() for tensor in self.tensors().values())

    def is_in(self, saved_round: int, saved_steps: int) -> bool:
        """Return whether a checkpoint saved at these counters has everything that a checkpoint saved now would have.

        It contains no unfinished inner steps of a round. With fragments, it contains the fast weights of the fragments
        that await their turn.
        """
        counters = self.counters
        is_whole = self._round_end.outer.settings.fragments == 1
        return saved_round == counters.round and (is_whole or saved_steps == counters.steps)

    @torch.no_grad()
    def save(self, path: Path) -> Content:
        """Write a checkpoint of the last outer step's weights; raises `OSError`, as `training.base.durable` does.

        It does not contain a round's unfinished inner steps: save right after an outer step to lose none. With
        fragments it contains the fast weights, since most of them await their fragment's turn.
        """
        self._read()
        return save_checkpoint(path, self.tensors(), self.layout, self.run_id, self.counters)

    @torch.no_grad()
    def snapshot(self, kind: Literal["newest", "start"] = "newest") -> Snapshot:
        """Return what `save` would write now, to write it while training continues; valid until the next of its kind.

        ``start``: of a round. Raises `MemoryError` if there is no memory for one more copy; the memory is kept.
        """
        if kind not in self._snapshots:
            self._snapshots[kind] = SnapshotMemory(self.vectors(), self._copier)
        self._read()
        copies, copied = self._snapshots[kind].fill(self.vectors())
        return Snapshot(self.counters, self.tensors(copies), self.layout, self.run_id, copied)

    def _read(self) -> None:
        """Update the fast weights where checkpoints have them, unless a contribution is still being encoded."""
        if self._round_end.outer.settings.fragments > 1 and not self._round_end.awaits_outer_step:
            self._round_end.weights.read()

    @torch.no_grad()
    def load(self, path: Path, hashes: bytes = b"") -> Content:
        """Continue from a checkpoint of this node or of a peer: weights, the outer rule's vectors, means, counters.

        ``hashes`` are its blocks' hashes, if known. A peer's may contain only the slow weights and the outer rule's
        vectors; AdamW's means are then zero. A replica without AdamW ignores the means. Raises `CheckpointError`, with
        nothing changed, if any part of it is invalid.
        """
        outer, theta, vectors = self._round_end.outer, self._round_end.weights.flat, self.vectors().keys()
        counters, content = load_checkpoint(
            path,
            self.tensors(),
            self.layout,
            self.run_id,
            vectors - set(required_vectors(outer.settings)),
            hashes,
            ignored=set(OPTIMIZER_VECTORS) - vectors,
        )
        if outer.settings.fragments == 1 or not bool(theta.any()):  # vectors missing from the file are zeros
            theta.copy_(outer.slow)
        self._restart(counters)
        return content

    @torch.no_grad()
    def start_from(self, path: Path, steps: int, tokens: int) -> None:
        """Begin with another run's weights and momentum instead of the seed's, and with these counts.

        Only before the first step. Raises `CheckpointError`, with nothing changed, if the file does not fit.
        """
        outer, means = self._round_end.outer, self._means()
        vectors = outer.state() | means
        load_start(path, self.tensors(vectors), optional=vectors.keys() - {SLOW}, partial=means.keys())
        self._round_end.weights.flat.copy_(outer.slow)
        self._restart(Counters(0, steps, tokens))

    @torch.no_grad()
    def begin_with(self, weights: Mapping[str, Tensor]) -> None:
        """Begin with these parameters, by name, before the first step."""
        slow = self._round_end.outer.slow
        for name, view in self.layout.views(slow).items():
            view.copy_(weights[name])
        self._round_end.weights.flat.copy_(slow)
        self._round_end.restart()

    def _restart(self, counters: Counters) -> None:
        totals = self._round_end.totals
        totals.round, totals.steps, totals.tokens = counters.round, counters.steps, counters.tokens
        self._begun = counters.steps, counters.tokens
        self._round_end.restart()
        if self._optimizer is not None:  # without its means, its rate is ramped up
            self._optimizer.restart(counters.steps, counters.begun_at)

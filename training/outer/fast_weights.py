"""The fast weights of a replica: a flat vector, and the weights that inner steps move, where these are others.

On a GPU, and where a user's own loop trains, inner steps move other weights than the flat vector, which is then a copy:
it is read at the end of a round, and written back after the outer step. If inner steps were taken since then, a GPU's
weights get a difference instead, which is in the flat vector until it is read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from farandole.protocol.wire.safetensors import FP32_BYTES

from .codec import slices
from .copying import Copier, copier_for


class TrainedWeights(Protocol):
    """The weights that inner steps move, where these are not the flat vector itself."""

    def read(self, flat: Tensor) -> None:
        """Copy the weights to ``flat`` (n,) fp32."""

    def write(self, flat: Tensor) -> None:
        """Set the weights to ``flat`` (n,) fp32."""


@runtime_checkable
class PartialWeights(TrainedWeights, Protocol):
    """Trained weights that can be changed in part, so that the flat vector need not be a copy of all."""

    device: torch.device
    """Where they are."""

    def write_part(self, values: Tensor, part: slice) -> None:
        """Set a part of the weights to ``values`` (n,) fp32."""

    def add(self, values: Tensor, part: slice) -> None:
        """Add ``values`` (n,) fp32 to a part of the weights; on a GPU, this may read them until the next `read`."""


class FastWeights:
    """The flat vector ``flat`` (n,) fp32, and the ``trained`` weights; None: inner steps move the flat vector."""

    def __init__(self, flat: Tensor, trained: TrainedWeights | None = None) -> None:
        self.flat = flat
        """The fast weights, as far as they were read; see above."""
        self._trained = trained
        self._copier = copier_for(trained.device) if isinstance(trained, PartialWeights) else Copier()
        self._room = flat.new_empty(0)
        self.is_copy = trained is not None
        """Whether inner steps move other weights."""

    @property
    def takes_corrections(self) -> bool:
        """Return whether `add` can be used."""
        return isinstance(self._trained, PartialWeights)

    def read(self) -> None:
        """Make the flat vector a copy of the trained weights."""
        if self._trained is not None:
            self._trained.read(self.flat)

    def write(self) -> None:
        """Make the trained weights a copy of the flat vector."""
        if self._trained is not None:
            self._trained.write(self.flat)

    def add(self, part: slice) -> None:
        """Add a part of the flat vector, which is a difference here, to the trained weights."""
        assert isinstance(self._trained, PartialWeights)
        self._trained.add(self.flat[part], part)

    def room(self, num_elements: int) -> Tensor:
        """Return memory for `replaced`, (n,) fp32. For a GPU it is kept, as page-locking it takes longer than using it.

        (PyTorch's own page-locked memory is as large as the next power of two.)
        """
        if not self.takes_corrections:
            return self.flat.new_empty(num_elements)
        if len(self._room) < num_elements:
            memory = np.empty(FP32_BYTES * num_elements, dtype=np.uint8)
            self._copier.pin(memory.data)
            self._room = torch.from_numpy(memory).view(torch.float32)
        return self._room[:num_elements]

    @contextlib.contextmanager
    def replaced(self, part: slice, weights: Tensor) -> Iterator[None]:
        """Replace a part of the fast weights by ``weights`` (n,), which are overwritten, and restore it afterwards."""
        self.read()
        before = self.flat[part]
        if isinstance(self._trained, PartialWeights):
            self._trained.write_part(weights, part)
            try:
                yield
            finally:
                self._trained.write_part(before, part)
            return
        self._swap(before, weights)
        try:
            yield
        finally:
            self._swap(before, weights)

    def _swap(self, one: Tensor, other: Tensor) -> None:
        """Swap the values of two vectors (n,) piece by piece, as a copy of all might have no room; write them."""
        for piece in slices(len(one)):
            kept = one[piece].clone()
            one[piece] = other[piece]
            other[piece] = kept
        self.write()

"""A trainer process of the benchmark: encodes its vector for the mesh process, decodes the partner's, averages."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from farandole.training.codec import decode, encode, encoded_size


class Trainer:
    """Holds the ``index``-th of two vectors."""

    def __init__(self, outgoing: memoryview, incoming: memoryview) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._vector = torch.empty(0)
        self._mean = torch.empty(0)

    async def begin(self, index: int, num_elements: int) -> dict[str, Any]:
        """With fresh vectors; both trainers share the machine, so each has one thread."""
        torch.set_num_threads(1)
        self._vector = random_vector(index, num_elements)
        self._mean = (random_vector(0, num_elements) + random_vector(1, num_elements)) / 2
        return {}

    async def contribute(self, codec: str) -> dict[str, Any]:
        """Encode, and hash as an offer wants it."""
        started_at = time.monotonic()
        size = encode(codec, self._vector, self._outgoing)
        digest = blake3(self._outgoing[:size]).hexdigest()
        return {"started_at": started_at, "ended_at": time.monotonic(), "size": size, "digest": digest}

    async def average(self, codec: str) -> dict[str, Any]:
        """Decode and average; and how far that is from the mean of what both had."""
        started_at = time.monotonic()
        size = encoded_size(codec, len(self._vector))
        mean = decode(codec, self._incoming[:size], len(self._vector)).add_(self._vector).mul_(0.5)
        ended_at = time.monotonic()
        error = float((mean - self._mean).square().mean().sqrt())
        return {"started_at": started_at, "ended_at": ended_at, "rms_error": error}


def random_vector(index: int, num_elements: int) -> Tensor:
    """(n,) fp32, the same as the other projects' peers start with."""
    return torch.from_numpy(np.random.default_rng(index).standard_normal(num_elements, dtype=np.float32))

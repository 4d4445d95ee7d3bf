"""The vectors of a replica's state: their names, and how many bytes they take in a checkpoint.

Each vector has one fp32 number for each parameter of the replica; ``square``, for each that AdamW steps. A checkpoint's
tensors are called VECTOR/PARAMETER, for example ``slow/layers.0.norm.weight``.
"""

from __future__ import annotations

import typing
from typing import Final

from ..wire.safetensors import FP32_BYTES, MAX_HEADER_BYTES
from .outer_rules import OuterConfig, OuterRules

SLOW: Final = "slow"
"""The weights after the last outer step."""
FAST: Final = "fast"
"""The weights now. Stored only with fragments: without fragments a checkpoint is written after an outer step, when they
are the slow weights."""
OPTIMIZER_VECTORS: Final = ("mean", "square")
"""AdamW's running means of the gradient and of its square. They would double a newcomer's download and are worth a few
dozen steps, which a replica without them takes slowly (`farandole.training.inner.optimizer.ramp`)."""
SENT: Final = "sent"
"""The value of each element that the codec topk has last sent."""
DROPPED: Final = ("error",)
"""Vectors that older checkpoints may have, and nothing reads: what a codec had rounded away."""
DRIFT: Final = "drift"
"""The drift correction of a replica (`OuterConfig.drift`)."""
# Vectors of a checkpoint in addition to the required ones: the optimizer's two, the fast weights, one of the codec, and
# the drift correction.
_NUM_OPTIONAL: Final = 5


def required_vectors(outer: OuterConfig) -> tuple[str, ...]:
    """Return the vectors that a newcomer to a run downloads: the slow weights, and the outer rule's shared state."""
    return (SLOW, *outer.vectors)


def is_required(outer: OuterConfig, tensor: str) -> bool:
    """Return whether a newcomer needs this tensor."""
    return tensor.partition("/")[0] in required_vectors(outer)


def is_square(tensor: str) -> bool:
    """Return whether this tensor must not have negative numbers."""
    return tensor.partition("/")[0].endswith("square")


def required_bytes(outer: OuterConfig, num_parameters: int) -> int:
    """Return the bytes that a newcomer downloads of a model of this size, without the header."""
    return num_parameters * len(required_vectors(outer)) * FP32_BYTES


def max_checkpoint_bytes(outer: OuterConfig, num_parameters: int) -> int:
    """Return the most bytes that an honest checkpoint of a model of this size takes."""
    num_vectors = len(required_vectors(outer)) + _NUM_OPTIONAL
    return num_parameters * num_vectors * FP32_BYTES + MAX_HEADER_BYTES


def max_whole_bytes(num_parameters: int) -> int:
    """Return the most bytes that a consolidated checkpoint of a model of this size takes, for any outer rule."""
    most = max(len(required_vectors(rule())) for rule in typing.get_args(OuterRules))
    return num_parameters * (most + len(OPTIMIZER_VECTORS)) * FP32_BYTES + MAX_HEADER_BYTES

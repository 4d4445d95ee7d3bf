"""The vectors of a replica's state: their names, and how many bytes they take in a checkpoint.

Each vector has one fp32 number for each parameter of the replica. A checkpoint's tensors are called VECTOR/PARAMETER,
for example ``slow/layers.0.norm.weight``.
"""

from __future__ import annotations

import typing
from typing import Final

from .outer_rules import OuterConfig, OuterRules
from .safetensors import FP32_BYTES, MAX_HEADER_BYTES

SLOW: Final = "slow"
"""The weights after the last outer step."""
FAST: Final = "fast"
"""The weights now. With fragments alone: without them a checkpoint is written after an outer step, and they are the
slow weights."""
OPTIMIZER_VECTORS: Final = ("mean", "square")
"""AdamW's running means of the gradient and of its square. They would double a newcomer's download and are worth a few
dozen steps, which a replica without them takes slowly (`farandole.training.inner.ramp`)."""
ERROR: Final = "error"
"""What a lossy codec rounded away of the contributions so far."""
SENT: Final = "sent"
"""What the codec topk has last sent of each element."""
# Of a checkpoint beside what its run requires: the optimizer's two, the fast weights, and one of the codec's.
_NUM_OPTIONAL: Final = 4


def required_vectors(outer: OuterConfig) -> tuple[str, ...]:
    """What a newcomer to a run downloads: the slow weights, and what the outer rule keeps."""
    return (SLOW, *outer.vectors)


def known_vectors() -> tuple[str, ...]:
    """Every vector that a checkpoint of any run may have, in the order in which checkpoints have them."""
    of_rules = (vector for rule in typing.get_args(OuterRules) for vector in rule.vectors)
    return tuple(dict.fromkeys((SLOW, *of_rules, *OPTIMIZER_VECTORS, FAST, ERROR, SENT)))


def is_required(outer: OuterConfig, tensor: str) -> bool:
    """Whether a newcomer needs this tensor."""
    return tensor.partition("/")[0] in required_vectors(outer)


def is_square(tensor: str) -> bool:
    """Whether no number of this tensor may be negative."""
    return tensor.partition("/")[0].endswith("square")


def required_bytes(outer: OuterConfig, num_parameters: int) -> int:
    """What a newcomer downloads of a model of this size, without the header."""
    return num_parameters * len(required_vectors(outer)) * FP32_BYTES


def max_checkpoint_bytes(outer: OuterConfig, num_parameters: int) -> int:
    """The most that an honest checkpoint of a model of this size takes."""
    return num_parameters * (len(required_vectors(outer)) + _NUM_OPTIONAL) * FP32_BYTES + MAX_HEADER_BYTES


def max_whole_bytes(num_parameters: int) -> int:
    """The most that a whole model of this size takes as a consolidated checkpoint, whatever its run's outer rule."""
    most = max(len(required_vectors(rule())) for rule in typing.get_args(OuterRules))
    return num_parameters * (most + len(OPTIMIZER_VECTORS)) * FP32_BYTES + MAX_HEADER_BYTES

"""The task of all variants in the benchmark of stages: the same microbatches through the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.manifest import ModelConfig, manifest_from_dict
from farandole.protocol.wire.identity import public_bytes

from ..process import BenchError

RUN_ID: Final = bytes(32)
# 3.6 M parameters: four stages of two layers, and microbatches that take some tens of milliseconds on a core.
MODEL: Final[Mapping[str, int]] = {
    "num_layers": 8,
    "width": 192,
    "num_heads": 6,
    "hidden": 576,
    "context": 128,
    "vocabulary": 256,
}
NUM_MICROBATCHES: Final = 16
# Low: in a run without a warm-up, activations could double from one inner step to the next, and would be refused.
LEARNING_RATE: Final = 1e-4
# Inner steps before the timed ones: shapes are inferred, links opened, pages mapped.
WARMUP_STEPS: Final = 1
# Nothing may be dropped, however busy the machine is, as losses are compared.
MICROBATCH_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class Task:
    """Inner steps of a model, each of ``num_microbatches`` of one sequence."""

    num_stages: int = 4
    steps: int = 4
    """Number of timed inner steps."""
    num_microbatches: int = NUM_MICROBATCHES
    """Number of microbatches per inner step."""
    model: Mapping[str, int] = field(default_factory=lambda: MODEL)

    @property
    def all_steps(self) -> int:
        """Return the number of inner steps, warm-up included."""
        return WARMUP_STEPS + self.steps

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens per inner step."""
        return self.num_microbatches * self.model["context"]

    def manifest(self, codec: str = "fp32", *, overlap: bool = False) -> dict[str, Any]:
        """Return the run's settings, as in a run file. Stages would clip separately, so clipping is off."""
        return {
            "name": "bench-stages",
            "model": {**self.model, "num_stages": self.num_stages},
            "inner": {
                "learning_rate": LEARNING_RATE,
                "warmup_steps": 2,
                "batch_size": self.num_microbatches,
                "clip": 0.0,
            },
            "pipeline": {
                "codec": codec,
                "microbatch_size": 1,
                "microbatch_seconds": MICROBATCH_SECONDS,
                "overlap": overlap,
            },
        }

    def check(self) -> ModelConfig:
        """Return the model to train; raises `ManifestError`, or `BenchError` if the task is too small for torch."""
        if self.num_stages < 2 or self.num_microbatches < self.num_stages:
            raise BenchError(f"{self.num_microbatches} microbatches do not go through {self.num_stages} stages at once")
        return manifest_from_dict(self.manifest()).model


def key_of(stage: int) -> Ed25519PrivateKey:
    """Return the key of the node that holds a stage; stage 0's author chooses the data."""
    return Ed25519PrivateKey.from_private_bytes((stage + 1).to_bytes(32, "big"))


def author() -> bytes:
    """Return the author whose data all variants learn from."""
    return public_bytes(key_of(0))

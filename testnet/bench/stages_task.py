"""What all variants of the benchmark of stages compute: the same microbatches through the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.identity import public_bytes
from farandole.protocol.manifest import ModelConfig, manifest_from_dict

from .process import BenchError

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
# Inner steps before those that are timed: shapes are inferred, links opened, pages mapped.
WARMUP_STEPS: Final = 1
# Nothing may be dropped: losses are compared, however busy the machine is.
MICROBATCH_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class Task:
    """Inner steps of a model, each of ``num_microbatches`` of one sequence."""

    num_stages: int = 4
    steps: int = 4
    """That are timed."""
    num_microbatches: int = NUM_MICROBATCHES
    """An inner step."""
    model: Mapping[str, int] = field(default_factory=lambda: MODEL)

    @property
    def all_steps(self) -> int:
        """With those that warm up."""
        return WARMUP_STEPS + self.steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens."""
        return self.num_microbatches * self.model["context"]

    def manifest(self, codec: str = "fp32", *, overlap: bool = False) -> dict[str, Any]:
        """As a run file has it. Stages clip each for themselves, so nobody clips."""
        return {
            "name": "bench-stages",
            "model": {**self.model, "num_stages": self.num_stages},
            "inner": {"learning_rate": 1e-3, "warmup_steps": 2, "batch_size": self.num_microbatches, "clip": 0.0},
            "pipeline": {
                "codec": codec,
                "microbatch_size": 1,
                "microbatch_seconds": MICROBATCH_SECONDS,
                "overlap": overlap,
            },
        }

    def check(self) -> ModelConfig:
        """The model to train; raises `ManifestError`, or `BenchError` if torch could not schedule so few."""
        if self.num_stages < 2 or self.num_microbatches < self.num_stages:
            raise BenchError(f"{self.num_microbatches} microbatches do not go through {self.num_stages} stages at once")
        return manifest_from_dict(self.manifest()).model


def key_of(stage: int) -> Ed25519PrivateKey:
    """Of the node that holds a stage; that of stage 0 chooses the data."""
    return Ed25519PrivateKey.from_private_bytes((stage + 1).to_bytes(32, "big"))


def author() -> bytes:
    """Whose data all variants learn from."""
    return public_bytes(key_of(0))

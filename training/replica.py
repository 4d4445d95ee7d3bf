"""One replica: a module in training, the whole model or a stage of it, and what belongs to it but for its batches.

Its rounds are those of `farandole.training.flat_replica`; its inner steps are AdamW's, on one flat vector: gradient and
means are flat fp32 vectors as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from farandole.protocol.manifest import InnerConfig, Manifest
from farandole.protocol.outer_rules import NoLoCoConfig, OuterConfig
from farandole.protocol.screening_rules import DEFAULT_SCREENING, ScreeningConfig

from .device import Device
from .flat_replica import FlatReplica
from .inner import FlatAdamW
from .parameters import flatten_, layout_of


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a replica learns: sections of the run's manifest."""

    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=NoLoCoConfig)
    screening: ScreeningConfig = DEFAULT_SCREENING

    @classmethod
    def of(cls, manifest: Manifest) -> Recipe:
        """The sections of a manifest."""
        return cls(manifest.inner, manifest.outer, manifest.screening)


class Replica(FlatReplica):
    """A module, its inner optimizer, its outer state, and the partner that it meets: an engine over flat vectors.

    What computes its gradient is another matter: `farandole.training.learner` where the module is the whole model,
    `farandole.training.stage_worker` where it is a stage. The same calls give the same bits in processes that have
    called `farandole.training.determinism.make_deterministic`, on machines of one class.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, *, run_id: bytes, device: Device) -> None:
        self.module = module.to(device.torch_device)
        """The model, or a stage of it; its parameters are views of `theta`."""
        layout = layout_of(self.module, recipe.outer.codec)
        theta, self.gradient = flatten_(self.module, layout)
        """`theta` is flat, and so is the sum of gradients of the inner step that is under way: (n,) fp32 each."""
        super().__init__(theta, layout, recipe.outer, recipe.screening, run_id=run_id, device=device)
        self._optimizer = FlatAdamW(recipe.inner, theta, self.gradient, list(self.module.parameters()))

    @property
    def learning_rate(self) -> float:
        """Rate of the next inner step."""
        return self._optimizer.rate(self.steps)

    @property
    def begun_at(self) -> int:
        """Inner step at which AdamW's means began, which no checkpoint has."""
        return self._optimizer.begun_at

    @begun_at.setter
    def begun_at(self, step: int) -> None:
        self._optimizer.begun_at = step

    def optimizer_digest(self) -> bytes:
        """BLAKE3 of AdamW's means, 32 bytes."""
        return self._optimizer.digest()

    def clear_gradient(self) -> None:
        """Before the backward passes of an inner step, which add to the parameters' gradients."""
        self.gradient.zero_()

    @torch.no_grad()
    def inner_step(self, num_tokens: int, divisor: int = 1) -> None:
        """Clip, and take one AdamW step, with the gradients that the backward passes summed, over ``divisor``."""
        self._optimizer.step(self.steps, divisor)
        self.count_step(num_tokens)

    def _restart(self) -> None:
        """As `FlatReplica._restart`: without the state of AdamW, its rate is ramped up."""
        self._optimizer.restart(self.steps)

    def _inner_vectors(self) -> dict[str, Tensor]:
        """As `FlatReplica._inner_vectors`."""
        return self._optimizer.state()

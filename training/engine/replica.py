"""One replica: a module in training, the whole model or a stage of it, with everything except its batches.

Its rounds come from `farandole.training.engine.flat_replica`; its inner steps are taken on one flat vector
(`farandole.training.inner.optimizer`): gradient and means are flat fp32 vectors as well. These four lie on the device
that trains; all that a round's end needs lies there too, or in the host's memory, where a GPU must have room for a
larger model. A lean replica has these four in bf16 (`farandole.training.inner.lean`), and a round's end on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import DataConfig, InnerConfig, Manifest, RoundConfig
from farandole.protocol.run.outer_rules import NoLoCoConfig, OuterConfig
from farandole.protocol.run.screening_rules import DEFAULT_SCREENING, ScreeningConfig

from ..base.device import Device, host_memory
from ..base.parameters import flatten_, layout_of
from ..inner.lean import LeanOptimizer, LeanWeights, Rounding, flatten_lean_, pieces
from ..inner.optimizer import InnerOptimizer
from ..outer.fast_weights import TrainedWeights
from .flat_replica import FlatReplica


@dataclass(frozen=True, slots=True)
class Recipe:
    """The training settings of a replica: sections of the run's manifest."""

    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=NoLoCoConfig)
    screening: ScreeningConfig = DEFAULT_SCREENING
    rounds: RoundConfig = field(default_factory=RoundConfig)
    data: DataConfig = field(default_factory=DataConfig)

    @classmethod
    def of(cls, manifest: Manifest) -> Recipe:
        """The sections of a manifest."""
        return cls(manifest.inner, manifest.outer, manifest.screening, manifest.rounds, manifest.data)


class DeviceWeights:
    """Trained weights (`training.outer.fast_weights.PartialWeights`): a flat vector (n,) fp32 on another device."""

    def __init__(self, flat: Tensor) -> None:
        self.device = flat.device
        self._flat = flat

    def read(self, flat: Tensor) -> None:
        """Waits for the inner steps that are queued."""
        flat.copy_(self._flat)

    def write(self, flat: Tensor) -> None:
        """Waits until it is there."""
        self._flat.copy_(flat)

    def write_part(self, values: Tensor, part: slice) -> None:
        """As `write`."""
        self._flat[part].copy_(values)

    def add(self, values: Tensor, part: slice) -> None:
        """Queue the additions, piece by piece: a copy of all values might have no room on the device."""
        target = self._flat[part]
        for piece in pieces(len(values), target.device):
            target[piece] += values[piece].to(target.device, non_blocking=True)


class Replica(FlatReplica):
    """A module, its inner optimizer, its outer state, and the partner that it meets: an engine over flat vectors.

    What computes its gradient is another matter: `farandole.training.engine.learner` where the module is the whole
    model, `farandole.training.engine.stage_worker` where it is a stage. The same calls give the same bits in processes
    that have called `farandole.training.base.determinism.make_deterministic`, on machines of one class.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        *,
        run_id: bytes,
        device: Device,
        averages_on_host: bool = False,
        lean_author: bytes | None = None,
    ) -> None:
        """``averages_on_host``: all that a round's end needs lies in the host's memory; at a CPU it does anyhow.

        ``lean_author``: the author of a lean replica, which seeds its rounding; None: the replica trains in fp32.
        """
        layout = layout_of(module, recipe.outer.codec)
        trained: TrainedWeights | None
        optimizer: Callable[..., InnerOptimizer]
        if lean_author is None:
            module = module.to(device.torch_device)
            weights, gradient = flatten_(module, layout)
            theta = host_memory(weights) if averages_on_host else weights
            trained = DeviceWeights(weights) if averages_on_host else None
            optimizer = InnerOptimizer
        else:
            rounding = Rounding(run_id, lean_author, device.torch_device)
            theta, weights, gradient = flatten_lean_(module, layout, device.torch_device)
            trained = LeanWeights(weights, rounding)
            optimizer = partial(LeanOptimizer, rounding)
        self.module = module
        """The model, or a stage of it; its parameters are views of a flat vector, which is `theta` or a copy of it."""
        self.gradient = gradient
        """The sum of gradients of the inner step under way, (n,), of the dtype of the weights."""
        super().__init__(
            theta,
            layout,
            recipe.outer,
            recipe.screening,
            run_id=run_id,
            device=device,
            trained=trained,
            partners=recipe.rounds.partners,
        )
        self._drift = self._outer.drift
        """The drift correction, where inner steps read it: a copy, if the outer state is elsewhere."""
        if self._drift is not None and trained is not None:
            self._drift = torch.zeros_like(weights)
        self._optimizer = optimizer(recipe.inner, module, layout, weights, gradient, self._drift)
        if lean_author is not None:
            self._fast.write()

    @property
    def learning_rate(self) -> float:
        """Rate of the next inner step."""
        return self._optimizer.rate(self.steps)

    @property
    def begun_at(self) -> int:
        """See `Engine.begun_at`."""
        return self._optimizer.begun_at

    @begun_at.setter
    def begun_at(self, step: int) -> None:
        self._optimizer.begun_at = step

    @property
    def num_skipped(self) -> int:
        """See `Engine.num_skipped`."""
        return self._optimizer.num_skipped

    def optimizer_digest(self) -> bytes:
        """BLAKE3 of the inner optimizer's means, 32 bytes."""
        return self._optimizer.digest()

    def clear_gradient(self) -> None:
        """Zero the gradient. Call it before an inner step's backward passes, which add to the gradient."""
        self.gradient.zero_()

    @torch.no_grad()
    def inner_step(self, num_tokens: int, divisor: int = 1) -> None:
        """Clip, and take one step, with the gradients that the backward passes summed, over ``divisor``."""
        self.count_step(num_tokens, self._optimizer.step(self.steps, divisor))

    def catch_up(self, round_index: int, first_step: int = 0) -> None:
        """Implement `Engine.catch_up`; the ramp of the rate goes on from where it was."""
        super().catch_up(round_index)
        if self.round:
            missed = round((self.steps - first_step) / self.round * (round_index - self.round))
            self.begun_at += missed if self.begun_at else 0
            self.steps += missed
            self._contributed_at += missed

    def _ramp(self, step: int) -> float:
        """See `FlatReplica._ramp`."""
        return self._optimizer.ramp(step)

    def _publish(self, corrected: slice | None = None) -> None:
        """See `FlatReplica._publish`; the drift correction goes with the weights."""
        super()._publish(corrected)
        drift = self._outer.drift
        if self._drift is not None and drift is not None and drift is not self._drift:
            self._drift.copy_(drift)

    def _restart(self, begun_at: int) -> None:
        """See `FlatReplica._restart`: without the state of AdamW, its rate is ramped up."""
        self._optimizer.restart(self.steps, begun_at)

    def _tensors(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `FlatReplica._tensors`; Muon keeps no mean of squares for matrices."""
        return self.layout.tensors(vectors, self._optimizer.parts)

    def _inner_vectors(self) -> dict[str, Tensor]:
        """See `FlatReplica._inner_vectors`."""
        return self._optimizer.state()

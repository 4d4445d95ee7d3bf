"""The inner optimizer: AdamW with linear warm-up and cosine decay, as functions on tensors.

Every operation is elementwise, so a whole model is stepped as one flat tensor (a handful of kernels instead of a
handful for each parameter), and many replicas as one (N, P) tensor. The operations and their order are those of
`torch.optim.AdamW` (foreach=False), which is the oracle of the tests, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from farandole.protocol.manifest import InnerConfig
from farandole.protocol.vectors import OPTIMIZER_VECTORS

# How many times the memory of the mean of squares the rate is ramped up for (`ramp` says why).
RAMP_MEMORIES = 2


def learning_rate(step: int, inner: InnerConfig) -> float:
    """The rate of inner step ``step`` (from 0): linear warm-up, cosine to its least at ``total_steps``, then flat."""
    if step < inner.warmup_steps:
        return inner.learning_rate * (step + 1) / inner.warmup_steps
    least = inner.learning_rate * inner.min_learning_rate_ratio
    progress = (step - inner.warmup_steps) / max(1, inner.total_steps - inner.warmup_steps)
    return least + (inner.learning_rate - least) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def ramp(step: int, inner: InnerConfig) -> float:
    """The share of the rate for inner step ``step`` (from 0) after AdamW's means were begun anew: linear up to 1.

    Until the mean of squares has seen enough steps its estimate is bad, and full steps do harm; twice its memory, which
    is 1 / (1 - beta2) steps, is enough whatever the model (Ma and Yarats, arXiv 1910.04209).
    """
    return min(1.0, (step + 1) * (1 - inner.beta2) / RAMP_MEMORIES)


def adamw_(
    weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, rate: float, inner: InnerConfig
) -> None:
    """One Adam step in place (arXiv 1412.6980), for tensors of one shape; ``step`` counts from 0.

    ``mean`` and ``square`` are the running means of the gradient and of its square. Decoupled weight decay
    (arXiv 1711.05101) is `decay_`, called before this.
    """
    mean.lerp_(gradient, 1 - inner.beta1)
    square.mul_(inner.beta2).addcmul_(gradient, gradient, value=1 - inner.beta2)
    bias1 = 1 - inner.beta1 ** (step + 1)
    bias2 = 1 - inner.beta2 ** (step + 1)
    denominator = (square.sqrt() / bias2**0.5).add_(inner.epsilon)
    weights.addcdiv_(mean, denominator, value=-rate / bias1)


def fused_adamw_(
    weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, rate: float, inner: InnerConfig
) -> None:
    """`adamw_` in one pass over memory, PyTorch's fused kernel: the same to rounding, and faster on a GPU."""
    torch._fused_adamw_(
        [weights],
        [gradient],
        [mean],
        [square],
        [],
        # Filled on the device: copied from here, it would wait for all that the device has yet to do.
        [torch.full((), step + 1, dtype=torch.float32, device=weights.device)],
        lr=rate,
        beta1=inner.beta1,
        beta2=inner.beta2,
        weight_decay=0.0,
        eps=inner.epsilon,
        amsgrad=False,
        maximize=False,
    )


def decay_(weights: Tensor, rate: float, inner: InnerConfig) -> None:
    """Decoupled weight decay in place."""
    if inner.weight_decay:
        weights.mul_(1 - rate * inner.weight_decay)


class FlatAdamW:
    """AdamW on all parameters of a replica at once: ``weights`` and ``gradient`` are flat, (n,) fp32.

    ``parameters`` are views into ``weights``, whose gradients are views into ``gradient``.
    """

    def __init__(
        self, settings: InnerConfig, weights: Tensor, gradient: Tensor, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._settings = settings
        self._weights = weights
        self._gradient = gradient
        self._parameters = parameters
        self._mean = torch.zeros_like(weights)
        self._square = torch.zeros_like(weights)
        self.begun_at = 0
        """Inner step at which the means began."""

    def rate(self, steps: int) -> float:
        """The learning rate of inner step ``steps`` (from 0): the schedule's, ramped up after a `restart`."""
        rate = learning_rate(steps, self._settings)
        return rate * ramp(steps - self.begun_at, self._settings) if self.begun_at else rate

    def step(self, steps: int, divisor: int) -> None:
        """Take inner step ``steps`` (from 0), with the gradient over ``divisor``, clipped. The gradient is changed."""
        if divisor != 1:
            self._gradient.div_(divisor)
        if self._settings.clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.clip)
        rate = self.rate(steps)
        for parameter in self._parameters:
            if parameter.ndim > 1:
                decay_(parameter, rate, self._settings)
        step_ = fused_adamw_ if self._weights.is_cuda else adamw_
        number = steps - self.begun_at
        step_(self._weights, self._gradient, self._mean, self._square, number, rate, self._settings)

    def restart(self, steps: int) -> None:
        """The means were loaded after ``steps`` inner steps; if they are zeros, the rate is ramped up from there."""
        self.begun_at = 0 if bool(self._square.any()) else steps

    def digest(self) -> bytes:
        """BLAKE3 of the running means, 32 bytes."""
        digest = blake3()
        for mean in (self._mean, self._square):
            digest.update(mean.cpu().numpy().view(np.uint8).data)
        return digest.digest()

    def state(self) -> dict[str, Tensor]:
        """The running means, flat vectors (n,), by name."""
        return dict(zip(OPTIMIZER_VECTORS, (self._mean, self._square), strict=True))

"""Muon: momentum whose matrices are made orthogonal before each step (Jordan 2024, kellerjordan.github.io/posts/muon).

A matrix's step is the momentum U S V^T with all singular values set to about 1. Newton-Schulz iterations compute it
with products of matrices alone. The rate is scaled as in "Muon is Scalable for LLM Training" (arXiv 2502.16982, section
2.2), so that a step is as large as AdamW's, and one learning rate serves both.

The operations and their order are the same as in `torch.optim.Muon` (``adjust_lr_fn="match_rms_adamw"``), which is the
oracle of the tests, bit for bit. Only the dtype differs on a CPU: few CPUs have bf16 units, and without them bf16
products take 10 to 27 times as long as fp32's.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

# Of the iteration x <- a x + (b x x^T + c (x x^T)^2) x: the slope at 0 is as large as stability permits.
_A: Final = 3.4445
_B: Final = -4.7750
_C: Final = 2.0315
_ITERATIONS: Final = 5
_EPSILON: Final = 1e-7
# The root mean square of AdamW's steps, as a share of the rate.
_ADAMW_RMS: Final = 0.2

# Names of the modules at a model's ends, if they are no `nn.Embedding`: farandole's own, GPT-2's, Llama's.
_ENDS: Final = frozenset({"embedding", "lm_head", "head", "wte", "wpe"})


def matrices_of(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that Muon steps: all matrices but those of embedding and head.

    A row of these two belongs to one token, so their steps are AdamW's, as are the steps of norms and biases. A module
    of one's own has its embedding in an `nn.Embedding`, and calls its head ``head`` or ``lm_head``.
    """
    embeddings = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    return frozenset(
        name
        for name, parameter in module.named_parameters()
        if parameter.ndim == 2 and id(parameter) not in embeddings and not _ENDS & set(name.split("."))
    )


def muon_(
    weight: Tensor, gradient: Tensor, momentum: Tensor, rate: float, share: float, scale: Tensor | None = None
) -> None:
    """Take one Muon step in place, for a matrix (r, c); weight decay is `farandole.training.inner.optimizer.decay_`.

    ``momentum`` (r, c) is the running mean of the gradient, of which a step keeps ``share``; the step looks ahead, as
    Nesterov's momentum does. ``scale``, a number on the device, scales the step.
    """
    momentum.lerp_(gradient, 1 - share)
    step = orthogonalised(gradient.lerp(momentum, share))
    if scale is not None:
        step.mul_(scale)
    weight.add_(step, alpha=-rate * rms_factor(*weight.shape))


def rms_factor(rows: int, columns: int) -> float:
    """Return the factor that makes an orthogonalised step as large as AdamW's."""
    return _ADAMW_RMS * math.sqrt(max(rows, columns))


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrix to (r, c), roughly, (r, c); bf16, or fp32 on a CPU.

    Large singular values become 0.7 to 1.2; very small ones stay smaller.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16, copy=True)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=_EPSILON))
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x

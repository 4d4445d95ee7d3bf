"""nanochat's rates: Muon for the layers' matrices, AdamW for the embedding and the head.

nanochat's Muon has refinements (Polar Express, NorMuon, cautious weight decay); PyTorch's is the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch

from .gpt import EMBEDDING_STD, GPT

# For batches of so many tokens, and AdamW's for this width.
REFERENCE_TOKENS: Final = 2**19
REFERENCE_WIDTH: Final = 768
MATRIX_RATE: Final = 0.02
HEAD_RATE: Final = 0.008
EMBEDDING_RATE: Final = 0.3 / 0.8 * EMBEDDING_STD  # nanochat's embedding starts with a standard deviation of 0.8
WARMUP_STEPS: Final = 40
# The last share of a training, in which the rates fall, and the factor that they fall to.
WARMDOWN: Final = 0.65
LAST_FACTOR: Final = 0.05


def optimizers_of(
    model: GPT, tokens_per_step: int, factor: float = 1.0
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return both optimizers, with nanochat's rates for such batches, times ``factor``."""
    scale = factor * math.sqrt(tokens_per_step / REFERENCE_TOKENS)
    wide = scale * math.sqrt(REFERENCE_WIDTH / model.ends.embedding.embedding_dim)
    muon = torch.optim.Muon(model.layers.parameters(), lr=scale * MATRIX_RATE, weight_decay=0.0)
    adamw = torch.optim.AdamW(
        [
            {"params": [model.ends.embedding.weight], "lr": wide * EMBEDDING_RATE, "betas": (0.8, 0.995)},
            {"params": [model.ends.head.weight], "lr": wide * HEAD_RATE, "betas": (0.8, 0.96)},
        ],
        eps=1e-10,
        weight_decay=0.0,
    )
    for group in (*muon.param_groups, *adamw.param_groups):
        group["initial_lr"] = group["lr"]
    return muon, adamw


def set_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Set all rates to a multiple of the first ones."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]


def factor_at(step: int, progress: float) -> float:
    """Return the rates' factor at a step, when this share of the training is over."""
    warmed_up = min(1.0, (step + 1) / WARMUP_STEPS)
    left = max(0.0, min(1.0, (1.0 - progress) / WARMDOWN))
    return warmed_up * (LAST_FACTOR + (1.0 - LAST_FACTOR) * left)

"""nanochat's measure: bits per byte, by which models with different tokenizers can be compared."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_AT_A_TIME = 8


@torch.no_grad()
def bits_per_byte(model: nn.Module, tokens: Tensor, num_bytes: Tensor, context: int, num_rows: int) -> float:
    """Return the bits per byte of the first rows (T + 1) of tokens (n,).

    The nats of all targets but special tokens are summed, and divided by the bytes of the same targets: ``num_bytes``
    (V,) has each token's, and 0 for special ones. Raises `ValueError` if there are too few tokens for a row.
    """
    rows = tokens.unfold(0, context + 1, context)[:num_rows].long() if len(tokens) > context else tokens[:0]
    if not len(rows):
        raise ValueError(f"{len(tokens)} tokens make no row of {context} and a target")
    nats = total = 0.0
    for some in rows.split(ROWS_AT_A_TIME):
        targets = some[:, 1:].flatten()
        losses = F.cross_entropy(model(some[:, :-1]).flatten(0, 1), targets, reduction="none")
        counted = num_bytes[targets]
        nats += losses[counted > 0].double().sum().item()
        total += counted.sum().item()
    return nats / (math.log(2) * total)

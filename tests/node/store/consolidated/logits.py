"""Compares a model that was trained here with the one that transformers loads."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

# Allowed difference of two programs that do the same in another order: in fp32, as a share of the largest logit.
TOLERANCE: Final = 1e-5


@torch.no_grad()
def assert_same_logits(theirs: Any, ours: nn.Module, tokens: Tensor) -> None:
    """Compare in fp64 to within `TOLERANCE`, in fp32 to within that share of the largest; leave both models in fp32."""
    for dtype in (torch.float64, torch.float32):
        expected = ours.to(dtype)(tokens)
        difference = float((theirs.to(dtype)(tokens).logits - expected).abs().max())
        largest = float(expected.abs().max())
        print(f"{dtype}: logits up to {largest:.2f}, off by {difference:.1e} at most")
        assert difference < TOLERANCE * (1.0 if dtype == torch.float64 else largest)

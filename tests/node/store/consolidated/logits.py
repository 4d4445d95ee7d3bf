"""Whether two models compute the same: one that trained here, and what transformers makes of it."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

# What two programs may differ by that do the same in another order: in fp32, of the largest logit.
TOLERANCE: Final = 1e-5


@torch.no_grad()
def assert_same_logits(theirs: Any, ours: nn.Module, tokens: Tensor) -> None:
    """In fp64 to within `TOLERANCE`, in fp32 to within that share of the largest; leaves both models in fp32."""
    for dtype in (torch.float64, torch.float32):
        expected = ours.to(dtype)(tokens)
        difference = float((theirs.to(dtype)(tokens).logits - expected).abs().max())
        largest = float(expected.abs().max())
        print(f"{dtype}: logits up to {largest:.2f}, off by {difference:.1e} at most")
        assert difference < TOLERANCE * (1.0 if dtype == torch.float64 else largest)

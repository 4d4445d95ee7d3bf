"""How tokens are drawn from a model's logits (`farandole.training.model.generation`). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GREEDY: Final = 0.0
"""The temperature at which the likeliest token is always taken."""

USUAL_TEMPERATURE: Final = 0.8
USUAL_TOP_K: Final = 50


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float
    """What the logits are divided by; below 1, likely tokens become likelier. See `GREEDY`."""
    top_k: int
    """Only this many of the likeliest tokens are drawn from; 0: all."""
    seed: int
    top_p: float = 1.0
    """Only the likeliest tokens that together have this chance are drawn from (arXiv 1904.09751); 1: all."""

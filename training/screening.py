"""Whether a partner's contribution is fit to be averaged with one's own.

Replicas of a run start from the same weights and are averaged all the time, so honest contributions lie close
together: with NoLoCo the weights' spread is below 1 % of their size at the end of training (BENCHMARKS.md). Four
replicas of 41 k parameters that trained for 1,000 steps, each on other text, without ever averaging, still had
cosines above 0.44 and norms within 12 % of each other. What lies far outside is another run's, damaged, or
hostile. This bounds the harm of one exchange; it does not detect a careful adversary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .errors import ScreeningError

MAX_NORM_RATIO = 4.0
MIN_COSINE = 0.25


def sums(own: Tensor, partner: Tensor) -> Tensor:
    """What `screen` needs to know of two contributions, or of parts of them (n,), whose sums add up: (3,) fp32.

    Own squares, the partner's squares, products.
    """
    return torch.stack((own @ own, partner @ partner, own @ partner))


def screen(sums: Tensor) -> None:
    """Compare two contributions by their `sums`; raises `ScreeningError` that says what is wrong with the partner's."""
    own_square, partner_square, product = sums.tolist()
    own_norm, partner_norm = math.sqrt(own_square), math.sqrt(partner_square)
    if not own_norm / MAX_NORM_RATIO <= partner_norm <= own_norm * MAX_NORM_RATIO:  # refuses NaN as well
        raise ScreeningError(
            f"the contribution's norm is {partner_norm:.3g}, mine {own_norm:.3g}: more than a factor of "
            f"{MAX_NORM_RATIO:g} apart"
        )
    if not product >= MIN_COSINE * own_norm * partner_norm:
        raise ScreeningError(
            f"the contribution's cosine with mine is {product / (own_norm * partner_norm):.3f}, below {MIN_COSINE:g}"
        )

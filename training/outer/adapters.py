"""``plain``, but adapters (LoRA) are averaged by what they do: the mean of their products B A, split into two again.

The mean of products is not the product of means (arXiv 2410.09432): of two members with shares w1 + w2 = 1 that lacks
w1 w2 (B1 - B2) (A1 - A2). An adapter has room for the best r of the mean's 2 r directions. With A (r, inputs) and B
(outputs, r), no matrix of the product's size is made:

    [A1; A2]' = Qa Ra,  [w1 B1, w2 B2] = Qb Rb,  P = w1 B1 A1 + w2 B2 A2 = Qb (Rb Ra') Qa',  where Rb Ra' is 2 r x 2 r
    A = W V,  B = P V' W^-1,  B A = P V'V,  where V has P's first r right singular vectors, and W = mean(A) V'

Of all splits this has the A nearest to the mean of A, which both partners know: they stay in one basis, and what knows
A and B apart keeps its meaning: an optimizer's vectors, distances, sketches, merged checkpoints. Where partners have
one A, or zeros for B, it is the mean of both apart, which is exact there: of directions in which P is nothing, V takes
A's (`_TIE`). W is kept from being singular (`_LEAST`). V's signs and order do not matter.

- *Liars*: a product grows with the square of its factors, and a clip bounds the mean of A and B apart. So an adapter
  whose split is further from that mean than a member is, or not finite, is averaged apart. The guard measures the loss
  of the weights that the step would make (`OuterState.towards`).
- *Late steps* add to A and B what they have moved since the contribution. Of *lossy codecs* only the difference of both
  members counts, as always. An adapter in two *fragments*, or of a rank above `_MAX_RANK`, is averaged apart. A
  *momentum* would add up movements in bases that differ a little: there is none.

With exact contributions partners get the same bits on machines of one class; others round in fp64, each in its way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..base.parameters import Layout

# The work grows with its square: beyond, factoring a large base's adapters would take longer than their exchange.
_MAX_RANK: Final = 64
# What counts as nothing in a product, as a share of all of it.
_TIE: Final = 1e-6
# The least singular value of W, as a share of the usual one of members' A.
_LEAST: Final = 0.1

Adapter = tuple[slice, slice, int]
"""Where A and B are in a fragment, and their rank."""
Factors = tuple[Tensor, Tensor]
"""A (r, inputs) and B (outputs, r), in fp64."""


def adapters_of(layout: Layout, part: slice) -> list[Adapter]:
    """Return the adapters, by peft's names, whose A and B are in the range ``part`` of the flat vector."""
    found, places = list[Adapter](), layout.places()
    for name, shape in layout.shapes.items():
        other, is_a = re.subn(r"(\blora_(?:embedding_)?)A\b", r"\1B", name)
        if not is_a or not shape or layout.shapes.get(other, ())[1:2] != shape[:1] or shape[0] > _MAX_RANK:
            continue
        a, b = (slice(each.start - part.start, each.stop - part.start) for each in (places[name], places[other]))
        if min(a.start, b.start) >= 0 and max(a.stop, b.stop) <= part.stop - part.start:
            found.append((a, b, shape[0]))
    return found


def merged(members: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Return the factors of the mean of the members' products, or the mean of their factors, by their ``weights``."""
    weighted = [(a * weight, b * weight) for (a, b), weight in zip(members, weights, strict=True)]
    mean = torch.stack([a for a, _ in weighted]).sum(0), torch.stack([b for _, b in weighted]).sum(0)

    def distance(factors: Factors) -> float:
        return math.hypot(*(float((one - of_mean).norm()) for one, of_mean in zip(factors, mean, strict=True)))

    try:
        split = factors_of(torch.cat([a for a, _ in members]), torch.cat([b for _, b in weighted], 1), mean[0])
    except RuntimeError:  # of LAPACK, which finds no factors of these
        return mean
    return split if distance(split) <= min(map(distance, members)) else mean  # NaN is no distance


def factors_of(rows: Tensor, columns: Tensor, mean: Tensor) -> Factors:
    """Return the factors of ``columns`` @ ``rows`` whose A is nearest to ``mean`` (r, inputs), by the formulas above.

    ``rows`` (k, inputs), ``columns`` (outputs, k). Raises `RuntimeError` if LAPACK finds none.
    """
    (row_basis, of_rows), (column_basis, of_columns) = torch.linalg.qr(rows.T), torch.linalg.qr(columns)
    product, anchor = of_columns @ of_rows.T, mean @ row_basis
    tie = _TIE * product.norm() / anchor.norm() if bool(product.any()) else 1.0
    kept = torch.linalg.svd(torch.cat([product, tie * anchor]), full_matrices=False)[2][: len(mean)]  # V's
    left, sizes, right = torch.linalg.svd(anchor @ kept.T, full_matrices=False)  # W
    sizes = sizes.clamp(min=_LEAST * float(rows.norm()) / math.sqrt(len(rows)))
    b = column_basis @ (product @ kept.T @ right.T / sizes @ left.T)
    return (left * sizes) @ right @ kept @ row_basis.T, b

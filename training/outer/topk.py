"""The codec topk: of every 256 elements, those k that moved furthest since they were last sent.

A block is a scale (fp32), k integers in -127..127 and their k places in the block, ascending, a byte each: 4 + 2 k
bytes for 256 elements. The last block, of r elements, sends min(k, r) of them. For the rest the receiver takes its own
values, so it decodes into a copy of these. The sender remembers what it last sent of every element: what is left out
moves on, and has its turn when it is further off than its neighbours. That memory is this codec's error feedback.

So two partners agree, to the codec's rounding, where both have sent. Where one has, the other alone moves, half the
way if their shares are equal; and where none has, nothing happens: their means are not one mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farandole.protocol.run.outer_rules import SCALE_BYTES, TOPK_BLOCK, topk_bytes

from ..base.errors import CodecError
from .magnitudes import MAX_MAGNITUDE, MIN_SCALE

_LEVELS = 127


@dataclass(frozen=True, slots=True)
class TopK:
    """A `farandole.training.outer.codec.Form` with a memory: ``k`` elements of each 256 travel, at most 128."""

    k: int

    def size(self, num_elements: int) -> int:
        """Return the bytes that ``num_elements`` take."""
        return topk_bytes(self.k, num_elements)

    def encode(self, values: Tensor, out: Tensor, last: Tensor | None = None) -> None:
        """Write the ``values`` (n,) fp32 that are furthest from the ones sent ``last`` (n,), by default zeros."""
        last = torch.zeros_like(values) if last is None else last
        whole = len(values) - len(values) % TOPK_BLOCK
        if whole:
            rows = out[: self.size(whole)].view(-1, self._num_bytes(self.k))
            _encode_blocks(values[:whole].view(-1, TOPK_BLOCK), last[:whole].view(-1, TOPK_BLOCK), self.k, rows)
        if rest := len(values) - whole:
            row = out[self.size(whole) :].view(1, -1)
            _encode_blocks(values[whole:].view(1, -1), last[whole:].view(1, -1), min(self.k, rest), row)

    def decode(self, data: Tensor, values: Tensor) -> None:
        """Replace what ``data`` (size(n),) uint8 has in ``values`` (n,); raises `CodecError` if that is malformed."""
        whole = len(values) - len(values) % TOPK_BLOCK
        if whole:
            rows = data[: self.size(whole)].view(-1, self._num_bytes(self.k))
            _decode_blocks(rows, self.k, values[:whole].view(-1, TOPK_BLOCK))
        if rest := len(values) - whole:
            _decode_blocks(data[self.size(whole) :].view(1, -1), min(self.k, rest), values[whole:].view(1, -1))

    @staticmethod
    def _num_bytes(k: int) -> int:
        return SCALE_BYTES + 2 * k


def _encode_blocks(blocks: Tensor, last: Tensor, k: int, rows: Tensor) -> None:
    """``blocks``, ``last`` (b, length) into ``rows`` (b, bytes of a block)."""
    places = _furthest((blocks - last).abs_(), k)  # (b, k)
    chosen = blocks.gather(1, places)
    largest = torch.maximum(chosen.amax(1, keepdim=True), chosen.amin(1, keepdim=True).neg_())
    if not bool((largest <= MAX_MAGNITUDE).all()):  # false for NaN as well, which is always chosen
        raise CodecError("a value to be sent is not finite, or too large for topk")
    scales = (largest / _LEVELS).clamp_(min=MIN_SCALE)  # (b, 1)
    rows[:, :SCALE_BYTES].copy_(scales.view(torch.uint8))
    rows[:, SCALE_BYTES : SCALE_BYTES + k].view(torch.int8).copy_((chosen / scales).round_())
    rows[:, SCALE_BYTES + k :].copy_(places)


def _furthest(moves: Tensor, k: int) -> Tensor:
    """The places (b, k) int64 of the k largest of ``moves`` (b, length), which are not negative; ascending.

    Floats in the order of their bits, the place in the last eight of these: one sort of integers, for which NumPy has
    vector instructions, and no ties. Moves that are equal to 2^-15 of their size go by their places.
    """
    keys = moves.view(torch.int32) & ~(TOPK_BLOCK - 1) | torch.arange(
        moves.shape[1], dtype=torch.int32, device=moves.device
    )
    if keys.device.type == "cpu":
        places = np.sort(np.sort(keys.numpy(), axis=1)[:, -k:] & (TOPK_BLOCK - 1), axis=1)
        return torch.from_numpy(places).long()
    return (keys.topk(k, dim=1, sorted=False).values & (TOPK_BLOCK - 1)).sort(dim=1).values.long()


def _decode_blocks(rows: Tensor, k: int, blocks: Tensor) -> None:
    """Replace what ``rows`` (b, bytes of a block) have in ``blocks`` (b, length)."""
    scales = rows.new_empty(len(rows), SCALE_BYTES).copy_(rows[:, :SCALE_BYTES]).view(torch.float32)  # (b, 1), aligned
    if not bool(((scales >= MIN_SCALE) & (scales <= MAX_MAGNITUDE / _LEVELS * 2)).all()):
        raise CodecError("a scale received is not a finite positive number")
    places = rows[:, SCALE_BYTES + k :].long()  # (b, k)
    if not bool((places[:, 1:] > places[:, :-1]).all() & (places[:, -1] < blocks.shape[1]).all()):
        raise CodecError("places received are not ascending, or beyond their block")
    levels = rows[:, SCALE_BYTES : SCALE_BYTES + k].view(torch.int8)
    blocks.scatter_(1, places, levels.to(torch.float32).mul_(scales))

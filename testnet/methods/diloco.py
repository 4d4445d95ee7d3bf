"""DiLoCo's outer step (arXiv 2311.08105): SGD with momentum, whose gradient is the mean of the replicas' progress.

All replicas have the same slow weights phi and send their outer gradient theta - phi; the mean is over all of them:

    G    = learning_rate mean_j(theta_j - phi)
    m   <- alpha m + G
    phi <- phi + G + alpha m

This is `torch.optim.SGD` on phi with the gradient -mean_j(theta_j - phi). Means over a part of the replicas would let
their slow weights drift apart, since nothing here pulls them together; `noloco` has the term that does.

With ``error_feedback`` what a codec loses of an outer gradient is added to the next one (arXiv 1901.09847, algorithm 1;
MuLoCo, arXiv 2505.23725, sends 2 bits so).
"""

from __future__ import annotations

import torch
from torch import Tensor

from farandole.protocol.run.rules import OuterConfig
from farandole.protocol.wire.safetensors import FP32_BYTES
from farandole.training.outer.rule import Meeting, OuterRule, OwnVectors


class DiLoCoConfig(OuterConfig, frozen=True, kw_only=True, tag_field="kind", tag="diloco"):
    """Settings of DiLoCo."""

    learning_rate: float = 0.7
    alpha: float = 0.9
    """Share of the momentum that an outer step keeps."""
    error_feedback: bool = False
    two_bits: bool = False
    """Outer gradients travel as `in_two_bits`, whatever the codec."""

    vectors = ("momentum",)


class DiLoCo(OuterRule):
    """DiLoCo, with Nesterov's momentum."""

    keeps_own_exact = False  # the slow weights of all replicas stay equal

    def __init__(self, settings: DiLoCoConfig) -> None:
        self._settings = settings

    def contribution(self, own: OwnVectors) -> Tensor:
        """The outer gradient, theta - phi."""
        return own.fast - own.slow

    def step(self, own: OwnVectors, meeting: Meeting) -> None:
        """The formulas above."""
        momentum = own.vectors["momentum"]
        progress = self._settings.learning_rate * meeting.mean()
        momentum.mul_(self._settings.alpha).add_(progress)
        own.slow.add_(progress.add_(self._settings.alpha * momentum))


# Of a normal distribution, the four numbers that lose least (Max, 1960: table I), and where the outer two begin.
_NEAR, _FAR, _BORDER = 0.4528, 1.510, 0.9816
_BLOCK = 256
TWO_BITS_BYTES = 2 / 8 + FP32_BYTES / _BLOCK
"""Bytes that an element takes, with its share of a block's scale."""


def in_two_bits(values: Tensor) -> Tensor:
    """Return what 2 bits an element keep of (n,) fp32: of each 256, four multiples of their root mean square.

    n is a multiple of 256. The paper's quantizer has the quantiles of a row; its release was not at hand.
    """
    blocks = values.view(-1, _BLOCK)
    scale = blocks.square().mean(1, keepdim=True).sqrt()
    magnitudes = torch.where(blocks.abs() > _BORDER * scale, _FAR * scale, _NEAR * scale)
    return torch.copysign(magnitudes, blocks).view_as(values)

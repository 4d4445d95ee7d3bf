"""Outlier detection for activations and gradients from neighbours, by statistics of earlier microbatches.

A stage cannot know what a neighbour should have computed. It can compare with earlier microbatches and with what other
nodes of the same stage send (Sentinel, arXiv 2603.03592, keeps running means of activations and gradients and measures
distances). Two quantities are kept of each microbatch, in addition to a few means by sender:

- its *level*, the logarithm of the mean norm of a token's activation. For gradients, it is the logarithm of the mean of
  |gradient| times |activation|: this product varies a third to a half as much between microbatches, since layers after
  a norm scale gradients by the inverse of the activation;
- its *direction*, a vector whose cosine with the mean direction of earlier microbatches is near 1 for honest senders,
  -1 if the sign is reversed, and 0 for noise, regardless of the norm. For activations it is the mean of the tokens'
  vectors and their correlation with random projections of themselves.

For gradients the direction is the correlation of their signs with random projections of the activations that were sent.
The gradients' mean over all tokens is not usable: it goes to zero as training proceeds, since a parameter could follow
it, and its cosine falls to 0.1 standard deviations above zero. The cosine of signs stays 1 to 4 standard deviations
above zero: most tokens are predicted well and have small gradients in a usual direction, and a few have large gradients
in other directions. One microbatch gives little evidence and ten give enough, so evidence is summed by sender (CUSUM,
Page 1954).

In the first inner steps the direction of honest gradients may turn within 20 microbatches, to a cosine of -0.2 with the
earlier ones. Therefore all directions but those of outliers are learned, however unusual: the expected direction turns
with them before the evidence is enough.

In the first rounds one honest replica of a stage may have taken many steps and another none, and they have not averaged
yet: 15 steps from the seed their levels differed by a factor of 5, and after the first average by 1.7 at most. So in
the first `YOUNG_ROUNDS` nothing but a level makes an outlier, and no evidence is summed.

**What an attacker can do.** It does not know the projections, which each node draws for itself. Outliers are not
learned, and with three or more senders the expected direction is the median of theirs, so a minority does not move it.
In the first rounds it may send anything of up to 20 times the usual norm.
A level within `SLACK` deviations of the usual (at least a factor of 1.5) gives no evidence. A sole sender may drift by
this much every few microbatches, and turn slowly, as honest senders do in the first inner steps. A few falsified
microbatches in ten are not detected if none is an outlier by itself. If two senders disagree from their first
microbatch on, neither is trusted. Where the cosine of honest gradients is within half a deviation of zero, neither
reversed gradients nor noise is detected.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import linear

from farandole.protocol.wire.bounds import Latest

# Random directions onto which activations are projected: 32 detect hardly more than 8, and cost four times as much.
NUM_PROJECTIONS: Final = 8
# Weight of the mean in the direction of activations: a reversed sign flips the mean, but not their self-correlation.
MEAN_WEIGHT: Final = math.sqrt(3.0)
# Number of senders whose directions are kept, the most recent ones: as many as a node has next hops.
MAX_SENDERS: Final = 8
# Microbatches after which the usual values are known.
NUM_WARM: Final = 16
# Microbatches of a sender after which its direction counts.
MIN_KNOWN: Final = 8
# The level is compared with the median of this number of recent levels: a third of them may be hostile, and the level
# may change by a factor of e in 100 microbatches, as it does in the first inner steps.
NUM_LEVELS: Final = 16
# Rate of the running mean of a sender's direction (its newest 20 microbatches), and rate of the usual cosine and the
# deviations (the newest 50, so that falsified microbatches that are not detected yet move them little).
RATE: Final = 0.05
SLOW_RATE: Final = 0.02
# Least standard deviations of level and cosine: replicas of a stage differ by this much between outer steps.
LEAST_LEVEL: Final = 0.2
LEAST_COSINE: Final = 0.1
# An outlier by itself: e^3 = 20 times larger or smaller than usual (the gradients of an unstable model occasionally
# differ by a factor of 5), or a cosine below zero and `OUTLIER_COSINE` standard deviations from the usual. A level
# below `USUAL` deviations is learned.
OUTLIER_LEVEL: Final = 3.0
OUTLIER_COSINE: Final = 8.0
USUAL: Final = 2.5
# Deviations are summed, by sender, as far as they exceed a slack: half of the deviation that noise (its cosine is 0) or
# a level of three times the usual would have, within these limits. Once a sum reaches `MAX_SUMS` (larger, smaller,
# turned), all microbatches are outliers: the level of honest gradients wanders for longer than their direction.
SLACK: Final = (0.5, 2.0)
SMALL_LEVEL: Final = math.log(3.0)
MAX_DEVIATION: Final = 4.0
# A usual cosine within half a deviation of zero gives no information on the direction, so no evidence is summed.
LEAST_SIGNAL: Final = 0.5
MAX_SUMS: Final = (32.0, 32.0, 16.0)
# Outer steps of this node before which levels alone are judged: a pair of replicas has averaged by then, even if
# partners were busy in a round or two.
YOUNG_ROUNDS: Final = 3
# After this number of consecutive outliers the statistics are reset: there is no other sender to compare with. A sender
# that is avoided after three of them, for longer each time, has then been avoided for two and a half minutes. In the
# first rounds, in which a node that hears nothing for some seconds finds levels 20 times as high, the second one does.
MAX_REFUSED: Final = 12
_TINY: Final = 1e-30

Kind = Literal["activations", "gradients"]
# Directions have a few thousand elements: NumPy takes a third of torch's time for one operation on them.
Direction = npt.NDArray[np.float32]
_FAULTS: Final = ("are larger than usual", "are smaller than usual", "point elsewhere than usual")


@dataclass(slots=True)
class _Sender:
    """The statistics of one sender."""

    num_known: int = 0
    direction: Direction = field(default_factory=lambda: np.zeros(0, np.float32))
    """Running mean of its microbatches' directions."""
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Evidence for each of `_FAULTS`, as a share of `MAX_SUMS`."""


class UsualTraffic:
    """The statistics of one kind of microbatches, from all peers that send them."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._senders = Latest[bytes, _Sender](MAX_SENDERS)
        self._levels = deque[float](maxlen=NUM_LEVELS)
        self._num_seen = 0
        self._level_deviation = self._cosine_deviation = 0.3
        self._cosine = 0.0
        self._refused: list[bytes] = []  # the senders of the latest microbatches, all of them outliers
        self._expected = np.zeros(0, np.float32)

    def judge(self, peer: bytes, level: float, direction: Direction, *, is_young: bool = False) -> str:
        """Return why a microbatch is an outlier, or an empty string and learn it. ``direction`` has norm 1.

        ``is_young``: replicas may not have averaged yet.
        """
        sender = self._senders[peer] = self._senders.get(peer) or _Sender()
        if not self._num_seen:
            self._levels.append(level)
            self._learn(sender, direction)
            return ""
        is_warm = self._num_seen >= NUM_WARM
        distance, cosine = level - statistics.median(self._levels), float(direction @ self._expected)
        by_level, by_cosine = max(self._level_deviation, LEAST_LEVEL), max(self._cosine_deviation, LEAST_COSINE)
        deviations = (distance / by_level, -distance / by_level, (self._cosine - cosine) / by_cosine)
        is_outlier = not abs(distance) < OUTLIER_LEVEL
        if is_warm and not is_young:
            alternatives = (SMALL_LEVEL / by_level, SMALL_LEVEL / by_level, self._cosine / by_cosine)
            for fault, (deviation, alternative) in enumerate(zip(deviations, alternatives, strict=True)):
                slack = min(max(alternative / 2, SLACK[0]), SLACK[1])
                signal = deviation if alternative >= LEAST_SIGNAL else 0.0
                excess = min(max(signal, -MAX_DEVIATION), MAX_DEVIATION) - slack
                sender.sums[fault] = min(max(sender.sums[fault] + excess / MAX_SUMS[fault], 0.0), 1.0)
            is_outlier |= cosine < 0.0 and deviations[2] > OUTLIER_COSINE
        if max(sender.sums) >= 1.0 and self._is_common(sender):
            self._begin()
            return ""
        if is_outlier or max(sender.sums) >= 1.0:
            self._refused.append(peer)
            senders = set(self._refused)
            are_most = 2 * len(senders) > len(self._senders) and len(self._refused) > 1
            if not (are_most and (is_young or len(senders) > 1)) and len(self._refused) < MAX_REFUSED:
                return _FAULTS[deviations.index(max(deviations)) if is_outlier else sender.sums.index(max(sender.sums))]
            self._begin()
            return ""
        self._refused.clear()
        self._note(distance, cosine, by_level, by_cosine)
        if not is_warm or max(deviations[:2]) < USUAL:
            self._levels.append(level)
        self._learn(sender, direction)
        return ""

    def _is_common(self, sender: _Sender) -> bool:
        """Return whether most senders deviate as this one does, which means that the model has changed."""
        fault = sender.sums.index(max(sender.sums))
        num_alike = sum(other.sums[fault] >= 0.25 for other in self._senders.values())
        return len(self._senders) > 1 and 2 * num_alike > len(self._senders)

    def _note(self, distance: float, cosine: float, by_level: float, by_cosine: float) -> None:
        """Update the means of the cosine and of absolute deviations (1.25 of which are a standard deviation)."""
        rate = max(SLOW_RATE, 1 / self._num_seen)
        self._cosine += rate * (cosine - self._cosine)
        off_level, off_cosine = min(abs(distance), USUAL * by_level), min(abs(cosine - self._cosine), USUAL * by_cosine)
        self._level_deviation += rate * (1.25 * off_level - self._level_deviation)
        self._cosine_deviation += rate * (1.25 * off_cosine - self._cosine_deviation)

    def _learn(self, sender: _Sender, direction: Direction) -> None:
        self._num_seen += 1
        sender.num_known += 1
        if sender.num_known == 1:
            sender.direction = direction.copy()
        sender.direction += max(RATE, 1 / sender.num_known) * (direction - sender.direction)
        if self._num_seen % 4 == 1 or self._num_seen < MIN_KNOWN:  # of norm 1: the median over known senders
            first = [sender for sender in self._senders.values() if sender.num_known]
            known = [sender for sender in first if sender.num_known >= MIN_KNOWN] or first
            directions = [_unit(sender.direction) for sender in known]
            median = np.median(directions, axis=0) if len(known) > 2 else sum(directions[1:], directions[0])
            self._expected = _unit(median)


class LinkStatistics:
    """Judge of a node's incoming activations and gradients.

    ``width`` is the activations' width; ``generator`` draws the projections.
    """

    def __init__(self, width: int, device: torch.device, generator: torch.Generator | None = None) -> None:
        if generator is None:
            generator = torch.Generator()
            generator.seed()  # seed from the operating system
        projections = torch.randn(width, NUM_PROJECTIONS, generator=generator) / math.sqrt(width)
        self._projections = projections.T.contiguous().to(device)  # (P, C): `linear` takes half of the time of ``@``
        self.usual: dict[Kind, UsualTraffic] = {"activations": UsualTraffic(), "gradients": UsualTraffic()}

    def mark(self, activations: Tensor) -> Tensor:
        """Return what is kept of activations (B, T, C) until their gradient arrives.

        It is (B T, 1 + P): the norm of each token's activation, and its random projections divided by the norm.
        """
        tokens = activations.detach().flatten(0, -2)
        norms = _norms(tokens)
        return torch.cat((norms, linear(tokens, self._projections) / norms), 1)

    def judge_activations(self, peer: bytes, activations: Tensor, num_rounds: int) -> str:
        """Return why activations (B, T, C) are outliers; empty if they are not. ``num_rounds``: outer steps taken."""
        tokens = activations.detach().flatten(0, -2)
        norms = _norms(tokens)
        units = tokens / norms
        correlation = linear(units, self._projections).T @ units
        return self._judge("activations", peer, num_rounds, norms.mean(), units.sum(0), correlation)

    def judge_gradient(self, peer: bytes, gradient: Tensor, mark: Tensor, num_rounds: int) -> str:
        """Return why the gradient (B, T, C) of activations with this mark is an outlier; empty if it is not."""
        tokens = gradient.detach().flatten(0, -2)
        mean_norm = (mark[:, :1] * _norms(tokens)).mean()
        return self._judge("gradients", peer, num_rounds, mean_norm, None, mark[:, 1:].T @ tokens.sign())

    def _judge(
        self, kind: Kind, peer: bytes, num_rounds: int, mean_norm: Tensor, mean: Tensor | None, correlation: Tensor
    ) -> str:
        """Judge by the mean (C,), if it has a direction, and the correlation (P, C) with projections."""
        parts = [mean_norm[None], correlation.flatten()] + ([] if mean is None else [mean])
        numbers = torch.cat(parts).float().cpu().numpy()
        direction = _unit(numbers[1 : 1 + correlation.numel()])
        if mean is not None:
            unit_mean = _unit(numbers[1 + correlation.numel() :])
            direction = _unit(np.concatenate((unit_mean * np.float32(MEAN_WEIGHT), direction)))
        level, is_young = math.log(max(float(numbers[0]), _TINY)), num_rounds < YOUNG_ROUNDS
        fault = self.usual[kind].judge(peer, level, direction, is_young=is_young)
        return f"{kind} {fault}" if fault else ""


def _norms(tokens: Tensor) -> Tensor:
    """Return the norms (N, 1) of vectors (N, C), none of them zero."""
    norms: Tensor = vector_norm(tokens.detach(), dim=1, keepdim=True)
    return norms.clamp_min(_TINY)


def _unit(vector: Direction) -> Direction:
    norm = math.sqrt(float(vector @ vector))
    unit: Direction = vector / np.float32(max(norm, _TINY))
    return unit

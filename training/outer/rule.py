"""Outer rules: what replicas send to each other, and how their slow weights move by it.

A round ends with an outer step. A replica has its fast weights (after inner steps) and its slow weights (after the last
outer step); a group of replicas, a pair in a run, exchange their contributions, and each moves its slow weights. A rule
answers two questions: what is a contribution, and where do the slow weights move.

Everything is elementwise: a rule is asked about one piece of the parameters after another, so that its temporaries fit
into a processor's cache, and so that fragments, stages and shards need nothing of their own.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from farandole.protocol.run.rules import AdaptersConfig, NoLoCoConfig, OuterConfig, PlainConfig


@dataclass(frozen=True, slots=True)
class OwnVectors:
    """A replica's own weights and its rule's vectors over some range of the parameters, (n,) fp32 each.

    A rule's step writes into the slow weights and the vectors, which are views.
    """

    fast: Tensor
    """The fast weights as they are contributed; a rule only reads them."""
    slow: Tensor
    vectors: Mapping[str, Tensor]
    """By the names in the settings' ``vectors``."""

    def piece(self, piece: slice) -> OwnVectors:
        """A part of the range."""
        vectors = {name: flat[piece] for name, flat in self.vectors.items()}
        return OwnVectors(self.fast[piece], self.slow[piece], vectors)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the members of a group contributed to one outer step, in the same order at all of them."""

    contributions: Sequence[Tensor]
    """Of all members, including this replica, (n,) each.

    With the rule's ``keeps_own_exact`` this replica's own has no codec error, and the others' differ from it as what
    was sent differs; otherwise all are as their receivers decode them. A replica that is alone has its own
    contribution, undistorted.
    """
    weights: Sequence[float]
    """The members' shares, which sum to 1."""
    own_place: int = 0
    """The place of this replica's own contribution."""
    is_late: bool = False
    """Whether this replica had taken inner steps since its contribution when the step was begun."""

    def mean(self) -> Tensor:
        """The mean of the contributions; of a single one, that one itself.

        It has the same bits at all members if the contributions have: products and sums are separate operations, since
        fused ones would round as the machine does.
        """
        first, *others = self.contributions
        if not others:
            return first
        mean = first * self.weights[0]
        for contribution, weight in zip(others, self.weights[1:], strict=True):
            mean.add_(contribution * weight)
        return mean


class OuterRule(abc.ABC):
    """An outer rule with its settings. It keeps no state itself: that is in `OwnVectors`, and so in checkpoints."""

    sends_fast_weights = False
    """Whether `contribution` is the fast weights themselves: they are sent without another copy then."""
    keeps_own_exact = True
    """Whether the codec's error in a replica's own contribution stays out of its step (`OuterState.step` says how).

    False for a rule whose replicas must move by the same mean, since each has another error.
    """

    @abc.abstractmethod
    def contribution(self, own: OwnVectors) -> Tensor:
        """Return what a replica sends, (n,): a new tensor, or ``own.fast`` itself."""

    @abc.abstractmethod
    def step(self, own: OwnVectors, meeting: Meeting) -> None:
        """Move ``own.slow`` and ``own.vectors`` by one outer step."""


class NoLoCo(OuterRule):
    """NoLoCo's outer step (arXiv 2506.10911).

    A replica i has slow weights phi, fast weights theta (after its inner steps from phi) and outer momentum m. It meets
    one partner; means are over the two, with the weights that the screening of both gives them:

        G_i   = beta mean_j(theta_j - phi_j) + gamma (mean_j(phi_j) - phi_i)
        m_i  <- alpha m_i + G_i
        heavy ball:  phi_i <- phi_i + m_i
        Nesterov:    phi_i <- phi_i + G_i + alpha m_i        with the new m_i

    The first is what the paper's equation 32 and its code compute (equation 2 prints the sign of beta wrongly, and the
    method is called Nesterov throughout); the second is Nesterov's as in `torch.optim.SGD(nesterov=True)`, DiLoCo's
    outer optimizer (arXiv 2311.08105), with the step size inside G. The term with gamma pulls replicas together.

    The paper's code sends two vectors, theta - phi and phi. One is enough, since G is linear in them:

        G_i   = beta mean_j(w_j) - gamma phi_i               with w_j = theta_j + (gamma / beta - 1) phi_j

    That w is the **contribution**. With gamma = beta, the default, it is theta itself, so a codec that is exact for the
    weights is exact for the step. The two forms agree to rounding.
    """

    def __init__(self, settings: NoLoCoConfig) -> None:
        self._settings = settings
        self.sends_fast_weights = settings.gamma == settings.beta

    def contribution(self, own: OwnVectors) -> Tensor:
        """W = theta + (gamma / beta - 1) phi; with gamma = beta it is theta itself."""
        if self.sends_fast_weights:
            return own.fast
        return own.fast + (self._settings.gamma / self._settings.beta - 1.0) * own.slow

    def step(self, own: OwnVectors, meeting: Meeting) -> None:
        """Both formulas above.

        phi's own terms are gathered, so that with alpha = 0, beta = gamma = 1 the new phi is the mean to the last bit.
        """
        alpha, beta, gamma = self._settings.alpha, self._settings.beta, self._settings.gamma
        phi, momentum = own.slow, own.vectors["momentum"]
        mean = meeting.mean()
        carried, pull = alpha * momentum, beta * mean
        new_momentum = (pull - gamma * phi).add_(carried)
        if self._settings.momentum == "heavy_ball":
            new_phi = ((1.0 - gamma) * phi).add_(pull).add_(carried)
        else:  # phi + G + alpha (alpha m + G) = phi + (1 + alpha) G + alpha^2 m
            lead = 1.0 + alpha
            new_phi = ((1.0 - lead * gamma) * phi).add_((lead * beta) * mean).add_((alpha * alpha) * momentum)
        phi.copy_(new_phi)
        momentum.copy_(new_momentum)


class PlainAverage(OuterRule):
    """Plain averaging: the slow weights become the mean of the fast weights.

        phi <- mean_j(theta_j)

    This is local SGD (arXiv 1805.09767) with the mean over a group. It equals `NoLoCo` with alpha = 0, beta = gamma = 1
    to the bit, but keeps no momentum: a replica needs 4 bytes less for each parameter in memory and on disk, and a
    newcomer downloads half as much. In pairs each exchange halves the difference between the two, so it is always
    stable.
    """

    sends_fast_weights = True

    def __init__(self, settings: PlainConfig) -> None:
        """``settings`` has none of its own."""

    def contribution(self, own: OwnVectors) -> Tensor:
        """The fast weights."""
        return own.fast

    def step(self, own: OwnVectors, meeting: Meeting) -> None:
        """The formula above."""
        own.slow.copy_(meeting.mean())


RULES: Final[Mapping[type[OuterConfig], type[Any]]] = {
    NoLoCoConfig: NoLoCo,
    PlainConfig: PlainAverage,
    AdaptersConfig: PlainAverage,  # and of the products that adapters make: `.adapters`
}


def rule_of(settings: OuterConfig) -> OuterRule:
    """Return the rule that a run's settings name."""
    rule: OuterRule = RULES[type(settings)](settings)
    return rule

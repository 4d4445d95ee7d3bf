"""The interface of outer rules.

A round ends with an outer step. A replica has its fast weights (after inner steps) and its slow weights (after the last
outer step); a group of replicas, a pair in a run, exchange their contributions, and each moves its slow weights. A rule
answers two questions: what is a contribution, and where do the slow weights move.

Everything is elementwise: a rule is asked about one piece of the parameters after another, so that its temporaries fit
into a processor's cache, and so that fragments, stages and shards need nothing of their own.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from farandole.protocol.run.rules import OuterConfig


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


def rule_of(settings: OuterConfig) -> OuterRule:
    """The rule that a run's settings name, from the module of that name."""
    module = importlib.import_module(f"{__package__}.{settings.kind}")
    rule: OuterRule = module.RULE(settings)
    return rule

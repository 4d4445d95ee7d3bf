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

from farandole.protocol.outer_rules import OuterConfig


@dataclass(frozen=True, slots=True)
class OwnVectors:
    """A replica's slow weights and its rule's vectors over some range of the parameters, (n,) fp32 each.

    They are views: a rule writes into them.
    """

    slow: Tensor
    vectors: Mapping[str, Tensor]
    """By the names in the settings' ``vectors``."""

    def piece(self, piece: slice) -> OwnVectors:
        """A part of the range."""
        return OwnVectors(self.slow[piece], {name: flat[piece] for name, flat in self.vectors.items()})


class OuterRule(abc.ABC):
    """An outer rule with its settings. It keeps no state itself: that is in `OwnVectors`, and so in checkpoints."""

    sends_fast_weights = False
    """Whether `contribution` is the fast weights themselves: they are sent without another copy then."""
    keeps_own_exact = True
    """Whether the codec's error in a replica's own contribution stays out of its step (`OuterState.step` says how).

    False for a rule whose replicas must move by the same mean, since each has another error.
    """

    @abc.abstractmethod
    def contribution(self, fast: Tensor, slow: Tensor) -> Tensor:
        """Return what a replica sends, (n,), given its fast and slow weights (n,): a new tensor, or ``fast`` itself."""

    @abc.abstractmethod
    def step(self, own: OwnVectors, contributions: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Move ``own`` by one outer step.

        ``contributions``, (n,) each, come from all members of the group, including this replica; all members get them
        in the same order. ``weights`` are the members' shares, and sum to 1. With ``keeps_own_exact`` this replica's
        own contribution has no codec error, and the others' differ from it as what was sent differs; otherwise all
        are as their receivers decode them. A replica that is alone has its own contribution, undistorted, with the
        weight 1.
        """


def weighted_mean(contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of contributions (n,); of a single one, that one itself.

    Members of a group that pass them in the same order get the same bits: products and sums are separate operations,
    since fused ones would round as the machine does.
    """
    first, *others = contributions
    if not others:
        return first
    mean = first * weights[0]
    for contribution, weight in zip(others, weights[1:], strict=True):
        mean.add_(contribution * weight)
    return mean


def rule_of(settings: OuterConfig) -> OuterRule:
    """The rule that a run's settings name, from the module of that name."""
    module = importlib.import_module(f"{__package__}.{settings.kind}")
    rule: OuterRule = module.RULE(settings)
    return rule

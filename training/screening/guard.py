"""Clips what is further away than what this node has accepted before, and refuses what makes the loss worse.

A pair has one neighbour each, so nothing in one exchange says whether a partner is honest: a median over neighbours, as
in most robust means, has nothing to work on. What a node has is its past. Honest contributions are about as far away
as those before, so a contribution is averaged only as far as a few medians of the distances that were accepted
(self-centred clipping, ClippedGossip, arXiv 2202.01545, with the radius from history):

    mean = own + share * clip * (partner's - own),   clip = min(1, limit / |partner's - own|)

The limit has a cap that follows this node's own movement in a round, which no partner sets and which shrinks with the
learning rate (BALANCE, arXiv 2406.10416): else an attacker that is met often would widen it threefold each time.

Clipping bounds the harm of an exchange, not its direction. So the loss of the mean on held-out text is compared with
the loss of one's own weights whenever something was clipped, the first times that a peer is met, always if it was ever
refused, and in some other exchanges, which nobody can foresee. An honest partner may be behind: it started later, or is
slower. So the mean may be worse by its share of what this node itself has gained in the last comparisons, and by a
little more; early in a run that is much, and soon it is nothing.

The number of tokens behind a contribution is its sender's word, so it moves the shares within narrow bounds.
Among honest partners nothing is clipped, and both compute the same mean to the bit.
"""

from __future__ import annotations

import math
import statistics
from typing import Final

import torch
from torch import Tensor

from farandole.protocol.screening_rules import GuardConfig

from .rule import Accept, Partner, Refuse, ScreeningRule, Verdict, share_by_tokens

# Accepted distances whose median counts. With fewer than MIN_KNOWN, this node's own movement is the yardstick.
WINDOW: Final = 16
MIN_KNOWN: Final = 4
# Comparisons of the loss in which a partner may be behind: as many as a run's first rounds have.
RECENT_LOSSES: Final = 4


class Guard(ScreeningRule):
    """Sums over pieces: squares of one's own contribution, and of the difference."""

    def __init__(self, settings: GuardConfig) -> None:
        self._settings = settings
        self.begin()

    def begin(self) -> None:
        """Zero the sum."""
        self._loss: float | None = None
        self._square = torch.zeros((), dtype=torch.float64)

    def feed(self, own: Tensor, contribution: Tensor) -> None:
        """Add a piece's squared distance, which is fp32, in fp64."""
        difference = contribution - own
        self._square += (difference @ difference).cpu()

    @property
    def _distance(self) -> float:
        return math.sqrt(float(self._square))

    def judge(self, partner: Partner) -> Verdict:
        """Clip, and compare losses where that is due. Comparisons are such that NaN is refused."""
        settings, distance, met = self._settings, self._distance, partner.encounter
        if not distance < math.inf:
            return Refuse("the contribution is infinitely far away from mine")
        share = share_by_tokens(met.own_tokens, met.partner_tokens, settings.min_share)
        usual, is_known = self._usual(partner)
        is_far = not distance <= usual
        if not is_far and met.chance >= settings.checked_share and not self._is_suspect(partner):
            return Accept(share)
        before = partner.evaluate(0.0)
        # At first a faster partner is far away too, and only the loss tells it from a liar: then nothing is clipped.
        clip = usual / distance if is_far and (is_known or before is None) else 1.0
        if clip < settings.min_clip:
            return Refuse(f"the contribution is {distance:.3g} away from mine, usual is {usual:.3g}")
        verdict = Accept(share, clip)
        after = None if before is None else partner.evaluate(verdict.shares[1])
        if before is None or after is None:
            return verdict
        self._loss = before
        gained = max(partner.everybody["loss"][-RECENT_LOSSES:], default=before if is_far else math.inf) - before
        if not after <= before + max(settings.max_loss_increase, verdict.shares[1] * gained) or not after < math.inf:
            return Refuse(f"with the contribution the loss on held-out text is {after:.3f}, without it {before:.3f}")
        return verdict

    def _is_suspect(self, partner: Partner) -> bool:
        """Whether the peer is new here, or was refused once. A peer whose key is not known is new."""
        return bool(partner.history["refused"]) or len(partner.history["accepted"]) < self._settings.first_checks

    def _usual(self, partner: Partner) -> tuple[float, bool]:
        """The distance up to which nothing is clipped, and whether it follows from what was accepted."""
        settings, movement = self._settings, partner.movement()
        known = partner.everybody[self._series(partner)][-WINDOW:]
        if len(known) < MIN_KNOWN:
            return settings.first_radius * movement, False
        usual = max(settings.radius * statistics.median(known), settings.first_radius * movement)
        return min(usual, settings.max_radius * statistics.median(partner.everybody["movement"])), True

    def remember(self, partner: Partner, verdict: Verdict) -> None:
        """The distance as far as it was accepted, one's own loss if it was asked for, and which peer was refused."""
        if self._loss is not None:
            partner.everybody.append("loss", self._loss)
            self._loss = None
        if isinstance(verdict, Refuse):
            partner.history.append("refused", 1.0)
        else:
            partner.everybody.append(self._series(partner), self._distance * verdict.clip)
            partner.everybody.append("movement", partner.movement())
            if len(partner.history["accepted"]) < self._settings.first_checks:
                partner.history.append("accepted", 1.0)

    @staticmethod
    def _series(partner: Partner) -> str:
        return f"distance {partner.fragment}"


RULE = Guard

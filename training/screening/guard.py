"""Clips what is further away than what this node has accepted before, and refuses what makes the loss worse.

A pair has one neighbour each, so nothing in one exchange says whether a partner is honest: a median over neighbours, as
in most robust means, has nothing to work on. What a node has is its past. Honest contributions are about as far away
as those before, so a contribution is averaged only as far as a few medians of the distances that were accepted
(self-centred clipping, ClippedGossip, arXiv 2202.01545, with the radius from history):

    mean = own + share * clip * (partner's - own),   clip = min(1, limit / |partner's - own|)

The limit has a cap that follows this node's own movement in a round, which no partner sets and which shrinks with the
learning rate (BALANCE, arXiv 2406.10416): else an attacker that is met often would widen it threefold each time.

Clipping bounds the harm of an exchange, not its direction. So the loss of the mean on held-out text is compared with
the loss of one's own weights whenever something was clipped, the first times that a peer is met, always if it was
refused before, and in some other exchanges, which cannot be foreseen. The mean of honest contributions is nearly always
the better one, by an amount that is known from the comparisons before, so a mean that stands out is noticed. It may
still be honest: by chance, or because the partner is behind. A partner's own weights may be as far behind as this node
was at its last comparisons, and the mean by its share of that: always if the partner says that it has learned from
fewer tokens, which costs it its share of the mean; else now and then, since after an exchange both have the mean and
are level. From all partners together such means are not accepted often: else liars would use the allowance each time.

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

from .history import History
from .rule import Accept, Partner, Refuse, ScreeningRule, Verdict, share_by_tokens

# Accepted distances whose median counts. With fewer than MIN_KNOWN, this node's own movement is the yardstick.
WINDOW: Final = 16
MIN_KNOWN: Final = 4
# Changes of a loss are shares of it; of a smaller one than this, in nats a token, they are shares of this.
LEAST_LOSS: Final = 1.0
# How often among the last `WINDOW` comparisons inner steps have to make the loss worse to be called noisy; and the
# share of what they gain that a mean may cost: below 1, since what it costs is gained again by the next inner steps.
MIN_WORSE: Final = 4
GAIN_SHARE: Final = 0.25
# After so many refusals in a row, whoever was met, contributions are tried in part: this node may be the odd one.
MAX_REFUSALS: Final = 3
PARTS: Final = (0.5, 0.25, 0.125)
# What is compared may be so many times further away than what is not.
CHECKED_RADIUS: Final = 2.0
# Comparisons of the loss by which a partner may be behind: as many as a run's first rounds have.
RECENT_LOSSES: Final = 4
# Means that stand out are accepted once in this many exchanges with a partner, and from all together this often.
OUTLIER_ONCE_IN: Final = 8
OUTLIER_WINDOW: Final = 32
MAX_OUTLIERS: Final = 4
# Comparisons from which the usual change of the loss is known, and median absolute deviations from it that stand out:
# two standard deviations.
MIN_CHANGES: Final = 8
MAX_DEVIATIONS: Final = 3.0


class Guard(ScreeningRule):
    """Sums over pieces: squares of one's own contribution, and of the difference."""

    def __init__(self, settings: GuardConfig) -> None:
        self._settings = settings
        self.begin()

    def begin(self) -> None:
        """Zero the sum."""
        self._losses: tuple[float, float] | None = None
        self._is_outlier = False
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
        # At first a faster partner is far away too, and so is one that found no partner for some rounds: only the loss
        # tells it from a liar.
        checked = CHECKED_RADIUS * usual if is_known else settings.max_radius * partner.movement()
        limit = usual if before is None else checked
        clip = min(1.0, limit / distance) if is_far else 1.0
        if clip < settings.min_clip:
            return Refuse(f"the contribution is {distance:.3g} away from mine, usual is {usual:.3g}")
        verdict = Accept(share, clip)
        return verdict if before is None else self._compare(partner, verdict, before, is_far)

    def _compare(self, partner: Partner, verdict: Accept, before: float, is_far: bool) -> Verdict:
        """The verdict, or a refusal if the mean is worse than one's own weights, whose loss is ``before``."""
        settings, after = self._settings, partner.evaluate(verdict.shares[1])
        if after is None:
            return verdict
        self._losses = before, after
        scale = max(before, LEAST_LOSS)
        self._is_outlier = not after - before <= max(
            scale * self._usual_change(partner.everybody), self._fluctuation(partner.everybody)
        )
        if not self._is_outlier:
            return verdict
        # This node's first comparison may be with one that is behind as well, unless it is far away too.
        gained = max(partner.everybody["loss"][-RECENT_LOSSES:], default=before if is_far else math.inf) - before
        of_partner = partner.evaluate(1.0) if gained > 0.0 else None
        behind = math.inf if of_partner is None else of_partner - before
        is_behind = behind <= gained and after - before <= verdict.shares[1] * gained and after < math.inf
        if is_behind and behind <= self._slowness(partner) * gained:
            self._is_outlier = False
            return verdict
        most = before + max(scale * settings.max_loss_increase, self._fluctuation(partner.everybody))
        if self._may_be_outlier(partner) and (is_behind or after <= most):
            return verdict
        refusal = Refuse(f"with the contribution the loss on held-out text is {after:.3f}, without it {before:.3f}")
        return self._partly(partner, verdict, most) or refusal

    def _partly(self, partner: Partner, verdict: Accept, most: float) -> Verdict | None:
        """After refusals in a row, as far as the loss allows: else two that drifted apart would never meet again."""
        if sum(partner.everybody["refused"][-MAX_REFUSALS:]) < MAX_REFUSALS:
            return None
        for part in PARTS:
            clipped = Accept(verdict.weight, verdict.clip * part)
            after = partner.evaluate(clipped.shares[1])
            if after is not None and after <= most:
                return clipped
        return None

    @staticmethod
    def _fluctuation(everybody: History) -> float:
        """How much worse a mean may be, in nats a token, given how much inner steps change this node's loss.

        The larger of a share of what they gain between two comparisons (large early in a run) and the median of what
        they lose, if they often do.
        """
        changes = everybody["inner change"][-WINDOW:]
        if len(changes) < MIN_WORSE:
            return 0.0
        worse = [change for change in changes if change > 0.0]
        noise = statistics.median(worse) if len(worse) >= MIN_WORSE else 0.0
        return max(noise, -GAIN_SHARE * statistics.median(changes))

    def _usual_change(self, everybody: History) -> float:
        """By which share of the loss a mean may be worse without being an outlier."""
        settings, changes = self._settings, everybody["change"][-OUTLIER_WINDOW:]
        if len(changes) < MIN_CHANGES:
            return settings.max_loss_increase
        median = statistics.median(changes)
        deviation = statistics.median(abs(change - median) for change in changes)
        usual = median + MAX_DEVIATIONS * deviation
        return min(max(usual, settings.least_loss_increase), settings.max_loss_increase)

    @staticmethod
    def _slowness(partner: Partner) -> float:
        """1 for a partner that has learned from half as many tokens as this node, or from fewer; 0 for an equal one."""
        met = partner.encounter
        return min(max(2.0 * (1.0 - met.partner_tokens / max(met.own_tokens, 1)), 0.0), 1.0)

    @staticmethod
    def _may_be_outlier(partner: Partner) -> bool:
        """Whether the allowance for outliers is not used up."""
        of_all = partner.everybody["outlier"][-OUTLIER_WINDOW:]
        return not any(partner.history["outlier"][-OUTLIER_ONCE_IN + 1 :]) and sum(of_all) < MAX_OUTLIERS

    def _is_suspect(self, partner: Partner) -> bool:
        """Whether the peer is new here, was refused once, or stood out. A peer whose key is not known is new."""
        history = partner.history
        is_new = len(history["accepted"]) < self._settings.first_checks
        return is_new or bool(history["refused"]) or any(history["outlier"][-OUTLIER_ONCE_IN + 1 :])

    def _usual(self, partner: Partner) -> tuple[float, bool]:
        """The distance up to which nothing is clipped, and whether it follows from what was accepted."""
        settings, movement = self._settings, partner.movement()
        known = partner.everybody[self._series(partner)][-WINDOW:]
        if len(known) < MIN_KNOWN:
            return settings.first_radius * movement, False
        usual = max(settings.radius * statistics.median(known), settings.first_radius * movement)
        return min(usual, settings.max_radius * statistics.median(partner.everybody["movement"])), True

    def remember(self, partner: Partner, verdict: Verdict) -> None:
        """The distance as far as it was accepted, the losses if they were compared, and which peer was refused."""
        everybody, history = partner.everybody, partner.history
        if self._losses is not None:
            if everybody["mean loss"]:
                everybody.append("inner change", self._losses[0] - everybody["mean loss"][-1])
            everybody.append("mean loss", self._losses[0] if isinstance(verdict, Refuse) else self._losses[1])
            everybody.append("loss", self._losses[0])
        everybody.append("refused", float(isinstance(verdict, Refuse)))
        if isinstance(verdict, Refuse):
            history.append("refused", 1.0)
            return
        if self._losses is not None:
            everybody.append("change", (self._losses[1] - self._losses[0]) / max(self._losses[0], LEAST_LOSS))
        for each in (history, everybody):
            each.append("outlier", float(self._is_outlier))
        everybody.append(self._series(partner), self._distance * verdict.clip)
        everybody.append("movement", partner.movement())
        if len(history["accepted"]) < self._settings.first_checks:
            history.append("accepted", 1.0)

    @staticmethod
    def _series(partner: Partner) -> str:
        return f"distance {partner.fragment}"


RULE = Guard

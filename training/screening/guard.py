"""Guard: average a contribution as far as that makes this node's weights no worse on text that only it can know.

In a pair there is no median over neighbours, which most robust means use. A node has its own history, and text. The
verdict is a share of the mean, in two steps.

**Distance.** Honest contributions are about as far away as earlier ones, so one is averaged only up to a few medians of
the accepted distances (self-centred clipping, ClippedGossip, arXiv 2202.01545, with the radius from history):

    mean = own + share * clip * (partner's - own),   clip = min(1, limit / |partner's - own|)

The limit has a cap that follows this node's own movement in a round, which no partner controls and which shrinks with
the learning rate (BALANCE, arXiv 2406.10416): an attacker that is met often would triple the limit each time. In the
first meetings a member that overshoots makes the loss of the mean better, and that at the end of the run worse: there
the mean leads little further than this node's inner steps and its usual partners' tokens explain. What is much further
is refused; in the first meetings what is further than the weights are large, for the node may have taken one step.

**Loss.** The loss of the mean is compared with that of this node's own weights, on windows of text that were drawn for
this exchange by a secret of the node's: a contribution can be good for them only by being good for all text. It counts
in full where the mean costs no more than noise on a few windows, or than the round's inner steps have gained: honest
replicas differ by as much, and the next steps gain it again. Where it costs more, half of it is tried, and then nothing
of the contribution counts here, while this node's own still helps the partner. The bound shrinks with the distance:
what lies nearer than inner steps lead may cost as much less. It is wider where means have usually cost something, as at
large learning rates, if the partner's own weights are as good as this node's.

Where all members' texts differ, a partner is always worse on this node's, and one whose text is unlike the others'
costs more than most liars do; members that count for nothing drift away until no mean is any good. So as much of each
contribution counts there as costs no more than half of the bound: half, a quarter and so on (`MAX_HALVINGS`).

A peer of which nothing counted is met last the next time. Members report to each other which peers these are
(`farandole.protocol.state.believing`): of a peer that enough of them suspect, a mean may cost no more than noise. Nodes
that liars have pushed apart would stay apart, so one that has found only such partners takes over the weights of the
next that is better on this node's text.

Where measuring would take longer than an exchange, distance alone decides, and the contribution counts by half. In
stages no loss is ever known, and it counts in full.

**Worth.** Where all have the same text, a partner whose own weights are behind this node's would take back as much of
the round as its share is, and the mean, which is smoother than both, would hide it. So its share shrinks the further it
is behind, down to `LEAST_WORTH` of it, unless it claims as many tokens fewer.

The number of tokens is the sender's claim, so it moves the shares within narrow bounds only. A newcomer whose weights
are of an earlier round claims none (`Engine.claim`): they have no weight, and it takes half of its partner's. Among
honest partners nothing is clipped, and both compute the same mean to the bit.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from farandole.protocol.run.rules import GuardConfig

from .rule import Accept, Encounter, Partner, Refuse, ScreeningRule, Verdict, share_by_tokens

# Number of accepted distances whose median is used. With fewer than MIN_KNOWN, this node's own movement is used.
WINDOW: Final = 16
MIN_KNOWN: Final = 4
# Noise of a cost, as a share of the loss, whatever a run's manifest says.
MOST_NOISE: Final = 0.003
# Costs are relative to the loss, or to this value in nats a token if the loss is smaller.
LEAST_LOSS: Final = 1.0
# Lower bound of a distance or a gain, to avoid a division by zero.
LEAST: Final = 1e-30
# Means may cost this many medians of what earlier ones would have cost, which fewer than half of liars do not move.
USUAL_COSTS: Final = 2.0
# A contribution whose loss is known may be further away by this factor: one of a faster partner is.
CHECKED_RADIUS: Final = 4.0
# Until MIN_KNOWN distances are known, a mean leads this many of the node's own movements from where the round began, or
# what partners' usual tokens explain; equally fast honest ones 1.42 at most. The limit solves a quadratic in the share.
MOST_LEAD: Final = 1.5
# A partner that is behind by a round's gain or more keeps this part of its share.
LEAST_WORTH: Final = 0.25
# The share that counts of a contribution whose loss was not known in time, and is tried of one that costs too much.
HALF: Final = 0.5
# So often half is tried, before nothing counts, where members' texts differ.
MAX_HALVINGS: Final = 4
# After this number of consecutive partners of which nothing counted, the node takes over the weights of a better one.
MAX_APART: Final = 3
# A newcomer is still behind if the mean is worse than the partner's own weights by more than this share of the loss.
LEAST_LAG: Final = 0.015


class Guard(ScreeningRule):
    """The guard rule. It sums the squared distance over pieces, and compares losses when it judges."""

    def __init__(self, settings: GuardConfig) -> None:
        self._settings = settings
        self.begin()

    def begin(self) -> None:
        """Reset the sum and the results of the last comparison."""
        self._losses: tuple[float, float] | None = None
        self._limit = 0.0
        self._is_astray = False
        self.sums = torch.zeros(1, dtype=torch.float64)

    def feed(self, own: Tensor, contribution: Tensor) -> None:
        """Add a piece's squared distance, which is fp32, in fp64."""
        difference = contribution - own
        self.sums += (difference @ difference).cpu()

    @property
    def _distance(self) -> float:
        return math.sqrt(float(self.sums))

    def judge(self, partner: Partner) -> Verdict:
        """Clip by distance, then by loss; suspect a peer of which nothing counts."""
        self._is_astray = False
        verdict = self._judge(partner)
        if isinstance(verdict, Refuse):
            return replace(verdict, is_suspect=True)
        return replace(verdict, is_suspect=self._is_astray, remark=self._remark(verdict))

    def _judge(self, partner: Partner) -> Verdict:
        """Judge without the suspicion; see `judge`. Comparisons are written so that NaN is refused."""
        distance, met = self._distance, partner.encounter
        if not distance < math.inf:
            return Refuse("the contribution is infinitely far away from mine")
        share = self._share(met)
        if share == 0.0:
            return Accept(share)
        usual = self._limit = self._usual(partner)
        if usual == 0.0:  # this node has taken no inner step yet, so there is no reference distance
            return Accept(share, LEAST)  # averages nothing, and 0 would blame the partner
        is_young = len(partner.everybody[self._series(partner)]) < MIN_KNOWN
        is_far = CHECKED_RADIUS * usual < self._settings.min_clip * distance
        if is_far and not (is_young and distance < partner.own.norm()):
            return Refuse(f"the contribution is {distance:.3g} away from mine, usual is {usual:.3g}")
        before = partner.evaluate(0.0)
        self._limit *= 1.0 if before is None else CHECKED_RADIUS
        if is_young and met.own_tokens:
            own, far = self._movement(partner), max(distance, LEAST)
            pace = statistics.median_low([1.0, 1.0, *partner.everybody["pace"], met.partner_tokens / met.own_tokens])
            most = MOST_LEAD * (1.0 + share * max(pace - 1.0, 0.0))
            slope = (partner.partner_movement() ** 2 - own**2) / far - far
            lead = math.sqrt(slope**2 + 4.0 * (most**2 - 1.0) * own**2) - slope
            self._limit = min(self._limit, lead / (2.0 * share))
        verdict = Accept(share, min(1.0, self._limit / max(distance, LEAST)))
        after = None if before is None else partner.evaluate(verdict.shares[1])
        if before is None or after is None:
            return replace(verdict, clip=HALF * verdict.clip) if partner.has_loss() else verdict
        verdict = self._compare(partner, verdict, before, after)
        return replace(verdict, weight=self._worth(partner, before, after) * verdict.weight)

    def _worth(self, partner: Partner, before: float, after: float) -> float:
        """Return what part of its share a partner's own weights are worth; of a mean as good as most, all of it."""
        costs, met = partner.everybody["cost"][-WINDOW:], partner.encounter
        is_usual = len(costs) >= MIN_KNOWN and after - before <= statistics.median_low(costs)
        if self._is_astray or is_usual or not partner.shares_text or not met.own_tokens:
            return 1.0
        of_partner, noise = partner.evaluate(1.0), self._noise(before)
        if of_partner is None or of_partner <= before + noise:
            return 1.0
        began, as_sent = partner.loss_before(), partner.loss_as_sent()
        gain = 0.0 if began is None else max(began - before, 0.0)
        explained = noise + gain * max(0.0, 1.0 - met.partner_tokens / met.own_tokens)
        if as_sent is not None:
            explained += max(as_sent - before, 0.0)
        return max(LEAST_WORTH, 1.0 - max(of_partner - before - explained, 0.0) / max(gain + noise, LEAST))

    def _compare(self, partner: Partner, verdict: Accept, before: float, after: float) -> Accept:
        """Return the verdict, or less of the contribution, if its mean costs too much."""
        self._losses = before, after
        allowed = self._allowed(partner, verdict, before, after)
        if after - before <= allowed:
            return self._as_newcomer(partner, verdict, after)
        if all(partner.everybody["astray"][-MAX_APART:]) and len(partner.everybody["astray"]) >= MAX_APART:
            of_partner = partner.evaluate(1.0)
            if of_partner is not None and of_partner <= before:
                return Accept(1.0)
        may_cost = 0.0 if partner.shares_text else HALF * allowed
        for _ in range(1 if partner.shares_text else MAX_HALVINGS):
            verdict = replace(verdict, clip=HALF * verdict.clip)
            tried = partner.evaluate(verdict.shares[1])
            if tried is not None and tried <= before + may_cost:
                return verdict
        self._is_astray = True
        return replace(verdict, clip=0.0)

    def _allowed(self, partner: Partner, verdict: Accept, before: float, after: float) -> float:
        """Return what the mean may cost, in nats a token. What takes time to know is asked for last."""
        nearness = min(1.0, self._distance * verdict.clip / max(self._movement(partner), LEAST))
        noise = allowed = self._noise(before) * nearness
        most = self._settings.max_loss_increase * max(before, LEAST_LOSS)
        if after - before <= allowed or partner.encounter.is_suspected:
            return min(allowed, most)
        began = partner.loss_before()
        gain = 0.0 if began is None else max(began - before, 0.0)
        allowed = max(allowed, gain * nearness)
        if after - before <= allowed:
            return min(allowed, most)
        as_sent = partner.loss_as_sent()
        if as_sent is not None:
            allowed += max(as_sent - before, 0.0)
        costs = partner.everybody["cost"][-WINDOW:]
        usual = USUAL_COSTS * statistics.median_low(costs) if len(costs) >= MIN_KNOWN else 0.0
        if usual > allowed:
            of_partner = partner.evaluate(1.0) if partner.shares_text else before
            if of_partner is not None and of_partner <= before + noise:
                allowed = usual
        return min(allowed, most)

    def _noise(self, loss: float) -> float:
        """Return what a few windows explain, in nats a token."""
        return min(self._settings.least_loss_increase, MOST_NOISE) * max(loss, LEAST_LOSS)

    def _as_newcomer(self, partner: Partner, verdict: Accept, after: float) -> Accept:
        """Return the verdict, with whether the mean is clearly worse than the weights of a newcomer's partner."""
        if partner.encounter.own_tokens:
            return verdict
        of_partner = partner.evaluate(1.0)
        is_behind = of_partner is not None and after > of_partner + LEAST_LAG * max(after, LEAST_LOSS)
        return replace(verdict, is_behind=is_behind)

    def _share(self, met: Encounter) -> float:
        """Return the partner's share of the mean.

        If one of the two claims no tokens, its weights are of an earlier round: they have no weight, and it takes half
        of the other's.
        """
        if met.partner_tokens == 0 < met.own_tokens:
            return 0.0
        is_newcomer = met.own_tokens == 0 < met.partner_tokens
        tokens = met.own_tokens, met.partner_tokens
        return HALF if is_newcomer else share_by_tokens(*tokens, self._settings.min_share)

    def _usual(self, partner: Partner) -> float:
        """Return the distance up to which nothing is clipped."""
        settings, movement = self._settings, self._movement(partner)
        known = partner.everybody[self._series(partner)][-WINDOW:]
        if len(known) < MIN_KNOWN:
            return settings.first_radius * movement
        usual = max(settings.radius * statistics.median(known), settings.first_radius * movement)
        return min(usual, settings.max_radius * statistics.median(partner.everybody["movement"]))

    @staticmethod
    def _movement(partner: Partner) -> float:
        """Return this node's own movement in the round, or the median of earlier ones if no inner step was taken."""
        known = partner.everybody["movement"][-WINDOW:]
        return partner.movement() or (statistics.median(known) if known else 0.0)

    def _remark(self, verdict: Accept) -> str:
        """Return why less than all of the partner's share counts; empty if all of it does."""
        if verdict.weight == 0.0:
            return "its sender claims no tokens for it, since its weights are of an earlier round"
        if verdict.clip == 1.0:
            return ""
        if self._limit == 0.0:
            return "this node has taken no inner step yet, so it does not know what is usual"
        if self._losses is not None and (self._is_astray or self._distance <= self._limit):
            own, mean = self._losses
            return f"the loss on held-out text is {mean:.3f} with it, and {own:.3f} of mine"
        far = f"it is {self._distance:.3g} away from mine, usual is up to {self._limit:.3g}"
        return far if self._distance > self._limit else "there was no time to measure its loss"

    def remember(self, partner: Partner, verdict: Verdict) -> None:
        """Record the accepted distance, and whether anything of the contribution counted."""
        if self._limit == 0.0 or (isinstance(verdict, Accept) and verdict.weight == 0.0):
            return
        everybody, met = partner.everybody, partner.encounter
        everybody.append("pace", met.partner_tokens / max(met.own_tokens, 1))
        if self._losses is not None and (cost := self._losses[1] - self._losses[0]) < math.inf:
            everybody.append("cost", cost)
        everybody.append("astray", float(self._is_astray))
        if isinstance(verdict, Accept) and verdict.clip > 0.0:
            everybody.append(self._series(partner), self._distance * verdict.clip)
            everybody.append("movement", self._movement(partner))

    @staticmethod
    def _series(partner: Partner) -> str:
        return f"distance {partner.fragment}"


RULE = Guard

"""Clips what is further away than what this node has accepted before, and refuses what makes the loss worse.

A pair has one neighbour each, so nothing in one exchange says whether a partner is honest: a median over neighbours, as
in most robust means, has nothing to work on. What a node has is its past. Honest contributions are about as far away
as those before, so a contribution is averaged only as far as a few medians of the distances that were accepted
(self-centred clipping, ClippedGossip, arXiv 2202.01545, with the radius from history):

    mean = own + share * clip * (partner's - own),   clip = min(1, limit / |partner's - own|)

The limit has a cap that follows this node's own movement in a round, which no partner sets and which shrinks with the
learning rate (BALANCE, arXiv 2406.10416): else an attacker that is met often would widen it threefold each time.

Clipping bounds the harm of an exchange, not its direction. So two losses on held-out text are compared with that of
one's own weights whenever something was clipped, the first times that a peer is met, always if it was refused before,
and in some other exchanges, which cannot be foreseen:

- that of the mean. Averaging small models at large learning rates costs up to a tenth of the loss, which the next inner
  steps gain back, so this bound is wide, and many liars pass it. It is narrow for what is far away: an honest partner
  that has come further makes the mean better.
- that of the partner's own weights. Honest members have learned as much from other batches, so theirs is as often
  better as worse, by little; a liar's is worse each time, however little of it shows in the mean. What is usual, past
  comparisons say: their lower quartile, which a third of liars, and members that these have just harmed, move little.
  A partner may also lack what this node's inner steps of the round have gained: half of it in any case, since rounds
  may cross, and all of it if it says that it has learned from fewer tokens, which costs it its share of the mean.

A partner that stands out may still be honest: one that was away for some rounds does. Twice its contribution is
averaged all the same if that costs little and it is not far away, and else counts for nothing here, while mine helps
it; the next times it is refused, and met last.

A liar that never stands out, but does some harm each time, is found by what its exchanges have in common: a cumulative
sum (Page, Biometrika 41, 1954) of how much of a round's progress its own weights lack, less what chance explains. A
member that never trains lacks a whole round each time, which is little late in a run. Above a limit its contributions
count for nothing here. They are not refused: an honest partner that was left alone for long looks just so, and is as
good as others again when mine has helped it.

Two nodes meet rarely, so members tell each other whom they suspect (`farandole.protocol.suspicion`). Where enough of
the members that this node has averaged with suspect a peer, a third of the sum is enough. Their word alone does
nothing: liars that suspect an honest member change nothing as long as its own weights are as good as this node's.

The number of tokens behind a contribution is its sender's word, so it moves the shares within narrow bounds.
Among honest partners nothing is clipped, and both compute the same mean to the bit.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
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
# What stands out is not averaged if it is so many times further away than usual.
TOLERATED_RADIUS: Final = 2.0
# A usual distance of zero counts as this.
LEAST: Final = 1e-30
# Of a partner's last exchanges so many may stand out without a refusal.
OUTLIER_WINDOW: Final = 8
MAX_OUTLIERS: Final = 2
# A peer's sum, in rounds of this node's gain: how much of it the peer's own weights lack in each comparison, at most so
# much, less the slack, which is larger for a peer that says that it has learned from fewer tokens. Above the limit the
# peer's contributions count for nothing; above the lower one, if enough others suspect it. The sum is bounded, so that
# few good exchanges let the peer in again.
MAX_LACKED_ROUNDS: Final = 1.0
EVIDENCE_SLACK: Final = 0.35
SLOWER_SLACK: Final = 0.6
EVIDENCE_LIMIT: Final = 1.5
SUSPECTED_LIMIT: Final = 0.5
MAX_EVIDENCE: Final = 2.5
# A gain counts as this share of the loss more, which is what equal members differ by late in a run.
LEAST_GAIN: Final = 0.003
# Above this sum all of a peer's exchanges are compared.
SUSPICIOUS_EVIDENCE: Final = 0.2
# Comparisons of losses that say what is usual: of those that chance or a first meeting led to, since a liar's exchanges
# are all compared.
COMPARED: Final = 32
# Comparisons from which the usual change of the loss is known, and median absolute deviations from it that stand out:
# two standard deviations.
MIN_CHANGES: Final = 8
MAX_DEVIATIONS: Final = 3.0
# A partner's own weights stand out if they are worse than this node's by so many lower quartiles of what others'
# differed: four standard deviations, little moved by a third of liars and by those whom they have just harmed. This
# share of the loss is never unusual. Comparisons from which that is known.
MAX_LAG_QUARTILES: Final = 12.0
LEAST_LAG: Final = 0.015
MIN_LAGS: Final = 3
# What the codec's rounding costs one's own weights, the partner's cost so many times as much: the difference between
# both contributions has the rounding of both in it, and a loss near its minimum grows with the square of a change.
ROUNDED_TWICE: Final = 2.0
# That cost differs between batches and between nodes: a lag of this many times as much may be chance.
ROUNDING_NOISE: Final = 2.0
# The share of a round's gain that a partner may lack whose rounds begin and end between this node's; and that one lacks
# for each share of this node's tokens that it has not learned from: more than one, as it lacked something before too.
CROSSING: Final = 0.5
SLOWER_LAG: Final = 1.5
# A contribution that stands out is averaged all the same, if its partner has not used up its allowance, where the mean
# costs no more than what inner steps gain in so many rounds, or `LEAST_LAG`.
TOLERATED_ROUNDS: Final = 1.25


class Guard(ScreeningRule):
    """Sums over pieces: squares of one's own contribution, and of the difference."""

    def __init__(self, settings: GuardConfig) -> None:
        self._settings = settings
        self.begin()

    def begin(self) -> None:
        """Zero the sum."""
        self._losses: tuple[float, float, float] | None = None
        self._lacked = 0.0
        self._lacked_rounds = self._evidence = 0.0
        self._is_outlier = False
        self._has_yardstick = True
        self._square = torch.zeros((), dtype=torch.float64)

    def feed(self, own: Tensor, contribution: Tensor) -> None:
        """Add a piece's squared distance, which is fp32, in fp64."""
        difference = contribution - own
        self._square += (difference @ difference).cpu()

    @property
    def _distance(self) -> float:
        return math.sqrt(float(self._square))

    def judge(self, partner: Partner) -> Verdict:
        """Clip, and compare losses where that is due; suspect a peer that is refused, or whose sum is large."""
        verdict = self._judge(partner)
        is_suspect = isinstance(verdict, Refuse) or self._evidence > SUSPECTED_LIMIT
        return replace(verdict, is_suspect=True) if is_suspect else verdict

    def _judge(self, partner: Partner) -> Verdict:
        """As `judge`. Comparisons are such that NaN is refused."""
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
        checked = CHECKED_RADIUS * usual if is_known else settings.max_radius * self._movement(partner)
        limit = usual if before is None else checked
        if is_far and limit == 0.0:  # this node has taken no inner step yet: that says nothing about the partner
            self._has_yardstick = False
            return Accept(share, 0.0)
        clip = min(1.0, limit / distance) if is_far else 1.0
        if clip < settings.min_clip:
            return Refuse(f"the contribution is {distance:.3g} away from mine, usual is {usual:.3g}")
        verdict = Accept(share, clip)
        return verdict if before is None else self._compare(partner, verdict, before, distance / max(usual, LEAST))

    def _compare(self, partner: Partner, verdict: Accept, before: float, reach: float) -> Verdict:
        """The verdict, or less, if the mean or the partner's own weights are worse than one's own (``before``).

        ``reach``: the distance in usual ones.
        """
        settings, after, of_partner = self._settings, partner.evaluate(verdict.shares[1]), partner.evaluate(1.0)
        if after is None or of_partner is None:
            return verdict
        as_sent = partner.loss_as_sent()
        rounding = 0.0 if as_sent is None else ROUNDED_TWICE * max(as_sent - before, 0.0)
        of_partner -= rounding
        self._losses = before, after, of_partner
        everybody, scale = partner.everybody, max(before, LEAST_LOSS)
        began = partner.loss_before()
        gain = 0.0 if began is None else max(began - before, 0.0)
        slower = SLOWER_LAG * gain * self._slowness(partner)
        self._lacked = lacking = CROSSING * gain + slower + ROUNDING_NOISE * rounding
        most_lag = before + scale * self._usual_lag(everybody)
        most_change = max(scale * self._usual_change(everybody), self._fluctuation(everybody))
        is_behind = not of_partner <= most_lag + lacking
        is_worse = not after <= before + most_change + verdict.shares[1] * lacking
        is_astray = reach > 1.0 and not after <= before + LEAST_GAIN * scale
        self._is_outlier = is_behind or is_worse or is_astray
        lacked = (of_partner - before - slower) / (gain + ROUNDING_NOISE * rounding + LEAST_GAIN * scale)
        self._lacked_rounds = lacked if lacked < MAX_LACKED_ROUNDS else MAX_LACKED_ROUNDS  # NaN as well
        self._evidence = self._sum_up(partner)
        if not self._is_outlier:
            return Accept(verdict.weight, 0.0) if self._is_harmful(partner) else verdict
        if self._may_be_outlier(partner) and after < math.inf:
            tolerated = max(TOLERATED_ROUNDS * gain, LEAST_LAG * scale)
            does_little = after <= before + min(tolerated, settings.max_loss_increase * scale)
            is_used = does_little and reach <= TOLERATED_RADIUS and not self._is_harmful(partner)
            return verdict if is_used else Accept(verdict.weight, 0.0)
        most = most_lag if is_behind else before + scale * settings.max_loss_increase
        words = f"{of_partner:.3f} of its own" if is_behind else f"{after:.3f} with it"
        refusal = Refuse(f"the loss on held-out text is {words}, and {before:.3f} of mine")
        return self._partly(partner, verdict, most) or refusal

    def _sum_up(self, partner: Partner) -> float:
        """A peer's sum after another comparison. What nearly all peers lack is no evidence: a lossy codec costs too."""
        known = sorted(partner.everybody["lacked rounds"][-COMPARED:])
        usual = max(known[len(known) // 4], 0.0) if len(known) >= MIN_LAGS else 0.0
        before = partner.history["evidence"][-1:] or (0.0,)
        more = self._lacked_rounds - usual - EVIDENCE_SLACK - SLOWER_SLACK * self._slowness(partner)
        return min(max(before[0] + more, 0.0), MAX_EVIDENCE)

    def _is_harmful(self, partner: Partner) -> bool:
        """Whether a peer that may not stand out has done some harm each time."""
        limit = SUSPECTED_LIMIT if partner.encounter.is_suspected else EVIDENCE_LIMIT
        return self._evidence > limit

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
        settings, changes = self._settings, everybody["change"][-COMPARED:]
        if len(changes) < MIN_CHANGES:
            return settings.max_loss_increase
        median = statistics.median(changes)
        deviation = statistics.median(abs(change - median) for change in changes)
        usual = median + MAX_DEVIATIONS * deviation
        return min(max(usual, settings.least_loss_increase), settings.max_loss_increase)

    @staticmethod
    def _slowness(partner: Partner) -> float:
        """From 0 to 1: which share of this node's tokens of the round the partner says that it has not learned from."""
        met = partner.encounter
        return min(max(1.0 - met.partner_tokens / max(met.own_tokens, 1), 0.0), 1.0)

    def _usual_lag(self, everybody: History) -> float:
        """By which share of the loss more than that a partner's own weights may be worse without standing out."""
        settings, lags = self._settings, sorted(everybody["lag"][-COMPARED:])
        if len(lags) < MIN_LAGS:
            return LEAST_LAG
        return min(max(MAX_LAG_QUARTILES * lags[max(1, len(lags) // 4)], LEAST_LAG), settings.max_loss_increase)

    @staticmethod
    def _may_be_outlier(partner: Partner) -> bool:
        """Whether the partner has not used up its allowance."""
        return sum(partner.history["outlier"][-OUTLIER_WINDOW:]) < MAX_OUTLIERS

    def _is_new(self, history: History) -> bool:
        return len(history["accepted"]) < self._settings.first_checks

    def _is_suspect(self, partner: Partner) -> bool:
        """Whether the peer is new here, was refused once, stood out, or was worse lately. One without a key is new."""
        history = partner.history
        is_worse = any(evidence > SUSPICIOUS_EVIDENCE for evidence in history["evidence"][-1:])
        return (
            self._is_new(history) or is_worse or bool(history["refused"]) or any(history["outlier"][-OUTLIER_WINDOW:])
        )

    def _usual(self, partner: Partner) -> tuple[float, bool]:
        """The distance up to which nothing is clipped, and whether it follows from what was accepted."""
        settings, movement = self._settings, self._movement(partner)
        known = partner.everybody[self._series(partner)][-WINDOW:]
        if len(known) < MIN_KNOWN:
            return settings.first_radius * movement, False
        usual = max(settings.radius * statistics.median(known), settings.first_radius * movement)
        return min(usual, settings.max_radius * statistics.median(partner.everybody["movement"])), True

    @staticmethod
    def _movement(partner: Partner) -> float:
        """This node's own movement in the round; after a round without inner steps, the median of those before."""
        known = partner.everybody["movement"][-WINDOW:]
        return partner.movement() or (statistics.median(known) if known else 0.0)

    def remember(self, partner: Partner, verdict: Verdict) -> None:
        """The distance as far as it was accepted, the losses if they were compared, and which peer was refused."""
        if not self._has_yardstick:
            return
        everybody, history = partner.everybody, partner.history
        is_used = isinstance(verdict, Accept) and verdict.clip > 0.0
        is_sample = partner.encounter.chance < self._settings.checked_share or self._is_new(history)
        if self._losses is not None:
            own, mean, of_partner = self._losses
            if everybody["mean loss"]:
                everybody.append("inner change", own - everybody["mean loss"][-1])
            everybody.append("mean loss", mean if is_used else own)
            history.append("evidence", self._evidence)
            if is_sample:
                everybody.append("lacked rounds", self._lacked_rounds)
        everybody.append("refused", float(isinstance(verdict, Refuse)))
        if isinstance(verdict, Refuse):
            history.append("refused", 1.0)
            history.append("outlier", 0.0)  # after enough of them it is let in again, as others help it meanwhile
            return
        if self._losses is not None and is_sample:
            everybody.append("change", (mean - own) / max(own, LEAST_LOSS))
            everybody.append("lag", max(abs(of_partner - own) - self._lacked, 0.0) / max(own, LEAST_LOSS))
        history.append("outlier", float(self._is_outlier))
        if is_used:
            everybody.append(self._series(partner), self._distance * verdict.clip)
            everybody.append("movement", self._movement(partner))
        if self._is_new(history):
            history.append("accepted", 1.0)

    @staticmethod
    def _series(partner: Partner) -> str:
        return f"distance {partner.fragment}"


RULE = Guard

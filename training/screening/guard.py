"""Guard: clip contributions further away than the ones accepted before, and refuse the ones that increase the loss.

In a pair each node has one neighbour, so one exchange does not show whether a partner is honest: there is no median
over neighbours, which most robust means use. A node can use its history. Honest contributions are about as far away as
earlier ones, so a contribution is averaged only up to a few medians of the accepted distances (self-centred clipping,
ClippedGossip, arXiv 2202.01545, with the radius from history):

    mean = own + share * clip * (partner's - own),   clip = min(1, limit / |partner's - own|)

The limit has a cap that follows this node's own movement in a round, which no partner controls and which shrinks with
the learning rate (BALANCE, arXiv 2406.10416). Without it, an attacker that is met often would triple the limit each
time.

Clipping bounds the harm of an exchange, not its direction. Therefore two losses on held-out text are compared with the
loss of this node's own weights: whenever something was clipped, the first times that a peer is met, always if the peer
was refused before, and in some other exchanges, chosen unpredictably:

- the loss of the mean. Averaging small models at large learning rates costs up to a tenth of the loss, which the next
  inner steps recover, so this bound is wide, and many liars pass it. It is narrow for distant contributions: an honest
  partner that is ahead improves the mean.
- the loss of the partner's own weights. Honest members have learned as much from other batches, so their loss is as
  often better as worse, by little. A liar's is worse each time, even if the mean hardly shows it. The usual difference
  is the lower quartile of past comparisons, which a third of liars, and members that they have just harmed, move
  little. A partner may also lack the gain of this node's inner steps of the round: half of it in any case, since rounds
  may cross, and all of it if it reports fewer tokens, which reduces its share of the mean.

A partner that stands out may still be honest, for example after it was away for some rounds. Twice, its contribution is
averaged anyway if that costs little and it is not far away; otherwise it gets weight zero here, while this node's
contribution helps the partner. After that it is refused, and met last.

Nodes that liars have pushed apart would stay apart: both are good, and the mean is worse than either. A node that has
found only such partners takes over the weights of the next one that is better. A liar gains little by being such a
partner: it must be as good as the node that it meets, and meet it each time.

A liar that never stands out, but does some harm each time, is detected by a cumulative sum (Page, Biometrika 41, 1954)
of how much of a round's progress its own weights lack, less what chance explains. A member that never trains lacks a
whole round each time, which is little late in a run. Above a limit its contributions get weight zero here. They are not
refused: an honest partner that was alone for a long time looks the same, and becomes as good as others when this node's
contribution has helped it. At a large learning rate honest members differ by more than a round's progress, so the sum
is in units of that difference, if it is larger.

A mean that is clearly better than this node's own weights is taken in any case, if the contribution is not far away:
then averaging helps, whatever the partner's own weights are worth.

A liar may also push a node away from the others, by sending an exaggeration of the node's own recent change
(dissensus, ClippedGossip, section 5). This costs little each time, but the members drift apart. An honest partner has
used other batches, so its difference from this node points against the change that is specific to this node's inner
steps, unless the partner is ahead of this node; then its weights are better. A contribution that lies further along
this node's change and is worse counts as a round in the sum.

Two nodes meet rarely, so members report to each other which peers they suspect (`farandole.protocol.state.believing`).
Where enough of the members that this node has averaged with suspect a peer, a lower limit holds (`SUSPECTED_LIMIT`).
Their report alone has no effect: liars that suspect an honest member change nothing as long as its own weights are as
good as this node's.

The number of tokens behind a contribution is claimed by its sender, so it moves the shares within narrow bounds only,
and not in favour of a peer whose weights lack progress. A newcomer whose weights are of an earlier round claims none
(`Engine.claim`): they would make the mean worse, so they have no weight, and the newcomer takes half of its
partner's. A member that claims none without need moves nothing. Among honest partners nothing is clipped, and both
compute the same mean to the bit.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from farandole.protocol.run.rules import GuardConfig

from .rule import Accept, Encounter, History, Partner, Refuse, ScreeningRule, Verdict, share_by_tokens

# Number of accepted distances whose median is used. With fewer than MIN_KNOWN, this node's own movement is used.
WINDOW: Final = 16
MIN_KNOWN: Final = 4
# Changes of a loss are relative to the loss, or to this value in nats a token if the loss is smaller.
LEAST_LOSS: Final = 1.0
# Number of the last `WINDOW` comparisons in which inner steps must increase the loss to be called noisy; and the share
# of their gain that a mean may cost: below 1, since the next inner steps recover the cost.
MIN_WORSE: Final = 4
GAIN_SHARE: Final = 0.25
# After this number of consecutive partners that are as good as this node, but whose means are worse, the node takes
# over the weights of one that is better.
MAX_APART: Final = 3
# A contribution whose losses are compared may be further away by this factor, and by as much more as its sender has
# trained on more tokens than this node, up to twice.
CHECKED_RADIUS: Final = 2.0
MAX_FASTER: Final = 2.0
# A contribution that stands out is not averaged if it is further away than usual by more than this factor.
TOLERATED_RADIUS: Final = 2.0
# Lower bound of the usual distance, to avoid a division by zero.
LEAST: Final = 1e-30
# Number of a partner's last `OUTLIER_WINDOW` exchanges that may stand out without a refusal.
OUTLIER_WINDOW: Final = 8
MAX_OUTLIERS: Final = 2
# A peer's sum, in rounds of this node's gain: how much of the gain the peer's own weights lack in each comparison, at
# most `MAX_LACKED_ROUNDS`, less the slack, which is larger for a peer that reports fewer tokens. Above `EVIDENCE_LIMIT`
# the peer's contributions get weight zero; above `SUSPECTED_LIMIT` too if enough others suspect it. The sum is bounded,
# so that few good exchanges let the peer in again.
MAX_LACKED_ROUNDS: Final = 1.0
EVIDENCE_SLACK: Final = 0.35
SLOWER_SLACK: Final = 0.6
EVIDENCE_LIMIT: Final = 2.0
SUSPECTED_LIMIT: Final = 0.5
MAX_EVIDENCE: Final = 3.0
# The series of a peer's sums: of rounds with inner steps, and of rounds without.
SUMS: Final = ("evidence", "evidence without steps")
# Evidence of a contribution that exaggerates this node's: it lies further along the change of this node's inner steps
# and is worse. 3 % of honest contributions do so by chance, so the first of `OUTLIER_WINDOW` comparisons is ignored.
EXAGGERATED_ROUNDS: Final = 1.25
# Equal members differ late in a run, too. So a gain is increased by this share of the loss, or by `NOISE_QUARTILES`
# lower quartiles of past differences between members if that is more: two thirds of a standard deviation.
LEAST_GAIN: Final = 0.003
NOISE_QUARTILES: Final = 2.0
# Above this sum all of a peer's exchanges are compared.
SUSPICIOUS_EVIDENCE: Final = 0.2
EQUAL_SHARE: Final = 0.5
# Number of loss comparisons that define the usual values. Only comparisons due to chance or to a first meeting count,
# since a liar's exchanges are all compared.
COMPARED: Final = 32
# Number of comparisons after which the usual change of the loss is known, and the median absolute deviations from it
# that stand out: two standard deviations.
MIN_CHANGES: Final = 8
MAX_DEVIATIONS: Final = 3.0
# A partner's own weights stand out if they are worse than this node's by more than `MAX_LAG_QUARTILES` lower quartiles
# of past differences: four standard deviations, little moved by a third of liars and by the members that they have just
# harmed. `LEAST_LAG` is a share of the loss that is never unusual. The quartile is known after `MIN_LAGS` comparisons.
MAX_LAG_QUARTILES: Final = 12.0
LEAST_LAG: Final = 0.015
MIN_LAGS: Final = 3
# Factor from the cost of the codec's rounding for this node's weights to its cost for the partner's: the difference
# of both contributions includes both roundings, and a loss near its minimum grows with the square of a change.
ROUNDED_TWICE: Final = 2.0
# That cost differs between batches and between nodes: a lag of up to this multiple of it may be chance.
ROUNDING_NOISE: Final = 2.0
# The share of a round's gain that a partner may lack if its rounds begin and end between this node's; and the
# factor from the share of this node's tokens that a partner has not learned from to the share of the gain that it
# lacks: above 1, as it lacked something before too.
CROSSING: Final = 0.5
SLOWER_LAG: Final = 2.5
# A contribution that stands out is averaged anyway, if its partner has not used up its allowance, where the mean costs
# no more than the gain of inner steps in this number of rounds, or `LEAST_LAG`. While the usual change of the loss is
# not known, it is a larger number: in the first rounds of a run, whoever has met a faster member is rounds ahead of
# whoever has not, and the next inner steps recover a cost soon.
TOLERATED_ROUNDS: Final = 1.25
FIRST_TOLERATED_ROUNDS: Final = 2.5


class Guard(ScreeningRule):
    """The guard rule. It sums the squared distance over pieces, and compares losses when it judges."""

    def __init__(self, settings: GuardConfig) -> None:
        self._settings = settings
        self.begin()

    def begin(self) -> None:
        """Reset the sum and the results of the last comparison."""
        self._losses: tuple[float, float, float] | None = None
        self._lacked = self._usual_distance = 0.0
        self._gain: float | None = None
        self._lacked_rounds = self._sum = self._evidence = 0.0
        self._is_outlier = self._is_apart = self._is_exaggerated = False
        self._has_yardstick = True
        self.sums = torch.zeros(1, dtype=torch.float64)

    def feed(self, own: Tensor, contribution: Tensor) -> None:
        """Add a piece's squared distance, which is fp32, in fp64."""
        difference = contribution - own
        self.sums += (difference @ difference).cpu()

    @property
    def _distance(self) -> float:
        return math.sqrt(float(self.sums))

    def judge(self, partner: Partner) -> Verdict:
        """Clip, and compare losses if needed; suspect a peer that is refused or whose sum is large."""
        verdict = self._judge(partner)
        if isinstance(verdict, Refuse):
            return replace(verdict, is_suspect=True)
        return replace(
            verdict,
            is_suspect=self._evidence > SUSPECTED_LIMIT,
            is_behind=self._is_behind(verdict),
            remark=self._remark(verdict),
        )

    def _remark(self, verdict: Accept) -> str:
        """Return why less than all of the partner's share counts; empty if all of it does."""
        if verdict.weight == 0.0:
            return "its sender claims no tokens for it, since its weights are of an earlier round"
        if verdict.clip == 1.0:
            return ""
        if not self._has_yardstick:
            return "this node has taken no inner step yet, so it does not know what is usual"
        far = f"it is {self._distance:.3g} away from mine, usual is up to {self._usual_distance:.3g}"
        if self._losses is None:
            return far
        own, mean, of_partner = self._losses
        losses = f"the loss on held-out text is {of_partner:.3f} of its own, {mean:.3f} with it, and {own:.3f} of mine"
        if verdict.clip > 0.0:
            return f"{far}; {losses}"
        return losses if self._is_outlier else f"{losses}, and its weights have lacked progress before"

    def _is_behind(self, verdict: Accept) -> bool:
        """Return whether the mean is clearly worse than the partner's own weights; False if it is not known."""
        if self._losses is None:
            return False
        before, after, of_partner = self._losses
        after = {0.0: before, 1.0: of_partner}.get(verdict.shares[1], after)
        return after > of_partner + LEAST_LAG * max(before, LEAST_LOSS) + self._lacked

    def _judge(self, partner: Partner) -> Verdict:
        """Judge without the suspicion; see `judge`. Comparisons are written so that NaN is refused."""
        settings, distance, met = self._settings, self._distance, partner.encounter
        if not distance < math.inf:
            return Refuse("the contribution is infinitely far away from mine")
        share = self._share(met)
        if share == 0.0:
            return Accept(share)
        usual, is_known = self._usual(partner)
        self._usual_distance = usual
        is_far = not distance <= usual
        if not is_far and met.chance >= settings.checked_share and not self._is_suspect(partner):
            return Accept(share)
        before = partner.evaluate(0.0)
        # At first a faster partner is far away too, and so is one that found no partner for some rounds: only the loss
        # distinguishes it from a liar.
        checked = (
            CHECKED_RADIUS * usual * min(max(met.partner_tokens / max(met.own_tokens, 1), 1.0), MAX_FASTER)
            if is_known
            else settings.max_radius * self._movement(partner)
        )
        limit = usual if before is None else checked
        if is_far and limit == 0.0:  # this node has taken no inner step yet, so there is no reference distance
            self._has_yardstick = False
            return Accept(share, 0.0)
        clip = min(1.0, limit / distance) if is_far else 1.0
        if clip < settings.min_clip:
            return Refuse(f"the contribution is {distance:.3g} away from mine, usual is {usual:.3g}")
        verdict = Accept(share, clip)
        return verdict if before is None else self._compare(partner, verdict, before, distance / max(usual, LEAST))

    def _share(self, met: Encounter) -> float:
        """Return the partner's share of the mean.

        If one of the two claims no tokens, its weights are of an earlier round: they have no weight, and it takes half
        of the other's.
        """
        if met.partner_tokens == 0 < met.own_tokens:
            return 0.0
        is_newcomer = met.own_tokens == 0 < met.partner_tokens
        tokens = met.own_tokens, met.partner_tokens
        return EQUAL_SHARE if is_newcomer else share_by_tokens(*tokens, self._settings.min_share)

    def _compare(self, partner: Partner, verdict: Accept, before: float, reach: float) -> Verdict:
        """Return the verdict, or a stricter one if the mean or the partner's weights are worse than this node's.

        ``before`` is the loss of this node's weights. ``reach`` is the distance divided by the usual one.
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
        self._gain = None if began is None else max(began - before, 0.0)
        gain = self._usual_gain(everybody) if self._gain is None else self._gain
        slower = SLOWER_LAG * gain * self._slowness(partner)
        self._lacked = lacking = CROSSING * gain + slower + ROUNDING_NOISE * rounding
        most_lag = before + scale * self._usual_lag(everybody)
        most_change = max(scale * self._usual_change(everybody), self._fluctuation(everybody))
        helps = reach <= 1.0 and after < before - LEAST_GAIN * scale
        is_behind = not helps and not of_partner <= most_lag + lacking
        is_worse = not after <= before + most_change + verdict.shares[1] * lacking
        is_astray = reach > 1.0 and not after <= before + LEAST_GAIN * scale
        self._is_outlier = is_behind or is_worse or is_astray
        self._is_apart = is_astray and not is_behind
        differences = sorted(everybody["difference"][-WINDOW:])  # by which equal members differ, as shares of the loss
        noise = LEAST_GAIN
        if len(differences) >= MIN_LAGS:
            noise = max(NOISE_QUARTILES * differences[len(differences) // 4], LEAST_GAIN)
        unit = gain + ROUNDING_NOISE * rounding + scale * noise
        lacked = (of_partner - before - slower) / unit
        self._lacked_rounds = lacked if lacked < MAX_LACKED_ROUNDS else MAX_LACKED_ROUNDS  # NaN as well
        self._is_exaggerated = of_partner > before and partner.alignment() > 0.0
        self._sum_up(partner)
        if self._evidence > SUSPICIOUS_EVIDENCE:  # what it claims of its tokens does not show in its weights
            verdict = replace(verdict, weight=min(verdict.weight, EQUAL_SHARE))
        if not self._is_outlier:
            return Accept(verdict.weight, 0.0) if not helps and self._is_harmful(partner) else verdict
        has_allowance = sum(partner.history["outlier"][-OUTLIER_WINDOW:]) < MAX_OUTLIERS
        may_be_outlier = has_allowance and after < math.inf
        is_early = len(everybody["change"]) < MIN_CHANGES
        rounds = FIRST_TOLERATED_ROUNDS if is_early else TOLERATED_ROUNDS
        tolerated = min(max(rounds * gain, LEAST_LAG * scale), settings.max_loss_increase * scale)
        does_little = after <= before + tolerated and reach <= TOLERATED_RADIUS
        if may_be_outlier and does_little and not self._is_harmful(partner):
            return verdict
        has_drifted = sum(everybody["apart"][-MAX_APART:]) == MAX_APART  # good partners that were all too far away
        if self._is_apart and of_partner <= before and has_drifted:
            return Accept(1.0)
        if self._is_apart or may_be_outlier:
            return Accept(verdict.weight, 0.0)
        words = f"{of_partner:.3f} of its own" if is_behind else f"{after:.3f} with it"
        return Refuse(f"the loss on held-out text is {words}, and {before:.3f} of mine")

    def _sum_up(self, partner: Partner) -> None:
        """Add this comparison to a peer's sum.

        What nearly all peers lack is no evidence: a lossy codec has a cost too. Rounds without inner steps have a sum
        of their own, which reduces no other: a member that never trains has just averaged, so it lacks nothing in them.
        """
        known = sorted(partner.everybody["lacked rounds"][-COMPARED:])
        usual = max(known[len(known) // 4], 0.0) if len(known) >= MIN_LAGS else 0.0
        more = self._lacked_rounds - usual - EVIDENCE_SLACK - SLOWER_SLACK * self._slowness(partner)
        if self._is_exaggerated and any(partner.history["exaggerated"][-OUTLIER_WINDOW:]):
            more += EXAGGERATED_ROUNDS
        before, of_others = (_newest(partner.history, name) for name in self._sums)
        self._sum = min(max(before + more, 0.0), MAX_EVIDENCE)
        self._evidence = self._sum + of_others

    @property
    def _sums(self) -> tuple[str, str]:
        """The series of a peer's sums: of rounds like this one, with inner steps or without, and of the others."""
        return SUMS if self._gain is not None else SUMS[::-1]

    def _is_harmful(self, partner: Partner) -> bool:
        """Return whether the peer's sum is above the limit: it has done some harm each time without standing out."""
        limit = SUSPECTED_LIMIT if partner.encounter.is_suspected else EVIDENCE_LIMIT
        return self._evidence > limit

    @staticmethod
    def _usual_gain(everybody: History) -> float:
        """Return the gain of inner steps, in nats a token, that a round without any is judged by; 0 if none is known.

        Such a round follows one with inner steps (`RoundConfig.partners`), whose partners were met in the same state.
        """
        known = everybody["gain"][-MIN_KNOWN:]
        return statistics.median(known) if known else 0.0

    @staticmethod
    def _fluctuation(everybody: History) -> float:
        """Return how much worse a mean may be, in nats a token, from how inner steps change this node's loss.

        It is the larger of a share of their gain between two comparisons (large early in a run) and the median of their
        losses, if they often lose.
        """
        changes = everybody["inner change"][-WINDOW:]
        if len(changes) < MIN_WORSE:
            return 0.0
        worse = [change for change in changes if change > 0.0]
        noise = statistics.median(worse) if len(worse) >= MIN_WORSE else 0.0
        return max(noise, -GAIN_SHARE * statistics.median(changes))

    def _usual_change(self, everybody: History) -> float:
        """Return the share of the loss by which a mean may be worse without being an outlier."""
        settings, changes = self._settings, everybody["change"][-COMPARED:]
        if len(changes) < MIN_CHANGES:
            return settings.max_loss_increase
        median = statistics.median(changes)
        deviation = statistics.median(abs(change - median) for change in changes)
        usual = median + MAX_DEVIATIONS * deviation
        return min(max(usual, settings.least_loss_increase), settings.max_loss_increase)

    @staticmethod
    def _slowness(partner: Partner) -> float:
        """Return the share (0 to 1) of this node's tokens of the round that the partner reports not to have."""
        met = partner.encounter
        return min(max(1.0 - met.partner_tokens / met.own_tokens, 0.0), 1.0) if met.own_tokens else 0.0

    def _usual_lag(self, everybody: History) -> float:
        """Return the share of the loss by which a partner's own weights may be worse without standing out.

        What the partner lacks for known reasons (`_lacked`) is allowed in addition.
        """
        settings, lags = self._settings, sorted(everybody["lag"][-COMPARED:])
        if len(lags) < MIN_LAGS:
            return LEAST_LAG
        return min(max(MAX_LAG_QUARTILES * lags[max(1, len(lags) // 4)], LEAST_LAG), settings.max_loss_increase)

    def _is_new(self, history: History) -> bool:
        return len(history["accepted"]) < self._settings.first_checks

    def _is_suspect(self, partner: Partner) -> bool:
        """Return whether the peer is new here, was refused once, stood out, or was worse in the last comparison.

        A peer without a key is new.
        """
        history = partner.history
        is_worse = sum(_newest(history, name) for name in SUMS) > SUSPICIOUS_EVIDENCE
        return (
            self._is_new(history) or is_worse or bool(history["refused"]) or any(history["outlier"][-OUTLIER_WINDOW:])
        )

    def _usual(self, partner: Partner) -> tuple[float, bool]:
        """Return the distance up to which nothing is clipped, and whether it follows from accepted distances."""
        settings, movement = self._settings, self._movement(partner)
        known = partner.everybody[self._series(partner)][-WINDOW:]
        if len(known) < MIN_KNOWN:
            return settings.first_radius * movement, False
        usual = max(settings.radius * statistics.median(known), settings.first_radius * movement)
        return min(usual, settings.max_radius * statistics.median(partner.everybody["movement"])), True

    @staticmethod
    def _movement(partner: Partner) -> float:
        """Return this node's own movement in the round, or the median of earlier ones if no inner step was taken."""
        known = partner.everybody["movement"][-WINDOW:]
        return partner.movement() or (statistics.median(known) if known else 0.0)

    def remember(self, partner: Partner, verdict: Verdict) -> None:
        """Record the accepted distance, the losses if they were compared, and a refusal of the peer."""
        if not self._has_yardstick or (isinstance(verdict, Accept) and verdict.weight == 0.0):
            return
        everybody, history = partner.everybody, partner.history
        is_used = isinstance(verdict, Accept) and verdict.clip > 0.0
        is_sample = partner.encounter.chance < self._settings.checked_share or self._is_new(history)
        if self._losses is not None:
            own, mean, of_partner = self._losses
            if self._gain is not None:
                everybody.append("gain", self._gain)
            if everybody["mean loss"]:
                everybody.append("inner change", own - everybody["mean loss"][-1])
            everybody.append("mean loss", mean if is_used else own)
            history.append(self._sums[0], self._sum)
            history.append("exaggerated", float(self._is_exaggerated))
            if is_sample:
                everybody.append("lacked rounds", self._lacked_rounds)
                if (difference := abs(of_partner - own) / max(own, LEAST_LOSS)) < math.inf:
                    everybody.append("difference", difference)
        if is_used or self._is_apart:
            everybody.append("apart", float(not is_used))
        if isinstance(verdict, Refuse):
            history.append("refused", 1.0)
            history.append("outlier", 0.0)  # after enough of them it is let in again, as others help it in between
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
        return f"{'near ' if partner.encounter.is_near else ''}distance {partner.fragment}"


def _newest(history: History, name: str) -> float:
    """Return the newest number of a series; 0 if there is none."""
    return (history[name][-1:] or (0.0,))[0]


RULE = Guard

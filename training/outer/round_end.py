"""The end of a round: a replica's contribution, the judgement of the partner's, and the outer step.

A round is any number of inner steps on the fast weights, `RoundEnd.contribution` for the partner, and `RoundEnd.apply`
with the partner's contribution, or with None to take it alone. If inner steps are taken between the last two, while the
exchange goes on, their progress is kept: the fast weights get the outer step's correction as a difference (Streaming
DiLoCo, arXiv 2501.18512); without such steps the fast weights become the slow weights exactly.

With fragments (the same paper) a round exchanges one part of the parameters, and its outer step moves that part only.
The other parts continue their inner steps until their turn, each with another partner. A part that is F times smaller
can be exchanged F times as often over the same link.

Where inner steps move other weights than the flat vector (on a GPU, or of another dtype), the flat vector is a copy
(`farandole.training.outer.outer_state`). While a GPU takes inner steps, a side thread can compute the end of the
previous round in the host's memory. Some of its operations use what inner steps use (the weights, the module): they are
handed over, to be done between two steps.
"""

from __future__ import annotations

import enum
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

import torch
from torch import Tensor

from farandole.protocol.run.rules import OuterConfig, ScreeningConfig

from ..base.errors import CodecError, DivergedError
from ..base.parameters import Layout
from ..screening.rule import UNKNOWN, Encounter, Partner, Refuse, Verdict, rule_of
from .codec import Buffer, Result
from .contribution import Contribution, Exam, Measure, PartnerContribution, copier_for
from .momentum import Momentum
from .outer_state import FastWeights, OuterState

# Number of recent rounds whose median movement is the usual one, and the minimum number of them.
WINDOW: Final = 16
MIN_KNOWN: Final = 4
# Rounds with inner steps of each fragment that weights must be behind the run to claim no tokens. Others may be a round
# ahead in any case, and the claim of a newcomer's first round allows for what one round lacks.
MIN_MISSED: Final = 2


class Aside(enum.IntEnum):
    """What of a round's end may be done in the side thread while inner steps are taken."""

    NOTHING = 0
    ENCODING = 1
    ALL = 2


@dataclass(slots=True)
class Totals:
    """What a replica has done so far."""

    round: int = 0
    """Outer steps taken."""
    steps: int = 0
    """Inner steps taken."""
    tokens: int = 0
    """Tokens trained on."""


@dataclass(frozen=True, slots=True)
class EndedRound:
    """The state of a replica at the end of a round's inner steps."""

    contribution: Contribution
    fragment: int
    steps: int
    """Inner steps that the replica had taken."""
    tokens: int
    """Tokens of the round."""
    has_steps: bool
    """Whether inner steps were taken since the contribution before."""
    ramp: float
    """The mean share of the schedule's learning rate at which these steps were taken."""


class SideThread:
    """The thread, its work in order, and the calls that it has handed over.

    It begins with the first work. All methods except `call` are for the thread that takes inner steps.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "side thread", self._enter)
        self._thread_id: int | None = None
        self._under_way = deque[Future[None]]()
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._is_over = False

    def _enter(self) -> None:
        self._thread_id = threading.get_ident()

    @property
    def is_busy(self) -> bool:
        """Return whether work is under way, which may wait for `look`."""
        return bool(self._under_way)

    def do(self, work: Callable[[], None], *, is_aside: bool) -> None:
        """Do ``work`` in the side thread, or now; in both cases after the work that was begun before."""
        if is_aside:
            self._under_way.append(self._thread.submit(work))
        else:
            self.settle()
            work()

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function between two inner steps: the side thread waits until the other one has called it.

        Returns what it returns and raises what it raises; raises `CancelledError` after `end`. Called in another thread
        than the side thread, it makes the call at once.
        """
        if threading.get_ident() != self._thread_id:
            return function()
        answer = Future[Result]()
        self._calls.put(partial(self._make, function, answer))
        if self._is_over:  # `end` might not have seen it
            raise CancelledError
        return answer.result()

    def _make(self, function: Callable[[], Result], answer: Future[Result]) -> None:
        if self._is_over:
            answer.cancel()
            return
        try:
            answer.set_result(function())
        except BaseException as error:  # whatever it is: the side thread raises it, and would wait for ever without it
            answer.set_exception(error)

    def look(self) -> None:
        """Make the calls that were handed over; raise the error of finished work."""
        self._make_calls()
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()

    def _make_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None:
                call()

    def settle(self) -> None:
        """Wait until no work is under way, and make its calls; raises its error."""
        while self._under_way:
            work = self._under_way.popleft()
            work.add_done_callback(lambda _: self._calls.put(None))
            while not work.done():
                if (call := self._calls.get()) is not None:
                    call()
            work.result()

    def end(self) -> None:
        """Give up the work that is under way, and cancel all calls: no inner steps follow."""
        self._is_over = True
        self._make_calls()
        self._thread.shutdown(wait=False, cancel_futures=True)


class RoundEnd:
    """The end of each round of one replica, whose fast weights are ``weights``, in the order of ``layout``.

    The slow weights begin as a copy of the flat vector, and all other vectors lie where that one does. ``measure``
    answers a screening rule that asks for losses; None: none is known. ``partners``: rounds with one partner each of
    which only the first has inner steps. In the others, screening rules ask for the steps before them.

    All calls come from the thread that takes inner steps, except those that `aside` allows in the side thread.
    """

    def __init__(
        self,
        weights: FastWeights,
        layout: Layout,
        outer: OuterConfig,
        screening: ScreeningConfig,
        measure: Measure | None = None,
        partners: int = 1,
        exam: Exam | None = None,
        momentum: Momentum | None = None,
    ) -> None:
        theta, copier = weights.flat, copier_for(weights.flat.device)
        self.totals = Totals()
        self.tokens_this_round = 0
        self.layout = layout
        """Names, shapes and codec of the parameters; partners must have the same layout."""
        self.weights = weights
        self.outer = OuterState(outer, theta, copier, layout, momentum)
        self._parts = layout.fragments(outer.fragments)
        self.contribution_bytes = max(map(self.outer.contributor.num_bytes, self._parts))
        """Of the largest contribution in this run, and of every one if there are no fragments."""
        received = theta.new_empty(max(part.stop - part.start for part in self._parts))
        self.partner = PartnerContribution(rule_of(screening), self.outer.contributor, received, copier, exam or Exam())
        self.ended: EndedRound | None = None
        """The round that awaits its outer step."""
        self.side_thread = SideThread()
        is_copied = copier.is_aside or weights.is_copy  # inner steps do not change a copy
        self.aside = Aside.ALL if weights.takes_corrections else Aside.ENCODING if is_copied else Aside.NOTHING
        self._measure = measure
        self._ramps: list[float] = []
        # Fragments of an earlier round than the run's, of which no mean with a member was as good as the member's.
        self._behind: set[int] = set()
        self._num_partners = partners
        self._norm = 0.0  # how far the inner steps of a round have moved this replica, and which round's
        self._norm_of: Contribution | None = None

    @property
    def awaits_outer_step(self) -> bool:
        """Return whether a contribution awaits its outer step. Until then, inner steps count for the next round."""
        return self.ended is not None

    @property
    def tokens_contributed(self) -> int:
        """Return the number of tokens behind the contribution that awaits its outer step, or behind the next one."""
        return self.tokens_this_round if self.ended is None else self.ended.tokens

    @property
    def is_behind(self) -> bool:
        """Return whether that contribution is of a newcomer, whose weights were of an earlier round than the run's."""
        return bool(self._behind) and (self.ended is None or self.ended.fragment in self._behind)

    @property
    def tokens_claimed(self) -> int:
        """Return the number of tokens by which that contribution is weighted: fewer in a newcomer's first rounds.

        Steps at a share of the learning rate count for that share.
        """
        if self.is_behind:
            return 0
        return round(self.tokens_contributed * (self._mean_ramp() if self.ended is None else self.ended.ramp))

    def claim(self, *, takes_steps: bool) -> int:
        """Return what to claim for that contribution: `tokens_claimed`, or 0 or 1 in a round without inner steps.

        There only 0, which a newcomer claims, makes a difference: nobody can show how many tokens it has trained on.
        """
        return self.tokens_claimed if takes_steps else int(not self.is_behind)

    def fast_weights(self) -> Tensor:
        """A copy of the fast weights, (n,) fp32."""
        self.weights.read()
        return self.weights.flat.clone()

    def count_step(self, num_tokens: int, ramp: float = 1.0) -> None:
        """Count an inner step, and the share of the schedule's learning rate that it was taken at, above 0 to 1."""
        self._ramps.append(ramp)
        self.totals.steps += 1
        self.totals.tokens += num_tokens
        self.tokens_this_round += num_tokens

    def _mean_ramp(self) -> float:
        """Return the mean share over the inner steps since the last contribution; 1 if there are none."""
        return statistics.fmean(self._ramps) if self._ramps else 1.0

    def catch_up(self, round_index: int) -> None:
        """Note that the run is in a later round than the weights that were just loaded."""
        num_fragments = self.outer.settings.fragments
        if round_index - self.totals.round >= MIN_MISSED * num_fragments * self._num_partners:
            self._behind = set(range(num_fragments))

    def restart(self) -> None:
        """Continue from weights, vectors and totals that were just loaded."""
        self.tokens_this_round = 0
        self._ramps.clear()
        self._forget()
        self.weights.write()

    # The contribution

    def contribute(
        self, out: Buffer, fragment: int = 0, progress: Callable[[int], None] = lambda num_bytes: None
    ) -> tuple[int, bytes]:
        """Call `contribution` and `encode`; return (bytes written, their BLAKE3)."""
        return self.contribution(fragment), self.encode(out, progress)

    @torch.no_grad()
    def contribution(self, fragment: int = 0) -> int:
        """Freeze this round's contribution for one fragment; return its size in bytes. Call `encode` next."""
        self.weights.read()
        frozen = self.outer.contributor.freeze(self._parts[fragment])
        self.ended = EndedRound(
            frozen,
            fragment,
            self.totals.steps,
            self.tokens_this_round,
            has_steps=bool(self._ramps),
            ramp=self._mean_ramp(),
        )
        self._ramps.clear()
        self.partner.expect(None)
        return self.outer.contributor.num_bytes(frozen.part)

    @torch.no_grad()
    def encode(self, out: Buffer, progress: Callable[[int], None] = lambda num_bytes: None) -> bytes:
        """Write the contribution to ``out``; returns its BLAKE3.

        ``progress`` is called every few megabytes with the number of leading bytes of ``out`` that are final. Call this
        before the next inner step, or in the side thread; then only inner steps and saves may come at the same time.
        Raises `DivergedError` if the weights are no longer finite.
        """
        assert self.ended is not None
        frozen = self.ended.contribution
        try:
            digest = self.outer.contributor.encode(frozen, out, progress)
        except CodecError as error:
            self._forget()
            raise DivergedError(f"this replica's weights diverged in round {self.totals.round}: {error}") from error
        self.partner.expect(frozen)
        return digest

    def _forget(self) -> None:
        self.ended = None
        self.partner.expect(None)

    # The partner's

    def take_in(self, data: Buffer, available: int) -> None:
        """Decode the complete slices in the first ``available`` bytes of a partner's contribution, while it arrives.

        ``data`` is the memory that it arrives in. It may be called again with more bytes; with fewer bytes, or with
        other memory, decoding restarts. It does nothing unless a contribution of this replica awaits a partner's. It
        reports no errors: `screen` and `apply` do.
        """
        self.partner.take_in(data, available)

    @torch.no_grad()
    def screen(self, partner: Buffer, encounter: Encounter = UNKNOWN, seconds: float = math.inf) -> Verdict:
        """Return the verdict on a partner's contribution, before the outer step; see `Exam.begin`."""
        self.partner.exam.begin(encounter.chance, seconds)
        return self._judge(partial(self.partner.judge, partner, encounter, self._partner_of))

    def _judge(self, judge: Callable[[], Verdict]) -> Verdict:
        """Return the judgement; with fragments between two inner steps.

        All of its losses must be of the same weights, and the other fragments' change with each inner step.
        """
        return self.side_thread.call(judge) if self.outer.settings.fragments > 1 else judge()

    def _partner_of(self, encounter: Encounter, contribution: Tensor) -> Partner:
        """Return what a screening rule may know of the partner, whose contribution (n,) this is."""
        ended = self.ended
        assert ended is not None
        histories, made = self.partner.histories, ended.contribution
        slow, is_distorted = self.outer.slow[made.part], self.outer.distorts(made)
        return Partner(
            encounter,
            made.sent,
            contribution,
            histories.of(encounter.peer),
            histories.of(b""),
            ended.fragment,
            movement=lambda: self._movement(ended),
            partner_movement=lambda: self.outer.distance_to_slow(replace(made, sent=contribution)),
            shares_text=self.partner.exam.shares_text,
            has_loss=lambda: self._measure is not None and self.partner.exam.has_text,
            evaluate=lambda share: self._loss_at(partial(self.outer.towards, share, made, contribution)),
            loss_before=lambda: self._loss_at(lambda out: out.copy_(slow)) if ended.has_steps else None,
            loss_as_sent=lambda: self._loss_at(lambda out: out.copy_(made.sent)) if is_distorted else None,
        )

    def _movement(self, ended: EndedRound) -> float:
        """See `Partner.movement`; computed once for each contribution."""
        if ended.has_steps and self._norm_of is not ended.contribution:
            self._norm = self.outer.distance_to_slow(ended.contribution) / ended.ramp
            self._norm_of = ended.contribution
        return self._norm

    def _loss_at(self, fill: Callable[[Tensor], object]) -> float | None:
        """Return the loss with the weights (n,) that ``fill`` writes in place of the contributed ones, if known."""
        measure, ended = self._measure, self.ended
        if measure is None:
            return None
        assert ended is not None
        made = ended.contribution
        tried = self.side_thread.call(partial(self.weights.room, len(made.theta)))
        fill(tried)

        @torch.no_grad()
        def loss() -> float | None:
            with self.weights.replaced(made.part, tried):
                return self.partner.exam.loss(measure)

        return self.side_thread.call(loss)

    def _loss(self) -> float | None:
        """Return the loss of the weights as they are, if known."""
        return None if self._measure is None else self.partner.exam.loss(self._measure)

    def _loss_ahead(self, momentum: Momentum) -> float | None:
        """Return the loss that the momentum leads to, if known."""
        self.weights.read()
        tried = self.weights.room(len(self.weights.flat))
        tried.copy_(self.weights.flat)
        momentum.look_ahead(tried)
        with self.weights.replaced(slice(0, len(tried)), tried):
            return self._loss()

    # The outer step

    @torch.no_grad()
    def apply(self, partner: Buffer | None, encounter: Encounter = UNKNOWN, *, own_first: bool = True) -> int:
        """End the round: take the outer step with the partner's contribution (None: alone), and begin the next round.

        It makes the contribution if there is none. ``own_first`` is True for one of the partners and False for the
        other (for example by comparing keys), so that both add in the same order. Returns how late the step is: the
        inner steps taken since `contribution`. A refused contribution counts for nothing, and one that `screen` has
        just accepted is not examined again. Raises `DivergedError` if this replica's weights are unfit; the state is
        then unchanged.
        """
        if self.ended is None:
            self.contribute(bytearray(self.contribution_bytes))
        ended = self.ended
        assert ended is not None
        made, is_late = ended.contribution, self.totals.steps > ended.steps
        corrects = self.aside is Aside.ALL
        if is_late and not corrects:
            self.weights.read()
        known = self.partner.histories.of(b"")["movement"][-WINDOW:]  # of rounds that ended with an exchange
        movement = statistics.median(known) if len(known) >= MIN_KNOWN else self._movement(ended)
        if movement:
            self.outer.limit_momentum(made.part, movement)
        is_behind = encounter.partner_tokens == 0  # the partner is another newcomer, or there is none
        pair: tuple[Tensor, ...] = ()
        shares: tuple[float, ...] = ()
        if partner is not None:
            self.partner.exam.begin(encounter.chance, math.inf)
            verdict = self._judge(partial(self.partner.verdict, partner, encounter, self._partner_of))
            if isinstance(verdict, Refuse):  # both partners have committed: it was not judged in time
                is_behind = True
            else:
                is_behind = is_behind or verdict.is_behind
                pair, shares = (made.sent, self.partner.values()), verdict.shares
                if not own_first:
                    pair, shares = pair[::-1], shares[::-1]
        if is_late and corrects:
            self.weights.flat[made.part].zero_()  # the step makes it the correction of the trained weights
        self.outer.step(made, pair, shares, is_late=is_late)
        share = sum(shares) - shares[0 if own_first else 1] if shares else 0.0
        return self.side_thread.call(partial(self._begin_round, ended, share, is_late=is_late, is_behind=is_behind))

    @torch.no_grad()
    def _begin_round(self, ended: EndedRound, share: float, *, is_late: bool, is_behind: bool) -> int:
        """Begin the next round with the outer step that was just taken; returns how late it is.

        ``share``: the partner's. ``is_late``: whether it was computed as a late one. Inner steps may have been taken
        during it.
        """
        part, late = ended.contribution.part, self.totals.steps - ended.steps
        if self.aside is not Aside.ALL or not late:
            self.weights.write()
        else:
            if not is_late:
                self.weights.flat[part] -= ended.contribution.theta
            self.weights.add(part)
        momentum = self.outer.contributor.momentum
        if share and momentum is not None:
            losses = self._loss, partial(self._loss_ahead, momentum)
            momentum.average(part, ended.contribution.momentum, share, late, losses)
        if not is_behind:
            self._behind.discard(ended.fragment)
        self.totals.round += 1
        self.tokens_this_round -= ended.tokens
        self._forget()
        return late

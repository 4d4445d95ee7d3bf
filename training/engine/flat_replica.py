"""A replica as flat vectors: fast and slow weights, the outer rule's vectors, and the partner of a round.

A round is any number of inner steps on the fast weights, `contribution` for the partner, and `apply` with the
partner's contribution, or with None to take it alone. If inner steps are taken between the last two, while the
exchange goes on, their progress is kept: the fast weights get the outer step's correction as a difference
(Streaming DiLoCo, arXiv 2501.18512); without such steps the fast weights become the slow weights exactly.

With fragments (the same paper) a round exchanges one part of the parameters, and its outer step moves that part only.
The other parts continue their inner steps until their turn, each with another partner. A part that is F times smaller
can be exchanged F times as often over the same link.

Subclasses take the inner steps: `farandole.training.engine.replica` has its own optimizer,
`farandole.training.cluster.external` follows a user's loop. Where inner steps move other weights than the flat vector
(on a GPU, or of another dtype), the flat vector is a copy (`farandole.training.outer.fast_weights`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from farandole.protocol.run.outer_rules import OuterConfig
from farandole.protocol.run.screening_rules import ScreeningConfig
from farandole.protocol.run.vectors import FAST, OPTIMIZER_VECTORS, SLOW, required_vectors

from ..base.device import Device
from ..base.errors import CodecError, DivergedError, ScreeningError
from ..base.parameters import Layout
from ..outer.codec import Buffer
from ..outer.copying import copier_for
from ..outer.drift import RateSums
from ..outer.fast_weights import FastWeights, TrainedWeights
from ..outer.outer_state import OuterState, Tried
from ..outer.partner import Answers, PartnerContribution
from ..outer.round_end import EndedRound, Movements
from ..screening.history import Histories
from ..screening.rule import UNKNOWN, Encounter, Refuse, Verdict, rule_of
from .blocks import Content
from .checkpoint import load_checkpoint, load_start
from .engine import Engine, no_progress
from .snapshot import Snapshot, SnapshotMemory

# Number of recent rounds whose median movement is the usual one, and the minimum number of them.
WINDOW: Final = 16
MIN_KNOWN: Final = 4
# Rounds with inner steps of each fragment that weights must be behind the run to claim no tokens. Others may be a round
# ahead in any case, and the claim of a newcomer's first round allows for what one round lacks.
MIN_MISSED: Final = 2


class FlatReplica(Engine):
    """An engine over flat vectors, (n,) fp32: ``theta`` are the fast weights, in the order of ``layout``.

    The slow weights begin as a copy of theta. All vectors are on theta's device; inner steps are taken on ``device``.
    ``trained``: the weights that inner steps move; None means theta.
    ``partners``: rounds with one partner each of which only the first has inner steps. In the others, screening rules
    ask for the steps before them.
    """

    def __init__(
        self,
        theta: Tensor,
        layout: Layout,
        outer: OuterConfig,
        screening: ScreeningConfig,
        *,
        run_id: bytes,
        device: Device,
        trained: TrainedWeights | None = None,
        partners: int = 1,
    ) -> None:
        self.device = device
        self.round = 0
        self.steps = 0
        self.tokens = 0
        self.tokens_this_round = 0
        self.slices = None
        self.run_id = run_id
        self.layout = layout
        self.theta = theta
        """Fast weights, (n,) fp32; where inner steps move other weights, what `FastWeights` says."""
        self._fast = FastWeights(theta, trained)
        self._outer = OuterState(outer, theta, copier_for(theta.device))
        received = theta.new_empty(layout.largest_fragment(outer.fragments))
        self._partner = PartnerContribution(
            rule_of(screening), self._outer.contributor.form, received, self._outer.copier
        )
        self._rates = RateSums(outer.fragments)
        self._round_end: EndedRound | None = None
        self._contributed_at = 0  # inner steps taken until the last contribution
        # Fragments of an earlier round than the run's, of which no mean with a member was as good as the member's.
        self._behind: set[int] = set()
        self._partners = partners
        self._movements = Movements(self._outer, torch.zeros_like(theta) if partners > 1 else None)
        self._snapshots: dict[str, SnapshotMemory] = {}

    @property
    def encodes_aside(self) -> bool:
        """Implement `Engine.encodes_aside`: inner steps do not change a copy."""
        return self._outer.copier.is_aside or self._fast.is_copy

    @property
    def averages_aside(self) -> bool:
        """Implement `Engine.averages_aside`."""
        return self._fast.takes_corrections

    @property
    def contribution_bytes(self) -> int:
        """Implement `Engine.contribution_bytes`."""
        return self._outer.contributor.largest_bytes

    @property
    def awaits_outer_step(self) -> bool:
        """Implement `Engine.awaits_outer_step`."""
        return self._round_end is not None

    @property
    def tokens_contributed(self) -> int:
        """Implement `Engine.tokens_contributed`."""
        return self.tokens_this_round if self._round_end is None else self._round_end.tokens

    @property
    def is_behind(self) -> bool:
        """Implement `Engine.is_behind`, by fragment."""
        return bool(self._behind) and (self._round_end is None or self._round_end.fragment in self._behind)

    @property
    def tokens_claimed(self) -> int:
        """Implement `Engine.tokens_claimed`: steps at a share of the learning rate count for that share."""
        ended = self._round_end
        if self.is_behind:
            return 0
        return round(self.tokens_contributed * (self._mean_ramp() if ended is None else ended.ramp))

    def fast_weights(self) -> Tensor:
        """A copy of the fast weights, (n,) fp32."""
        self._fast.read()
        return self.theta.clone()

    def slow_weights(self) -> Tensor:
        """A copy of phi, (n,) fp32."""
        return self._outer.slow.clone()

    def _publish(self, corrected: slice | None = None) -> None:
        """Give inner steps what an outer step or a checkpoint has changed.

        ``corrected``: a part of theta that has a difference to be added to the weights, whose copy theta is not; None:
        theta has the new weights.
        """
        if corrected is None:
            self._fast.write()
        else:
            self._fast.add(corrected)

    def count_step(self, num_tokens: int, rate: float = 0.0) -> None:
        """Count an inner step and its learning rate."""
        self._rates.add(rate)
        self.steps += 1
        self.tokens += num_tokens
        self.tokens_this_round += num_tokens

    def contribute(
        self, out: Buffer, fragment: int = 0, progress: Callable[[int], None] = no_progress
    ) -> tuple[int, bytes]:
        """Call `contribution` and `encode`; return (bytes written, their BLAKE3)."""
        return self.contribution(fragment), self.encode(out, progress)

    @torch.no_grad()
    def contribution(self, fragment: int = 0) -> int:
        """Implement `Engine.contribution`."""
        self._fast.read()
        frozen = self._outer.contributor.freeze(self.layout.fragment(fragment, self._outer.settings.fragments))
        rates = self._rates.since(fragment)
        total = self._rates.total
        has_steps, ramp = self.steps > self._contributed_at, self._mean_ramp()
        self._contributed_at = self.steps
        self._round_end = EndedRound(
            frozen, fragment, self.steps, self.tokens_this_round, rates, total, has_steps, ramp
        )
        self._partner.expect(None)
        return self._outer.contributor.form.size(len(frozen.theta))

    @torch.no_grad()
    def encode(self, out: Buffer, progress: Callable[[int], None] = no_progress) -> bytes:
        """Implement `Engine.encode`."""
        assert self._round_end is not None
        frozen = self._round_end.contribution
        try:
            digest = self._outer.contributor.encode(frozen, out, progress)
        except CodecError as error:
            self._forget_round_end()
            raise DivergedError(f"this replica's weights diverged in round {self.round}: {error}") from error
        self._partner.expect(frozen)
        return digest

    def pin(self, memory: Buffer) -> None:
        """Implement `Engine.pin`."""
        self._outer.copier.pin(memory)

    def take_in(self, data: Buffer, available: int) -> None:
        """Implement `Engine.take_in`."""
        self._partner.take_in(data, available)

    @torch.no_grad()
    def screen(self, partner: Buffer, encounter: Encounter = UNKNOWN) -> Verdict:
        """Implement `Engine.screen`."""
        return self._judge(partial(self._partner.judge, partner, encounter, self._answers()))

    def _judge(self, judge: Callable[[], Verdict]) -> Verdict:
        """Return the judgement; with fragments between two inner steps.

        All of its losses must be of the same weights, and the other fragments' change with each inner step.
        """
        return self.between_steps.call(judge) if self._outer.settings.fragments > 1 else judge()

    @property
    def histories(self) -> Histories:
        """Implement `Engine.histories`."""
        return self._partner.histories

    @histories.setter
    def histories(self, histories: Histories) -> None:
        self._partner.histories = histories

    def _answers(self) -> Answers:
        """Return what a screening rule may ask about this round."""
        fragment = 0 if self._round_end is None else self._round_end.fragment
        return Answers(
            fragment, self._movement, self._alignment, self._loss_towards, self._loss_before, self._loss_as_sent
        )

    def _movement(self) -> float:
        """See `Partner.movement`."""
        assert self._round_end is not None
        return self._movements.norm(self._round_end)

    def _alignment(self, contribution: Tensor) -> float:
        """See `Partner.alignment`, with a contribution (n,)."""
        assert self._round_end is not None
        return self._movements.alignment(self._round_end, contribution)

    def _usual_movement(self) -> float:
        """Return the median movement of the last `WINDOW` rounds that ended with an exchange.

        With fewer than `MIN_KNOWN` such rounds, return this round's movement.
        """
        known = self.histories.of(b"")["movement"][-WINDOW:]
        return statistics.median(known) if len(known) >= MIN_KNOWN else self._movement()

    def _loss_towards(self, share: float, partner: Tensor) -> float | None:
        """See `Partner.evaluate`: the loss of the contributed fast weights, moved towards the partner's."""
        return self._loss_at(Tried.TOWARDS, share, partner)

    def _loss_before(self) -> float | None:
        """See `Partner.loss_before`."""
        if self._round_end is not None and not self._round_end.has_steps:
            return None
        return self._loss_at(Tried.BEFORE)

    def _loss_as_sent(self) -> float | None:
        """See `Partner.loss_as_sent`."""
        if self._round_end is None or not self._outer.distorts(self._round_end.contribution):
            return None
        return self._loss_at(Tried.AS_SENT)

    def _loss_at(self, trial: Tried, share: float = 0.0, partner: Tensor | None = None) -> float | None:
        """Return the held-out loss with other weights in place of the contributed fast weights; None if unknown.

        ``share``, ``partner``: see `OuterState.fill`.
        """
        if self.is_driven:  # it computes no loss by itself
            return None
        assert self._round_end is not None
        made, evaluation, call = self._round_end.contribution, self._partner.evaluation, self.between_steps.call
        num_batches = evaluation.chosen
        if num_batches is None:
            num_batches = call(partial(self._prepare_losses, len(made.theta)))
        if not num_batches:
            return None
        tried = self._fast.room(len(made.theta))
        self._outer.fill(trial, share, made, made.sent if partner is None else partner, tried)
        return call(partial(self._loss_with, tried, made.part, num_batches))

    def _prepare_losses(self, num_elements: int) -> int:
        """Return how many batches this contribution's losses are taken on, and get the memory for them."""
        num_batches = self._partner.evaluation.num_batches(self.evaluate)
        if num_batches:
            self._fast.room(num_elements)
        return num_batches

    @torch.no_grad()
    def _loss_with(self, weights: Tensor, part: slice, num_batches: int) -> float | None:
        """Return the held-out loss with ``weights`` (n,) in place of a part of the fast weights."""
        with self._fast.replaced(part, weights):
            return self._partner.evaluation.timed(self._loss_now, num_batches)

    def _loss_now(self, num_batches: int) -> float | None:
        """Return the held-out loss of the fast weights; None if it cannot be computed now."""
        return self.evaluate(num_batches)

    @torch.no_grad()
    def apply(self, partner: Buffer | None, encounter: Encounter = UNKNOWN, *, own_first: bool = True) -> int:
        """Implement `Engine.apply`; make the contribution if there is none."""
        if self._round_end is None:
            self.contribute(bytearray(self.contribution_bytes))
        ended = self._round_end
        assert ended is not None
        made, is_late = ended.contribution, self.steps > ended.steps
        if is_late and not self.averages_aside:
            self._fast.read()
        self._movements.keep(ended)
        if movement := self._usual_movement():
            self._outer.limit_momentum(made.part, movement)
        is_behind = encounter.partner_tokens == 0  # the partner is another newcomer, or there is none
        pair: tuple[Tensor, ...] = ()
        shares: tuple[float, ...] = ()
        if partner is not None:
            verdict = self._judge(partial(self._partner.verdict, partner, encounter, self._answers()))
            if isinstance(verdict, Refuse):
                raise ScreeningError(verdict.reason)
            is_behind = is_behind or verdict.is_behind
            pair, shares = (made.sent, self._partner.values()), verdict.shares
            if not own_first:
                pair, shares = pair[::-1], shares[::-1]
        if is_late and self.averages_aside:
            self.theta[made.part].zero_()  # the step makes it the correction of the trained weights
        self._outer.step(made, pair, shares, is_late=is_late, rates=ended.rates)
        if movement and ended.rates:
            self._outer.limit_drift(made.part, movement, ended.rates)
        return self.between_steps.call(partial(self._begin_round, ended, is_late=is_late, is_behind=is_behind))

    @torch.no_grad()
    def _begin_round(self, ended: EndedRound, *, is_late: bool, is_behind: bool) -> int:
        """Begin the next round with the outer step that was just taken; returns how late it is.

        ``is_late``: whether it was computed as a late one. Inner steps may have been taken during it.
        """
        part, late = ended.contribution.part, self.steps - ended.steps
        if not self.averages_aside or not late:
            self._publish()
        else:
            if not is_late:
                self.theta[part] -= ended.contribution.theta
            self._publish(part)
        self._rates.settle(ended.fragment, ended.rates_total)
        if not is_behind:
            self._behind.discard(ended.fragment)
        self.round += 1
        self.tokens_this_round -= ended.tokens
        self._forget_round_end()
        return late

    def _forget_round_end(self) -> None:
        self._round_end = None
        self._partner.expect(None)

    def is_in(self, saved_round: int, saved_steps: int) -> bool:
        """Implement `Engine.is_in`.

        A checkpoint contains no unfinished inner steps of a round. With fragments, it contains the fast weights of the
        fragments that await their turn.
        """
        return saved_round == self.round and (self._outer.settings.fragments == 1 or saved_steps == self.counters.steps)

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """Implement `Engine.snapshot`."""
        return self._snapshot_as("newest")

    @torch.no_grad()
    def start(self) -> Snapshot:
        """Return a snapshot of the start of a round, in separate memory; valid until the next call of `start`."""
        return self._snapshot_as("start")

    @torch.no_grad()
    def save(self, path: Path) -> Content:
        """See `Engine.save`."""
        self._read_what_is_saved()
        return super().save(path)

    def _read_what_is_saved(self) -> None:
        """Update theta where checkpoints have it, unless a contribution that is still being encoded might change."""
        if self._outer.settings.fragments > 1 and self._round_end is None:
            self._fast.read()

    def _snapshot_as(self, kind: str) -> Snapshot:
        """Return a snapshot in the memory for its kind, which is kept."""
        if kind not in self._snapshots:
            self._snapshots[kind] = SnapshotMemory(self.vectors(), copier_for(self.device.torch_device))
        self._read_what_is_saved()
        copies, copied = self._snapshots[kind].fill(self.vectors())
        return Snapshot(self.counters, self._tensors(copies), self.layout, self.run_id, copied)

    @torch.no_grad()
    def load(self, path: Path, hashes: bytes = b"") -> Content:
        """Load a checkpoint of this node or of a peer: weights, the outer rule's vectors, AdamW, counters.

        A peer's checkpoint may contain only the slow weights and the outer rule's vectors; AdamW's means are then zero.
        A replica that has no AdamW of its own ignores the means. See `Engine.load`.
        """
        vectors = self.vectors().keys()
        counters, content = load_checkpoint(
            path,
            self.state(),
            self.layout,
            self.run_id,
            vectors - set(required_vectors(self._outer.settings)),
            hashes,
            ignored=set(OPTIMIZER_VECTORS) - vectors,
        )
        if self._outer.settings.fragments == 1 or not bool(self.theta.any()):  # vectors missing from the file are zeros
            self.theta.copy_(self._outer.slow)
        self.round, self.steps, self.tokens = counters.round, counters.steps, counters.tokens
        self.tokens_this_round, self._contributed_at = 0, counters.steps
        self._forget_round_end()
        self._outer.contributor.restart()
        self._rates.restart()
        self._publish()
        self._restart(counters.begun_at)
        return content

    @torch.no_grad()
    def start_from(self, path: Path, steps: int, tokens: int) -> None:
        """Begin with another run's weights and momentum; see `Engine.start_from`."""
        inner = self._inner_vectors()
        vectors = self._outer.state() | inner
        load_start(path, self._tensors(vectors), optional=vectors.keys() - {SLOW}, partial=inner.keys())
        self.theta.copy_(self._outer.slow)
        self.round, self.steps, self.tokens, self.tokens_this_round = 0, steps, tokens, 0
        self._contributed_at = steps
        self._outer.contributor.restart(forgets=True)
        self._rates.restart()
        self._publish()
        self._restart(0)

    def catch_up(self, round_index: int, first_step: int = 0) -> None:
        """Implement `Engine.catch_up`."""
        num_fragments = self._outer.settings.fragments
        if round_index - self.round >= MIN_MISSED * num_fragments * self._partners:
            self._behind = set(range(num_fragments))

    def _mean_ramp(self) -> float:
        """Return the mean of `_ramp` over the inner steps since the last contribution; 1 if there are none."""
        steps = range(self._contributed_at, self.steps)
        return statistics.fmean(map(self._ramp, steps)) if steps else 1.0

    def _ramp(self, step: int) -> float:
        """Return the share of the schedule's learning rate, above 0 to 1, that an inner step was taken at."""
        return 1.0

    def _restart(self, begun_at: int) -> None:
        """Prepare inner steps to continue from the fast weights and counters that were just loaded.

        ``begun_at`` is the inner step at which the loaded means began, if there are any.
        """

    def _inner_vectors(self) -> dict[str, Tensor]:
        """Return the inner optimizer's vectors for a checkpoint: flat vectors, by name."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Implement `Engine.state` with views of `vectors`."""
        return self._tensors(self.vectors())

    def _tensors(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return views of the vectors' parameters, by ``VECTOR/PARAMETER``."""
        return self.layout.tensors(vectors)

    def vectors(self) -> dict[str, Tensor]:
        """Return everything in a checkpoint except the counters: flat vectors by name, most of them (n,)."""
        vectors = self._outer.state() | self._inner_vectors()
        if self._outer.settings.fragments > 1:
            vectors[FAST] = self.theta
        return vectors | self._outer.saved()

"""A replica as flat vectors: fast and slow weights, the outer rule's vectors, and the partner of a round.

A round is any number of inner steps on the fast weights, `contribution` for the partner, and `apply` with the
partner's contribution, or with None to take it alone. If inner steps are taken between the last two, while the
exchange goes on, their progress is kept: the fast weights get the outer step's correction as a difference
(Streaming DiLoCo, arXiv 2501.18512); without such steps the fast weights become the slow weights exactly.

With fragments (the same paper) a round exchanges a part of the parameters, and its outer step moves that part alone:
the others' inner steps go on until their turn, each with another partner. A part that is F times as small can be
exchanged F times as often over the same link.

What takes the inner steps is a subclass's: `farandole.training.replica` has an optimizer of its own,
`farandole.training.external` follows a user's loop.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from farandole.protocol.outer_rules import OuterConfig
from farandole.protocol.screening_rules import ScreeningConfig
from farandole.protocol.vectors import FAST, SLOW, required_vectors

from .blocks import Content
from .checkpoint import load_checkpoint, load_start
from .codec import Buffer
from .contribution import Contribution
from .copying import copier_for
from .device import Device
from .engine import Engine, no_progress
from .errors import CodecError, DivergedError, ScreeningError
from .outer_state import OuterState
from .parameters import Layout
from .partner import Answers, PartnerContribution
from .screening.history import Histories
from .screening.rule import UNKNOWN, Encounter, Refuse, Verdict, rule_of
from .snapshot import Snapshot, SnapshotMemory

# Rounds whose movements say what is usual, and from how many on.
WINDOW: Final = 16
MIN_KNOWN: Final = 4


@dataclass(slots=True)
class _RoundEnd:
    """This replica at the end of a round's inner steps."""

    contribution: Contribution
    fragment: int
    steps: int
    """Inner steps that the replica had taken."""
    tokens: int
    """Tokens of the round."""
    movement: float | None = None
    """As `Partner.movement`, once it was asked for."""


class FlatReplica(Engine):
    """An engine over flat vectors, (n,) fp32: ``theta`` are the fast weights, in the order of ``layout``.

    The slow weights begin as a copy of them.
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
        """Fast weights, (n,) fp32."""
        self._copier = copier_for(device.torch_device)
        self.encodes_aside = self._copier.is_aside  # on CUDA
        self._outer = OuterState(outer, theta, self._copier)
        self.contribution_bytes = self._outer.contributor.largest_bytes
        received = theta.new_empty(layout.largest_fragment(outer.fragments))
        self._partner = PartnerContribution(self._outer.contributor.form, received, self._copier, rule_of(screening))
        self._round_end: _RoundEnd | None = None
        self._snapshots: SnapshotMemory | None = None
        self._starts: SnapshotMemory | None = None

    @property
    def awaits_outer_step(self) -> bool:
        """As `Engine.awaits_outer_step`."""
        return self._round_end is not None

    @property
    def tokens_contributed(self) -> int:
        """As `Engine.tokens_contributed`."""
        return self.tokens_this_round if self._round_end is None else self._round_end.tokens

    def fast_weights(self) -> Tensor:
        """A copy of theta, (n,) fp32."""
        return self.theta.clone()

    def slow_weights(self) -> Tensor:
        """A copy of phi, (n,) fp32."""
        return self._outer.slow.clone()

    def count_step(self, num_tokens: int) -> None:
        """Count an inner step."""
        self.steps += 1
        self.tokens += num_tokens
        self.tokens_this_round += num_tokens

    def contribute(
        self, out: Buffer, fragment: int = 0, progress: Callable[[int], None] = no_progress
    ) -> tuple[int, bytes]:
        """Both `contribution` and `encode`: (bytes written, their BLAKE3)."""
        return self.contribution(fragment), self.encode(out, progress)

    @torch.no_grad()
    def contribution(self, fragment: int = 0) -> int:
        """As `Engine.contribution`."""
        frozen = self._outer.contributor.freeze(self.layout.fragment(fragment, self._outer.settings.fragments))
        self._round_end = _RoundEnd(frozen, fragment, self.steps, self.tokens_this_round)
        self._partner.expect(None)
        return self._outer.contributor.form.size(len(frozen.theta))

    @torch.no_grad()
    def encode(self, out: Buffer, progress: Callable[[int], None] = no_progress) -> bytes:
        """As `Engine.encode`."""
        assert self._round_end is not None
        frozen = self._round_end.contribution
        try:
            digest = self._outer.contributor.encode(frozen, out, progress)
        except CodecError as error:
            self._forget_round_end()
            raise DivergedError(f"this replica's weights diverged in round {self.round}: {error}") from error
        self._partner.expect(frozen.sent)
        return digest

    def pin(self, memory: Buffer) -> None:
        """As `Engine.pin`."""
        self._copier.pin(memory)

    def take_in(self, data: Buffer, available: int) -> None:
        """As `Engine.take_in`."""
        self._partner.take_in(data, available)

    @torch.no_grad()
    def screen(self, partner: Buffer, encounter: Encounter = UNKNOWN) -> Verdict:
        """As `Engine.screen`."""
        return self._partner.judge(partner, encounter, self._answers())

    @property
    def histories(self) -> Histories:
        """As `Engine.histories`."""
        return self._partner.histories

    @histories.setter
    def histories(self, histories: Histories) -> None:
        self._partner.histories = histories

    def _answers(self) -> Answers:
        """What a screening rule may ask of this round."""
        fragment = 0 if self._round_end is None else self._round_end.fragment
        return Answers(fragment, self._movement, self._loss_towards, self._loss_before, self._loss_as_sent)

    def _movement(self) -> float:
        """As `Partner.movement`; computed once for each contribution."""
        ended = self._round_end
        assert ended is not None
        if ended.movement is None:
            ended.movement = self._outer.distance_to_slow(ended.contribution)
        return ended.movement

    def _usual_movement(self) -> float:
        """The median of the last rounds that ended with an exchange; of fewer than four, that of this round."""
        known = self.histories.of(b"")["movement"][-WINDOW:]
        return statistics.median(known) if len(known) >= MIN_KNOWN else self._movement()

    def _loss_towards(self, share: float, own: Tensor, partner: Tensor) -> float | None:
        """As `Partner.evaluate`: of the fast weights as they were contributed, moved towards the partner's."""
        return self._loss_at(lambda made: torch.add(made.theta, partner - own, alpha=share))

    def _loss_before(self) -> float | None:
        """As `Partner.loss_before`."""
        return self._loss_at(lambda made: self._outer.slow[made.part])

    def _loss_as_sent(self) -> float | None:
        """As `Partner.loss_as_sent`."""
        return self._loss_at(self._outer.weights_as_sent)

    def _loss_at(self, weights_of: Callable[[Contribution], Tensor | None]) -> float | None:
        """The held-out loss with these in the place of the contributed fast weights (n,); None where none is known."""
        if self.is_driven:  # it computes no loss by itself
            return None
        assert self._round_end is not None
        made = self._round_end.contribution
        num_batches = self._partner.num_evaluated(self.evaluate)
        if not num_batches or (weights := weights_of(made)) is None:
            return None
        return self._loss_with(made.part, weights, num_batches)

    def _loss_with(self, part: slice, weights: Tensor, num_batches: int) -> float | None:
        """The held-out loss while a part of the fast weights is replaced."""
        theta = self.theta[part]
        before = theta.clone()
        theta.copy_(weights)
        try:
            return self.evaluate(num_batches)
        finally:
            theta.copy_(before)

    @torch.no_grad()
    def apply(self, partner: Buffer | None, encounter: Encounter = UNKNOWN, *, own_first: bool = True) -> int:
        """As `Engine.apply`; makes the contribution where there is none."""
        if self._round_end is None:
            self.contribute(bytearray(self.contribution_bytes))
        ended = self._round_end
        assert ended is not None
        made, late = ended.contribution, self.steps - ended.steps
        if movement := self._usual_movement():
            self._outer.limit_momentum(made.part, movement)
        if partner is None:
            self._outer.step(made, (), (), is_late=late > 0)
        else:
            verdict = self._partner.verdict(partner, encounter, self._answers())
            if isinstance(verdict, Refuse):
                raise ScreeningError(verdict.reason)
            pair, shares = (made.sent, self._partner.values()), verdict.shares
            if not own_first:
                pair, shares = pair[::-1], shares[::-1]
            self._outer.step(made, pair, shares, is_late=late > 0)
        self.round += 1
        self.tokens_this_round -= ended.tokens
        self._forget_round_end()
        return late

    def _forget_round_end(self) -> None:
        self._round_end = None
        self._partner.expect(None)

    def is_in(self, saved_round: int, saved_steps: int) -> bool:
        """Whether a checkpoint of then gives all that one of now would.

        It has nothing of a round's unfinished inner steps; but with fragments, most of them await their turn in it.
        """
        return saved_round == self.round and (self._outer.settings.fragments == 1 or saved_steps == self.steps)

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """As `Engine.snapshot`."""
        if self._snapshots is None:
            self._snapshots = SnapshotMemory(self.vectors(), self._copier)
        return self._snapshot_in(self._snapshots)

    @torch.no_grad()
    def start(self) -> Snapshot:
        """As `snapshot`, in memory of its own: what a round starts from, good until the next one is taken."""
        if self._starts is None:
            self._starts = SnapshotMemory(self.vectors(), self._copier)
        return self._snapshot_in(self._starts)

    def _snapshot_in(self, memory: SnapshotMemory) -> Snapshot:
        copies, copied = memory.fill(self.vectors())
        return Snapshot(self.counters, self.layout.tensors(copies), self.layout, self.run_id, copied)

    @torch.no_grad()
    def load(self, path: Path, hashes: bytes = b"") -> Content:
        """Continue from a checkpoint, this node's or a peer's: weights, the outer rule's vectors, AdamW, counters.

        A peer's may have the slow weights and the outer rule's vectors alone: then AdamW's means begin at zero.
        Otherwise as `Engine.load`.
        """
        optional = self.vectors().keys() - set(required_vectors(self._outer.settings))
        counters, content = load_checkpoint(path, self.state(), self.layout, self.run_id, optional, hashes)
        if self._outer.settings.fragments == 1 or not bool(self.theta.any()):  # what is not in the file is zeros
            self.theta.copy_(self._outer.slow)
        self.round, self.steps, self.tokens = counters.round, counters.steps, counters.tokens
        self.tokens_this_round = 0
        self._forget_round_end()
        self._restart()
        return content

    @torch.no_grad()
    def start_from(self, path: Path, steps: int, tokens: int) -> None:
        """Begin with another run's weights and momentum; otherwise as `Engine.start_from`."""
        vectors = self._outer.state() | self._inner_vectors()
        load_start(path, self.layout.tensors(vectors), optional=vectors.keys() - {SLOW})
        self.theta.copy_(self._outer.slow)
        self.round, self.steps, self.tokens, self.tokens_this_round = 0, steps, tokens, 0
        self._restart()

    def _restart(self) -> None:
        """Inner steps go on from the fast weights, and the counters, that were just loaded."""

    def _inner_vectors(self) -> dict[str, Tensor]:
        """What a checkpoint has of the inner optimizer: flat vectors (n,), by name."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """As `Engine.state`: views of `vectors`."""
        return self.layout.tensors(self.vectors())

    def vectors(self) -> dict[str, Tensor]:
        """What a checkpoint has besides counters: flat vectors (n,), by name."""
        vectors = self._outer.state() | self._inner_vectors()
        if self._outer.settings.fragments > 1:
            vectors[FAST] = self.theta
        return vectors | self._outer.contributor.saved()

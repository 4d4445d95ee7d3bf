"""The weights of a replica: the fast ones, and the state of the outer step.

The fast weights are a flat fp32 vector, and the weights that inner steps move, where these are others. On a GPU, and
where a user's own loop trains, inner steps move other weights than the flat vector, which is then a copy: it is read at
the end of a round, and written back after the outer step. If inner steps were taken since then, a GPU's weights get a
difference instead, which is in the flat vector until it is read again.

The outer state is the slow weights, the outer rule's vectors, and the contributions, also flat vectors. A round is
`Contributor.freeze`, `Contributor.encode` and `step`; `farandole.testnet.methods.stacked` has the same for many
replicas at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from farandole.protocol.run.rules import SLOW, AdaptersConfig, OuterConfig
from farandole.protocol.wire.safetensors import FP32_BYTES

from ..base.parameters import Layout
from .adapters import Adapter, adapters_of, merged
from .codec import each_piece, in_order, one_thread, slices
from .contribution import Contribution, Contributor, Copier, copier_for
from .momentum import Momentum
from .rule import Meeting, OwnVectors, rule_of

# In simulated honest runs with unequal speeds it came to 5.1 at most, and usually to 0.35 (`limit_momentum`).
MAX_MOMENTUM: Final = 10.0


class TrainedWeights(Protocol):
    """The weights that inner steps move, where these are not the flat vector itself."""

    def read(self, flat: Tensor) -> None:
        """Copy the weights to ``flat`` (n,) fp32."""

    def write(self, flat: Tensor) -> None:
        """Set the weights to ``flat`` (n,) fp32."""


Store = Callable[[Tensor, Tensor], object]
"""Writes fp32 values, which it may overwrite, to weights of the same shape."""


class DeviceWeights:
    """Trained weights as a flat vector (n,) on any device, which can be changed in part: no copy of all is needed.

    ``store`` rounds to bf16 weights; fp32 ones need no rounding. Copies go piece by piece: whole vectors of another
    dtype would need a copy of them on the device, and so would a sum.
    """

    def __init__(self, flat: Tensor, store: Store = Tensor.copy_) -> None:
        self.device = flat.device
        self._flat = flat
        self._store = store

    def read(self, flat: Tensor) -> None:
        """Copy the weights exactly; waits for the inner steps that are queued."""
        for piece in slices(len(flat)):
            flat[piece].copy_(self._flat[piece].float())

    def write(self, flat: Tensor) -> None:
        """Set the weights; numbers that are bf16 already stay as they are."""
        self.write_part(flat, slice(0, len(flat)))

    def write_part(self, values: Tensor, part: slice) -> None:
        """Set a part of the weights to ``values`` (n,) fp32."""
        for piece in slices(len(values)):
            self._store(self._flat[part][piece], values[piece].to(self.device, copy=True))

    def add(self, values: Tensor, part: slice) -> None:
        """Queue the addition of ``values`` (n,) fp32 to a part of the weights; they may be read until `read`."""
        for piece in slices(len(values)):
            target = self._flat[part][piece]
            self._store(target, target + values[piece].to(self.device, non_blocking=True))


class FastWeights:
    """The flat vector ``flat`` (n,) fp32, and the ``trained`` weights; None: inner steps move the flat vector."""

    def __init__(self, flat: Tensor, trained: TrainedWeights | None = None) -> None:
        self.flat = flat
        """The fast weights, as far as they were read; see above."""
        self._trained = trained
        self._copier = copier_for(trained.device) if isinstance(trained, DeviceWeights) else Copier()
        self._room = flat.new_empty(0)
        self.is_copy = trained is not None
        """Whether inner steps move other weights."""
        self.takes_corrections = isinstance(trained, DeviceWeights)
        """Whether `add` can be used."""

    def read(self) -> None:
        """Make the flat vector a copy of the trained weights."""
        if self._trained is not None:
            self._trained.read(self.flat)

    def write(self) -> None:
        """Make the trained weights a copy of the flat vector."""
        if self._trained is not None:
            self._trained.write(self.flat)

    def add(self, part: slice) -> None:
        """Add a part of the flat vector, which is a difference here, to the trained weights."""
        assert isinstance(self._trained, DeviceWeights)
        self._trained.add(self.flat[part], part)

    def room(self, num_elements: int) -> Tensor:
        """Return memory for `replaced`, (n,) fp32. For a GPU it is kept, as page-locking it takes longer than using it.

        (PyTorch's own page-locked memory is as large as the next power of two.)
        """
        if not self.takes_corrections:
            return self.flat.new_empty(num_elements)
        if len(self._room) < num_elements:
            memory = np.empty(FP32_BYTES * num_elements, dtype=np.uint8)
            self._copier.pin(memory.data)
            self._room = torch.from_numpy(memory).view(torch.float32)
        return self._room[:num_elements]

    @contextlib.contextmanager
    def replaced(self, part: slice, weights: Tensor) -> Iterator[None]:
        """Replace a part of the fast weights by ``weights`` (n,), which are overwritten, and restore it afterwards."""
        self.read()
        before = self.flat[part]
        if isinstance(self._trained, DeviceWeights):
            self._trained.write_part(weights, part)
            try:
                yield
            finally:
                self._trained.write_part(before, part)
            return
        self._swap(before, weights)
        try:
            yield
        finally:
            self._swap(before, weights)

    def _swap(self, one: Tensor, other: Tensor) -> None:
        """Swap the values of two vectors (n,) piece by piece, as a copy of all might have no room; write them."""
        for piece in slices(len(one)):
            kept = one[piece].clone()
            one[piece] = other[piece]
            other[piece] = kept
        self.write()


@dataclass(eq=False)
class OuterState:
    """The outer state of the fast weights ``fast`` (n,) fp32, which `step` moves too.

    The slow weights begin as a copy of them. ``layout``: theirs. ``momentum``: what travels with the weights; None:
    nothing.
    """

    settings: OuterConfig
    _fast: Tensor
    copier: Copier
    layout: Layout
    momentum: InitVar[Momentum | None] = None

    def __post_init__(self, momentum: Momentum | None) -> None:
        self.slow = self._fast.clone()
        self.vectors = {name: torch.zeros_like(self._fast) for name in self.settings.vectors}
        self._rule = rule_of(self.settings)
        self._own = OwnVectors(self._fast, self.slow, self.vectors)
        self.contributor = Contributor(self.settings, self._rule, self._own, self.copier, momentum)
        """Makes the contributions, of the weights and vectors as they are then."""

    def step(
        self,
        made: Contribution,
        contributions: Sequence[Tensor],
        weights: Sequence[float],
        *,
        is_late: bool,
    ) -> None:
        """Take the outer step of one fragment, whose own contribution is ``made``; slice by slice, in place.

        ``contributions``, (n,) each, are as their receivers decode them, the own one is ``made.sent``; ``weights`` are
        their shares. Without any, the replica is alone. ``is_late``: inner steps were taken since the contribution,
        and their progress is kept.

        A lossy codec would round away all of a replica's own progress below half a quantum in each round. Therefore
        the step is taken around the exact contribution w: a member that sent Q_j counts as w + (Q_j - Q), where Q is
        what this replica sent (CHOCO-Gossip, arXiv 1902.00340, which also exchanges differences and keeps its own
        value). With equal shares, what one partner gains the other one loses, so the sum of a pair is conserved; the
        partners' means differ by the difference of their codec errors.
        """
        whole = replace(self._own.piece(made.part), fast=made.theta)
        fast = self._fast[made.part]
        is_alone = not contributions
        own_place = 0 if is_alone else next(place for place, each in enumerate(contributions) if each is made.sent)
        if is_alone:
            contributions, weights = [made.theta if self._rule.sends_fast_weights else made.sent], [1.0]
            for piece in () if self._rule.sends_fast_weights else slices(len(made.sent)):
                made.sent[piece] = self._rule.contribution(whole.piece(piece))  # without the codec's errors
        keeps_own_exact = self.settings.is_lossy and self._rule.keeps_own_exact and not is_alone

        def step(piece: slice) -> None:
            own = whole.piece(piece)
            pieces = [contribution[piece] for contribution in contributions]
            if keeps_own_exact:
                sent, exact = pieces[own_place], self._rule.contribution(own)
                pieces = [exact if place == own_place else exact + (other - sent) for place, other in enumerate(pieces)]
            meeting = Meeting(pieces, weights, own_place, is_late)
            self._rule.step(own, meeting)
            if is_late:
                fast[piece] += own.slow - made.theta[piece]
            else:
                fast[piece] = own.slow

        each_piece(step, slices(len(fast)), fast)
        for place, values in self._merged(made, contributions, weights):
            fast[place] = fast[place] + (values - whole.slow[place]) if is_late else values
            whole.slow[place] = values

    def _merged(
        self, made: Contribution, contributions: Sequence[Tensor], weights: Sequence[float]
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield where a fragment has the A and B of whole adapters, and their values by the mean of products (n,)."""

        def exact(contribution: Tensor, place: slice) -> Tensor:  # as in `step`
            return (contribution[place] - (made.sent[place] - made.theta[place])).cpu().double()

        def merge(adapter: Adapter) -> list[tuple[slice, Tensor]]:
            of_a, of_b, rank = adapter
            a, b = merged(
                [(exact(each, of_a).view(rank, -1), exact(each, of_b).view(-1, rank)) for each in contributions],
                weights,
            )
            return [(of_a, a), (of_b, b)]

        if isinstance(self.settings, AdaptersConfig) and len(weights) > 1 and 0.0 not in weights:
            for of_one in in_order(merge, adapters_of(self.layout, made.part)):
                for place, values in of_one:
                    yield place, values.flatten().to(made.theta)

    def limit_momentum(self, part: slice, movement: float) -> None:
        """Clip what is carried over from earlier rounds.

        ``movement``: how far this replica's inner steps usually move the part in a round, a norm. Momentum that honest
        rounds have made is at most `MAX_MOMENTUM` times what such movements add up to (momentum clipping: CO2,
        arXiv 2401.16265, section 3.3, with another yardstick). A checkpoint of a stranger's may have any, and so may
        a round in which the loss went up steeply.
        """
        if "momentum" not in self.vectors:
            return
        momentum, limit = self.vectors["momentum"][part], MAX_MOMENTUM * self.settings.momentum_gain * movement
        with one_thread():
            norm = math.sqrt(sum(float(momentum[piece] @ momentum[piece]) for piece in slices(len(momentum))))
        for piece in slices(len(momentum)) if not norm <= limit else ():
            momentum[piece].mul_(limit / norm) if norm < math.inf else momentum[piece].zero_()

    def distance_to_slow(self, made: Contribution) -> float:
        """Return the norm of the difference between what was sent and what would be sent without inner steps.

        The rule's vectors count as zeros, their first values: what one of them carries over is sent, too.
        """
        square = 0.0
        with one_thread():
            for piece in slices(len(made.sent)):
                slow = self.slow[made.part][piece]
                zeros = dict.fromkeys(self.vectors, slow.new_zeros(1).expand(len(slow)))
                moved = made.sent[piece] - self._rule.contribution(OwnVectors(slow, slow, zeros))
                square += float(moved @ moved)
        return math.sqrt(square)

    def towards(self, share: float, made: Contribution, partner: Tensor, out: Tensor) -> None:
        """Write the mean of the contributed fast weights and ``partner`` (n,), with its share, to ``out`` (n,)."""

        def fill(piece: slice) -> None:
            torch.sub(partner[piece], made.sent[piece], out=out[piece])
            out[piece].mul_(share).add_(made.theta[piece])

        each_piece(fill, slices(len(out)), out)
        for place, values in self._merged(made, (made.sent, partner), (1.0 - share, share)):
            out[place] = values

    def distorts(self, made: Contribution) -> bool:
        """Return whether a partner decodes fast weights with the codec's errors."""
        return self._rule.sends_fast_weights and made.sent.data_ptr() != made.theta.data_ptr()

    def state(self) -> dict[str, Tensor]:
        """Return the vectors that every checkpoint of the run has: flat vectors (n,), by name."""
        return {SLOW: self.slow, **{name: self.vectors[name] for name in self.settings.vectors}}

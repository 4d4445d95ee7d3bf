"""Muon's momentum in a contribution: a vector of its own behind the weights, in a codec of its own.

An orthogonalised step is not linear: averaging weights after it loses what many replicas' gradients would gain by being
averaged before it. So partners average their momenta too (SUDA-Muon, arXiv 2604.23980; FedMuon, arXiv 2510.27403). It
has the elements of the fragment that Muon steps, in the order of the layout; AdamW's first moments stay at home, since
where a replica has seen no token of a kind its second moment is almost zero, and another's mean makes a huge step.

    m_i  <-  m_i + share keep^k clip (Q(m_j) - Q(m_i)),   clip = min(1, MAX_DISTANCE |Q(m_i)| / |Q(m_j) - Q(m_i)|)

The share is the partner's share of the weights. The own half stays exact, as in `OuterState.step`. What arrives k inner
steps late has faded by then as if it had been there, because a step keeps ``keep`` of the momentum and adds to it.

A step has one size whatever its momentum is, so a liar can turn a replica's next steps and not enlarge them. The clip
bounds how far; but a matrix's small singular values count in a step as much as large ones, and are turned at little
distance. So a replica looks ahead, along its own momentum and along the mean, on the windows of text that it judges the
partner on: a mean that leads less than half as far down as its own momentum counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from typing import Final

from torch import Tensor

from .codec import FORMS, Form, slices

# Honest momenta are about as long as each other, and mostly noise: their distance is about 1.4 times their length, that
# of one's own and its reverse 2.
MAX_DISTANCE: Final = 1.5
# What is left of the gain of a replica's own momentum at least, and the share that counts where no loss is known.
LEAST_GAIN: Final = 0.5
UNKNOWN_SHARE: Final = 0.5

Ahead = Callable[[], float | None]
"""Returns the loss ahead of a replica's weights, along its momentum; None where it is not known."""


@dataclass(eq=False)
class Momentum:
    """The momenta of one replica: those ``places`` of the flat vector ``mean`` (n,) that Muon steps.

    ``keep``: the share of its momentum that a step keeps. ``parts``: the fragments. ``like``: a tensor on the device of
    averaging. ``look_ahead`` moves weights (n,) by some steps along the momentum. All calls but `freeze` and `average`
    may come from the side thread.
    """

    _mean: Tensor
    places: Sequence[slice]
    codec: InitVar[str]
    _keep: float
    parts: InitVar[Sequence[slice]]
    like: InitVar[Tensor]
    look_ahead: Callable[[Tensor], None] = lambda weights: None

    def __post_init__(self, codec: str, parts: Sequence[slice], like: Tensor) -> None:
        self.form: Form = FORMS[codec]
        largest = max((self.num_elements(part) for part in parts), default=0)
        self._own, self._received = like.new_empty(largest), like.new_empty(largest)

    def _within(self, part: slice) -> Iterator[tuple[slice, slice]]:
        """Yield the places within a fragment, and where they are among its momenta."""
        first = 0
        for place in self.places:
            start, stop = max(place.start, part.start), min(place.stop, part.stop)
            if start < stop:
                yield slice(start, stop), slice(first, first + stop - start)
                first += stop - start

    def num_elements(self, part: slice) -> int:
        """Return the number of momenta of a fragment, m."""
        return sum(place.stop - place.start for place, _ in self._within(part))

    def num_bytes(self, part: slice) -> int:
        """Return the encoded size of a fragment's momenta."""
        return self.form.size(self.num_elements(part))

    def freeze(self, part: slice) -> Tensor:
        """Return a fragment's momenta as they are (m,), valid until the next call; encoding makes them what is sent."""
        for place, among in self._within(part):
            self._own[among].copy_(self._mean[place])
        return self._own[: self.num_elements(part)]

    def received(self, own: Tensor) -> Tensor:
        """Return memory for the partner's momenta, which are as many as this replica's ``own``."""
        return self._received[: len(own)]

    def average(self, part: slice, own: Tensor, share: float, num_late: int, losses: tuple[Ahead, Ahead]) -> None:
        """Average a fragment's momenta with the partner's, which are in `received`, ``num_late`` inner steps late.

        ``losses``: of the weights, and ahead of them.
        """
        received = self.received(own)
        distance = math.sqrt(sum(float((received[piece] - own[piece]).square().sum()) for piece in slices(len(own))))
        length = math.sqrt(sum(float(own[piece] @ own[piece]) for piece in slices(len(own))))
        if share == 0.0 or distance == 0.0:
            return
        clip = min(1.0, MAX_DISTANCE * length / distance)
        correction = received.sub_(own).mul_(share * clip * self._keep**num_late)
        here, ahead = losses
        own_ahead = None if (now := here()) is None else ahead()
        if now is None or own_ahead is None:
            correction.mul_(UNKNOWN_SHARE)
        self._add(part, correction)
        if now is None or own_ahead is None:
            return
        mean_ahead = ahead()
        if mean_ahead is None or not mean_ahead <= now - LEAST_GAIN * (now - own_ahead):
            self._add(part, correction.neg_())

    def _add(self, part: slice, correction: Tensor) -> None:
        for place, among in self._within(part):
            self._mean[place].add_(correction[among].to(self._mean))

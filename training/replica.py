"""One replica: a module in training, the whole model or a stage of it, and what belongs to it but for its batches.

A round is `inner_step` as often as the round allows, `contribution` for the partner, and `outer_step` with the
partner's contribution, or with None to take it alone. If inner steps are taken between the last two, while the
exchange goes on, their progress is kept: the fast weights get the outer step's correction as a difference
(Streaming DiLoCo, arXiv 2501.18512); without such steps the fast weights become the slow weights exactly.

With fragments (the same paper) a round exchanges a part of the parameters, and its outer step moves that part alone:
the others' inner steps go on until their turn, each with another partner. A part that is F times as small can be
exchanged F times as often over the same link.

With error feedback, what the codec rounds away of a contribution is added to the next one (Karimireddy et al., arXiv
1901.09847), so over the rounds a replica passes on all of its weights' movement, and the mean over the
replicas is not biased. What no partner used was not passed on: only an outer step with a partner carries the error on.

All state is flat fp32 vectors: fast weights, gradient, AdamW's two means, slow weights, outer momentum, and the error
that is fed back.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from . import noloco
from .checkpoint import Counters, load_checkpoint, save_checkpoint
from .codec import Buffer, decode, encode, encoded_size
from .config import InnerConfig, OuterConfig
from .device import Device
from .errors import CodecError, DivergedError, ScreeningError
from .inner import adamw_, decay_, learning_rate
from .parameters import flatten_, layout_of
from .screening import screen

# Elements that the outer step takes at a time: bounds its temporaries, and elementwise work does not see the cuts.
_SLICE = 1 << 22


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """This replica at the end of a round's inner steps: the n elements of the fragment that is exchanged."""

    part: slice
    """Where the fragment lies in the flat vectors."""
    theta: Tensor
    """A copy of the fast weights (n,)."""
    sent: Tensor
    """The contribution as the partner decodes it (n,)."""
    error: Tensor | None
    """What the codec rounded away of it (n,), where errors are fed back."""
    steps: int
    """Inner steps that the replica had taken."""
    tokens: int
    """Tokens of the round."""


class Replica:
    """A module, its inner optimizer, slow weights and outer momentum.

    Who computes its gradient is another matter: `farandole.training.learner` where the module is the whole model,
    `farandole.training.stage_worker` where it is a stage. Deterministic on a CPU: the same calls give the same bits.
    """

    def __init__(
        self, module: nn.Module, inner: InnerConfig, outer: OuterConfig, *, run_id: bytes, device: Device
    ) -> None:
        self.device = device
        self.round = 0
        self.steps = 0
        self.tokens = 0
        self.tokens_this_round = 0
        self._inner = inner
        self._outer = outer
        self._run_id = run_id
        self._module = module.to(device.torch_device)
        self.layout = layout_of(self._module, outer.codec)
        self._theta, self._gradient = flatten_(self._module, self.layout)
        self._parameters = list(self._module.parameters())
        self._mean = torch.zeros_like(self._theta)
        self._square = torch.zeros_like(self._theta)
        self._phi = self._theta.clone()
        self._momentum = torch.zeros_like(self._theta)
        self._error = torch.zeros_like(self._theta) if outer.feeds_errors_back else None
        self._snapshot: _Snapshot | None = None

    @property
    def contribution_bytes(self) -> int:
        """Size of the largest contribution in this run, and of every one if there are no fragments."""
        return encoded_size(self._outer.codec, -(-self.layout.num_elements // self._outer.fragments))

    @property
    def awaits_outer_step(self) -> bool:
        """Whether a contribution was made whose outer step is due: inner steps belong to the next round meanwhile."""
        return self._snapshot is not None

    @property
    def tokens_contributed(self) -> int:
        """Tokens behind the contribution that awaits its outer step, or behind the next one."""
        return self.tokens_this_round if self._snapshot is None else self._snapshot.tokens

    @property
    def learning_rate(self) -> float:
        """Rate of the next inner step."""
        return learning_rate(self.steps, self._inner)

    def fast_weights(self) -> Tensor:
        """A copy of theta, (n,) fp32."""
        return self._theta.clone()

    def slow_weights(self) -> Tensor:
        """A copy of phi, (n,) fp32."""
        return self._phi.clone()

    def clear_gradient(self) -> None:
        """Before the backward passes of an inner step, which add to the parameters' gradients."""
        self._gradient.zero_()

    @torch.no_grad()
    def inner_step(self, num_tokens: int, divisor: int = 1) -> None:
        """Clip, and take one AdamW step, with the gradients that the backward passes summed, over ``divisor``."""
        if divisor != 1:
            self._gradient.div_(divisor)
        if self._inner.clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._inner.clip)
        rate = self.learning_rate
        for parameter in self._parameters:
            if parameter.ndim > 1:
                decay_(parameter, rate, self._inner)
        adamw_(self._theta, self._gradient, self._mean, self._square, self.steps, rate, self._inner)
        self.steps += 1
        self.tokens += num_tokens
        self.tokens_this_round += num_tokens

    @torch.no_grad()
    def contribution(self, out: Buffer, fragment: int = 0) -> tuple[int, bytes]:
        """Freeze this round's fast weights, those of one fragment, and encode them for the partner into ``out``.

        Returns (bytes written, their BLAKE3). Raises `DivergedError` if the weights are no longer finite.
        """
        part = self.layout.fragment(fragment, self._outer.fragments)
        theta = self._theta[part].clone()
        values = noloco.contribution(theta, self._phi[part], self._outer)
        if self._error is not None:
            values = values + self._error[part]
        try:
            size = encode(self._outer.codec, values, out)
        except CodecError as error:
            raise DivergedError(f"this replica's weights diverged in round {self.round}: {error}") from error
        written = np.frombuffer(out, dtype=np.uint8)[:size].data
        sent = values if self._outer.codec == "fp32" else self._decode(written, len(values))
        kept = None if self._error is None else values - sent
        self._snapshot = _Snapshot(part, theta, sent, kept, self.steps, self.tokens_this_round)
        return size, blake3(written).digest()

    def _decode(self, data: Buffer, num_elements: int) -> Tensor:
        return decode(self._outer.codec, data, num_elements, self.device.torch_device)

    @torch.no_grad()
    def outer_step(
        self, partner: Buffer | None, own_tokens: int = 0, partner_tokens: int = 0, own_first: bool = True
    ) -> int:
        """End the round: mean with the partner's contribution (None: alone), outer step, next round.

        ``own_first`` is True for one of the partners and False for the other (whose key is less, say), so that both
        add in one order. Returns how late the step is: the inner steps taken since `contribution`. Raises
        `ScreeningError` if the contribution is unfit, or `DivergedError` if the own weights are, and leaves everything
        as it was.
        """
        if self._snapshot is None:
            self.contribution(bytearray(self.contribution_bytes))
        snapshot = self._snapshot
        assert snapshot is not None
        if partner is None:
            mean = noloco.contribution(snapshot.theta, self._phi[snapshot.part], self._outer)
        else:
            shares = noloco.partner_shares(own_tokens, partner_tokens)
            pairs = [(snapshot.sent, shares[0]), (self._screened(partner, snapshot.sent), shares[1])]
            (first, first_share), (second, second_share) = pairs if own_first else reversed(pairs)
            mean = noloco.weighted_mean(first, second, (first_share, second_share))
            if self._error is not None and snapshot.error is not None:
                self._error[snapshot.part] = snapshot.error
        self._apply(mean, snapshot)
        return self.steps - snapshot.steps

    def _screened(self, data: Buffer, own: Tensor) -> Tensor:
        try:
            theirs = self._decode(data, len(own))
        except CodecError as error:
            raise ScreeningError(f"the contribution cannot be used: {error}") from error
        screen(own, theirs)
        return theirs

    @torch.no_grad()
    def refusal(self, partner: Buffer) -> str:
        """Why a partner's contribution is refused, or nothing: what `outer_step` would raise, before it is due."""
        if self._snapshot is None:
            return "no contribution of this replica's own awaits one"
        try:
            self._screened(partner, self._snapshot.sent)
        except ScreeningError as error:
            return str(error)
        return ""

    def _apply(self, mean: Tensor, snapshot: _Snapshot) -> None:
        theta, phi, momentum = self._theta[snapshot.part], self._phi[snapshot.part], self._momentum[snapshot.part]
        for start in range(0, len(mean), _SLICE):
            part = slice(start, start + _SLICE)
            phi[part], momentum[part] = noloco.outer_step(phi[part], momentum[part], mean[part], self._outer)
        if self.steps == snapshot.steps:
            theta.copy_(phi)
        else:
            theta.add_(phi - snapshot.theta)
        self.round += 1
        self.tokens_this_round -= snapshot.tokens
        self._snapshot = None

    @torch.no_grad()
    def abandon_round(self) -> None:
        """Forget this round's inner steps and AdamW's means: what is left to do after `DivergedError`."""
        self._theta.copy_(self._phi)
        self._mean.zero_()
        self._square.zero_()
        if self._error is not None:
            self._error.zero_()
        self.tokens_this_round = 0
        self._snapshot = None

    def save(self, path: Path) -> tuple[str, int]:
        """Write a checkpoint of the last outer step's weights; returns (SHA-256 in hexadecimal, bytes).

        A round's unfinished inner steps are not in it: take it right after an outer step to lose none. With fragments
        the fast weights are in it, since most of them await their fragment's turn.
        """
        return save_checkpoint(path, self._saved(), self.layout, self._run_id, self._counters())

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Continue from a checkpoint, this node's or a peer's: both kinds of weights, momentum, AdamW, counters.

        Raises `CheckpointError`, with nothing changed, if any of it is not as it must be.
        """
        counters = load_checkpoint(path, self._saved(), self.layout, self._run_id, optional=("error",))
        if self._outer.fragments == 1:
            self._theta.copy_(self._phi)
        self.round, self.steps, self.tokens = counters.round, counters.steps, counters.tokens
        self.tokens_this_round = 0
        self._snapshot = None

    def _saved(self) -> dict[str, Tensor]:
        vectors = {"slow": self._phi, "momentum": self._momentum, "mean": self._mean, "square": self._square}
        if self._outer.fragments > 1:
            vectors["fast"] = self._theta
        if self._error is not None:
            vectors["error"] = self._error
        return vectors

    def _counters(self) -> Counters:
        return Counters(self.round, self.steps, self.tokens)

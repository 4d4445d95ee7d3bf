"""One replica: a module in training, the whole model or a stage of it, and what belongs to it but for its batches.

A round is `inner_step` as often as the round allows, `contribution` for the partner, and `outer_step` with the
partner's contribution, or with None to take it alone. If inner steps are taken between the last two, while the
exchange goes on, their progress is kept: the fast weights get the outer step's correction as a difference
(Streaming DiLoCo, arXiv 2501.18512); without such steps the fast weights become the slow weights exactly.

With fragments (the same paper) a round exchanges a part of the parameters, and its outer step moves that part alone:
the others' inner steps go on until their turn, each with another partner. A part that is F times as small can be
exchanged F times as often over the same link.

All state is flat fp32 vectors: fast weights, gradient, AdamW's two means, slow weights, outer momentum, and what
`farandole.training.contribution` remembers of what was sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from farandole.protocol.manifest import InnerConfig, OuterConfig

from . import noloco
from .blocks import Content
from .checkpoint import Counters, load_checkpoint, save_checkpoint
from .codec import Buffer, slices
from .contribution import Contribution, Contributor
from .copying import copier_for
from .device import Device
from .errors import CodecError, DivergedError, ScreeningError
from .inner import adamw_, decay_, fused_adamw_, learning_rate, ramp
from .parameters import flatten_, layout_of
from .partner import PartnerContribution
from .slices import SliceQueue
from .snapshot import Snapshot, SnapshotMemory
from .start import load_start

# What every checkpoint has; the rest is a replica's own, and another can do without.
REQUIRED_VECTORS = frozenset(("slow", "momentum"))


@dataclass(frozen=True, slots=True)
class _RoundEnd:
    """This replica at the end of a round's inner steps."""

    contribution: Contribution
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
        self.slices: SliceQueue | None = None
        """What it learns from, where the run counts epochs and this replica draws data."""
        self._inner = inner
        self._outer = outer
        self._run_id = run_id
        self._module = module.to(device.torch_device)
        self.layout = layout_of(self._module, outer.codec)
        self._theta, self._gradient = flatten_(self._module, self.layout)
        self._parameters = list(self._module.parameters())
        self._mean = torch.zeros_like(self._theta)
        self._square = torch.zeros_like(self._theta)
        self._means_from = 0  # inner steps taken when these were zeros last
        self._phi = self._theta.clone()
        self._momentum = torch.zeros_like(self._theta)
        self._copier = copier_for(device.torch_device)
        self._contributor = Contributor(outer, self._theta, self._copier)
        self._received = self._theta.new_empty(self.layout.largest_fragment(outer.fragments))  # a partner's, decoded
        self._round_end: _RoundEnd | None = None
        self._partner: PartnerContribution | None = None
        self._snapshots: SnapshotMemory | None = None

    @property
    def counters(self) -> Counters:
        """How far this replica is."""
        return Counters(self.round, self.steps, self.tokens)

    @property
    def contribution_bytes(self) -> int:
        """Size of the largest contribution in this run, and of every one if there are no fragments."""
        return self._contributor.largest_bytes

    def contribution_size(self, fragment: int = 0) -> int:
        """Bytes of a contribution of this fragment."""
        part = self.layout.fragment(fragment, self._outer.fragments)
        return self._contributor.form.size(part.stop - part.start)

    @property
    def awaits_outer_step(self) -> bool:
        """Whether a contribution was made whose outer step is due: inner steps belong to the next round meanwhile."""
        return self._round_end is not None

    @property
    def tokens_contributed(self) -> int:
        """Tokens behind the contribution that awaits its outer step, or behind the next one."""
        return self.tokens_this_round if self._round_end is None else self._round_end.tokens

    @property
    def learning_rate(self) -> float:
        """Rate of the next inner step."""
        rate = learning_rate(self.steps, self._inner)
        return rate * ramp(self.steps - self._means_from, self._inner) if self._means_from else rate

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
        step_ = fused_adamw_ if self.device.torch_device.type == "cuda" else adamw_
        step_(self._theta, self._gradient, self._mean, self._square, self.steps - self._means_from, rate, self._inner)
        self.steps += 1
        self.tokens += num_tokens
        self.tokens_this_round += num_tokens

    @torch.no_grad()
    def contribution(
        self, out: Buffer, fragment: int = 0, progress: Callable[[int], None] = lambda bytes_ready: None
    ) -> tuple[int, bytes]:
        """Freeze this round's fast weights, those of one fragment, and encode them for the partner into ``out``.

        Returns (bytes written, their BLAKE3). ``progress`` is called with how many of the first bytes of ``out`` are
        final, every few megabytes. Raises `DivergedError` if the weights are no longer finite.
        """
        self.freeze(fragment)
        return self.encode(out, progress)

    @property
    def encodes_aside(self) -> bool:
        """Whether `encode` may run in a thread of its own while this one takes inner steps: on CUDA."""
        return self._copier.is_aside

    @torch.no_grad()
    def freeze(self, fragment: int = 0) -> None:
        """The first half of `contribution`: the second, `encode`, comes before the next inner step, or aside."""
        part = self.layout.fragment(fragment, self._outer.fragments)
        self._round_end = _RoundEnd(self._contributor.freeze(self._theta, part), self.steps, self.tokens_this_round)
        self._partner = None

    @torch.no_grad()
    def encode(self, out: Buffer, progress: Callable[[int], None] = lambda bytes_ready: None) -> tuple[int, bytes]:
        """The second half of `contribution`, which may be called where `encodes_aside` says.

        Of the other methods only those of inner steps may be called before it returns, and `save`.
        """
        assert self._round_end is not None
        frozen = self._round_end.contribution
        try:
            size, digest = self._contributor.encode(frozen, self._theta, self._phi, out, progress)
        except CodecError as error:
            self._forget_round_end()
            raise DivergedError(f"this replica's weights diverged in round {self.round}: {error}") from error
        received = self._received[: len(frozen.sent)]
        self._partner = PartnerContribution(self._contributor.form, frozen.sent, received, self._copier)
        return size, digest

    def pin(self, memory: Buffer) -> None:
        """Make ready for copies the memory in which contributions will be made, or will arrive; it must stay mapped."""
        self._copier.pin(memory)

    def take_in(self, data: Buffer, available: int) -> None:
        """Decode what is whole of the first ``available`` bytes of a partner's contribution, while the rest arrives.

        ``data`` is where it arrives. May be called ever again with more; with less, or for another place, it begins
        anew. Does nothing while no contribution of this replica's own awaits one. What is wrong with the partner's,
        `refusal` and `outer_step` tell; they take in the rest themselves.
        """
        if self._partner is not None:
            self._partner.take_in(data, available)

    def forget_partner(self) -> None:
        """What was taken in is of no use: another contribution comes to the same place."""
        if self._partner is not None:
            self._partner.forget()

    @torch.no_grad()
    def refusal(self, partner: Buffer) -> str:
        """Why a partner's contribution is refused, or nothing: what `outer_step` would raise, before it is due."""
        if self._partner is None:
            return "no contribution of this replica's own awaits one"
        try:
            self._partner.screen(partner)
        except ScreeningError as error:
            return str(error)
        return ""

    @torch.no_grad()
    def outer_step(
        self, partner: Buffer | None, own_tokens: int = 0, partner_tokens: int = 0, own_first: bool = True
    ) -> int:
        """End the round: mean with the partner's contribution (None: alone), outer step, next round.

        ``own_first`` is True for one of the partners and False for the other (whose key is less, say), so that both
        add in one order. Returns how late the step is: the inner steps taken since `contribution`. Raises
        `ScreeningError` if the contribution is unfit, or `DivergedError` if the own weights are, and leaves everything
        as it was. What `refusal` has just accepted is not looked at again.
        """
        if self._round_end is None:
            self.contribution(bytearray(self.contribution_bytes))
        ended = self._round_end
        assert ended is not None
        made, late = ended.contribution, self.steps - ended.steps
        if partner is None:
            phi = self._phi[made.part]
            self._apply(made, lambda piece: noloco.contribution(made.theta[piece], phi[piece], self._outer), late)
        else:
            assert self._partner is not None
            shares = noloco.partner_shares(own_tokens, partner_tokens)
            pairs = [(made.sent, shares[0]), (self._partner.values(partner), shares[1])]
            (first, first_share), (second, second_share) = pairs if own_first else reversed(pairs)
            ordered = (first_share, second_share)
            self._apply(made, lambda piece: noloco.weighted_mean(first[piece], second[piece], ordered), late)
            self._contributor.passed_on(made)
        self.round += 1
        self.tokens_this_round -= ended.tokens
        self._forget_round_end()
        return late

    def _apply(self, made: Contribution, mean: Callable[[slice], Tensor], late: int) -> None:
        """Move the weights by the outer step with ``mean``, slice by slice: elementwise work does not see the cuts."""
        theta, phi, momentum = (flat[made.part] for flat in (self._theta, self._phi, self._momentum))
        for piece in slices(len(phi)):
            phi[piece], momentum[piece] = noloco.outer_step(phi[piece], momentum[piece], mean(piece), self._outer)
            if late:
                theta[piece] += phi[piece] - made.theta[piece]
            else:
                theta[piece] = phi[piece]

    def _forget_round_end(self) -> None:
        self._round_end = self._partner = None

    @torch.no_grad()
    def abandon_round(self) -> None:
        """Forget this round's inner steps and AdamW's means: what is left to do after `DivergedError`."""
        self._theta.copy_(self._phi)
        self._mean.zero_()
        self._square.zero_()
        self._means_from = self.steps
        self._contributor.forget_errors()
        self.tokens_this_round = 0
        self._forget_round_end()

    @property
    def num_bytes(self) -> int:
        """What a checkpoint takes, but for its header."""
        return sum(flat.nbytes for flat in self.state().values())

    def is_in(self, saved_round: int, saved_steps: int) -> bool:
        """Whether a checkpoint of then gives all that one of now would.

        It has nothing of a round's unfinished inner steps; but with fragments, most of them await their turn in it.
        """
        return saved_round == self.round and (self._outer.fragments == 1 or saved_steps == self.steps)

    def save(self, path: Path) -> Content:
        """Write a checkpoint of the last outer step's weights; raises `OSError`, as `farandole.training.durable` does.

        A round's unfinished inner steps are not in it: take it right after an outer step to lose none. With fragments
        the fast weights are in it, since most of them await their fragment's turn.
        """
        return save_checkpoint(path, self.state(), self.layout, self._run_id, self.counters)

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """What `save` would write now, to be written while this replica goes on; good until the next snapshot.

        Raises `MemoryError` if there is no memory for one more copy.
        """
        vectors = self.state()
        if self._snapshots is None:
            self._snapshots = SnapshotMemory(vectors, self._copier)
        copies, copied = self._snapshots.fill(vectors)
        return Snapshot(self.counters, copies, self.layout, self._run_id, copied)

    @torch.no_grad()
    def load(self, path: Path, hashes: bytes = b"") -> Content:
        """Continue from a checkpoint, this node's or a peer's: both kinds of weights, momentum, AdamW, counters.

        A peer's may have slow weights and momentum alone: then AdamW's means begin anew, with a ramp. ``hashes`` are
        those of its blocks, if they are known. Raises `CheckpointError`, with nothing changed, if any of it is not as
        it must be.
        """
        saved = self.state()
        optional = saved.keys() - REQUIRED_VECTORS
        counters, content = load_checkpoint(path, saved, self.layout, self._run_id, optional, hashes)
        if self._outer.fragments == 1 or not bool(self._theta.any()):  # what is not in the file is zeros
            self._theta.copy_(self._phi)
        self.round, self.steps, self.tokens = counters.round, counters.steps, counters.tokens
        self._means_from = 0 if bool(self._square.any()) else self.steps
        self.tokens_this_round = 0
        self._forget_round_end()
        return content

    @torch.no_grad()
    def start_from(self, path: Path, steps: int, tokens: int) -> None:
        """Begin with another run's weights and momentum instead of the seed's (`farandole.training.start`).

        Of a replica that has taken no step yet. The learning rate's schedule goes on at inner step ``steps``; without
        the state of AdamW it is ramped up, as in `load`. Raises `CheckpointError`, with nothing changed, if the file
        does not fit.
        """
        state = {"slow": self._phi, "momentum": self._momentum, "mean": self._mean, "square": self._square}
        load_start(path, state, self.layout, optional=state.keys() - {"slow"})
        self._theta.copy_(self._phi)
        self.round, self.steps, self.tokens, self.tokens_this_round = 0, steps, tokens, 0
        self._means_from = 0 if bool(self._square.any()) else steps

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint has beside counters: flat vectors (n,), by name."""
        vectors = {"slow": self._phi, "momentum": self._momentum, "mean": self._mean, "square": self._square}
        if self._outer.fragments > 1:
            vectors["fast"] = self._theta
        return vectors | self._contributor.saved()

"""The stage engine: what one stage computes for microbatches that travel through all stages and back.

A microbatch of B sequences of T tokens travels as activations (B, T, C). The stage 0 replica that has its tokens calls
`draw`, one replica of each other stage calls `forward`, and the first replica calls `tail`, which computes logits,
loss, and the gradient of the last activations. It travels back over the same replicas, which call `backward`; the
replica that drew the microbatch is the last one. A stage sums the gradients of its microbatches; `step` divides by
their number and takes the inner step.

A microbatch may be lost on its way back, when later stages already have its gradient in their sums and earlier ones
will never have it. Therefore a stage keeps what it needs to remove a microbatch's gradient from the sum, its input and
the gradient of its output, until `settle` reports whether all stages have it. Removal subtracts the same number that
was added, so only a rounding of the sum (2^-24 of it) remains, as with any other order of addition.

With ``overlap`` microbatches of the *following* inner step begin while some of the current one's are in flight, and
remain in flight when the current step is taken. A microbatch uses the same weights forward and backward: a *version*, a
copy of the fast weights, which is kept until its last microbatch is settled. The following step has a separate sum.
Where the run's rounds overlap, an outer step may fall between a microbatch's forward and backward pass, so there are
versions, too.

The mesh process schedules the computations (`farandole.protocol.stages.pipeline`) with commands (`StageWorker.obey`).
Activations are in memory that it shares, in two places for each slot: incoming and outgoing.

Memory: from its first call to `settle`, each microbatch keeps its tokens and the graph of its forward pass (with
``recompute`` only its input), and after `backward` its input and the gradient of its output. Callers bound the number
of microbatches, which are identified by slots 0, 1, ... With ``overlap`` there are also a second sum and two versions
of the weights, and a third version while an outer step falls between: 4 bytes a parameter each. Where only rounds
overlap, there is one version, and a second one then.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.stages.activations import link_bytes
from farandole.protocol.trainer.trainer_messages import (
    InnerStepTaken,
    Settle,
    TakeInnerStep,
    TrainerSettings,
    Work,
    Worked,
)

from ..base.device import Device, choose_device
from ..base.errors import ActivationError, CodecError, DataError, NoSliceError, OutlierError, TrainingError
from ..base.parameters import bind_
from ..data.batches import Batches
from ..data.dataset import NOTHING, Bring, build_sampler
from ..model.model import StageModule
from ..model.stages import build_stage
from ..outer.codec import Buffer, decode, encode
from .engine import Engine, Until
from .learner import DEFAULTS
from .link_statistics import LinkStatistics
from .replica import Replica

# The inner step number of held-out microbatches: only their loss is measured.
_HELD_OUT = -1


@dataclass(slots=True, eq=False)
class _Version:
    """The stage's module with the weights of one point in time."""

    module: StageModule
    weights: Tensor
    """The module's weights, (n,) fp32."""
    mark: int = -1
    """The fast weights' change counter at the time of the copy."""
    num_users: int = 0
    """Number of microbatches that have begun with this version and are not settled."""


@dataclass(slots=True)
class _Microbatch:
    """A microbatch's state that a stage keeps until the microbatch is settled."""

    version: _Version
    number: int
    """Number of the inner step that it belongs to, counted from the start of this process; `_HELD_OUT`: none."""
    held_out: int = 0
    """Number of the held-out microbatch, if it was drawn from held-out text here."""
    tokens: Tensor | None = None
    """(B, T + 1), if it was drawn here."""
    drawn: tuple[int, int, int] | None = None
    """Its epoch, slice and part, if the run counts epochs and it was drawn here."""
    x: Tensor | None = None
    """The stage's input (B, T, C); None where it is the tokens."""
    y: Tensor | None = None
    """The stage's output with its graph, from the forward to the backward pass, unless it is recomputed."""
    mark: Tensor | None = None
    """The mark of the stage's output, by which its gradient is judged (`LinkStatistics.mark`)."""
    y_gradient: Tensor | None = None
    """The gradient of the output, set once it is in the sum."""
    last: Tensor | None = None
    """The last stage's output (B, T, C), set once the head's gradient is in the sum."""

    @property
    def is_whole(self) -> bool:
        """Return whether the sum contains all gradients of this stage for the microbatch."""
        return self.y_gradient is not None and (self.tokens is None or self.last is not None)


class _Versions:
    """The versions of a stage. Where nothing changes the weights under a microbatch there is one: the stage itself."""

    def __init__(self, module: StageModule, replica: Replica, *, are_kept: bool) -> None:
        self._module = module
        self._layout = replica.round_end.layout
        self._are_kept = are_kept
        self._theta = replica.round_end.weights.flat
        self.kept = [] if are_kept else [_Version(module, self._theta)]

    def newest(self, gradient: Tensor) -> _Version:
        """Return the stage with the current fast weights; a new one's gradients are views of ``gradient`` (n,)."""
        if not self._are_kept:
            return self.kept[0]
        mark = self._theta._version  # counts all writes to the vector
        free = None
        for version in self.kept:
            if version.mark == mark:
                return version
            free = version if version.num_users == 0 else free
        if free is None:
            free = _Version(copy.deepcopy(self._module), torch.empty_like(self._theta))
            bind_(free.module, self._layout, free.weights, gradient)
            self.kept.append(free)
        free.weights.copy_(self._theta)
        free.mark = mark
        return free


class _Sums:
    """The sums of gradients: that of the next inner step, and where steps overlap that of the following one."""

    def __init__(self, replica: Replica, *, overlap: bool) -> None:
        self._gradient = replica.gradient
        self._overlap = overlap
        flats = [self._gradient, torch.zeros_like(self._gradient)] if overlap else [self._gradient]
        self._views = [list(replica.round_end.layout.views(flat).values()) for flat in flats]
        self.last = flats[-1]
        """The sum of the latest step that microbatches may begin for, (n,)."""
        self.number = 0
        """Number of the next inner step."""
        self.counts = [0, 0]
        """Numbers of settled microbatches in the sums of the next and the following inner step."""
        self._gradient.zero_()

    def direct(self, microbatch: _Microbatch) -> None:
        """Direct later gradients to the sum of the microbatch's inner step."""
        views = self._views[microbatch.number - self.number]
        for parameter, gradient in zip(microbatch.version.module.parameters(), views, strict=True):
            parameter.grad = gradient

    def advance(self) -> None:
        """Make the following step the next one."""
        self.number += 1
        self.counts = [self.counts[1], 0]
        if self._overlap:
            self._gradient.copy_(self.last)
        self.last.zero_()


class StageWorker(Engine):
    """A replica of one stage. ``sampler`` is given for stage 0 only, which draws the microbatches."""

    replica: Replica

    def __init__(
        self,
        module: StageModule,
        manifest: Manifest,
        sampler: Batches | None,
        *,
        run_id: bytes,
        device: Device,
        recompute: bool = False,
    ) -> None:
        model, pipeline = manifest.model, manifest.pipeline
        replica = Replica(module, manifest, run_id=run_id, device=device)
        super().__init__(device, replica.round_end, replica.checkpoint, replica)
        self._pipeline = pipeline
        self._recompute = recompute or pipeline.recompute
        self.sampler = sampler
        self.microbatches: dict[int, _Microbatch] = {}
        """Those that are not settled, by slot."""
        self._num_drawn = 0
        self._losses: list[float] = []
        self._held_out_losses: dict[int, float] = {}
        self.versions = _Versions(module, replica, are_kept=pipeline.overlap or manifest.rounds.overlap)
        self.sums = _Sums(replica, overlap=pipeline.overlap)
        self._shape = (pipeline.microbatch_size, model.context, model.width)
        sizes = link_bytes(manifest)
        self._codecs = tuple(zip(pipeline.codecs, sizes, strict=True))
        """Codec and bytes of a microbatch's activations, and of their gradient."""
        self.activation_bytes = max(sizes)
        self.memory = memoryview(b"")
        """Shared memory: slot i has incoming activations at 2 i `activation_bytes`, and outgoing ones after them."""
        self.statistics = LinkStatistics(model.width, device.torch_device)

    def inner_steps(self, until: Until) -> None:
        """Implement `Engine.inner_steps`."""
        self._losses.clear()
        super().inner_steps(until)

    def mean_loss(self) -> float | None:
        """Implement `Engine.mean_loss`; only stage 0 knows losses."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def obey(self, command: Work | Settle | TakeInnerStep) -> Worked | InnerStepTaken | None:
        """Implement `Engine.obey`, on the slot's places in `memory`."""
        if isinstance(command, TakeInnerStep):
            return InnerStepTaken(self.step())
        if isinstance(command, Settle):
            self.settle(command.slot, command.is_kept)
            return None
        size, slot, sender = self.activation_bytes, command.slot, command.sender
        places = self.memory[2 * slot * size : 2 * (slot + 1) * size]
        incoming, outgoing = places[:size], places[size:]
        try:
            match command.work:
                case "draw":
                    held_out = command.number if command.is_held_out else None
                    self.draw(slot, outgoing, is_following=command.is_following, held_out=held_out)
                case "forward":
                    follows, is_held_out = command.is_following, command.is_held_out
                    self.forward(slot, incoming, outgoing, is_following=follows, is_held_out=is_held_out, sender=sender)
                case "tail":
                    loss = float(self.tail(slot, incoming, outgoing, sender=sender))
                    if not command.is_held_out:
                        self._losses.append(loss)
                case "backward":
                    self.backward(slot, incoming, outgoing, sender=sender)
        except (ActivationError, NoSliceError, DataError) as error:
            return Worked(str(error), is_outlier=isinstance(error, OutlierError))
        return Worked()

    def draw(self, slot: int, out: Buffer, *, is_following: bool = False, held_out: int | None = None) -> None:
        """Begin the next microbatch of this replica's data, and write its activations to ``out``.

        ``is_following``: for the inner step after the next one that is taken; only where steps overlap. ``held_out``:
        begin this microbatch of the held-out text instead, for its loss alone (`evaluate`).
        Microbatches are consecutive parts of the batches that a learner of the whole model would have. Raises
        `NoSliceError` if there is none now, `DataError` if too little is held out.
        """
        assert self.sampler is not None, "only stage 0 draws data"
        size = self._pipeline.microbatch_size
        num_parts = self.sampler.batch_size // size
        microbatch = self._new_microbatch(is_following, held_out)
        if held_out is not None:
            index, part = divmod(held_out, num_parts)
            batch = self.sampler.held_out_batch(index)
        elif self.slices is None:
            # After a restart: skip the parts of earlier steps.
            number = max(self._num_drawn, self.totals.steps * num_parts)
            index, part = divmod(number, num_parts)
            batch = self.sampler.batch(index)
            self._num_drawn = number + 1
        else:
            microbatch.drawn = epoch, index, part = self.slices.draw()
            batch = self.sampler.slice_batch(epoch, index)
        microbatch.tokens = torch.as_tensor(batch[part * size : (part + 1) * size]).to(self.device.torch_device)
        try:
            self._start(slot, microbatch, out)
        except ActivationError:
            self._settle_slice(microbatch, is_kept=False)
            raise

    def evaluate(self, num_batches: int) -> float:
        """Implement `Engine.evaluate`, on held-out batches that went through all stages since the last call.

        Raises `DataError` if some of them did not.
        """
        assert self.sampler is not None, "only stage 0 draws data"
        self.sampler.held_out_batch(0)  # or why there is none
        losses, self._held_out_losses = self._held_out_losses, {}
        num_microbatches = num_batches * (self.sampler.batch_size // self._pipeline.microbatch_size)
        if len(losses) < num_microbatches:
            raise DataError(
                f"{num_microbatches - len(losses)} of {num_microbatches} microbatches were lost on their way"
            )
        return sum(losses.values()) / num_microbatches

    def forward(
        self,
        slot: int,
        data: Buffer,
        out: Buffer,
        *,
        is_following: bool = False,
        is_held_out: bool = False,
        sender: bytes = b"",
    ) -> None:
        """Compute this stage's output for the activations ``data``, and write it to ``out``.

        ``is_following`` is as in `draw`. ``is_held_out``: only the loss is wanted, so no gradient comes back.
        ``sender`` is the peer by whose earlier activations these are judged; empty: they are not judged. Raises
        `ActivationError` if they are unfit, and keeps nothing of them.
        """
        x = self._decode_activations(data, sender)
        microbatch = self._new_microbatch(is_following, 0 if is_held_out else None)
        microbatch.x = x
        self._start(slot, microbatch, out)

    def tail(self, slot: int, data: Buffer, out: Buffer, *, sender: bytes = b"") -> Tensor:
        """Return the loss of a drawn microbatch with last activations ``data``; write their gradient to ``out``.

        For held-out text there is no gradient, and the loss is kept for `evaluate`. The loss is a scalar on the device,
        in nats a token. ``sender`` is as in `forward`. Raises `ActivationError` if they are unfit, with nothing added.
        """
        microbatch = self.microbatches[slot]
        last = self._decode_activations(data, sender)
        if microbatch.number == _HELD_OUT:
            loss = self._loss(microbatch, last.detach())
            self._held_out_losses[microbatch.held_out] = float(loss)
            return loss
        loss = self._add_tail(microbatch, last, 1.0)
        microbatch.last = last.detach()
        assert last.grad is not None
        self._encode(last.grad, out, is_gradient=True)
        return loss

    def backward(self, slot: int, data: Buffer, out: Buffer | None, *, sender: bytes = b"") -> None:
        """Add a microbatch's gradient, given its output's gradient ``data``; write its input's gradient to ``out``.

        ``sender`` as in `forward`. Raises `ActivationError` if it is unfit, with nothing added.
        """
        microbatch = self.microbatches[slot]
        y_gradient = self._decode(data, is_gradient=True)
        mark = microbatch.mark if sender else None
        if mark is not None and (
            fault := self.statistics.judge_gradient(sender, y_gradient, mark, self.round_end.totals.round)
        ):
            raise OutlierError(fault)
        x_gradient = self._add(microbatch, y_gradient)
        microbatch.y, microbatch.y_gradient = None, y_gradient
        if out is not None and x_gradient is not None:
            self._encode(x_gradient, out, is_gradient=True)

    def settle(self, slot: int, is_kept: bool) -> None:
        """Finish a microbatch: keep its gradient in the sum, or remove what the sum has of it."""
        microbatch = self.microbatches.pop(slot)
        is_kept = is_kept and microbatch.is_whole
        self._settle_slice(microbatch, is_kept=is_kept)
        if is_kept:
            self.sums.counts[microbatch.number - self.sums.number] += 1
        else:
            if microbatch.last is not None:
                self._add_tail(microbatch, microbatch.last.requires_grad_(), -1.0)
            if microbatch.y_gradient is not None:
                self._add(microbatch, -microbatch.y_gradient)
        microbatch.version.num_users -= 1

    def _settle_slice(self, microbatch: _Microbatch, *, is_kept: bool) -> None:
        if microbatch.drawn is not None and self.slices is not None:
            self.slices.settle(*microbatch.drawn, is_kept=is_kept)

    def step(self) -> bool:
        """Take the inner step with the mean of the summed gradients, unless there are none or they are not finite.

        Returns whether the step was taken; the following step is next in either case. Raises `TrainingError` while a
        microbatch of the step is not settled: half of its gradient might be in the sum.
        """
        if num_open := sum(microbatch.number == self.sums.number for microbatch in self.microbatches.values()):
            raise TrainingError(f"{num_open} microbatches are in flight: no step can be taken")
        num_summed = self.sums.counts[0]
        num_skipped, is_fit = self.num_skipped, False
        if num_summed:
            size, context, _ = self._shape
            self.replica.inner_step(num_summed * size * context, num_summed)
            is_fit = self.num_skipped == num_skipped
        self.sums.advance()
        return is_fit

    def _new_microbatch(self, is_following: bool, held_out: int | None) -> _Microbatch:
        number = self.sums.number + is_following if held_out is None else _HELD_OUT
        return _Microbatch(self.versions.newest(self.sums.last), number, held_out or 0)

    def _start(self, slot: int, microbatch: _Microbatch, out: Buffer) -> None:
        if slot in self.microbatches:
            raise TrainingError(f"slot {slot} has a microbatch that is not settled")
        is_to_come_back = microbatch.number != _HELD_OUT
        with torch.set_grad_enabled(is_to_come_back and not self._recompute):
            y = self._advance(microbatch)
        self._encode(y.detach(), out)
        microbatch.y = y if y.requires_grad else None
        microbatch.mark = self.statistics.mark(y) if is_to_come_back else None
        microbatch.version.num_users += 1
        self.microbatches[slot] = microbatch

    def _advance(self, microbatch: _Microbatch) -> Tensor:
        """Return the stage's output (B, T, C) in fp32."""
        stage = microbatch.version.module
        with self.device.autocast():
            if microbatch.x is None:
                assert microbatch.tokens is not None
                return stage.advance(stage.embed(microbatch.tokens[:, :-1])).float()
            return stage.advance(microbatch.x).float()

    def _add(self, microbatch: _Microbatch, y_gradient: Tensor) -> Tensor | None:
        """Add to the parameters' gradients; return the input's gradient, or None if the input is tokens."""
        y = self._advance(microbatch) if microbatch.y is None else microbatch.y
        if microbatch.x is not None:
            microbatch.x.grad = None
        self.sums.direct(microbatch)
        torch.autograd.backward([y], [y_gradient])
        if microbatch.x is None:
            return None
        gradient, microbatch.x.grad = microbatch.x.grad, None
        return gradient

    def _add_tail(self, microbatch: _Microbatch, last: Tensor, sign: float) -> Tensor:
        loss = self._loss(microbatch, last)
        self.sums.direct(microbatch)
        (sign * loss).backward()
        return loss.detach()

    def _loss(self, microbatch: _Microbatch, last: Tensor) -> Tensor:
        assert microbatch.tokens is not None
        stage = microbatch.version.module
        with self.device.autocast(), torch.set_grad_enabled(last.requires_grad):
            return stage.loss(last, microbatch.tokens[:, 1:])

    def _decode_activations(self, data: Buffer, sender: bytes) -> Tensor:
        """Return activations (B, T, C) whose gradient is wanted; raises `ActivationError` if they are unfit."""
        activations = self._decode(data)
        if sender and (fault := self.statistics.judge_activations(sender, activations, self.round_end.totals.round)):
            raise OutlierError(fault)
        return activations.requires_grad_()

    def _decode(self, data: Buffer, *, is_gradient: bool = False) -> Tensor:
        """Return activations (B, T, C), or their gradient; raises `ActivationError` if they are unfit."""
        codec, size = self._codecs[is_gradient]
        try:  # a place in memory is as large as the larger of both
            return decode(codec, data[:size], math.prod(self._shape), self.device.torch_device).view(self._shape)
        except CodecError as error:
            raise ActivationError(f"activations that cannot be used: {error}") from error

    def _encode(self, values: Tensor, out: Buffer, *, is_gradient: bool = False) -> None:
        """Raise `ActivationError` if the values (B, T, C) cannot be encoded."""
        try:
            encode(self._codecs[is_gradient][0], values.float().flatten(), out)
        except CodecError as error:
            raise ActivationError(f"what this stage computed cannot be sent: {error}") from error


def build_stage_worker(
    manifest: Manifest,
    *,
    stage: int,
    run_id: bytes,
    author: bytes,
    settings: TrainerSettings = DEFAULTS,
    bring: Bring = NOTHING,
) -> StageWorker:
    """Return a stage's replica from a run's manifest and this node's settings; only stage 0 reads text.

    Of the settings, ``recompute`` is as ``pipeline.recompute``, of this node alone.

    Raises `DataError` if the text or tokenizer is unfit, `TrainingError` if the device or stage does not exist.
    """
    sampler = build_sampler(manifest, run_id, author, bring) if stage == 0 else None
    worker = StageWorker(
        build_stage(manifest.model, manifest.seed, stage, settings.allow_model),
        manifest,
        sampler,
        run_id=run_id,
        device=choose_device(settings.device),
        recompute=settings.recompute,
    )
    if sampler is not None and manifest.data.epochs:
        worker.slices = sampler.slices(manifest.inner.batch_size // manifest.pipeline.microbatch_size)
    return worker

"""One stage's part in the inner steps: what it computes for microbatches that travel through all stages and back.

A microbatch of B sequences of T tokens goes its way as activations (B, T, C): `draw` at the stage 0 that has its
tokens, `forward` at one replica of each other stage, and back at the first, `tail`: logits, loss, and the gradient of
the last activations. That gradient goes back over the same replicas, `backward`, the last time at the one that drew. A
stage sums the gradients of its microbatches; `step` divides by their number and takes the inner step.

Somewhere on its way back a microbatch may be lost, when later stages have its gradient in their sums already, and
earlier ones will never have it. So a stage keeps what it needs to take a microbatch's gradient out again, its input and
the gradient of its output, until it hears by `settle` whether all stages have it. Taken out is the same number that was
added, so what remains is a rounding of the sum (2^-24 of it), as with any other order of adding.

Memory: what is kept of each microbatch from its first call to `settle`, besides its tokens, is the graph of its forward
pass (with ``recompute`` only its input), and from `backward` on its input and the gradient of its output. Callers bound
the number of microbatches, which are known by slots 0, 1, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from .codec import Buffer, decode, encode, encoded_size
from .config import DataConfig, InnerConfig, ModelConfig, OuterConfig, PipelineConfig, TokenizerConfig
from .data import Sampler, build_sampler
from .device import Device, choose_device
from .errors import ActivationError, CodecError, TrainingError
from .model import cross_entropy
from .replica import Replica
from .stages import as_stage, build_stage


@dataclass(slots=True)
class _Microbatch:
    """What a stage keeps of a microbatch until it is settled."""

    tokens: Tensor | None = None
    """(B, T + 1), where it was drawn."""
    x: Tensor | None = None
    """The stage's input (B, T, C); None where it is the tokens."""
    y: Tensor | None = None
    """The stage's output with its graph, from the forward pass to the backward, unless that is to be recomputed."""
    y_gradient: Tensor | None = None
    """Once it is in the sum."""
    last: Tensor | None = None
    """The last stage's output (B, T, C), once the head's gradient is in the sum."""

    @property
    def is_whole(self) -> bool:
        """Whether all that this stage adds to its gradient for it is in the sum."""
        return self.y_gradient is not None and (self.tokens is None or self.last is not None)


class StageWorker(Replica):
    """A replica of one stage. ``sampler``: of stage 0, which draws the microbatches."""

    def __init__(
        self,
        module: nn.Module,
        model: ModelConfig,
        inner: InnerConfig,
        outer: OuterConfig,
        pipeline: PipelineConfig,
        sampler: Sampler | None,
        *,
        run_id: bytes,
        device: Device,
    ) -> None:
        super().__init__(module, inner, outer, run_id=run_id, device=device)
        self._stage = as_stage(module)
        self._pipeline = pipeline
        self._sampler = sampler
        self._shape = (pipeline.microbatch_size, model.context, model.width)
        self._microbatches: dict[int, _Microbatch] = {}
        self._num_drawn = 0
        self.num_summed = 0
        """Microbatches in the gradient."""
        self.clear_gradient()

    @property
    def activation_bytes(self) -> int:
        """Of one microbatch's activations, or their gradient, as they travel."""
        return encoded_size(self._pipeline.codec, self._num_activations)

    @property
    def num_in_flight(self) -> int:
        """Microbatches that are not settled."""
        return len(self._microbatches)

    @property
    def _num_activations(self) -> int:
        size, context, width = self._shape
        return size * context * width

    def draw(self, slot: int, out: Buffer) -> None:
        """Begin the next microbatch of this replica's data, and write its activations to ``out``.

        Microbatches are consecutive parts of the batches that a learner of the whole model would have.
        """
        if self._sampler is None:
            raise TrainingError("only stage 0 draws data")
        size = self._pipeline.microbatch_size
        num_parts = self._sampler.batch_size // size
        number = max(self._num_drawn, self.steps * num_parts)  # after a restart: past those of earlier steps
        batch, part = divmod(number, num_parts)
        tokens = self._sampler.batch(batch)[part * size : (part + 1) * size]  # (B, T + 1)
        self._start(slot, _Microbatch(tokens=torch.as_tensor(tokens).to(self.device.torch_device)), out)
        self._num_drawn = number + 1

    def forward(self, slot: int, data: Buffer, out: Buffer) -> None:
        """Take the activations ``data`` through this stage, and write those that come out to ``out``.

        Raises `ActivationError` if they are unfit, and keeps nothing of them.
        """
        self._start(slot, _Microbatch(x=self._decode_activations(data)), out)

    def tail(self, slot: int, data: Buffer, out: Buffer) -> Tensor:
        """The loss of a drawn microbatch whose last activations are ``data``; writes their gradient to ``out``.

        A scalar left on the device, in nats a token. Raises `ActivationError` if they are unfit, with nothing added.
        """
        microbatch = self._microbatches[slot]
        last = self._decode_activations(data)
        loss = self._add_tail(microbatch, last, 1.0)
        microbatch.last = last.detach()
        assert last.grad is not None
        self._encode_activations(last.grad, out)
        return loss

    def backward(self, slot: int, data: Buffer, out: Buffer | None) -> None:
        """Add a microbatch's gradient, given that of this stage's output; writes that of its input to ``out``.

        Raises `ActivationError` if it is unfit, with nothing added.
        """
        microbatch = self._microbatches[slot]
        y_gradient = self._decode_activations(data, is_input=False)
        x_gradient = self._add(microbatch, y_gradient)
        microbatch.y, microbatch.y_gradient = None, y_gradient
        if out is not None and x_gradient is not None:
            self._encode_activations(x_gradient, out)

    def settle(self, slot: int, is_kept: bool) -> None:
        """A microbatch is at its end: its gradient stays in the sum, or what is there of it is taken out again."""
        microbatch = self._microbatches.pop(slot)
        if is_kept and microbatch.is_whole:
            self.num_summed += 1
            return
        if microbatch.last is not None:
            self._add_tail(microbatch, microbatch.last.requires_grad_(), -1.0)
        if microbatch.y_gradient is not None:
            self._add(microbatch, -microbatch.y_gradient)

    def step(self) -> bool:
        """The inner step with the mean of the gradients in the sum. Not if there are none, or if they are not finite.

        Returns whether it was taken. Raises `TrainingError` while a microbatch is not settled: half of its gradient
        might be in the sum.
        """
        if self._microbatches:
            raise TrainingError(f"{len(self._microbatches)} microbatches are in flight: no step can be taken")
        is_fit = self.num_summed > 0 and bool(torch.isfinite(vector_norm(self._gradient)))
        if is_fit:
            size, context, _ = self._shape
            self.inner_step(self.num_summed * size * context, self.num_summed)
        self.num_summed = 0
        self.clear_gradient()
        return is_fit

    def _start(self, slot: int, microbatch: _Microbatch, out: Buffer) -> None:
        if slot in self._microbatches:
            raise TrainingError(f"slot {slot} has a microbatch that is not settled")
        with torch.set_grad_enabled(not self._pipeline.recompute):
            y = self._advance(microbatch)
        self._encode_activations(y.detach(), out)
        microbatch.y = None if self._pipeline.recompute else y
        self._microbatches[slot] = microbatch

    def _advance(self, microbatch: _Microbatch) -> Tensor:
        """The stage's output (B, T, C) in fp32."""
        with self.device.autocast():
            if microbatch.x is None:
                assert microbatch.tokens is not None
                return self._stage.advance(self._stage.embed(microbatch.tokens[:, :-1])).float()
            return self._stage.advance(microbatch.x).float()

    def _add(self, microbatch: _Microbatch, y_gradient: Tensor) -> Tensor | None:
        """Add to the gradients of the parameters; that of the input, if it is not tokens."""
        y = self._advance(microbatch) if microbatch.y is None else microbatch.y
        if microbatch.x is not None:
            microbatch.x.grad = None
        torch.autograd.backward([y], [y_gradient])
        if microbatch.x is None:
            return None
        gradient, microbatch.x.grad = microbatch.x.grad, None
        return gradient

    def _add_tail(self, microbatch: _Microbatch, last: Tensor, sign: float) -> Tensor:
        assert microbatch.tokens is not None
        with self.device.autocast():
            loss = cross_entropy(self._stage.logits(last), microbatch.tokens[:, 1:])
        (sign * loss).backward()
        return loss.detach()

    def _decode_activations(self, data: Buffer, *, is_input: bool = True) -> Tensor:
        try:
            values = decode(self._pipeline.codec, data, self._num_activations, self.device.torch_device)
        except CodecError as error:
            raise ActivationError(f"activations that cannot be used: {error}") from error
        return values.view(self._shape).requires_grad_(is_input)

    def _encode_activations(self, values: Tensor, out: Buffer) -> None:
        try:
            encode(self._pipeline.codec, values.float().flatten(), out)
        except CodecError as error:
            raise ActivationError(f"what this stage computed cannot be sent: {error}") from error


def build_stage_worker(
    model: ModelConfig,
    inner: InnerConfig,
    outer: OuterConfig,
    data: DataConfig,
    tokenizer: TokenizerConfig,
    pipeline: PipelineConfig,
    *,
    stage: int,
    seed: int,
    run_id: bytes,
    author: bytes,
    device: str = "auto",
    text_paths: Sequence[Path] = (),
    tokenizer_path: Path | None = None,
) -> StageWorker:
    """A stage's replica from a run's settings and this node's own; text is read by stage 0 alone.

    Raises `DataError` if the text or the tokenizer will not do, `TrainingError` if the device or stage is not there.
    """
    sampler = None
    if stage == 0:
        sampler = build_sampler(model, inner, data, tokenizer, run_id, author, text_paths, tokenizer_path)
    return StageWorker(
        build_stage(model, seed, stage),
        model,
        inner,
        outer,
        pipeline,
        sampler,
        run_id=run_id,
        device=choose_device(device),
    )

"""Who learns the whole model alone, on its own batches: the replica of a run without stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from .config import DataConfig, InnerConfig, ModelConfig, OuterConfig, TokenizerConfig
from .data import Sampler, build_sampler
from .device import Device, choose_device
from .model import language_loss
from .replica import Replica
from .stages import build_module


class Learner(Replica):
    """A replica of the whole model, and the batches that it learns from.

    ``is_compiled``: whether its inner steps run through `torch.compile`, which pays on a GPU after a minute's work.
    """

    def __init__(
        self,
        module: nn.Module,
        inner: InnerConfig,
        outer: OuterConfig,
        sampler: Sampler,
        *,
        run_id: bytes,
        device: Device,
        is_compiled: bool = False,
    ) -> None:
        super().__init__(module, inner, outer, run_id=run_id, device=device)
        self._sampler = sampler
        self._forward = cast("nn.Module", torch.compile(self._module)) if is_compiled else self._module

    def learn(self) -> Tensor:
        """One inner step on the next batch; returns the loss before it, a scalar left on the device (no waiting)."""
        tokens = self._batch(self._sampler.batch(self.steps))  # (B, T + 1)
        self.clear_gradient()
        with self.device.autocast():
            loss = language_loss(self._forward, tokens)
        loss.backward()
        self.inner_step(self._sampler.batch_size * self._sampler.context)
        return loss.detach()

    @torch.no_grad()
    def validation_loss(self, num_batches: int = 8) -> float:
        """Mean loss of the fast weights on held-out batches, in nats a token; the batches are always the same.

        Raises `DataError` if too little text is held out.
        """
        losses = []
        for index in range(num_batches):
            with self.device.autocast():
                losses.append(language_loss(self._module, self._batch(self._sampler.held_out_batch(index))))
        return float(torch.stack(losses).mean())

    def _batch(self, tokens: object) -> Tensor:
        batch = torch.as_tensor(tokens)
        if self.device.torch_device.type == "cuda":
            batch = batch.pin_memory()  # from other memory, the copy might wait for what is queued
        return batch.to(self.device.torch_device, non_blocking=True)


def build_learner(
    model: ModelConfig,
    inner: InnerConfig,
    outer: OuterConfig,
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    seed: int,
    run_id: bytes,
    author: bytes,
    device: str = "auto",
    text_paths: Sequence[Path] = (),
    tokenizer_path: Path | None = None,
    is_compiled: bool = False,
) -> Learner:
    """A learner from a run's settings and this node's own: its key, its device, where its text lies.

    Raises `DataError` if the text or the tokenizer will not do, `TrainingError` if the device is not there.
    """
    chosen = choose_device(device)
    sampler = build_sampler(model, inner, data, tokenizer, run_id, author, text_paths, tokenizer_path)
    module = build_module(model, seed)
    return Learner(module, inner, outer, sampler, run_id=run_id, device=chosen, is_compiled=is_compiled)

"""A plain training loop, in a process of its own: the baseline of a node's training.

It has the same model, batches, precision and loss as a node, `torch.optim.AdamW` (fused on CUDA), clipping, and nothing
else.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from farandole.node.store.run_file import manifest_of
from farandole.training.data import Sampler, load_text
from farandole.training.device import choose_device
from farandole.training.model import build_model, language_loss
from farandole.training.tokenizer import load_tokenizer

from .server import Server


class PlainLoop(msgspec.Struct, frozen=True):
    """The settings of a plain loop."""

    run: dict[str, object]
    """The run's settings, as in a run file."""
    device: str
    warmup_seconds: float
    """Not counted: kernels are chosen, caches filled, and the other loops started in this time."""
    seconds: float
    author: int
    """Index of this loop: each has batches of its own."""


class PlainRate(msgspec.Struct, frozen=True):
    """The result of a plain loop."""

    tokens_per_second: float
    device: str
    """Name of the device."""


def run(settings: PlainLoop) -> PlainRate:
    """Train for the warm-up and the measured time."""
    manifest = manifest_of(settings.run, Path(), 0.0)
    model, inner = manifest.model, manifest.inner
    device = choose_device(settings.device)
    sampler = Sampler(
        load_text(manifest.data, load_tokenizer(manifest.tokenizer, None)),
        run_id=bytes(32),
        author=settings.author.to_bytes(32, "little"),
        batch_size=inner.batch_size,
        context=model.context,
        vocabulary=model.vocabulary,
    )
    module = build_model(model, 0).to(device.torch_device)
    is_cuda = device.torch_device.type == "cuda"
    optimizer = torch.optim.AdamW(
        module.parameters(), inner.learning_rate, (inner.beta1, inner.beta2), weight_decay=0.0, fused=is_cuda or None
    )

    def finish() -> float:
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    step, counted_from, started_at = 0, 0, finish()
    counted_at = started_at
    while (now := time.perf_counter()) < started_at + settings.warmup_seconds + settings.seconds:
        if not counted_from and now >= started_at + settings.warmup_seconds:
            counted_at, counted_from = finish(), step
        tokens = torch.as_tensor(sampler.batch(step)).to(device.torch_device, non_blocking=True)
        optimizer.zero_grad()
        with device.autocast():
            loss = language_loss(module, tokens)
        loss.backward()
        if inner.clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), inner.clip)
        optimizer.step()
        step += 1
    seconds = finish() - counted_at
    return PlainRate((step - counted_from) * inner.batch_size * model.context / seconds, device.description)


class PlainTrainer:
    """A process that runs a loop."""

    def __init__(self, server: Server) -> None:
        torch.set_num_threads(1)  # as a testnet's nodes have

    def learn(self, **settings: Any) -> dict[str, Any]:
        """Run a loop with the settings of `PlainLoop`."""
        rate: dict[str, Any] = msgspec.to_builtins(run(PlainLoop(**settings)))
        return rate

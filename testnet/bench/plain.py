"""A plain training loop, in a process of its own: the baseline of a node's training.

It has the same model, batches, precision and loss as a node, `torch.optim.AdamW` (fused on CUDA), clipping, and nothing
else.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import torch

from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.manifest import Manifest
from farandole.training.base.device import Device, choose_device
from farandole.training.data.dataset import build_sampler
from farandole.training.engine.learner import Learner, build_learner
from farandole.training.model.model import build_model, language_loss

from .server import Server

RUN_ID: Final = bytes(32)


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


class EngineRate(msgspec.Struct, frozen=True):
    """Inner steps of a node's engine and of a plain loop in turns, in one process: medians in tokens per second."""

    plain_tokens_per_second: float
    engine_tokens_per_second: float
    ratio: float
    """The engine's rate over the plain loop's, the median over pairs of turns."""


class PlainSteps:
    """Inner steps in plain PyTorch."""

    def __init__(self, manifest: Manifest, author: bytes, device: Device) -> None:
        model, self._inner, self._device = manifest.model, manifest.inner, device
        self._sampler = build_sampler(manifest, RUN_ID, author)
        self._module = build_model(model, 0).to(device.torch_device)
        self._step = 0
        inner = self._inner
        self._optimizer = torch.optim.AdamW(
            self._module.parameters(),
            inner.learning_rate,
            (inner.beta1, inner.beta2),
            weight_decay=0.0,
            fused=device.torch_device.type == "cuda" or None,
        )

    def learn(self) -> None:
        """Take a step."""
        tokens = torch.as_tensor(self._sampler.batch(self._step)).to(self._device.torch_device, non_blocking=True)
        self._optimizer.zero_grad()
        with self._device.autocast():
            loss = language_loss(self._module, tokens)
        loss.backward()
        if self._inner.clip:
            torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._inner.clip)
        self._optimizer.step()
        self._step += 1


def run(settings: PlainLoop) -> PlainRate:
    """Train for the warm-up and the measured time."""
    manifest, device = manifest_of(settings.run, Path(), 0.0), choose_device(settings.device)
    steps = PlainSteps(manifest, settings.author.to_bytes(32, "little"), device)
    rate_of(steps, manifest, device, settings.warmup_seconds)
    return PlainRate(rate_of(steps, manifest, device, settings.seconds), device.description)


def compare(run: dict[str, object], device_name: str, turns: int, seconds: float) -> EngineRate:
    """Train with a node's engine and with a plain loop in turns of ``seconds``, on the same batches."""
    manifest, device, author = manifest_of(run, Path(), 0.0), choose_device(device_name), bytes(32)
    plain = PlainSteps(manifest, author, device)
    engine = build_learner(manifest, run_id=RUN_ID, author=author, device=device_name)
    turns += 1  # in the first, kernels are chosen and caches filled
    rates = [rate_of(learner, manifest, device, seconds) for _ in range(turns) for learner in (plain, engine)][2:]
    pairs = list(zip(rates[::2], rates[1::2], strict=True))
    ratio = median(fast / slow for slow, fast in pairs)
    return EngineRate(median(slow for slow, _ in pairs), median(fast for _, fast in pairs), ratio)


def rate_of(learner: PlainSteps | Learner, manifest: Manifest, device: Device, seconds: float) -> float:
    """Take inner steps for this time; return tokens per second."""

    def now() -> float:
        if device.torch_device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    began_at, num_steps = now(), 0
    while time.perf_counter() < began_at + seconds or not num_steps:
        learner.learn()
        num_steps += 1
    return num_steps * manifest.inner.batch_size * manifest.model.context / (now() - began_at)


class PlainTrainer:
    """A process that runs a loop."""

    def __init__(self, server: Server) -> None:
        torch.set_num_threads(1)  # as a testnet's nodes have

    def learn(self, **settings: Any) -> dict[str, Any]:
        """Run a loop with the settings of `PlainLoop`."""
        rate: dict[str, Any] = msgspec.to_builtins(run(PlainLoop(**settings)))
        return rate

    def compare(self, run: dict[str, object], device: str, turns: int, seconds: float) -> dict[str, Any]:
        """See `compare`."""
        rate: dict[str, Any] = msgspec.to_builtins(compare(run, device, turns, seconds))
        return rate

"""The parts of the benchmarks of training and saving: a plain loop, and trainers that end rounds, or save in one way.

The plain loop has the same model, batches, precision and loss as a node, `torch.optim.AdamW` (fused on CUDA), clipping,
and nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

import torch

from farandole.node.base.system.tuning import TRAINING_NICENESS
from farandole.node.store.folder import CheckpointFolder, Saver
from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.manifest import Manifest, manifest_from_dict
from farandole.protocol.trainer.trainer_messages import Saved, TrainerSettings
from farandole.training.base.device import Device, choose_device
from farandole.training.base.durable import sync_folder
from farandole.training.data.dataset import build_sampler
from farandole.training.engine.learner import Learner, build_learner
from farandole.training.model.model import build_model, language_loss
from farandole.training.screening.rule import Encounter

RUN_ID: Final = bytes(32)
# A partner that the guard has not met before, and of whose contribution it asks for the losses.
_PARTNER: Final = Encounter(b"partner".ljust(32), own_tokens=1, partner_tokens=1, chance=0.0)
Result = TypeVar("Result")


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

    def __init__(self, stack: AsyncExitStack) -> None:
        torch.set_num_threads(1)  # as a testnet's nodes have

    def learn(
        self, run: dict[str, object], device: str, warmup_seconds: float, seconds: float, author: int
    ) -> dict[str, Any]:
        """Train plainly; the warm-up is not counted: kernels are chosen, and the other loops start in this time.

        ``author`` is the loop's index: each has batches of its own.
        """
        manifest, chosen = manifest_of(run, Path(), 0.0), choose_device(device)
        steps = PlainSteps(manifest, author.to_bytes(32, "little"), chosen)
        rate_of(steps, manifest, chosen, warmup_seconds)
        return {"tokens_per_second": rate_of(steps, manifest, chosen, seconds), "device": chosen.description}

    def compare(self, run: dict[str, object], device: str, turns: int, seconds: float) -> dict[str, Any]:
        """Train with a node's engine and with a plain loop in turns of ``seconds``, on the same batches."""
        manifest, chosen, author = manifest_of(run, Path(), 0.0), choose_device(device), bytes(32)
        plain = PlainSteps(manifest, author, chosen)
        engine = build_learner(manifest, run_id=RUN_ID, author=author, settings=TrainerSettings(device=device))
        turns += 1  # in the first, kernels are chosen and caches filled
        rates = [rate_of(learner, manifest, chosen, seconds) for _ in range(turns) for learner in (plain, engine)][2:]
        return {"ratio": median(fast / slow for slow, fast in zip(rates[::2], rates[1::2], strict=True))}


class EndingTrainer:
    """A trainer that ends rounds, and times each part of it; call `begin` first, once."""

    _learner: Learner

    def __init__(self, stack: AsyncExitStack) -> None:
        os.nice(TRAINING_NICENESS)  # as trainers are
        self._seconds: dict[str, float] = {}

    def begin(self, manifest: dict[str, Any], device: str, path: str) -> dict[str, Any]:
        """Build the engine and take the first step, which allocates."""
        self._learner = build_learner(
            manifest_from_dict(manifest), run_id=RUN_ID, author=bytes(32), settings=TrainerSettings(device=device)
        )
        self._path = Path(path)
        self._learner.learn()
        self._outgoing, self._incoming = (bytearray(self._learner.round_end.contribution_bytes) for _ in range(2))
        for memory in (self._outgoing, self._incoming):
            self._learner.round_end.outer.copier.pin(memoryview(memory))
        return {"num_parameters": self._learner.checkpoint.layout.num_elements}

    def play(self) -> dict[str, Any]:
        """End a round with a partner whose contribution equals this one; return each part's seconds."""
        learner, self._seconds = self._learner, {}
        learner.learn()

        def encode() -> int:
            size = learner.round_end.contribution()
            learner.round_end.encode(memoryview(self._outgoing)[:size])
            return size

        size = self._time("encode", encode)
        incoming = memoryview(self._incoming)[:size]
        incoming[:] = memoryview(self._outgoing)[:size]
        self._time("decode", lambda: learner.round_end.take_in(incoming, size))
        self._time("judge", lambda: learner.round_end.screen(incoming, _PARTNER))
        self._time("outer step", lambda: learner.round_end.apply(incoming, _PARTNER))
        saved = self._time("save", lambda: learner.checkpoint.save(self._path))
        self._time("load", lambda: learner.checkpoint.load(self._path, saved.hashes))
        return {"seconds": self._seconds, "checkpoint_bytes": self._path.stat().st_size}

    def _time(self, part: str, call: Callable[[], Result]) -> Result:
        began_at = time.perf_counter()
        result = call()
        if self._learner.device.torch_device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds[part] = time.perf_counter() - began_at
        return result


class SavingTrainer:
    """Trains, and saves at the beginning of each round; `begin` must be called once, first."""

    _learner: Learner
    _save: Callable[[], None]

    def __init__(self, stack: AsyncExitStack) -> None:
        os.nice(TRAINING_NICENESS)  # as trainers are
        self._reports: list[tuple[float, Saved]] = []

    def begin(self, manifest: dict[str, Any], way: str, device: str, threads: int, folder: str) -> dict[str, Any]:
        """Set up the trainer; ``way`` is none, behind, or torch, which is `torch.save` and fsync."""
        torch.set_num_threads(threads)
        checked = manifest_from_dict(manifest)
        self._learner = build_learner(checked, run_id=RUN_ID, author=bytes(32), settings=TrainerSettings(device=device))
        self._folder = CheckpointFolder(Path(folder), 0)
        self._folder.path.mkdir(parents=True)
        self._saver = Saver(self._folder, lambda saved: self._reports.append((time.monotonic(), saved)))
        self._save = {
            "none": lambda: None,
            "behind": lambda: self._saver.save_behind(self._learner.checkpoint.snapshot()),
            "torch": self._torch_save,
        }[way]
        self._take_step()  # one-time allocations happen here
        return {}

    def play(self, steps: int) -> dict[str, Any]:
        """Run a round (a save, inner steps, an outer step); return its duration and the save's, until durable."""
        self._reports.clear()
        began_at = time.monotonic()
        self._save()
        held = time.monotonic() - began_at
        for _ in range(steps):
            self._take_step()
        self._learner.round_end.apply(None)
        self._synchronize()
        figures = {"seconds": time.monotonic() - began_at, "held_seconds": held}
        self._saver.wait()
        for durable_at, saved in self._reports:
            if saved.problem:
                raise OSError(saved.problem)
            figures |= {"write_seconds": durable_at - began_at, "size": saved.size}
        return figures

    def _take_step(self) -> None:
        self._learner.learn()
        self._synchronize()

    def _synchronize(self) -> None:
        """Wait for the GPU's queue, so that queued work is in the time."""
        if self._learner.device.torch_device.type == "cuda":
            torch.cuda.synchronize()

    def _torch_save(self) -> None:
        temporary, path = self._folder.path / "torch.tmp", self._folder.path / "torch"
        with temporary.open("wb") as file:
            torch.save(self._learner.checkpoint.vectors(), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(self._folder.path)
        counters = self._learner.checkpoint.counters
        saved = Saved(counters.round, counters.steps, counters.tokens, str(path), path.stat().st_size)
        self._reports.append((time.monotonic(), saved))

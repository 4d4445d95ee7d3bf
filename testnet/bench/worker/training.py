"""The parts of the benchmarks of training and saving: a plain loop, and trainers that end rounds, or save.

The plain loop has the same model, batches, precision and loss as a node, `torch.optim.AdamW` (fused on CUDA), clipping,
and nothing else.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
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
from farandole.training.engine.learner import build_learner
from farandole.training.model.model import build_model, language_loss
from farandole.training.screening.rule import Encounter

RUN_ID: Final = bytes(32)
# A partner that the guard has not met before, and of whose contribution it asks for the losses.
_PARTNER: Final = Encounter(b"partner".ljust(32), own_tokens=1, partner_tokens=1, chance=0.0)
Result = TypeVar("Result")


def plain_steps(manifest: Manifest, author: bytes, device: Device) -> Callable[[], None]:
    """Return a function that takes the next inner step in plain PyTorch."""
    model, inner = manifest.model, manifest.inner
    batches = map(build_sampler(manifest, RUN_ID, author).batch, itertools.count())
    module = build_model(model, 0).to(device.torch_device)
    optimizer = torch.optim.AdamW(
        module.parameters(),
        inner.learning_rate,
        (inner.beta1, inner.beta2),
        weight_decay=0.0,
        fused=device.torch_device.type == "cuda" or None,
    )

    def learn() -> None:
        tokens = torch.as_tensor(next(batches)).to(device.torch_device, non_blocking=True)
        optimizer.zero_grad()
        with device.autocast():
            loss = language_loss(module, tokens)
        loss.backward()
        if inner.clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), inner.clip)
        optimizer.step()

    return learn


def rate_of(learn: Callable[[], object], manifest: Manifest, device: Device, seconds: float) -> float:
    """Take inner steps for this time; return tokens per second."""
    synchronize(device)
    began_at, num_steps = time.perf_counter(), 0
    while time.perf_counter() < began_at + seconds or not num_steps:
        learn()
        num_steps += 1
    synchronize(device)
    return num_steps * manifest.inner.batch_size * manifest.model.context / (time.perf_counter() - began_at)


def synchronize(device: Device) -> None:
    """Wait for the GPU's queue, so that queued work is in the time."""
    if device.torch_device.type == "cuda":
        torch.cuda.synchronize()


def learn_plainly(
    run: dict[str, object], device: str, warmup_seconds: float, seconds: float, author: int
) -> dict[str, Any]:
    """Train plainly; the warm-up is not counted: kernels are chosen, and the other loops start in this time.

    ``author`` is the loop's index: each has batches of its own.
    """
    torch.set_num_threads(1)  # as a testnet's nodes have
    manifest, chosen = manifest_of(run, Path(), 0.0), choose_device(device)
    learn = plain_steps(manifest, author.to_bytes(32, "little"), chosen)
    rate_of(learn, manifest, chosen, warmup_seconds)
    return {"tokens_per_second": rate_of(learn, manifest, chosen, seconds), "device": chosen.description}


def compare(run: dict[str, object], device: str, turns: int, seconds: float) -> dict[str, Any]:
    """Train with a node's engine and with a plain loop in turns of ``seconds``, on the same batches."""
    torch.set_num_threads(1)
    manifest, chosen, author = manifest_of(run, Path(), 0.0), choose_device(device), bytes(32)
    engine = build_learner(manifest, run_id=RUN_ID, author=author, settings=TrainerSettings(device=device))
    loops = plain_steps(manifest, author, chosen), engine.learn
    turns += 1  # in the first, kernels are chosen and caches filled
    rates = [rate_of(learn, manifest, chosen, seconds) for _ in range(turns) for learn in loops][2:]
    return {"ratio": median(fast / slow for slow, fast in zip(rates[::2], rates[1::2], strict=True))}


def end_rounds(run: dict[str, object], device: str, path: str, turns: int) -> dict[str, Any]:
    """End rounds with a partner whose contribution equals this one; return each part's seconds, medians.

    The first round, which maps memory, is not counted. The checkpoint is saved to ``path``.
    """
    os.nice(TRAINING_NICENESS)  # as trainers are
    manifest = manifest_of(run, Path(), 0.0)
    learner = build_learner(manifest, run_id=RUN_ID, author=bytes(32), settings=TrainerSettings(device=device))
    end = learner.round_end
    outgoing, incoming = (memoryview(bytearray(end.contribution_bytes)) for _ in range(2))
    for memory in (outgoing, incoming):
        end.outer.copier.pin(memory)
    seconds: defaultdict[str, list[float]] = defaultdict(list)

    def timed(part: str, call: Callable[[], Result]) -> Result:
        began_at = time.perf_counter()
        result = call()
        synchronize(learner.device)
        seconds[part].append(time.perf_counter() - began_at)
        return result

    def encode() -> int:
        size = end.contribution()
        end.encode(outgoing[:size])
        return size

    for _ in range(turns + 1):
        learner.learn()
        size = timed("encode", encode)
        received = incoming[:size]
        received[:] = outgoing[:size]
        timed("decode", partial(end.take_in, received, size))
        timed("judge", partial(end.screen, received, _PARTNER))
        timed("outer step", partial(end.apply, received, _PARTNER))
        saved = timed("save", partial(learner.checkpoint.save, Path(path)))
        timed("load", partial(learner.checkpoint.load, Path(path), saved.hashes))
    return {"seconds": {part: median(each[1:]) for part, each in seconds.items()}}


def save_in_turns(manifest: dict[str, Any], folder: str, turns: int, seconds: float) -> dict[str, Any]:
    """Play rounds of about ``seconds``: a save, inner steps, an outer step; each way to save has its turn.

    The ways are none, behind, and torch, which is `torch.save` and fsync. Return the rounds of each: their duration,
    how long the save held the trainer, and how long it took until it was durable.
    """
    os.nice(TRAINING_NICENESS)  # as trainers are
    torch.set_num_threads(1)
    checked = manifest_from_dict(manifest)
    learner = build_learner(checked, run_id=RUN_ID, author=bytes(32), settings=TrainerSettings(device="cpu"))
    kept = CheckpointFolder(Path(folder), 0)
    kept.path.mkdir(parents=True)
    reports: list[tuple[float, Saved]] = []
    saver = Saver(kept, lambda saved: reports.append((time.monotonic(), saved)))

    def save_with_torch() -> None:
        temporary, path = kept.path / "torch.tmp", kept.path / "torch"
        with temporary.open("wb") as file:
            torch.save(learner.checkpoint.vectors(), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(kept.path)
        reports.append((time.monotonic(), Saved(0, 0, 0, str(path), path.stat().st_size)))

    ways: dict[str, Callable[[], object]] = {
        "none": lambda: None,
        "behind": lambda: saver.save_behind(learner.checkpoint.snapshot()),
        "torch": save_with_torch,
    }

    def play(way: str, steps: int) -> dict[str, float]:
        reports.clear()
        began_at = time.monotonic()
        ways[way]()
        held = time.monotonic() - began_at
        for _ in range(steps):
            learner.learn()
        learner.round_end.apply(None)
        figures = {"seconds": time.monotonic() - began_at, "held_seconds": held}
        saver.wait()
        for durable_at, saved in reports:
            if saved.problem:
                raise OSError(saved.problem)
            figures |= {"write_seconds": durable_at - began_at, "size": saved.size}
        return figures

    for way in ways:  # memory for a snapshot, the file's first blocks: obtained once
        play(way, 1)
    steps = max(1, math.ceil(seconds / play("none", 1)["seconds"]))
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for turn in range(turns):
        for way in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            rounds[way].append(play(way, steps))
    return {"rounds": rounds}

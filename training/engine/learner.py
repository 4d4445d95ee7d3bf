"""The local engine: the whole model on one device, which learns from batches of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer.trainer_messages import Replay, Replayed, TrainerSettings

from ..base.determinism import build, device_class
from ..base.device import Device, choose_device, is_out_of_memory
from ..base.errors import TrainingError
from ..data.batches import Batch, Batches
from ..data.dataset import NOTHING, Bring, build_sampler
from ..model.model import Transformer, language_loss
from ..model.stages import build_module
from ..outer.contribution import Exam
from .engine import Engine, Until
from .replica import Replica

# Of the GPU, for each parameter: 18 for training, 20 for slow weights, momentum and contributions.
BYTES_WITH_AVERAGING: Final = 38

# Held-out sequences are evaluated together up to this number of tokens: below it, a forward pass takes as long as
# reading the weights does. That is less memory than a microbatch's gradient takes.
TOKENS_AT_ONCE: Final = 1_024
DEFAULTS: Final = TrainerSettings()


class HeldOutLoss:
    """The loss of a module on text that it has not trained on; ``size``: sequences taken at once."""

    def __init__(self, module: nn.Module, sampler: Batches, device: Device, size: int) -> None:
        self._module = module
        self._sampler = sampler
        self._device = device
        self._size = size

    def on_exam(self, num_windows: int, key: bytes) -> float:
        """See `Measure`."""
        return self.on(self._sampler.exam(num_windows, key))

    @torch.no_grad()
    def on(self, batch: Batch) -> float:
        """Return the loss on a batch."""
        losses = []
        self._module.eval()  # one's own may have dropout
        try:
            for part, share in _microbatches(batch, self._size):
                with self._device.autocast():
                    losses.append(share * language_loss(self._module, _on(self._device, part)))
        finally:
            self._module.train()
        return float(torch.stack(losses).sum())


class Learner(Engine):
    """A replica of the whole model, and the batches that it learns from.

    Of the ``settings``: microbatches need less memory than the whole batch, and their gradients are summed to the
    batch's own, within rounding. Compiled inner steps take a minute here and pay off on a GPU; raises `TrainingError`
    where compiling fails, and for a lean replica or recomputed layers of other models than farandole's own.
    ``averages_on_host``: as in `Replica`. If the manifest masks documents, raises `DataError` where the sampler's
    tokenizer has no separator.
    """

    is_driven: ClassVar[bool] = False
    replica: Replica
    sampler: Batches

    def __init__(
        self,
        module: nn.Module,
        manifest: Manifest,
        sampler: Batches,
        *,
        run_id: bytes,
        device: Device,
        author: bytes = bytes(32),
        settings: TrainerSettings = DEFAULTS,
        averages_on_host: bool = False,
    ) -> None:
        if settings.lean:
            _own(module, "--lean")
        if settings.recompute:
            _own(module, "--recompute").recomputes = True
        if manifest.data.mask_documents:
            _own(module, "data.mask_documents").separator = sampler.separator
        self.sampler = sampler
        self.microbatch_size = min(settings.microbatch or sampler.batch_size, sampler.batch_size)
        size = max(self.microbatch_size, TOKENS_AT_ONCE // sampler.context)
        self._held_out = HeldOutLoss(module, sampler, device, size)
        replica = Replica(
            module,
            manifest,
            run_id=run_id,
            device=device,
            averages_on_host=averages_on_host,
            lean_author=author if settings.lean else None,
            measure=self._held_out.on_exam,
            exam=Exam(sampler.context, shares_text=manifest.data.shares_text),
        )
        super().__init__(device, replica.round_end, replica.checkpoint, replica)
        self.loss: Callable[[nn.Module, Tensor], Tensor] = language_loss
        """What inner steps make smaller: the mean over tokens (B, T + 1)."""
        # Sum and number stay on the device: reading them would wait for the steps.
        self._losses: Tensor | float = 0.0
        self._num_losses: Tensor | int = 0
        self._forward = replica.module
        if settings.compile:
            self._compile()

    def _compile(self) -> None:
        """Compile the module and call it once, which runs the compilers: a round must not wait for them, or fail."""
        self._forward = cast("nn.Module", torch.compile(self.replica.module))
        try:
            self._add_gradient(np.zeros((self.microbatch_size, self.sampler.context + 1), np.int64), 1.0)
        except Exception as error:  # compilers are other packages, and raise errors of their own
            if not is_out_of_memory(error):  # the first inner step is, too, and is tried again with less
                why = " ".join(str(error).splitlines()[:2])
                raise TrainingError(
                    f"inner steps cannot be compiled here ({type(error).__name__}: {why}). PyTorch needs a C++ "
                    "compiler (on Debian or Ubuntu: apt install g++ python3-dev), and on a GPU the package triton: "
                    "install them, or leave out --compile"
                ) from error

    def inner_steps(self, until: Until) -> None:
        """Implement `Engine.inner_steps`; an inner step is `learn`."""
        self._losses, self._num_losses = 0.0, 0
        while not until():
            loss = self.learn()
            is_finite = loss.isfinite()  # otherwise the step was skipped
            self._losses = torch.where(is_finite, loss, 0.0) + self._losses
            self._num_losses = is_finite + self._num_losses

    def mean_loss(self) -> float | None:
        """Implement `Engine.mean_loss`."""
        num_losses = int(self._num_losses)
        return float(self._losses) / num_losses if num_losses else None

    def learn(self) -> Tensor:
        """Take one inner step on the next batch; return the loss before it, a scalar on the device, without waiting.

        Raises `NoSliceError` if there is no slice now.
        """
        if self.slices is None:
            return self._learn(self.sampler.batch(self.totals.steps))
        epoch, index, part = self.slices.draw()
        loss = self._learn(self.sampler.slice_batch(epoch, index))
        self.slices.settle(epoch, index, part, is_kept=True)
        return loss

    def _learn(self, batch: Batch) -> Tensor:
        self.replica.gradient.zero_()
        losses = [self._add_gradient(part, share) for part, share in _microbatches(batch, self.microbatch_size)]
        self.replica.inner_step(self.sampler.batch_size * self.sampler.context)
        return torch.stack(losses).sum()

    def _add_gradient(self, tokens: Batch, share: float) -> Tensor:
        """Add the gradient of a microbatch with this share of its batch; return its part of the batch's mean loss."""
        with self.device.autocast():
            loss = share * self.loss(self._forward, _on(self.device, tokens))
        loss.backward()
        return loss.detach()

    def evaluate(self, num_batches: int = 8) -> float:
        """Implement `Engine.evaluate` for the fast weights."""
        return self._held_out.on(np.concatenate([self.sampler.held_out_batch(index) for index in range(num_batches)]))


def _microbatches(batch: Batch, size: int) -> Iterator[tuple[Batch, float]]:
    """Consecutive parts of a batch (B, T + 1), of ``size`` sequences each, with their shares of the sequences."""
    for first in range(0, len(batch), size):
        part = batch[first : first + size]
        yield part, len(part) / len(batch)


def _on(device: Device, tokens: Batch) -> Tensor:
    batch = torch.as_tensor(tokens)
    if device.torch_device.type == "cuda":
        batch = batch.pin_memory()  # from other memory, the copy might wait for what is queued
    return batch.to(device.torch_device, non_blocking=True)


def _own(module: nn.Module, flag: str) -> Transformer:
    """Return the module, typed. Raises `TrainingError` if it is not farandole's own model."""
    if not isinstance(module, Transformer):
        raise TrainingError(f"{flag} is for farandole's own models, and this run's is another: leave it out")
    return module


def build_learner(
    manifest: Manifest,
    *,
    run_id: bytes,
    author: bytes,
    settings: TrainerSettings = DEFAULTS,
    bring: Bring = NOTHING,
) -> Learner:
    """Return a learner of the whole model from a run's manifest and this node's key, settings and text.

    With a CUDA GPU, what only outer steps need is in the host's memory, unless the GPU has room for twice all that
    training and averaging take.

    Raises `DataError` if the text or the tokenizer is unfit, `TrainingError` if the device does not exist, settings
    exclude each other, or the model is code that is not allowed or not installed.
    """
    device = choose_device(settings.device)
    if settings.lean and device.torch_device.type == "mps":
        raise TrainingError("--lean is for CUDA, and was not tried on an Apple GPU: leave it out")
    sampler = build_sampler(manifest, run_id, author, bring)
    module = build_module(manifest.model, manifest.seed, allowed_models=settings.allow_model)
    on_host = False
    if device.torch_device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device.torch_device)
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        room = min(free, settings.gpu_memory * 1e9 or free)
        # Twice: activations and other programs need room too.
        on_host = settings.lean or room < 2 * BYTES_WITH_AVERAGING * num_parameters
    learner = Learner(
        module,
        manifest,
        sampler,
        run_id=run_id,
        device=device,
        author=author,
        settings=settings,
        averages_on_host=on_host,
    )
    if manifest.data.epochs:
        learner.slices = sampler.slices()
    return learner


def replay_round(own: Learner, manifest: Manifest, command: Replay, until: Until) -> Replayed:
    """Repeat any author's inner steps of a round from the state in which they began; return hashes of the result.

    It has the text and the device of ``own``, which is not changed. A round's batches follow from its author and the
    numbers of its inner steps, so a checkpoint of its start is all that a replay needs. Where the run is deterministic
    and both processors are of one class (`farandole.training.base.determinism`), the hashes equal the author's. A
    replay has a separate replica: memory for about eight copies of the model. ``until`` is called before each inner
    step; if it returns True before the last one, the replay reports a problem.
    """
    committed = command.commitment
    try:
        learner = Learner(
            build_module(manifest.model, manifest.seed),
            manifest,
            own.sampler.of_author(command.author),
            run_id=own.checkpoint.run_id,
            device=own.device,
            settings=TrainerSettings(microbatch=committed.microbatch),
        )
        learner.checkpoint.load(Path(command.path))
        learner.replica.optimizer.begun_at = committed.begun_at
        if learner.totals.steps != committed.first_step:
            raise TrainingError(f"it begins at inner step {learner.totals.steps}, not {committed.first_step}")
        if not 0 <= committed.fragment < manifest.outer.fragments:
            raise TrainingError(f"there is no fragment {committed.fragment}")
        last_step = committed.first_step + committed.steps
        learner.inner_steps(lambda: learner.totals.steps == last_step or until())
        if learner.totals.steps != last_step:
            return Replayed(problem="it was interrupted")
        out = bytearray(learner.round_end.contribution_bytes)
        _, contribution = learner.round_end.contribute(out, committed.fragment)
    except TrainingError as error:
        return Replayed(problem=str(error), is_unfit=True)
    except MemoryError as error:
        return Replayed(problem=str(error) or "there is no memory for a second replica")
    kind = build(), device_class(own.device.torch_device), own.sampler.corpus
    return Replayed(learner.replica.optimizer.digest(), contribution, "", False, *kind)

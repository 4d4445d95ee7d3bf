"""Text that a model generates, from weights on this disk: `farandole sample`.

Torch is imported only when the weights are known to be there, to fit into the memory, and to be of a model that may be
made here.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farandole.protocol.errors import FarandoleError
from farandole.protocol.manifest import ModelConfig
from farandole.protocol.needs import TRAINER_BYTES
from farandole.protocol.safetensors import FP32_BYTES
from farandole.protocol.shapes import shapes_of
from farandole.training.errors import TrainingError
from farandole.training.host_memory import available_bytes
from farandole.training.own_function import require_allowed
from farandole.training.sampling import Sampling
from farandole.training.tokenizer import TextStream, Tokenizer, load_tokenizer

from ..base.figures import size
from ..base.settings import NodeSettings
from ..base.system.terminal import without_controls
from .model_weights import ModelWeights, open_weights


class SampleError(FarandoleError):
    """No text can be generated here; the message says why, and what to do."""


@dataclass(slots=True)
class Sample:
    """A text in the making; made by `prepare_sample`."""

    weights: ModelWeights
    tokenizer: Tokenizer
    start: Sequence[int]
    """The prompt's tokens; without a prompt the separator, which stands before each document."""
    _generated: Iterator[int]
    tokens: list[int] = field(default_factory=list)
    """The tokens generated so far, without the separator that ends a document."""
    is_ended: bool = False
    """Whether the model has ended the document."""

    @property
    def facts(self) -> dict[str, object]:
        """Return where the weights are from and how far they are trained, for scripts."""
        weights = self.weights
        return {
            "weights": str(weights.path),
            "run": weights.manifest.name,
            "run_id": None if weights.run_id is None else weights.run_id.hex(),
            "round": weights.round,
            "inner_steps": weights.inner_steps,
        }

    def pieces(self) -> Iterator[str]:
        """Yield the text that follows the prompt, as its tokens come; a terminal may be given it. `SampleError`."""
        text = TextStream(self.tokenizer, self.start)
        with _for_people():
            for token in self._generated:
                if token == self.tokenizer.separator:
                    self.is_ended = True
                    break
                self.tokens.append(token)
                yield without_controls(text.add(token))
        yield without_controls(text.end())


def prepare_sample(
    settings: NodeSettings, folder: Path | None, prompt: str, num_tokens: int, sampling: Sampling, device: str
) -> Sample:
    """Load the newest weights (see `open_weights`), for a text of at most ``num_tokens`` tokens after the prompt.

    Raises `SampleError`, and what `open_weights` raises.
    """
    with open_weights(settings, folder) as weights, _for_people():
        manifest = weights.manifest
        _require_known(manifest.model, settings.allow_model)
        tokenizer = load_tokenizer(manifest.tokenizer, weights.tokenizer)
        start = tokenizer.encode(prompt.encode(errors="surrogateescape")).tolist() or [tokenizer.separator]
        _require_room(manifest.model, min(manifest.model.context, len(start) + num_tokens))

        import torch

        from farandole.training.device import choose_device
        from farandole.training.generation import generate, load_model

        if folder is None:
            # The trainer computes beside it: several threads would wait for each other at every operation.
            torch.set_num_threads(1)
        chosen = choose_device(device)
        generated = generate(
            load_model(manifest, weights.read, chosen, settings.allow_model),
            start,
            context=manifest.model.context,
            vocabulary=min(manifest.model.vocabulary, tokenizer.vocabulary),
            sampling=sampling,
            device=chosen,
        )
    return Sample(weights, tokenizer, start, itertools.islice(generated, num_tokens))


@contextlib.contextmanager
def _for_people() -> Iterator[None]:
    """Raise training's errors as `SampleError`."""
    try:
        yield
    except TrainingError as error:
        raise SampleError(str(error)) from error


def _require_known(model: ModelConfig, allowed: Collection[str]) -> None:
    """Raise `SampleError` or `TrainingError` unless this node can and may make such a model."""
    if model.external is not None:
        raise SampleError(
            "this run's members train in loops of their own, and only these know how the model computes. Its weights "
            "are in checkpoint.safetensors of a folder that `farandole checkpoint pull` writes, by the names slow/..."
        )
    if model.own is not None:
        require_allowed(model.own.function, model.own.package, allowed)


def _require_room(model: ModelConfig, window: int) -> None:
    """Raise `SampleError` if the weights and the logits of a window of tokens do not fit into the memory now."""
    num_parameters = sum(math.prod(shape) for shape in shapes_of(model).values())
    needed = FP32_BYTES * (num_parameters + window * model.vocabulary) + TRAINER_BYTES
    available = available_bytes()
    if available is not None and available < needed:
        raise SampleError(
            f"the model's {num_parameters:,} parameters take {size(needed)} of memory here, with PyTorch, and "
            f"{size(available)} are free: stop other programs, or sample on a machine with more"
        )

"""Text that a model generates, from weights on this disk: `farandole sample`."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farandole.protocol.planning.needs import TRAINER_BYTES
from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.models import shapes_of
from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.safetensors import FP32_BYTES
from farandole.training.base.errors import TrainingError
from farandole.training.base.host_memory import available_bytes
from farandole.training.data.tokenizer import TextStream, Tokenizer, load_tokenizer
from farandole.training.model.own_function import require_allowed
from farandole.training.model.sampling import Sampling

from ..base.figures import size
from ..base.settings import NodeSettings
from ..base.system.terminal import without_controls
from .model_weights import ModelWeights, open_weights


class UnusableModelError(FarandoleError):
    """The model cannot be used here; the message says why, and what to do."""


@contextlib.contextmanager
def _errors_for_people() -> Iterator[None]:
    """Raise training's errors as `UnusableModelError`."""
    try:
        yield
    except TrainingError as error:
        raise UnusableModelError(str(error)) from error


def _require_known(model: ModelConfig, allowed: Collection[str]) -> None:
    """Raise `UnusableModelError` or `TrainingError` unless this node can and may make such a model."""
    if model.external is not None:
        raise UnusableModelError(
            "this run's members train in loops of their own, and only these know how the model computes. Its weights "
            "are in checkpoint.safetensors of a folder that `farandole checkpoint pull` writes, by the names slow/..."
        )
    if model.own is not None:
        require_allowed(model.own.function, model.own.package, allowed)


def _require_room(model: ModelConfig, positions: int) -> None:
    """Raise `UnusableModelError` if the weights and the logits of so many tokens do not fit into the memory now."""
    num_parameters = sum(math.prod(shape) for shape in shapes_of(model).values())
    needed = FP32_BYTES * (num_parameters + positions * model.vocabulary) + TRAINER_BYTES
    available = available_bytes()
    if available is not None and available < needed:
        raise UnusableModelError(
            f"the model's {num_parameters:,} parameters, and its logits, take {size(needed)} of memory here, with "
            f"PyTorch, and {size(available)} are free: stop other programs, or use a machine with more"
        )


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

    def pieces(self) -> Iterator[str]:
        """Yield the text that follows the prompt, as its tokens come; a terminal may be given it.

        Raises `UnusableModelError`.
        """
        text = TextStream(self.tokenizer, self.start)
        with _errors_for_people():
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

    Torch is imported only when the weights are known to be there, to fit into the memory, and to be of a model that may
    be made here. Raises `UnusableModelError`, and what `open_weights` raises.
    """
    with open_weights(settings, folder) as weights, _errors_for_people():
        manifest, allowed = weights.manifest, tuple(settings.allow_model)
        model = manifest.model
        _require_known(model, allowed)
        tokenizer = load_tokenizer(manifest.tokenizer, weights.tokenizer)
        start = tokenizer.encode(prompt.encode(errors="surrogateescape")).tolist() or [tokenizer.separator]
        _require_room(model, min(model.context, len(start) + num_tokens))

        import torch

        from farandole.training.base.device import choose_device
        from farandole.training.model.generation import generate, load_model

        if weights.is_own:
            # The trainer computes beside it: several threads would wait for each other at every operation.
            torch.set_num_threads(1)
        chosen = choose_device(device)
        module = load_model(manifest, weights.read, chosen, allowed, tokenizer.separator)
        generated = generate(
            module,
            start,
            context=model.context,
            vocabulary=min(model.vocabulary, tokenizer.vocabulary),  # the model may have logits for more tokens
            sampling=sampling,
            device=chosen,
        )
    return Sample(weights, tokenizer, start, itertools.islice(generated, num_tokens))

"""The whole model of weights on this disk, ready to compute: for `farandole sample`.

Torch is imported only when the weights are known to be there, to fit into the memory, and to be of a model that may be
made here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.protocol.planning.needs import TRAINER_BYTES
from farandole.protocol.run.cut import shapes_of
from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.safetensors import FP32_BYTES
from farandole.training.base.errors import TrainingError
from farandole.training.base.host_memory import available_bytes
from farandole.training.data.tokenizer import Tokenizer, load_tokenizer
from farandole.training.model.own_function import require_allowed

from ..base.figures import size
from ..base.settings import NodeSettings
from .model_weights import ModelWeights, open_weights

if TYPE_CHECKING:
    from torch import nn

    from farandole.training.base.device import Device


class UnusableModelError(FarandoleError):
    """The model cannot be used here; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model and its tokenizer; made by `open_whole_model`."""

    weights: ModelWeights
    tokenizer: Tokenizer
    _allowed: tuple[str, ...]

    @property
    def context(self) -> int:
        """The most tokens that the model can see."""
        return self.weights.manifest.model.context

    @property
    def vocabulary(self) -> int:
        """Tokens below this have text; the model may have logits for more."""
        return min(self.weights.manifest.model.vocabulary, self.tokenizer.vocabulary)

    def load(self, device: str, positions: int) -> tuple[nn.Module, Device]:
        """Return the module, with its weights, on the device.

        ``positions``: the tokens whose logits are in the host's memory at once. Raises `UnusableModelError`.
        """
        weights = self.weights
        model = weights.manifest.model
        with training_errors_for_people():
            _require_room(model, positions)

            import torch

            from farandole.training.base.device import choose_device
            from farandole.training.model.generation import load_model

            if weights.is_own:
                # The trainer computes beside it: several threads would wait for each other at every operation.
                torch.set_num_threads(1)
            chosen = choose_device(device)
            separator = self.tokenizer.separator
            return load_model(weights.manifest, weights.read, chosen, self._allowed, separator), chosen


@contextlib.contextmanager
def open_whole_model(settings: NodeSettings, folder: Path | None) -> Iterator[WholeModel]:
    """Open the newest weights (see `open_weights`) and their tokenizer; `WholeModel.load` works while the block runs.

    Raises `UnusableModelError`, and what `open_weights` raises.
    """
    with open_weights(settings, folder) as weights:
        with training_errors_for_people():
            _require_known(weights.manifest.model, settings.allow_model)
            tokenizer = load_tokenizer(weights.manifest.tokenizer, weights.tokenizer)
        yield WholeModel(weights, tokenizer, tuple(settings.allow_model))


@contextlib.contextmanager
def training_errors_for_people() -> Iterator[None]:
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

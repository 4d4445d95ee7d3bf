"""Text from a model: its next tokens, one by one, drawn from the logits.

Any module will do that makes logits (B, T, V) of tokens (B, T). A model of transformers keeps the keys and values of
earlier tokens. For others nothing is kept between two tokens: each takes a forward pass of the window of the last
tokens, of which a model sees ``context`` at most; enough for a look at a model in training.

The logits are drawn from on the CPU, with a generator of its own: the same weights, prompt and settings make the same
text on one machine, whatever was drawn before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import Manifest

from ..base.device import Device, is_out_of_memory
from ..base.errors import CheckpointError, TrainingError
from .adapters import Adapted
from .model import LanguageModel, Transformer
from .sampling import GREEDY, Sampling
from .stages import build_module, build_stage

# Returns a parameter by its name.
Read = Callable[[str], npt.NDArray[np.float32]]
NOT_FINITE: Final = "the model's logits are not finite: its weights have diverged, or are of another model"


@torch.no_grad()
def load_model(
    manifest: Manifest,
    read: Read,
    device: Device,
    allowed: Collection[str] = (),
    separator: int | None = None,
    stage: int | None = None,
) -> nn.Module:
    """Make a run's model, with the parameters that ``read`` returns for their names, to be used on the device.

    ``separator``: the token between documents, which a run that masks them needs; None: nothing is masked. ``stage``:
    the only one that is made; None: the whole model.

    Raises `TrainingError` if it cannot be made here (`build_module`) or does not fit into the memory, and
    `CheckpointError` if a parameter has another shape than in ``read``.
    """
    model, seed = manifest.model, manifest.seed
    try:
        if stage is None:
            module = build_module(model, seed, allowed_models=allowed)
        else:
            module = build_stage(model, seed, stage, allowed)
        read_parameters_(module, read)
        if manifest.data.mask_documents and isinstance(module, Transformer):
            module.separator = separator
        return module.to(device.torch_device).eval()
    except (RuntimeError, MemoryError) as error:
        _require_room(error, device)
        raise


@torch.no_grad()
def read_parameters_(module: nn.Module, read: Read) -> None:
    """Copy what ``read`` returns into the module's parameters; raises `CheckpointError` at another shape."""
    for name, parameter in module.named_parameters():
        found = torch.from_numpy(read(name))
        if found.shape != parameter.shape:
            raise CheckpointError(f"{name} has the shape {tuple(found.shape)}, not {tuple(parameter.shape)}")
        parameter.copy_(found)


def generate(
    module: nn.Module, prompt: Sequence[int], *, context: int, vocabulary: int, sampling: Sampling, device: Device
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, which has at least one, without end.

    ``context``: the most tokens that the model can see. ``vocabulary``: tokens below this are drawn; a model may have
    logits for more of them than its tokenizer knows. Raises `TrainingError` if the model's logits are not to be used.
    """
    if max(prompt) >= vocabulary:
        raise TrainingError(f"the prompt has token {max(prompt)}, and the model has only {vocabulary}")
    chance = torch.Generator().manual_seed(sampling.seed)
    window, kept, num_seen = list(prompt[-context:]), list[Any](), 0
    while True:
        if len(window) > context:  # its tokens have other positions now
            window, kept, num_seen = window[-context:], [], 0
        logits = last_logits(module, window[num_seen:], device, kept)
        num_seen = len(window) if kept else 0
        window.append(draw(logits[:vocabulary], sampling, chance))
        yield window[-1]


@torch.no_grad()
def last_logits(module: nn.Module, tokens: Sequence[int], device: Device, kept: list[Any] | None = None) -> Tensor:
    """Logits (V,), fp32 on the CPU, of the token that follows these, computed in the device's precision.

    ``kept``, empty at first: where a model of transformers keeps keys and values; the next tokens follow these then.
    Raises `TrainingError` if the module makes something else, or the memory is too small.
    """
    try:
        with device.autocast():
            given = torch.tensor([tokens]).to(device.torch_device)
            if isinstance(module, Adapted) and kept is not None:
                logits, kept[:] = module.following(given, kept)
            elif isinstance(module, LanguageModel):  # no logits of the other tokens: they may be gigabytes
                logits = module.logits(module.last_hidden(given)[:, -1:])
            else:
                logits = module(given)
                if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != given.shape:
                    made = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                    raise TrainingError(
                        "the model must return logits (B, T, V) for tokens (B, T); "
                        f"for {tuple(given.shape)} it is {made}"
                    )
        return logits[0, -1].float().cpu()
    except (RuntimeError, MemoryError) as error:
        _require_room(error, device)
        raise


def draw(logits: Tensor, sampling: Sampling, chance: torch.Generator) -> int:
    """Return the next token, drawn from logits (V,). Raises `TrainingError` if they are not finite."""
    largest = logits.max()
    if not largest.isfinite():  # minus infinity elsewhere is a token that a model excludes; NaN is the maximum of all
        raise TrainingError(NOT_FINITE)
    if sampling.temperature == GREEDY:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        logits, tokens = logits.topk(sampling.top_k)
    else:
        tokens = torch.arange(len(logits))
    # Relative to the largest, and in fp64, no quotient is too large for any temperature.
    chances = ((logits - largest).double() / sampling.temperature).softmax(dim=0)
    if sampling.top_p < 1:
        chances, order = chances.sort(descending=True)
        chances, tokens = chances.where(chances.cumsum(0) - chances < sampling.top_p, 0.0), tokens[order]
    return int(tokens[torch.multinomial(chances, 1, generator=chance)])


def _require_room(error: Exception, device: Device) -> None:
    """Raise `TrainingError`, which says what to do, if an operation on the device failed for lack of memory."""
    if is_out_of_memory(error):
        remedy = "stop other programs that use it" if device.torch_device.type == "cpu" else "use --device cpu"
        raise TrainingError(f"the model does not fit into the memory of the {device.description}: {remedy}") from error

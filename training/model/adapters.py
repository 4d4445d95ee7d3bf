"""Adapters of a base model (LoRA, arXiv 2106.09685, by the package peft): only they are trained, averaged and sent.

A linear layer with weights W gets two small matrices, and computes W x + (alpha / r) B A x, with A (r, in) and B
(out, r); A begins at random and B as zeros. The base stays as it is, in a folder that every member has. Its parameters
become buffers here: nothing moves them, and no contribution or checkpoint has them.

Members average what adapters do, B A (`farandole.training.outer.adapters`).
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

from torch import Tensor, nn

from farandole.protocol.run.own_model import MAX_RANK

from ..base.errors import TrainingError, how_to_add
from .base_folder import require_base

# Of a model whose settings name no limit.
USUAL_CONTEXT: Final = 2_048


class Adapted(nn.Module):
    """A model of transformers, with adapters or without: logits (B, T, V) in fp32 of tokens (B, T)."""

    def __init__(self, adapted: nn.Module) -> None:
        super().__init__()
        self.adapted = adapted
        settings: Any = adapted.config
        self.context = int(getattr(settings.get_text_config(), "max_position_embeddings", USUAL_CONTEXT))
        """The most tokens that the model can see."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.adapted(input_ids=tokens, use_cache=False).logits
        return logits.float()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Do as `nn.Module._apply`, with each tensor once: a head that is the embedding too would be there twice."""
        moved: Self = super()._apply(cache(fn), recurse)  # type: ignore[no-untyped-call]  # in torch it has no types
        return moved

    def following(self, tokens: Tensor, kept: list[Any]) -> tuple[Tensor, list[Any]]:
        """Return the last token's logits (B, 1, V), and what to give with the tokens that follow; at first nothing."""
        past = kept[0] if kept else None
        made = self.adapted(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
        return made.logits.float(), [made.past_key_values]


def adapted(settings: dict[str, Any]) -> nn.Module:
    """Make the model of a run's ``config``: ``base`` (its hash), ``rank``, ``alpha``.

    ``folder`` is this member's copy of the base, ``parameters`` the number that the run's adapters have. Raises
    `TrainingError` if it is another model, or lacks a package.
    """
    try:
        from peft import LoraConfig, get_peft_model
        from transformers.pytorch_utils import Conv1D
    except ImportError as error:
        raise TrainingError(f"this run trains adapters of a base model: {how_to_add('lora')}") from error
    if not (folder := settings.get("folder")):
        raise TrainingError("this run trains adapters of a base model: name its folder with --base FOLDER")
    if settings["rank"] > MAX_RANK:  # before any memory is taken: the manifest is a stranger's
        raise TrainingError(f"the run's adapters have rank {settings['rank']}, and {MAX_RANK} is the most")
    require_base(Path(folder), settings["base"])
    config = LoraConfig(
        r=settings["rank"], lora_alpha=settings["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of these packages about each other
        base = _pretrained(Path(folder))
        head = base.get_output_embeddings()
        linear = [part for part in base.modules() if isinstance(part, nn.Linear | Conv1D) and part is not head]
        needed = settings["rank"] * sum(sum(part.weight.shape) for part in linear)
        if needed > settings.get("parameters", needed):  # before they are made: the rank is a stranger's
            raise TrainingError(
                f"the run's adapters have {settings['parameters']} parameters, and of rank {settings['rank']} this "
                f"base's have {needed}"
            )
        return adapters_of(get_peft_model(base, config))


def adapters_of(model: nn.Module) -> Adapted:
    """Return a model of peft whose frozen parameters are buffers; tied ones stay one tensor."""
    buffers = {id(each): each.detach() for each in model.parameters() if not each.requires_grad}
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, buffers[id(parameter)], persistent=False)
    return Adapted(model)


def model_of(base: Path, adapters: Path | None) -> Adapted:
    """Load a model of transformers, with the adapters of a peft folder or without. Raises `TrainingError`."""
    try:
        model = _pretrained(base)
        if adapters is not None:
            from peft import PeftModel

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model = PeftModel.from_pretrained(model, adapters)
        return Adapted(model)
    except ImportError as error:
        raise TrainingError(f"{base} needs other packages: {how_to_add('lora' if adapters else 'hf')}") from error
    except (OSError, ValueError, RuntimeError, LookupError) as error:  # of another size, or not whole
        raise TrainingError(f"{adapters or base} does not load as a model: {error}") from error


def _pretrained(folder: Path) -> Any:
    """Load a whole model of transformers; no code but what is installed, and no pickle."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    safe = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="sdpa", **safe)

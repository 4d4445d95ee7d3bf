"""Adapters of a base model (LoRA, arXiv 2106.09685, by the package peft): only they are trained, averaged and sent.

A linear layer with weights W gets two small matrices, and computes W x + (alpha / r) B A x, with A (r, in) and B
(out, r); A begins at random and B as zeros. The base stays as it is, in a folder that every member has. Its parameters
become buffers here: nothing moves them, and no contribution or checkpoint has them.

Members average A and B apart, and the mean of products is not the product of means (arXiv 2410.09432).
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from farandole.protocol.run.own_model import MAX_RANK

from ..base.errors import TrainingError, how_to_add
from .base_folder import require_base


class Adapted(nn.Module):
    """A base model with adapters: logits (B, T, V) in fp32 of tokens (B, T)."""

    def __init__(self, adapted: nn.Module) -> None:
        super().__init__()
        self.adapted = adapted

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.adapted(input_ids=tokens, use_cache=False).logits
        return logits.float()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Do as `nn.Module._apply`, with each tensor once: a head that is the embedding too would be there twice."""
        moved: Self = super()._apply(cache(fn), recurse)  # type: ignore[no-untyped-call]  # in torch it has no types
        return moved


def adapted(settings: dict[str, Any]) -> nn.Module:
    """Make the model of a run's ``config``: ``base`` (its hash), ``rank``, ``alpha``.

    ``folder`` is this member's copy of the base, ``parameters`` the number that the run's adapters have. Raises
    `TrainingError` if it is another model, or lacks a package.
    """
    try:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM
        from transformers.pytorch_utils import Conv1D
        from transformers.utils import logging
    except ImportError as error:
        raise TrainingError(f"this run trains adapters of a base model: {how_to_add('lora')}") from error
    if not (folder := settings.get("folder")):
        raise TrainingError("this run trains adapters of a base model: name its folder with --base FOLDER")
    if settings["rank"] > MAX_RANK:  # before any memory is taken: the manifest is a stranger's
        raise TrainingError(f"the run's adapters have rank {settings['rank']}, and {MAX_RANK} is the most")
    require_base(Path(folder), settings["base"])
    logging.disable_progress_bar()
    config = LoraConfig(
        r=settings["rank"], lora_alpha=settings["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of these packages about each other
        base = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype="auto", attn_implementation="sdpa", use_safetensors=True
        )
        head = base.get_output_embeddings()
        linear = [part for part in base.modules() if isinstance(part, nn.Linear | Conv1D) and part is not head]
        needed = settings["rank"] * sum(sum(part.weight.shape) for part in linear)
        if needed > settings.get("parameters", needed):  # before they are made: the rank is a stranger's
            raise TrainingError(
                f"the run's adapters have {settings['parameters']} parameters, and of rank {settings['rank']} this "
                f"base's have {needed}"
            )
        model = get_peft_model(base, config)
    buffers = {id(each): each.detach() for each in model.parameters() if not each.requires_grad}
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, buffers[id(parameter)], persistent=False)
    return Adapted(model)

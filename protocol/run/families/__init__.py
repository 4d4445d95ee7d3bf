"""Hugging Face ``transformers`` causal language models in a manifest: a file for each supported family.

Field names and defaults match transformers' ``config.json`` (5.23; `transformers.LlamaConfig`, `GPT2Config`), reduced
to what decides the model's shape, its first weights and what it computes. Other settings of a file are handled where it
is read (`farandole.node.store.run_file`). A manifest states every field, so that the defaults of an installed version
of transformers do not matter. Nothing here is code, or names any: the code is transformers' own, which
`farandole.training.model.families` calls.

There is no dropout: a microbatch whose stage is lost is computed again by another node, and must come out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from ...wire.errors import ManifestError
from . import gpt2, llama
from .gpt2 import GPT2Config
from .llama import LlamaConfig

HFConfig = LlamaConfig | GPT2Config

FAMILIES: Final[Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "llama": llama.settings_from_json,
    "gpt2": gpt2.settings_from_json,
}
"""``model_type`` -> function from the settings of a ``config.json`` to the ones of an `HFConfig`; raises
`ManifestError`."""


def hf_config_from_dict(settings: object) -> HFConfig:
    """Make a configuration from a parsed ``config.json``. Raises `ManifestError`, which names the wrong setting."""
    try:
        config: HFConfig = msgspec.convert(settings, HFConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ManifestError(f"model.hf: {error}") from error
    return config

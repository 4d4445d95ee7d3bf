"""Adapters (LoRA) of a base model, planned by the base's sizes alone, and the memory that the base takes.

The base is there once, frozen: in bf16, or, in loops of members' own, in 4 bits (NF4 with its scales in 8 bits, arXiv
2305.14314), which leave embedding, head and norms in bf16. The backward pass passes through it, and keeps activations,
which `tests/training/model/test_adapters.py` counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..run.families.base import repeated
from ..run.families.llama import LlamaConfig
from ..run.manifest import ModelConfig
from ..run.own_model import ADAPTERS, OwnModel, packed
from ..wire.safetensors import Shape

# What a home GPU has memory for beside a base; a run file may say more.
USUAL_CONTEXT: Final = 512
_BF16_BYTES: Final = 2.0
_NF4_BYTES: Final = 0.5 + 1 / 64 + 4 / (64 * 256)
# Bytes kept for each token by a layer, in widths, in widths of its MLP and in ranks: under autocast, as on a GPU, and
# without, as on a CPU. And by the head, in vocabularies: the loss's fp32 and its gradient.
_KEPT: Final = {True: (28, 8, 14), False: (40, 10, 28)}
_LOGIT_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Base:
    """A base model of adapters, by the shapes of its weights, and the context of the run."""

    shapes: Mapping[str, Shape]
    num_layers: int
    width: int
    hidden: int
    vocabulary: int
    context: int = USUAL_CONTEXT

    @property
    def _matrices(self) -> dict[str, Shape]:
        """Those of the layers: embedding and head get no adapters."""
        return {name: each for name, each in self.shapes.items() if len(each) == 2 and re.search(r"\.\d+\.", name)}

    def adapted(self, rank: int) -> ModelConfig:
        """Return the model of such a run: its parameters are the adapters of all matrices, named as by peft."""
        ends = dict[str, Shape]()
        for name, (outputs, inputs) in self._matrices.items():
            place = f"adapted.base_model.model.{name.removesuffix('.weight')}"
            ends[f"{place}.lora_A.default.weight"] = (rank, inputs)
            ends[f"{place}.lora_B.default.weight"] = (outputs, rank)
        own = OwnModel(ADAPTERS, packed(ends), config={"rank": rank, "alpha": 2.0 * rank})
        return ModelConfig(1, 0, 0, 0, self.context, self.vocabulary, own=own)

    @property
    def num_parameters(self) -> int:
        """The base's parameters."""
        return sum(map(math.prod, self.shapes.values()))

    def weight_bytes(self, *, in_4_bits: bool = False) -> int:
        """Return the bytes of the base's weights."""
        packable = sum(map(math.prod, self._matrices.values())) if in_4_bits else 0
        return int(_BF16_BYTES * (self.num_parameters - packable) + _NF4_BYTES * packable)

    def kept_bytes(self, rank: int, *, on_gpu: bool) -> int:
        """Return the bytes that the forward pass of one sequence keeps for the backward pass."""
        widths, hiddens, ranks = _KEPT[on_gpu]
        each = self.num_layers * (widths * self.width + hiddens * self.hidden + ranks * rank)
        return self.context * (each + self.vocabulary * _LOGIT_BYTES)


def _llama(num_layers: int, width: int, heads: int, keys: int, hidden: int, vocabulary: int) -> Base:
    known = LlamaConfig(vocabulary, width, hidden, num_layers, heads, keys, width // heads)
    layers = repeated(known.layers_name, num_layers, known.layer_shapes)
    return Base({**layers, **known.end_shapes}, num_layers, width, hidden, vocabulary)


# Bases of known sizes: Llama 2's (arXiv 2307.09288) and Llama 3's (arXiv 2407.21783).
BASES: Final[Mapping[str, Base]] = {
    "7B": _llama(32, 4_096, 32, 32, 11_008, 32_000),
    "8B": _llama(32, 4_096, 32, 8, 14_336, 128_256),
    "13B": _llama(40, 5_120, 40, 40, 13_824, 32_000),
    "70B": _llama(80, 8_192, 64, 8, 28_672, 128_256),
}

"""Adapters (LoRA) of a base model, planned by the base's sizes alone, and the memory that the base takes.

The base is there once, frozen: in bf16, or, in loops of members' own, in 4 bits (NF4 with its scales in 8 bits, arXiv
2305.14314), which leave embedding, head and norms in bf16. The backward pass passes through it, and keeps activations,
which `tests/training/model/test_adapters.py` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..run.manifest import ModelConfig
from ..run.models import num_parameters, shapes_of
from ..run.own_model import ADAPTERS, OwnModel, packed


def _llama(num_layers: int, width: int, heads: int, keys: int, hidden: int, vocabulary: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": num_layers, "hidden_size": width, "intermediate_size": hidden}
    attention = {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": width // heads}
    return {"model_type": "llama", "vocab_size": vocabulary, "max_position_embeddings": 4_096, **sizes, **attention}


# Known sizes of bases, as a config.json has them: Llama 2's (arXiv 2307.09288) and Llama 3's (arXiv 2407.21783).
BASES: Final[Mapping[str, dict[str, Any]]] = {
    "7B": _llama(32, 4_096, 32, 32, 11_008, 32_000),
    "8B": _llama(32, 4_096, 32, 8, 14_336, 128_256),
    "13B": _llama(40, 5_120, 40, 40, 13_824, 32_000),
    "70B": _llama(80, 8_192, 64, 8, 28_672, 128_256),
}
_BF16_BYTES: Final = 2.0
_NF4_BYTES: Final = 0.5 + 1 / 64 + 4 / (64 * 256)
# Bytes kept for each token by a layer, in widths, in widths of its MLP and in ranks: under autocast, as on a GPU, and
# without, as on a CPU. And by the head, in vocabularies: the loss's fp32 and its gradient.
_KEPT: Final = {True: (28, 8, 14), False: (40, 10, 28)}
_LOGIT_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Base:
    """A base model of adapters of rank ``rank``; ``model`` has its sizes, and the context of the run."""

    model: ModelConfig
    rank: int

    @property
    def adapted(self) -> ModelConfig:
        """The model of such a run: its parameters are the adapters of all matrices of the layers, named as by peft."""
        ends = dict[str, tuple[int, ...]]()
        for name, (outputs, inputs) in self._matrices.items():
            place = f"adapted.base_model.model.{name.removesuffix('.weight')}"
            ends[f"{place}.lora_A.default.weight"] = (self.rank, inputs)
            ends[f"{place}.lora_B.default.weight"] = (outputs, self.rank)
        own = OwnModel(ADAPTERS, packed(ends), config={"rank": self.rank, "alpha": 2.0 * self.rank})
        return ModelConfig(1, 0, 0, 0, self.model.context, self.model.vocabulary, own=own)

    @property
    def _matrices(self) -> dict[str, tuple[int, ...]]:
        assert self.model.hf is not None
        start = self.model.hf.layers_name
        return {
            name: shape for name, shape in shapes_of(self.model).items() if name.startswith(start) and len(shape) > 1
        }

    def weight_bytes(self, *, in_4_bits: bool = False) -> int:
        """Return the bytes of the base's weights."""
        packable = sum(rows * columns for rows, columns in self._matrices.values()) if in_4_bits else 0
        return int(_BF16_BYTES * (num_parameters(self.model) - packable) + _NF4_BYTES * packable)

    def kept_bytes(self, *, on_gpu: bool) -> int:
        """Return the bytes that the forward pass of one sequence keeps for the backward pass."""
        model = self.model
        widths, hiddens, ranks = _KEPT[on_gpu]
        each = model.num_layers * (widths * model.width + hiddens * model.hidden + ranks * self.rank)
        return model.context * each + model.context * model.vocabulary * _LOGIT_BYTES

    def taken_bytes(self, *, on_gpu: bool, in_4_bits: bool) -> int:
        """Return what the base takes of the memory in which it trains."""
        return self.weight_bytes(in_4_bits=in_4_bits) + self.kept_bytes(on_gpu=on_gpu)

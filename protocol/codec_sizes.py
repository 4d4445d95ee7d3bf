"""How many bytes the codecs make of a number of elements. Imports no torch: plans and the doctor read this.

The forms in `farandole.training.codec` take their sizes from here, and describe the layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

SCALE_BYTES: Final = 4  # fp32
TOPK_BLOCK: Final = 256  # places fit a byte
DEFAULT_TOPK: Final = 64


@dataclass(frozen=True, slots=True)
class CodecSize:
    """The layout of a codec that sends every element."""

    bits: int
    """Of each element."""
    block: int = 0
    """Elements that share a scale; 0: there are no scales."""

    def of(self, num_elements: int) -> int:
        """Bytes that so many elements take."""
        scales = SCALE_BYTES * -(-num_elements // self.block) if self.block else 0
        return scales + -(-num_elements * self.bits // 8)


SIZES: Final[Mapping[str, CodecSize]] = MappingProxyType(
    {
        "fp32": CodecSize(32),
        "bf16": CodecSize(16),
        "fp16": CodecSize(16),
        "int8": CodecSize(8, 256),
        "int4": CodecSize(4, 64),
    }
)


def topk_bytes(topk: int, num_elements: int) -> int:
    """Bytes of ``topk`` elements of each block: a scale for the block, and for each element its value and place."""
    whole, rest = divmod(num_elements, TOPK_BLOCK)
    last = SCALE_BYTES + 2 * min(topk, rest) if rest else 0
    return whole * (SCALE_BYTES + 2 * topk) + last


def encoded_bytes(codec: str, num_elements: int, topk: int = DEFAULT_TOPK) -> int:
    """Bytes that so many fp32 numbers take in a codec of a manifest."""
    return topk_bytes(topk, num_elements) if codec == "topk" else SIZES[codec].of(num_elements)

"""Encoded sizes of the codecs. Imports no torch: plans and the doctor use this.

The codecs in `farandole.training.outer.codec` take their sizes from here, and describe the layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

SCALE_BYTES: Final = 4  # fp32
TOPK_BLOCK: Final = 256  # an element's place fits in a byte
DEFAULT_TOPK: Final = 64


@dataclass(frozen=True, slots=True)
class CodecSize:
    """The size of a codec that sends every element."""

    bits: int
    """Bits of each element."""
    block: int = 0
    """Elements that share a scale; 0: no scales."""

    def of(self, num_elements: int) -> int:
        """Return the bytes that ``num_elements`` elements take."""
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
    """Return the bytes of ``topk`` elements of each block: a scale for the block, a value and a place per element."""
    whole, rest = divmod(num_elements, TOPK_BLOCK)
    last = SCALE_BYTES + 2 * min(topk, rest) if rest else 0
    return whole * (SCALE_BYTES + 2 * topk) + last


def encoded_bytes(codec: str, num_elements: int, topk: int = DEFAULT_TOPK) -> int:
    """Return the bytes that ``num_elements`` fp32 numbers take in a codec of a manifest."""
    return topk_bytes(topk, num_elements) if codec == "topk" else SIZES[codec].of(num_elements)

"""How a tensor travels: as fp32, bf16, fp16, or int8 or int4 in blocks. The size follows from the number of elements.

    fp32   4 bytes an element, exact
    bf16   2 bytes an element, |x - decoded| <= 2^-8 |x| for normal numbers (rounded to the nearest)
    fp16   2 bytes an element, |x - decoded| <= 2^-11 |x|, or 2^-25 below 2^-14; what is beyond 65,504 is refused
    int8   blocks of 256 elements, each a scale (fp32) and one byte an element: 8.125 bits an element;
           |x - decoded| <= scale (1/2 + 2^-15), scale = max(absmax / 127, 2^-126)      (the 2^-15: fp32's rounding)
    int4   blocks of 64 elements, each a scale (fp32) and half a byte an element: 4.5 bits an element;
           the same bound with scale = max(absmax / 7, 2^-126)

Bytes are little-endian. Encoding is deterministic, and decoding uses exact operations only, so both partners decode
the same numbers from the same bytes on any machine. int8 of the weights lost nothing against fp32 in measurements of
NoLoCo (BENCHMARKS.md), at a quarter of the traffic. int4's error is larger than a round's progress, so that without
error feedback (`Replica`) progress is rounded away. Values that are not finite, or so large that rounding might make
them so, are refused on both ends.

Measured with 8 replicas, each on its own kind of text, 400 inner steps (40 of warm-up), a round every 10, one seed
(fp32 2.198, nobody averages 2.514): int8 2.202; int4 2.275 with error feedback, 2.496 without. Feedback changes
nothing for int8. Rejected: int4 of the outer gradient with error feedback and, in every round, an eighth of the slow
weights (2.283) or a quarter (2.248), since replicas drift apart; the largest sixteenth of the outer gradient in the
same way (2.487), or of the weights that moved most since they were last sent (2.429). Every second time half of the
weights, without rounding, is better than any of these: 2.212. int4 modulo the partner's own weights (Moniqua, arXiv
2002.11787) came to 2.207 with a range of four times the movement of a round, and to 2.302 with two: what once differs
by more than the range is not pulled together again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .errors import CodecError

# Rounding upwards can at most double a value, so what is encoded below this decodes finite.
MAX_MAGNITUDE = 2.0**126
MAX_FP16 = 65_504.0
MIN_SCALE = 2.0**-126  # the least normal number: blocks of zeros and denormals need no case of their own
# Elements encoded at a time (a multiple of a block): bounds the temporaries to some 100 MB for a model of any size.
_SLICE = 1 << 22


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Integers of ``bits`` in -levels..levels, times a scale that each block of ``length`` elements has."""

    length: int
    levels: int
    bits: int

    @property
    def num_bytes(self) -> int:
        """Of a whole block."""
        return self.size(self.length)

    def size(self, num_elements: int) -> int:
        return _SCALE_BYTES * -(-num_elements // self.length) + -(-num_elements * self.bits // 8)


_SCALE_BYTES = 4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCKS = {"int8": _Blocks(256, 127, 8), "int4": _Blocks(64, 7, 4)}
CODECS = (*_DTYPES, *_BLOCKS)

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


def encoded_size(codec: str, num_elements: int) -> int:
    """Bytes that ``num_elements`` fp32 numbers take."""
    if codec in _DTYPES:
        return _DTYPES[codec].itemsize * num_elements
    if codec in _BLOCKS:
        return _BLOCKS[codec].size(num_elements)
    raise CodecError(f"no codec is called {codec!r}; there are {', '.join(CODECS)}")


def encode(codec: str, values: Tensor, out: Buffer) -> int:
    """Write ``values`` (n,) fp32 to the start of the writable ``out``; returns the number of bytes written.

    Raises `CodecError` if a value is not finite (or beyond `MAX_MAGNITUDE`, `MAX_FP16`), or ``out`` is too small.
    """
    size = encoded_size(codec, values.numel())
    target = np.frombuffer(out, dtype=np.uint8)
    if len(target) < size:
        raise CodecError(f"{values.numel()} elements in {codec} take {size} bytes, the buffer has {len(target)}")
    limit = MAX_FP16 if codec == "fp16" else MAX_MAGNITUDE
    for start in range(0, values.numel(), _SLICE):
        part = values[start : start + _SLICE]
        if not bool((part.abs() <= limit).all()):  # false for NaN as well
            raise CodecError(f"a value to be sent is not finite, or too large for {codec}")
        offset = encoded_size(codec, start)
        encoded = _encode_slice(codec, part).cpu().numpy()
        target[offset : offset + len(encoded)] = encoded
    return size


def decode(codec: str, data: Buffer, num_elements: int, device: torch.device | str = "cpu") -> Tensor:
    """The (n,) fp32 numbers that ``data`` holds, on ``device``.

    Raises `CodecError` if ``data`` has another length than n elements take, or holds a value that is not finite.
    """
    source = np.frombuffer(data, dtype=np.uint8)
    if len(source) != encoded_size(codec, num_elements):
        raise CodecError(
            f"{num_elements} elements in {codec} take {encoded_size(codec, num_elements)} bytes, not {len(source)}"
        )
    values = torch.empty(num_elements, dtype=torch.float32, device=device)
    for start in range(0, num_elements, _SLICE):
        stop = min(start + _SLICE, num_elements)
        part = source[encoded_size(codec, start) : encoded_size(codec, stop)].copy()  # aligned, and writable for torch
        decoded = _decode_slice(codec, torch.from_numpy(part).to(device), stop - start)
        if not bool((decoded.abs() <= 2 * MAX_MAGNITUDE).all()):
            raise CodecError("a value received is not finite, or too large")
        values[start:stop] = decoded
    return values


def _encode_slice(codec: str, values: Tensor) -> Tensor:
    """(bytes,) uint8."""
    if codec in _DTYPES:
        return values.to(_DTYPES[codec]).contiguous().view(torch.uint8)
    form = _BLOCKS[codec]
    padding = -values.numel() % form.length
    blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, form.length)  # (blocks, length)
    scales = (blocks.abs().amax(1, keepdim=True) / form.levels).clamp_(min=MIN_SCALE)  # (blocks, 1)
    levels = (blocks / scales).round_().clamp_(-form.levels, form.levels).to(torch.int8)  # (blocks, length)
    if form.bits == 4:  # two to a byte, the first in the low half
        halves = (levels + 8).view(torch.uint8)
        packed = halves[:, ::2] | (halves[:, 1::2] << 4)  # (blocks, length / 2)
    else:
        packed = levels.view(torch.uint8)
    rows = torch.cat((scales.view(torch.uint8), packed), dim=1)  # (blocks, bytes of a block)
    return rows.flatten()[: encoded_size(codec, values.numel())]


def _decode_slice(codec: str, data: Tensor, num_elements: int) -> Tensor:
    """(n,) fp32."""
    if codec in _DTYPES:
        return data.view(_DTYPES[codec]).to(torch.float32)
    form = _BLOCKS[codec]
    rows = torch.nn.functional.pad(data, (0, -data.numel() % form.num_bytes)).view(-1, form.num_bytes)
    scales = rows[:, :_SCALE_BYTES].contiguous().view(torch.float32)  # (blocks, 1)
    if not bool(((scales >= MIN_SCALE) & (scales <= MAX_MAGNITUDE / form.levels * 2)).all()):
        raise CodecError("a scale received is not a finite positive number")
    packed = rows[:, _SCALE_BYTES:]
    if form.bits == 4:
        levels = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1).to(torch.float32) - 8  # (blocks, length)
    else:
        levels = packed.contiguous().view(torch.int8).to(torch.float32)
    return (levels * scales).flatten()[:num_elements]

"""How a tensor travels: as fp32, bf16, fp16, or int8 in blocks. The size follows from the number of elements alone.

    fp32   4 bytes an element, exact
    bf16   2 bytes an element, |x - decoded| <= 2^-8 |x| for normal numbers (rounded to the nearest)
    fp16   2 bytes an element, |x - decoded| <= 2^-11 |x|, or 2^-25 below 2^-14; what is beyond 65,504 is refused
    int8   blocks of 256 elements, each a scale (fp32) and one byte an element;
           |x - decoded| <= scale (1/2 + 2^-15), scale = max(absmax / 127, 2^-126)      (the 2^-15: fp32's rounding)

Bytes are little-endian. Encoding is deterministic, and decoding uses exact operations only, so both partners decode
the same numbers from the same bytes on any machine. int8 of the weights lost nothing against fp32 in measurements of
NoLoCo (BENCHMARKS.md), at a quarter of the traffic. Values that are not finite, or so large that rounding might make
them so, are refused on both ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .errors import CodecError

CODECS = ("fp32", "bf16", "fp16", "int8")
INT8_BLOCK = 256
_INT8_BLOCK_BYTES = 4 + INT8_BLOCK
_INT8_LEVELS = 127
# Rounding upwards can at most double a value, so what is encoded below this decodes finite.
MAX_MAGNITUDE = 2.0**126
MAX_FP16 = 65_504.0
MIN_INT8_SCALE = 2.0**-126  # the least normal number: blocks of zeros and denormals need no case of their own
# Elements encoded at a time (a multiple of a block): bounds the temporaries to some 100 MB for a model of any size.
_SLICE = 1 << 22
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


def encoded_size(codec: str, num_elements: int) -> int:
    """Bytes that ``num_elements`` fp32 numbers take."""
    if codec in _DTYPES:
        return _DTYPES[codec].itemsize * num_elements
    if codec == "int8":
        return num_elements + 4 * -(-num_elements // INT8_BLOCK)
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
    padding = -values.numel() % INT8_BLOCK
    blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, INT8_BLOCK)  # (blocks, 256)
    scales = (blocks.abs().amax(1, keepdim=True) / _INT8_LEVELS).clamp_(min=MIN_INT8_SCALE)  # (blocks, 1)
    levels = (blocks / scales).round_().clamp_(-_INT8_LEVELS, _INT8_LEVELS).to(torch.int8)  # (blocks, 256)
    rows = torch.cat((scales.view(torch.uint8), levels.view(torch.uint8)), dim=1)  # (blocks, 4 + 256)
    return rows.flatten()[: encoded_size(codec, values.numel())]


def _decode_slice(codec: str, data: Tensor, num_elements: int) -> Tensor:
    """(n,) fp32."""
    if codec in _DTYPES:
        return data.view(_DTYPES[codec]).to(torch.float32)
    rows = torch.nn.functional.pad(data, (0, -data.numel() % _INT8_BLOCK_BYTES)).view(-1, _INT8_BLOCK_BYTES)
    scales = rows[:, :4].contiguous().view(torch.float32)  # (blocks, 1)
    if not bool(((scales >= MIN_INT8_SCALE) & (scales <= MAX_MAGNITUDE / _INT8_LEVELS * 2)).all()):
        raise CodecError("a scale received is not a finite positive number")
    levels = rows[:, 4:].contiguous().view(torch.int8)  # (blocks, 256)
    return (levels.to(torch.float32) * scales).flatten()[:num_elements]

"""Codecs for tensors on the wire: fp32, bf16, fp16, or blocks of int8 or int4. The length determines the size.

    fp32   4 bytes an element, exact
    bf16   2 bytes an element, |x - decoded| <= 2^-8 |x| for normal numbers (rounded to the nearest)
    fp16   2 bytes an element, |x - decoded| <= 2^-11 |x|, or 2^-25 below 2^-14; what is beyond 65,504 is refused
    int8   blocks of 256 elements, each a scale (fp32) and one byte an element: 8.125 bits an element;
           |x - decoded| <= scale (1/2 + 2^-15), scale = max(absmax / 127, 2^-126)      (the 2^-15: fp32's rounding)
    int4   blocks of 64 elements, each a scale (fp32) and half a byte an element: 4.5 bits an element;
           the same bound with scale = max(absmax / 7, 2^-126)

Bytes are little-endian. Encoding is deterministic, and decoding uses exact operations only, so both partners decode
the same numbers from the same bytes on any machine. int8 of the weights lost nothing against fp32 in measurements of
NoLoCo (BENCHMARKS.md), at a quarter of the traffic. int4's error is larger than a round's progress; a replica's own
progress survives it, because own contributions stay exact (`farandole.training.outer.outer_state`). Values that are not
finite, or so large that rounding might make them so, are refused on both ends.

What other codecs cost, and why they were rejected, is in docs/decisions.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from farandole.protocol.run.rules import SCALE_BYTES, SIZES, CodecSize

from ..base.errors import CodecError

# Rounding upwards can at most double a value, so what is encoded below this decodes finite.
MAX_MAGNITUDE = 2.0**126
MAX_FP16 = 65_504.0
MIN_SCALE = 2.0**-126  # the least normal number: blocks of zeros and denormals need no case of their own

Result = TypeVar("Result")
Piece = TypeVar("Piece")


# Elements encoded or decoded at a time, a multiple of every block: 2 MiB of fp32 stay in a processor's cache from one
# operation to the next, and the operations' fixed costs do not show. Bounds the temporaries for a model of any size.
_SLICE = 1 << 19

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Plain:
    """A form with one PyTorch floating-point number per element."""

    name: str
    dtype: torch.dtype
    limit: float = MAX_MAGNITUDE

    def size(self, num_elements: int) -> int:
        return self.dtype.itemsize * num_elements

    def encode(self, values: Tensor, out: Tensor) -> None:
        if not _is_within(values, self.limit):
            raise CodecError(f"a value to be sent is not finite, or too large for {self.name}")
        out.view(self.dtype).copy_(values)

    def decode(self, data: Tensor, values: Tensor) -> None:
        values.copy_(data.view(self.dtype))
        if not _is_within(values, 2 * MAX_MAGNITUDE):
            raise CodecError("a value received is not finite, or too large")


def _is_within(values: Tensor, limit: float) -> bool:
    """Return whether no value (n,) is NaN or exceeds ``limit`` in magnitude."""
    # One pass without temporaries: in practice the sum of squares shows that all values are far below the limit.
    if float(values @ values) <= min(limit * limit, 2.0**127):
        return True
    return bool((values.abs() <= limit).all())


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A form with integers in -levels..levels, times one scale per block of elements."""

    layout: CodecSize
    levels: int

    def size(self, num_elements: int) -> int:
        return self.layout.of(num_elements)

    def encode(self, values: Tensor, out: Tensor) -> None:
        length, num_bytes = self.layout.block, self.size(self.layout.block)
        if not (missing := -len(values) % length):
            self._encode_blocks(values.view(-1, length), out.view(-1, num_bytes))
        else:  # zeros complete the last block, and are not sent
            blocks = pad(values, (0, missing)).view(-1, length)
            rows = out.new_empty(len(blocks), num_bytes)
            self._encode_blocks(blocks, rows)
            out.copy_(rows.view(-1)[: len(out)])

    def _encode_blocks(self, blocks: Tensor, rows: Tensor) -> None:
        """Encode ``blocks`` (b, length) into ``rows`` (b, bytes of a block)."""
        largest = torch.maximum(blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True).neg_())  # (b, 1)
        if not bool((largest <= MAX_MAGNITUDE).all()):  # false for NaN as well
            raise CodecError("a value to be sent is not finite, or too large for blocks")
        scales = (largest / self.levels).clamp_(min=MIN_SCALE)
        rows[:, :SCALE_BYTES].copy_(scales.view(torch.uint8))
        levels = (blocks / scales).round_()  # rounding makes no quotient more than ``levels``
        if self.layout.bits == 4:  # two to a byte, the first in the low half
            pairs = levels.add_(8).to(torch.int8).view(torch.int16)  # (b, length / 2), the first in the low byte
            rows[:, SCALE_BYTES:].copy_(pairs | (pairs >> 4))
        else:
            rows.view(torch.int8)[:, SCALE_BYTES:].copy_(levels)

    def decode(self, data: Tensor, values: Tensor) -> None:
        length, num_bytes = self.layout.block, self.size(self.layout.block)
        if not len(values) % length:
            self._decode_blocks(data.view(-1, num_bytes), values.view(-1, length))
        else:
            rows = pad(data, (0, -len(data) % num_bytes)).view(-1, num_bytes)
            blocks = values.new_empty(len(rows), length)
            self._decode_blocks(rows, blocks)
            values.copy_(blocks.view(-1)[: len(values)])

    def _decode_blocks(self, rows: Tensor, blocks: Tensor) -> None:
        """Decode ``rows`` (b, bytes of a block) into ``blocks`` (b, length)."""
        scales = rows[:, :SCALE_BYTES].contiguous().view(torch.float32)  # (b, 1)
        if not bool(((scales >= MIN_SCALE) & (scales <= MAX_MAGNITUDE / self.levels * 2)).all()):
            raise CodecError("a scale received is not a finite positive number")
        packed = rows[:, SCALE_BYTES:]
        if self.layout.bits == 4:
            pairs = packed.to(torch.int16)
            blocks.copy_(((pairs | (pairs << 4)) & 0x0F0F).view(torch.int8)).sub_(8)
        else:
            blocks.copy_(packed.view(torch.int8))
        blocks.mul_(scales)


Form = _Plain | _Blocks
"""A codec's layout of numbers in bytes. All tensors of one call are on the same device.

`size` returns the bytes that n elements take; whole blocks' bytes do not depend on the elements after them. `encode`
writes values (n,) fp32 into out (size(n),) uint8, and `decode` reads data (size(n),) uint8 into values (n,) fp32. Both
raise `CodecError` if a value is not finite, or too large.
"""

FORMS: dict[str, Form] = {
    "fp32": _Plain("fp32", torch.float32),
    "bf16": _Plain("bf16", torch.bfloat16),
    "fp16": _Plain("fp16", torch.float16, MAX_FP16),
    "int8": _Blocks(SIZES["int8"], 127),
    "int4": _Blocks(SIZES["int4"], 7),
}
CODECS = tuple(FORMS)


def slices(num_elements: int, start: int = 0) -> Iterator[slice]:
    """Split a vector of ``num_elements`` into the parts that are encoded and decoded at a time, from ``start`` on.

    Each part except the last consists of whole blocks, so that its bytes (`bytes_of`) are separate.
    """
    for begin in range(start, num_elements, _SLICE):
        yield slice(begin, min(begin + _SLICE, num_elements))


def bytes_of(form: Form, part: slice, first: int = 0) -> slice:
    """Return the byte range of a part yielded by `slices`, of a vector whose bytes begin at ``first``."""
    return slice(first + form.size(part.start), first + form.size(part.stop))


def bytes_to_fill(num_bytes: int, out: Buffer) -> Tensor:
    """Return the start of the writable ``out``: (num_bytes,) uint8, the same memory.

    Raises `CodecError` if ``out`` is too small.
    """
    target = np.frombuffer(out, dtype=np.uint8)
    if len(target) < num_bytes:
        raise CodecError(f"the contribution takes {num_bytes} bytes, the buffer has {len(target)}")
    return torch.from_numpy(target[:num_bytes])


def bytes_to_read(data: npt.NDArray[np.uint8]) -> Tensor:
    """Return ``data`` as (bytes,) uint8; the same memory if PyTorch can use it (aligned and writable), else a copy."""
    return torch.from_numpy(data if data.flags.writeable and not data.ctypes.data % 4 else data.copy())


def encode(codec: str, values: Tensor, out: Buffer) -> int:
    """Write ``values`` (n,) fp32 to the start of the writable ``out``; returns the number of bytes written.

    Raises `CodecError` if a value is not finite (or beyond `MAX_MAGNITUDE`, `MAX_FP16`), or ``out`` is too small.
    """
    form = FORMS[codec]
    target = bytes_to_fill(form.size(values.numel()), out)
    for part in slices(values.numel()):
        form.encode(values[part].cpu(), target[bytes_of(form, part)])
    return len(target)


def decode(codec: str, data: Buffer, num_elements: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the (n,) fp32 numbers in ``data``, on ``device``.

    Raises `CodecError` if the length of ``data`` is not the size of n elements, or a value is not finite.
    """
    form = FORMS[codec]
    source = np.frombuffer(data, dtype=np.uint8)
    if len(source) != form.size(num_elements):
        raise CodecError(f"{num_elements} elements take {form.size(num_elements)} bytes, not {len(source)}")
    values = torch.zeros(num_elements, dtype=torch.float32)
    for part in slices(num_elements):
        form.decode(bytes_to_read(source[bytes_of(form, part)]), values[part])
    return values.to(device)


# Work on pieces of flat vectors on the CPU: each operation in one thread, several pieces at a time.
#
# PyTorch divides every operation among its threads and waits for the slowest. On a busy machine each wait lasts until
# the system runs the last thread again, some milliseconds, and the end of a round has thousands of short operations.
# With two threads beside other busy processes on two cores, encoding 125 M parameters took 26 s instead of 0.9 s.
# Threads that have whole pieces wait for each other only at the end.


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Let PyTorch use one thread for each operation of this thread; yields how many it used before.

    Threads that begin meanwhile use one as well.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def each_piece(work: Callable[[slice], object], pieces: Iterable[slice], vector: Tensor) -> None:
    """Call ``work(piece)`` for each piece of ``vector`` (n,): one after another, or `in_order` on the CPU."""
    if vector.device.type == "cpu":
        for _ in in_order(work, pieces):
            pass
    else:
        for piece in pieces:
            work(piece)


def in_order(work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
    """Yield ``work(piece)`` for each piece, in order; as many pieces at a time as PyTorch has threads.

    Gradients are not recorded. Raises what ``work`` raises for the first piece for which it does.
    """
    listed = list(pieces)
    with one_thread() as num_threads:
        if min(num_threads, len(listed)) < 2:
            with torch.no_grad():
                yield from map(work, listed)
            return
        with ThreadPoolExecutor(min(num_threads, len(listed))) as pool:
            try:
                yield from pool.map(torch.no_grad()(work), listed)
            except BaseException:  # the rest is of no use
                pool.shutdown(wait=True, cancel_futures=True)
                raise

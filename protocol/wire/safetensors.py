"""The header of a safetensors file, parsed and written: names, types, shapes and places of tensors.

A file is eight bytes with the header's length, the header (JSON), and the tensors' bytes
(https://huggingface.co/docs/safetensors). The library needs a whole file in memory to write one, and a file on the disk
to read one; checkpoints are hashed while they are written, and fetched in parts, so their header is handled here.

Bytes may come from a peer: every number has a bound, and only `RemoteProtocolError` is raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from .errors import RemoteProtocolError

Shape = tuple[int, ...]

# Names and shapes of a few thousand parameters take a few hundred KB.
MAX_HEADER_BYTES: Final = 16 * 1024 * 1024
# Six vectors of ten thousand parameters.
MAX_TENSORS: Final = 1 << 16
MAX_NAME_CHARS: Final = 512
MAX_DIMENSIONS: Final = 8
FP32_BYTES: Final = 4
LENGTH_BYTES: Final = 8
"""The header's length, little-endian, at the start of a file."""
_ALIGNMENT: Final = 8
_METADATA: Final = "__metadata__"


class _TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a header; offsets count from the header's end."""

    dtype: Literal["F32"]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**48)], ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**50)], Annotated[int, msgspec.Meta(ge=0, le=2**50)]]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode
_decode_tensor = msgspec.json.Decoder(_TensorEntry).decode


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file."""

    name: str
    shape: Shape
    start: int
    """Offset of its first byte in the file."""
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of a safetensors file."""

    metadata: dict[str, str]
    tensors: tuple[FileTensor, ...]
    """In the order of their bytes."""
    num_bytes: int
    """Length of the header with its eight bytes; the tensors begin there."""


def header_size(first: bytes | bytearray | memoryview, size: int) -> int:
    """Return the length of the header of a file of ``size`` bytes, from and including its first eight bytes.

    Raises `RemoteProtocolError` if that is more than the file has, or than `MAX_HEADER_BYTES`.
    """
    if len(first) < LENGTH_BYTES:
        raise RemoteProtocolError(f"a safetensors file of {len(first)} bytes")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise RemoteProtocolError(f"a header of {length} bytes in a file of {size}")
    return LENGTH_BYTES + length


def parse_header(raw: bytes | bytearray | memoryview, size: int) -> Header:
    """Parse the header of a checkpoint's file of ``size`` bytes, of which ``raw`` are the first, at least the header.

    Raises `RemoteProtocolError` unless its tensors are fp32 and follow each other without gaps up to the file's end.
    """
    num_bytes = header_size(raw, size)
    if len(raw) < num_bytes:
        raise RemoteProtocolError(f"{len(raw)} bytes of a header of {num_bytes}")
    try:
        entries = _decode_header(memoryview(raw)[LENGTH_BYTES:num_bytes])
        metadata = _decode_metadata(entries.pop(_METADATA, msgspec.Raw(b"{}")))
        if len(entries) > MAX_TENSORS or any(len(name) > MAX_NAME_CHARS for name in entries):
            raise RemoteProtocolError(f"{len(entries)} tensors, or a name that is too long")
        parsed = [(name, _decode_tensor(entry)) for name, entry in entries.items()]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not a safetensors header: {error}") from error
    end, tensors = num_bytes, list[FileTensor]()
    for name, entry in sorted(parsed, key=lambda item: item[1].data_offsets):
        start, end_before = num_bytes + entry.data_offsets[0], end
        end = num_bytes + entry.data_offsets[1]
        if start != end_before or end - start != FP32_BYTES * math.prod(entry.shape):
            raise RemoteProtocolError(f"{name} does not lie where it should, or has another size")
        tensors.append(FileTensor(name, entry.shape, start, end))
    if end != size:
        raise RemoteProtocolError(f"the tensors end at byte {end}, the file at {size}")
    return Header(metadata, tuple(tensors), num_bytes)


def encode_header(metadata: Mapping[str, str], shapes: Iterable[tuple[str, Shape]]) -> bytes:
    """Return the first bytes of a file of these fp32 tensors, by name and shape, in the order of their bytes."""
    entries: dict[str, object] = {_METADATA: metadata}
    offset = 0
    for name, shape in shapes:
        end = offset + FP32_BYTES * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = msgspec.json.encode(entries)
    raw += b" " * (-len(raw) % _ALIGNMENT)  # the format asks for tensors at multiples of 8
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw

"""The weights of a Hugging Face folder, as a consolidated checkpoint that a run starts from: continued pre-training.

Of Llama and GPT-2 as `farandole.node.store.hf_file` knows them. Only safetensors are read (a ``.bin`` is a pickle,
which is code), and they are read here without torch, which bf16 needs no help with: it is the upper half of fp32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np

from farandole.protocol.manifest import Manifest
from farandole.protocol.shapes import Shape

from .folder import model_shapes
from .tensors import ConsolidatedError, Floats, is_finite

# Names and shapes; the largest models have some thousand tensors.
MAX_HEADER_BYTES: Final = 16 * 1024 * 1024
MAX_INDEX_BYTES: Final = 16 * 1024 * 1024
# Of models of some hundred billion parameters.
MAX_FILES: Final = 1_024

_FILE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_METADATA: Final = "__metadata__"
_WIDTHS: Final = {"F32": 4, "F16": 2, "BF16": 2}
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+\.safetensors$", max_length=128)]]


class _Entry(msgspec.Struct, frozen=True):
    dtype: Literal["F32", "F16", "BF16"]
    shape: Annotated[tuple[_Offset, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Offset, _Offset]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode


@dataclass(frozen=True, slots=True)
class _Place:
    file: BufferedReader
    dtype: str
    start: int


class HFWeights:
    """The weights of a folder under our names; made by `open_hf_weights`."""

    def __init__(self, shapes: Mapping[str, Shape], places: Mapping[str, _Place]) -> None:
        self._shapes = shapes
        self._places = places

    def read(self, name: str) -> Floats:
        """One parameter, in fp32. Raises `ConsolidatedError` if it is not finite."""
        shape, place = self._shapes[name], self._places[name]
        raw = np.empty(math.prod(shape) * _WIDTHS[place.dtype], dtype=np.uint8)
        place.file.seek(place.start)
        if place.file.readinto(raw.data) != raw.size:
            raise ConsolidatedError(f"{place.file.name} is shorter than its header says")
        weights = _as_fp32(raw, place.dtype).reshape(shape)
        if not is_finite(weights):
            raise ConsolidatedError(f"{place.file.name}: {name} holds a value that is not finite")
        return weights


def _as_fp32(raw: np.ndarray[tuple[int], np.dtype[np.uint8]], dtype: str) -> Floats:
    match dtype:
        case "BF16":
            return (raw.view("<u2").astype("<u4") << 16).view("<f4")
        case "F16":
            return raw.view("<f2").astype(np.float32)
        case _:
            return raw.view("<f4")


@contextlib.contextmanager
def open_hf_weights(folder: Path, manifest: Manifest) -> Iterator[HFWeights]:
    """The folder's weights, for as long as the block runs.

    Raises `ConsolidatedError` if they are not all that the manifest's model has, in its shapes.
    """
    shapes = model_shapes(manifest)
    with contextlib.ExitStack() as stack:
        try:
            files = {name: stack.enter_context((folder / name).open("rb")) for name in _file_names(folder)}
            entries = {name: place for file in files.values() for name, place in _entries(file).items()}
        except OSError as error:
            raise ConsolidatedError(
                f"cannot read {error.filename or folder}: {error.strerror}. The folder needs its weights as {_FILE}, "
                f"or as several files with {_INDEX}"
            ) from error
        yield HFWeights(shapes, {name: _find(folder, name, shape, entries) for name, shape in shapes.items()})


def _file_names(folder: Path) -> list[str]:
    index = folder / _INDEX
    if not index.exists():
        return [_FILE]
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise ConsolidatedError(f"{index} has more than {MAX_INDEX_BYTES} bytes")
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConsolidatedError(f"{index} says not which file has which weights: {error}") from error
    if len(names) > MAX_FILES:
        raise ConsolidatedError(f"{index} names {len(names)} files; at most {MAX_FILES} are read")
    return sorted(names)


def _entries(file: BufferedReader) -> dict[str, tuple[_Entry, _Place]]:
    """What a safetensors file holds that could be weights; others (masks that old files have) are passed over."""
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ConsolidatedError(f"{file.name} announces a header of {length} bytes: it is no safetensors file")
    size = file.seek(0, 2)
    file.seek(8)
    found = {}
    try:
        for name, raw in _decode_header(file.read(length)).items():
            if name == _METADATA or _is_buffer(name):
                continue
            entry = _decode_entry(raw)
            start, end = entry.data_offsets
            if end - start != math.prod(entry.shape) * _WIDTHS[entry.dtype] or 8 + length + end > size:
                raise ConsolidatedError(f"{file.name}: {name} does not lie where the header says")
            found[name] = entry, _Place(file, entry.dtype, 8 + length + start)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConsolidatedError(f"{file.name} is no safetensors file of weights: {error}") from error
    return found


def _is_buffer(name: str) -> bool:
    """What is no parameter, and follows from the configuration: causal masks, frequencies of rotary embeddings."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))


def _find(folder: Path, name: str, shape: Shape, entries: Mapping[str, tuple[_Entry, _Place]]) -> _Place:
    # Files of a model without its head name parameters without what precedes them in the whole.
    bare = name.removeprefix("transformer.").removeprefix("model.")
    found = entries.get(name) or entries.get(bare)
    if found is None:
        raise ConsolidatedError(f"{folder} has no weights {name}, which its configuration asks for")
    entry, place = found
    if entry.shape != shape:
        raise ConsolidatedError(f"{folder}: {name} has the shape {entry.shape}, its configuration makes it {shape}")
    return place

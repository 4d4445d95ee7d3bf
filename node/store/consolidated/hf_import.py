"""The weights of a Hugging Face folder, as a consolidated checkpoint that a run starts from: continued pre-training.

Of Llama and GPT-2 as `farandole.node.store.hf_file` knows them. Only safetensors are read (a ``.bin`` is a pickle,
which is code), and they are read here without torch, which bf16 needs no help with: it is the upper half of fp32.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.manifest import Manifest
from farandole.protocol.safetensors import LENGTH_BYTES, FileTensor, Shape, header_size, parse_tensors

from .folder import model_shapes
from .tensors import ConsolidatedError, Floats, is_finite

MAX_INDEX_BYTES: Final = 16 * 1024 * 1024
# Of models of some hundred billion parameters.
MAX_FILES: Final = 1_024

_FILE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+\.safetensors$", max_length=128)]]


_Place = tuple[BufferedReader, FileTensor]


class HFWeights:
    """The weights of a folder under our names; made by `open_hf_weights`."""

    def __init__(self, places: Mapping[str, _Place]) -> None:
        self._places = places

    def read(self, name: str) -> Floats:
        """One parameter, in fp32. Raises `ConsolidatedError` if it is not finite."""
        file, tensor = self._places[name]
        raw = np.empty(tensor.end - tensor.start, dtype=np.uint8)
        file.seek(tensor.start)
        if file.readinto(raw.data) != raw.size:
            raise ConsolidatedError(f"{file.name} is shorter than its header says")
        weights = _as_fp32(raw, tensor.dtype).reshape(tensor.shape)
        if not is_finite(weights):
            raise ConsolidatedError(f"{file.name}: {name} holds a value that is not finite")
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
        yield HFWeights({name: _find(folder, name, shape, entries) for name, shape in shapes.items()})


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


def _entries(file: BufferedReader) -> dict[str, _Place]:
    """The tensors of a safetensors file that could be weights; others (masks in old files) are skipped."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    first = file.read(LENGTH_BYTES)
    try:
        first += file.read(header_size(first, size) - len(first))
        header = parse_tensors(first, size, is_skipped=_is_buffer)
    except RemoteProtocolError as error:
        raise ConsolidatedError(f"{file.name} is no safetensors file of weights: {error}") from error
    return {tensor.name: (file, tensor) for tensor in header.tensors}


def _is_buffer(name: str) -> bool:
    """What is no parameter, and follows from the configuration: causal masks, frequencies of rotary embeddings."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))


def _find(folder: Path, name: str, shape: Shape, entries: Mapping[str, _Place]) -> _Place:
    # Files of a model without its head name parameters without what precedes them in the whole.
    bare = name.removeprefix("transformer.").removeprefix("model.")
    found = entries.get(name) or entries.get(bare)
    if found is None:
        raise ConsolidatedError(f"{folder} has no weights {name}, which its configuration asks for")
    if (held := found[1].shape) != shape:
        raise ConsolidatedError(f"{folder}: {name} has the shape {held}, its configuration makes it {shape}")
    return found

"""A replica's state as a safetensors file: flat vectors by parameter's name, and counters in the metadata.

Files come from peers as well, so loading trusts nothing: sizes first, then hashes where they are known, then names,
types and shapes, then every value; only then is anything copied. There is no pickle. Writing streams the vectors
through SHA-256, block by block, into a file that replaces the old one in one step, when it is durable.

The format is written by hand, because the library's writer needs a second copy of everything in memory; reading is
the library's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.safetensors import LENGTH_BYTES, encode_header, header_size
from farandole.protocol.vectors import is_square

from .blocks import BlockHasher, Content, content_of, first_difference
from .durable import WholeFile, replacing
from .errors import CheckpointError
from .parameters import Layout

FORMAT = "farandole/checkpoint/1"
MAX_COUNTER = 2**53  # exact in JSON everywhere
_SLICE = 1 << 22  # elements that are fetched from a device at a time, 16 MiB


@dataclass(frozen=True, slots=True)
class Counters:
    """How far a replica is."""

    round: int
    """Outer steps taken."""
    steps: int
    """Inner steps taken."""
    tokens: int
    """Tokens trained on."""


def save_checkpoint(
    path: Path, vectors: Mapping[str, Tensor], layout: Layout, run_id: bytes, counters: Counters
) -> Content:
    """Write flat vectors (n,) to ``path``, atomically and durably; raises `OSError`, as `replacing` does."""
    with replacing(path) as file:
        return _write(file, itertools.chain([_header(tuple(vectors), layout, run_id, counters)], _data(vectors)))


def load_checkpoint(
    path: Path,
    vectors: Mapping[str, Tensor],
    layout: Layout,
    run_id: bytes,
    optional: Collection[str] = (),
    hashes: bytes = b"",
) -> tuple[Counters, Content]:
    """Validate the file at ``path`` and copy it into the flat vectors (n,).

    ``hashes`` are those of its blocks, if they are known. Vectors named in ``optional`` may be missing, which become
    zeros then. Raises `CheckpointError`, before anything is changed, if it is not wholly a checkpoint of this run and
    layout.
    """
    _check_size(path, layout, len(vectors) - len(optional), len(vectors))
    try:
        content = content_of(path)
        if hashes and (damaged := first_difference(content, hashes)) is not None:
            raise CheckpointError(f"{path.name} is damaged: its block {damaged} is not what was written")
        with safe_open(path, framework="pt") as file:
            counters = _counters_of(file.metadata() or {}, layout, run_id)
            tensors = set(file.keys())
            held = {name.partition("/")[0] for name in tensors}
            present = {name: flat for name, flat in vectors.items() if name in held or name not in optional}
            if tensors != {f"{vector}/{name}" for vector in present for name in layout.names}:
                raise CheckpointError("the checkpoint's tensors are not those of this run's model")
            for vector in present:
                for name, shape in zip(layout.names, layout.shapes, strict=True):
                    check_tensor(f"{vector}/{name}", file.get_tensor(f"{vector}/{name}"), shape)
            for vector, flat in present.items():
                for name, view in layout.views(flat).items():
                    view.copy_(file.get_tensor(f"{vector}/{name}"))
            for vector in vectors.keys() - present.keys():
                vectors[vector].zero_()
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from error
    return counters, content


def _header(vectors: tuple[str, ...], layout: Layout, run_id: bytes, counters: Counters) -> memoryview:
    metadata = {"format": FORMAT, "run_id": run_id.hex(), "layout": layout.hash.hex()}
    metadata |= {name: str(value) for name, value in asdict(counters).items()}
    parameters = list(zip(layout.names, layout.shapes, strict=True))
    shapes = ((f"{vector}/{name}", tuple(shape)) for vector in vectors for name, shape in parameters)
    return memoryview(encode_header(metadata, shapes))


def _data(vectors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    for flat in vectors.values():
        for start in range(0, len(flat), _SLICE):
            yield flat[start : start + _SLICE].cpu().numpy().view(np.uint8).data


def _write(file: WholeFile, parts: Iterable[memoryview]) -> Content:
    hasher = BlockHasher()
    for part in parts:
        position = 0
        while position < len(part):
            block = part[position : position + hasher.room]
            file.write(block)
            hasher.update(block)
            position += len(block)
    return hasher.content()


def _check_size(path: Path, layout: Layout, least: int, most: int) -> None:
    """The file must have at least so many vectors, and at most."""
    try:
        with path.open("rb") as file:
            first, size = file.read(LENGTH_BYTES), file.seek(0, os.SEEK_END)
        num_bytes = size - header_size(first, size)
    except RemoteProtocolError as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}") from error
    vector_bytes = 4 * layout.num_elements
    num_vectors, rest = divmod(num_bytes, vector_bytes)
    if rest or not least <= num_vectors <= most:
        raise CheckpointError(
            f"{path.name} has {size} bytes, {most * vector_bytes} of them would be this model's numbers: it is "
            "damaged, or another model's"
        )


def _counters_of(metadata: Mapping[str, str], layout: Layout, run_id: bytes) -> Counters:
    if metadata.get("format") != FORMAT:
        raise CheckpointError("the file is no farandole checkpoint")
    if metadata.get("run_id") != run_id.hex():
        raise CheckpointError(f"the checkpoint is of run {metadata.get('run_id', '')[:16]}, not of {run_id.hex()[:16]}")
    if metadata.get("layout") != layout.hash.hex():
        raise CheckpointError("the checkpoint's layout is not this run's: it is of another model")
    return Counters(*(_counter(metadata, name) for name in ("round", "steps", "tokens")))


def _counter(metadata: Mapping[str, str], name: str) -> int:
    text = metadata.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= MAX_COUNTER):
        raise CheckpointError(f"the checkpoint's counter {name!r} is no number in range")
    return int(text)


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `CheckpointError` if a tensor of a checkpoint is not fp32 of this shape, or not finite."""
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
        raise CheckpointError(f"the checkpoint's {name} is {tensor.dtype} {tuple(tensor.shape)}, not fp32 {shape}")
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"the checkpoint's {name} holds a value that is not finite")
    if is_square(name) and not bool((tensor >= 0).all()):
        raise CheckpointError(f"the checkpoint's {name} holds a negative square")

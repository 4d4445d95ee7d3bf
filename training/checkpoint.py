"""A replica's state as a safetensors file: flat vectors by parameter's name, and counters in the metadata.

Files come from peers as well, so loading trusts nothing: sizes first, then names, types and shapes, then every
value; only then is anything copied. There is no pickle. Writing streams the vectors through SHA-256 into a temporary
file that replaces the old one in one step, so a crash leaves the old checkpoint or the new one, never half of one.

The format is written by hand, because the library's writer needs a second copy of everything in memory; reading is
the library's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import CheckpointError
from .parameters import Layout

FORMAT = "farandole/checkpoint/1"
# Names and shapes of a few thousand parameters take a few hundred KB.
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_COUNTER = 2**53  # exact in JSON everywhere
_SLICE = 1 << 22  # elements written at a time, 16 MiB


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
) -> tuple[str, int]:
    """Write flat vectors (n,) to ``path``, atomically and durably; returns (SHA-256 in hexadecimal, size in bytes)."""
    header = _header(tuple(vectors), layout, run_id, counters)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            for part in itertools.chain([memoryview(header)], _bytes_of(vectors)):
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return digest.hexdigest(), size


def load_checkpoint(
    path: Path, vectors: Mapping[str, Tensor], layout: Layout, run_id: bytes, optional: Collection[str] = ()
) -> Counters:
    """Validate the file at ``path`` and copy it into the flat vectors (n,).

    The file has all vectors, or all but those named in ``optional``, which become zeros then.
    Raises `CheckpointError`, before anything is changed, if it is not wholly a checkpoint of this run and layout.
    """
    required = {name: flat for name, flat in vectors.items() if name not in optional}
    has_all = _check_size(path, [len(kept) * layout.num_elements * 4 for kept in (required, vectors)])
    present = vectors if has_all else required
    try:
        with safe_open(path, framework="pt") as file:
            counters = _counters_of(file.metadata() or {}, layout, run_id)
            expected = {f"{vector}/{name}" for vector in present for name in layout.names}
            if set(file.keys()) != expected:
                raise CheckpointError("the checkpoint's tensors are not those of this run's model")
            for vector in present:
                for name, shape in zip(layout.names, layout.shapes, strict=True):
                    _check_tensor(f"{vector}/{name}", file.get_tensor(f"{vector}/{name}"), shape)
            for vector, flat in present.items():
                for name, view in layout.views(flat).items():
                    view.copy_(file.get_tensor(f"{vector}/{name}"))
            for vector in vectors.keys() - present.keys():
                vectors[vector].zero_()
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from error
    return counters


def _header(vectors: tuple[str, ...], layout: Layout, run_id: bytes, counters: Counters) -> bytes:
    metadata = {"format": FORMAT, "run_id": run_id.hex(), "layout": layout.hash.hex()}
    metadata |= {name: str(value) for name, value in asdict(counters).items()}
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for vector in vectors:
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            end = offset + 4 * torch.Size(shape).numel()
            header[f"{vector}/{name}"] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
            offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # tensors start at a multiple of 8, as the format asks
    return len(raw).to_bytes(8, "little") + raw


def _bytes_of(vectors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    for flat in vectors.values():
        for start in range(0, len(flat), _SLICE):
            yield flat[start : start + _SLICE].cpu().numpy().view(np.uint8).data


def _sync_folder(folder: Path) -> None:
    """Make the renaming itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_size(path: Path, data_bytes: list[int]) -> bool:
    """Whether the file holds the last of the sizes that it may have."""
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}") from error
    if header_bytes > MAX_HEADER_BYTES or size - 8 - header_bytes not in data_bytes:
        raise CheckpointError(
            f"{path.name} has {size} bytes, {data_bytes[-1]} of them would be this model's numbers: it is damaged, or "
            "another model's"
        )
    return size - 8 - header_bytes == data_bytes[-1]


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


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
        raise CheckpointError(f"the checkpoint's {name} is {tensor.dtype} {tuple(tensor.shape)}, not fp32 {shape}")
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"the checkpoint's {name} holds a value that is not finite")
    if name.startswith("square/") and not bool((tensor >= 0).all()):
        raise CheckpointError(f"the checkpoint's {name} holds a negative square")

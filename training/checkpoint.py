"""An engine's state as a safetensors file: tensors by ``VECTOR/PARAMETER``, and counters in the metadata.

Files come from peers as well, so loading trusts nothing: sizes first, then hashes where they are known, then names,
types and shapes, then every value; only then is anything copied. There is no pickle. Writing streams the tensors
through SHA-256, block by block, into a file that replaces the old one in one step, when it is durable.

The format is written by hand, because the library's writer needs a second copy of everything in memory; reading is
the library's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
# No number of a replica that still learns is larger, by far, but the arithmetic after loading stays finite with it.
MAX_MAGNITUDE = 1e6
_SLICE = 1 << 22  # elements that are fetched from a device at a time, 16 MiB


@dataclass(frozen=True, slots=True)
class Counters:
    """How far an engine is."""

    round: int
    """Outer steps taken."""
    steps: int
    """Inner steps taken."""
    tokens: int
    """Tokens trained on."""


def save_checkpoint(
    path: Path, state: Mapping[str, Tensor], layout: Layout, run_id: bytes, counters: Counters
) -> Content:
    """Write fp32 tensors to ``path``, atomically and durably; raises `OSError`, as `replacing` does."""
    metadata = {"format": FORMAT, "run_id": run_id.hex(), "layout": layout.hash.hex()}
    metadata |= {name: str(value) for name, value in asdict(counters).items()}
    header = encode_header(metadata, ((name, tuple(tensor.shape)) for name, tensor in state.items()))
    with replacing(path) as file:
        return _write(file, itertools.chain([memoryview(header)], _data(state.values())))


def load_checkpoint(
    path: Path,
    state: Mapping[str, Tensor],
    layout: Layout,
    run_id: bytes,
    optional: Collection[str] = (),
    hashes: bytes = b"",
) -> tuple[Counters, Content]:
    """Validate the file at ``path`` and copy it into the tensors of ``state``, by ``VECTOR/PARAMETER``.

    ``hashes`` are those of its blocks, if they are known. Vectors named in ``optional`` may be missing, which become
    zeros then. Raises `CheckpointError`, before anything is changed, if it is not wholly a checkpoint of this run and
    layout.
    """
    vectors = {_vector_of(name) for name in state}
    _check_size(path, layout, len(vectors) - len(optional), len(vectors))
    try:
        content = content_of(path)
        if hashes and (damaged := first_difference(content, hashes)) is not None:
            raise CheckpointError(f"{path.name} is damaged: its block {damaged} is not what was written")
        with safe_open(path, framework="pt") as file:
            counters = _counters_of(file.metadata() or {}, layout, run_id)
            names = set(file.keys())
            present = _present(state, names, optional)
            if names != present.keys():
                raise CheckpointError("the checkpoint's tensors are not those of this run's model")
            _copy(file.get_tensor, state, present)
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from error
    return counters, content


def load_start(path: Path, state: Mapping[str, Tensor], optional: Collection[str]) -> None:
    """Copy from another run's file, which this run starts from, what it has of ``state``; the rest is passed over.

    The run's manifest names the file by its content, and its bytes were proved before they came here: whether they fit
    is checked. A stage takes its own part. Vectors named in ``optional`` may be missing, wholly, and become zeros then.
    Raises `CheckpointError`, before anything is changed, if anything is missing or unfit.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            present = _present(state, names, optional)
            if missing := next((name for name in present if name not in names), ""):
                raise CheckpointError(f"{path.name} has no {missing}: it is of another model")
            _copy(file.get_tensor, state, present)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from error


def _vector_of(name: str) -> str:
    return name.partition("/")[0]


def _present(state: Mapping[str, Tensor], names: Collection[str], optional: Collection[str]) -> dict[str, Tensor]:
    """What a file with these names must have: all of every vector that it has any of, or that is not optional."""
    wanted = {_vector_of(name) for name in state if name in names or _vector_of(name) not in optional}
    return {name: tensor for name, tensor in state.items() if _vector_of(name) in wanted}


def _copy(read: Callable[[str], Tensor], state: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    """Check what is ``present`` in a file, then copy it all; the others become zeros."""
    for name, tensor in present.items():
        _check_tensor(name, read(name), tuple(tensor.shape))
    for name, tensor in state.items():
        if name in present:
            tensor.copy_(read(name))
        else:
            tensor.zero_()


def _data(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    for flat in (tensor.flatten() for tensor in tensors):
        for start in range(0, len(flat), _SLICE):
            yield flat[start : start + _SLICE].cpu().numpy().view(np.uint8).data


def _write(file: WholeFile, parts: Iterable[memoryview]) -> Content:
    hasher = BlockHasher()
    for part in parts:
        file.write(part)
        hasher.update(part)
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


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `CheckpointError` if a tensor of a checkpoint is not fp32 of this shape, or not finite."""
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
        raise CheckpointError(f"the checkpoint's {name} is {tensor.dtype} {tuple(tensor.shape)}, not fp32 {shape}")
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"the checkpoint's {name} holds a value that is not finite")
    limit = MAX_MAGNITUDE**2 if is_square(name) else MAX_MAGNITUDE
    if tensor.numel() and (largest := float(tensor.abs().max())) > limit:
        raise CheckpointError(f"the checkpoint's {name} holds {largest:.3g}: no weights are larger than {limit:.0e}")
    if is_square(name) and not bool((tensor >= 0).all()):
        raise CheckpointError(f"the checkpoint's {name} holds a negative square")

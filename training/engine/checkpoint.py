"""Checkpoints: an engine's state as a safetensors file, with tensors by ``VECTOR/PARAMETER`` and counters in metadata.

Files may come from peers, so loading validates everything before it copies anything: sizes, then hashes if they are
known, then names, types and shapes, then every value. There is no pickle. Writing streams the tensors through SHA-256,
block by block, into a file that atomically replaces the old one when it is durable.

The writer is implemented here because the library's writer needs a second copy of everything in memory; the reader is
the library's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farandole.protocol.run.rules import DROPPED, is_square
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.safetensors import FP32_BYTES, LENGTH_BYTES, encode_header, header_size

from ..base.durable import replacing
from ..base.errors import CheckpointError
from ..base.parameters import Layout
from .blocks import BlockHasher, Content, content_of

FORMAT = "farandole/checkpoint/1"
# Far larger than any number of a replica that still learns, yet the arithmetic after loading stays finite.
MAX_MAGNITUDE = 1e6
_SLICE = 1 << 22  # elements that are fetched from a device at a time, 16 MiB


_Counter = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # exact in JSON everywhere


class Counters(msgspec.Struct, frozen=True):
    """The steps that an engine has taken and the tokens that it has trained on."""

    round: _Counter
    """Outer steps taken."""
    steps: _Counter
    """Inner steps taken."""
    tokens: _Counter
    """Tokens trained on."""
    begun_at: _Counter = 0
    """Inner step at which AdamW's means began (`InnerOptimizer.begun_at`); older files have none."""


def save_checkpoint(
    path: Path, state: Mapping[str, Tensor], layout: Layout, run_id: bytes, counters: Counters
) -> Content:
    """Write tensors to ``path`` as fp32, atomically and durably; raises `OSError`, as `replacing` does."""
    metadata = {"format": FORMAT, "run_id": run_id.hex(), "layout": layout.hash.hex()}
    metadata |= {name: str(value) for name, value in msgspec.structs.asdict(counters).items()}
    header = encode_header(metadata, ((name, tuple(tensor.shape)) for name, tensor in state.items()))
    hasher = BlockHasher()
    with replacing(path) as file:
        file.write(header)
        hasher.update(memoryview(header))
        for flat in (tensor.flatten() for tensor in state.values()):
            for start in range(0, len(flat), _SLICE):
                part = flat[start : start + _SLICE].cpu().float().numpy().view(np.uint8).data
                file.write(part)
                hasher.update(part)
    return hasher.content()


def load_checkpoint(
    path: Path,
    state: Mapping[str, Tensor],
    layout: Layout,
    run_id: bytes,
    optional: Collection[str] = (),
    hashes: bytes = b"",
    *,
    ignored: Collection[str] = (),
) -> tuple[Counters, Content]:
    """Validate the file at ``path`` and copy it into the tensors of ``state``, by ``VECTOR/PARAMETER``.

    ``hashes`` are its blocks' hashes, if known. Vectors named in ``optional`` may be missing; they become zeros.
    Vectors named in ``ignored`` may be present. Raises `CheckpointError`, before anything is changed, if the file is
    not a valid checkpoint of this run and layout.
    """
    ignored = {*DROPPED, *ignored}
    sizes = {name: FP32_BYTES * tensor.numel() for name, tensor in state.items()}
    least = sum(size for name, size in sizes.items() if _vector_of(name) not in optional)
    most = sum(sizes.values()) + len(ignored) * FP32_BYTES * layout.num_elements
    try:
        with path.open("rb") as raw:
            first, size = raw.read(LENGTH_BYTES), raw.seek(0, os.SEEK_END)
        if not least <= size - header_size(first, size) <= most:
            raise CheckpointError(f"{path.name} has {size} bytes, this model's numbers take {most}: it is another's")
        content = content_of(path)
        if hashes and content.hashes != hashes:
            raise CheckpointError(f"{path.name} is damaged: it is not what was written")
        with safe_open(path, framework="pt") as file:
            counters = _counters_of(file.metadata() or {}, layout, run_id)
            names = {name for name in file.keys() if _vector_of(name) not in ignored}  # noqa: SIM118 - it is no dict
            present = _present(state, names, optional)
            if names != present.keys():
                raise CheckpointError("the checkpoint's tensors are not those of this run's model")
            _copy(file.get_tensor, state, present)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}") from error
    except (SafetensorError, UnicodeDecodeError, RemoteProtocolError) as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from error
    return counters, content


def load_start(
    path: Path, state: Mapping[str, Tensor], optional: Collection[str], partial: Collection[str] = ()
) -> None:
    """Copy the tensors of ``state`` from another run's file, which this run starts from; ignore the other tensors.

    The run's manifest names the file by its content, and the caller has verified the file's bytes; this function checks
    that the tensors fit. A stage takes its own part. Vectors named in ``optional`` may be missing; those in ``partial``
    may also lack parameters, as another inner optimizer's do. Both become zeros. Raises `CheckpointError`, before
    anything is changed, if anything else is missing or unfit.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            lacking = {_vector_of(name) for name in state if name not in names} & set(partial)
            present = _present(state, {name for name in names if _vector_of(name) not in lacking}, optional)
            if missing := next((name for name in present if name not in names), ""):
                raise CheckpointError(f"{path.name} has no {missing}: it is of another model")
            _copy(file.get_tensor, state, present)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from error


def _vector_of(name: str) -> str:
    return name.partition("/")[0]


def _present(state: Mapping[str, Tensor], names: Collection[str], optional: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors that a file with these names must have.

    These are all tensors of each vector that is not optional or of which the file has at least one tensor.
    """
    wanted = {_vector_of(name) for name in state if name in names or _vector_of(name) not in optional}
    return {name: tensor for name, tensor in state.items() if _vector_of(name) in wanted}


def _copy(read: Callable[[str], Tensor], state: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    """Check the tensors that are ``present`` in a file, then copy them; set the others to zero."""
    for name, expected in present.items():
        tensor, shape = read(name), tuple(expected.shape)
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
            raise CheckpointError(f"the checkpoint's {name} is {tensor.dtype} {tuple(tensor.shape)}, not fp32 {shape}")
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"the checkpoint's {name} holds a value that is not finite")
        limit = MAX_MAGNITUDE**2 if is_square(name) else MAX_MAGNITUDE
        if tensor.numel() and (largest := float(tensor.abs().max())) > limit:
            raise CheckpointError(
                f"the checkpoint's {name} holds {largest:.3g}: no weights are larger than {limit:.0e}"
            )
        if is_square(name) and not bool((tensor >= 0).all()):
            raise CheckpointError(f"the checkpoint's {name} holds a negative square")
    for name, tensor in state.items():
        if name in present:
            tensor.copy_(read(name))
        else:
            tensor.zero_()


def _counters_of(metadata: Mapping[str, str], layout: Layout, run_id: bytes) -> Counters:
    if metadata.get("format") != FORMAT:
        raise CheckpointError("the file is no farandole checkpoint")
    if metadata.get("run_id") != run_id.hex():
        raise CheckpointError(f"the checkpoint is of run {metadata.get('run_id', '')[:16]}, not of {run_id.hex()[:16]}")
    if metadata.get("layout") != layout.hash.hex():
        raise CheckpointError("the checkpoint's layout is not this run's: it is of another model")
    try:
        return msgspec.convert(metadata, Counters, strict=False)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the checkpoint's counters are no numbers in range: {error}") from error

"""Safetensors files without torch: read tensor by tensor, written in a stream; folders written atomically.

This is done by hand, because the library's writer needs the whole file in memory; here a model may be as large as the
disk. bf16 needs no torch either: it is the upper half of fp32.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from farandole.protocol.wire.errors import FarandoleError, RemoteProtocolError
from farandole.protocol.wire.safetensors import LENGTH_BYTES, Header, Shape, encode_header, header_size, parse_header
from farandole.training.base.durable import sync_file, sync_folder

Floats = npt.NDArray[np.float32]

# Elements that are checked, or written, at a time: 16 MiB.
_SLICE: Final = 1 << 22


class ConsolidatedError(FarandoleError):
    """A file or folder is not what it must be, or cannot be written; the message says which, and what to do."""


class TensorFile:
    """An open safetensors file; made by `open_tensors`."""

    def __init__(self, path: Path, file: BufferedReader, header: Header) -> None:
        self.path = path
        self.metadata = header.metadata
        self.shapes = {tensor.name: tensor.shape for tensor in header.tensors}
        self._file = file
        self._tensors = {tensor.name: tensor for tensor in header.tensors}

    def read(self, name: str) -> Floats:
        """Read one tensor, in fp32. Raises `ConsolidatedError` if it is not there, or not finite."""
        if name not in self._tensors:
            raise ConsolidatedError(f"{self.path} has no tensor {name}")
        place = self._tensors[name]
        raw = np.empty(place.end - place.start, dtype=np.uint8)
        with _reading(self.path):
            self._file.seek(place.start)
            if self._file.readinto(raw.data) != raw.size:
                raise ConsolidatedError(f"{self.path} is shorter than it was")
        match place.dtype:
            case "BF16":
                tensor = (raw.view("<u2").astype("<u4") << 16).view("<f4")
            case "F16":
                tensor = raw.view("<f2").astype(np.float32)
            case _:
                tensor = raw.view("<f4")
        if not is_finite(tensor):
            raise ConsolidatedError(f"{self.path}: {name} holds a value that is not finite")
        return tensor.reshape(place.shape)


@contextlib.contextmanager
def open_tensors(
    path: Path, parse: Callable[[bytes, int], Header] = parse_header, kind: str = "checkpoint, or not whole"
) -> Iterator[TensorFile]:
    """Open a safetensors file while the block runs. Raises `ConsolidatedError` if ``parse`` rejects it.

    ``parse`` gets the first bytes, up to the header's end, and the file's size; ``kind`` names what it accepts.
    """
    with contextlib.ExitStack() as stack:
        with _reading(path):
            file = stack.enter_context(path.open("rb"))
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            first = file.read(LENGTH_BYTES)
            try:
                first += file.read(header_size(first, size) - len(first))
                header = parse(first, size)
            except RemoteProtocolError as error:
                raise ConsolidatedError(f"{path} is no {kind}: {error}") from error
        yield TensorFile(path, file, header)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConsolidatedError(f"cannot read {path}: {error.strerror or error}") from error


def is_finite(tensor: Floats) -> bool:
    """Return whether all values are finite, checked slice by slice."""
    flat = tensor.reshape(-1)
    return all(bool(np.isfinite(flat[start : start + _SLICE]).all()) for start in range(0, flat.size, _SLICE))


def write_tensors(
    path: Path, metadata: Mapping[str, str], shapes: Mapping[str, Shape], tensor_of: Callable[[str], Floats]
) -> None:
    """Write a safetensors file with these fp32 tensors, in this order; each is asked for when its turn comes.

    The file is on disk on return. On `OSError` half a file is left: write into a `new_folder`.
    """
    with path.open("wb") as file:
        file.write(encode_header(metadata, shapes.items()))
        for name, shape in shapes.items():
            tensor = np.ascontiguousarray(tensor_of(name), dtype="<f4")
            assert tensor.shape == shape, f"{name} is {tensor.shape}, not {shape}"
            flat = tensor.reshape(-1)
            for start in range(0, flat.size, _SLICE):
                file.write(flat[start : start + _SLICE].data)
        file.flush()
        sync_file(file.fileno())


def check_is_new(path: Path) -> None:
    """Raise `ConsolidatedError` unless a folder can be made at ``path``: nothing is there, or an empty one."""
    if path.name in ("", ".."):
        raise ConsolidatedError(f"{path} is no name for a new folder: give it one with --to")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConsolidatedError(f"{path} is there already: name a new folder with --to")


@contextlib.contextmanager
def new_folder(path: Path, num_bytes: int) -> Iterator[Path]:
    """Make a folder to fill; it appears at ``path``, with all its files, when the block ends.

    On failure nothing is left. ``num_bytes``: its approximate size on the disk. Raises `ConsolidatedError` if there
    is something at ``path`` already, or the disk does not take it.
    """
    check_is_new(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        if (free := shutil.disk_usage(temporary).free) < num_bytes:
            raise ConsolidatedError(
                f"{path} needs {num_bytes / 1e6:.0f} MB, and the disk has {free / 1e6:.0f} MB left: "
                "free some, or name a folder elsewhere with --to"
            )
        yield temporary
        sync_folder(temporary)
        if path.exists():
            path.rmdir()  # it is empty; Windows replaces no folder by another
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some room, or name a folder elsewhere with --to"
        raise ConsolidatedError(f"cannot write {path}: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a file in a `new_folder`; it is on disk on return. Raises `OSError`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        sync_file(file.fileno())


def shards(shapes: Mapping[str, Shape], max_bytes: int) -> Sequence[Mapping[str, Shape]]:
    """Split the tensors, in order, into files of at most ``max_bytes`` each; a larger tensor gets its own file."""
    parts: list[dict[str, Shape]] = [{}]
    size = 0
    for name, shape in shapes.items():
        num_bytes = 4 * math.prod(shape)
        if parts[-1] and size + num_bytes > max_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = shape
        size += num_bytes
    return parts

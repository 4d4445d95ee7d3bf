"""Safetensors files: read tensor by tensor, written in a stream; folders written atomically.

Files are written by hand, because the library's writer needs the whole file in memory; here a model may be as large as
the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.safetensors import Shape, encode_header
from farandole.training.base.durable import replacing, sync_folder

Floats = npt.NDArray[np.float32]

# Types of elements that are read.
_FLOATS: Final = ("F32", "F16", "BF16")
# Elements that are checked, or written, at a time: 16 MiB.
_SLICE: Final = 1 << 22


class ConsolidatedError(FarandoleError):
    """A file or folder is not what it must be, or cannot be written; the message says which, and what to do."""


class TensorFile:
    """An open safetensors file; made by `open_tensors`."""

    def __init__(self, path: Path, file: safe_open) -> None:
        self.path = path
        self.metadata: dict[str, str] = file.metadata() or {}
        self.shapes: dict[str, Shape] = {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
        """By name, in the order of the tensors' bytes."""
        self._file = file

    @property
    def counters(self) -> tuple[int, int, int]:
        """The round, inner steps and tokens of a checkpoint. Raises `ConsolidatedError` if they are not in range."""
        texts = [self.metadata.get(name, "") for name in ("round", "steps", "tokens")]
        if not all(text.isascii() and text.isdigit() and len(text) <= 15 for text in texts):  # exact in JSON
            raise ConsolidatedError(f"{self.path}: its counters are no numbers in range")
        round_index, steps, tokens = map(int, texts)
        return round_index, steps, tokens

    def read(self, name: str) -> Floats:
        """Read one tensor, in fp32. Raises `ConsolidatedError` if it is not there, no float, or not finite."""
        if name not in self.shapes:
            raise ConsolidatedError(f"{self.path} has no tensor {name}")
        if (dtype := self._file.get_slice(name).get_dtype()) not in _FLOATS:
            raise ConsolidatedError(f"{self.path}: {name} is {dtype}, not {' or '.join(_FLOATS)}")
        if dtype == "BF16":  # numpy has none
            with _open(self.path, "pt") as file:
                tensor: Floats = file.get_tensor(name).float().numpy()
        else:
            tensor = self._file.get_tensor(name).astype(np.float32, copy=False)
        flat = tensor.reshape(-1)
        if not all(bool(np.isfinite(flat[start : start + _SLICE]).all()) for start in range(0, flat.size, _SLICE)):
            raise ConsolidatedError(f"{self.path}: {name} holds a value that is not finite")
        return tensor


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file while the block runs. Raises `ConsolidatedError` if it is none."""
    with _open(path, "numpy") as file:
        yield TensorFile(path, file)


def _open(path: Path, framework: str) -> safe_open:
    try:
        return safe_open(path, framework=framework)
    except OSError as error:
        raise ConsolidatedError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ConsolidatedError(f"{path} is no safetensors file, or not whole: {error}") from error


def write_tensors(
    path: Path, metadata: Mapping[str, str], shapes: Mapping[str, Shape], tensor_of: Callable[[str], Floats]
) -> None:
    """Write a safetensors file with these fp32 tensors, in this order; each is asked for when its turn comes.

    The file is on disk on return. Raises `OSError`.
    """
    with replacing(path) as file:
        file.write(encode_header(metadata, shapes.items()))
        for name, shape in shapes.items():
            tensor = np.asarray(tensor_of(name), dtype="<f4", order="C")
            assert tensor.shape == shape, f"{name} is {tensor.shape}, not {shape}"
            flat = tensor.reshape(-1)
            for start in range(0, flat.size, _SLICE):
                file.write(flat[start : start + _SLICE].data)


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
        temporary.replace(path)  # or an empty folder
        sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some room, or name a folder elsewhere with --to"
        raise ConsolidatedError(f"cannot write {path}: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file, or nothing; it is on disk on return. Raises `OSError`."""
    with replacing(path) as file:
        file.write(data)

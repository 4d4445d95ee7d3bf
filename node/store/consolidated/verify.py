"""Verifies that a checkpoint is whole: its hashes, the names and shapes of its tensors, each of its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from farandole.protocol.run.vectors import SLOW, is_square, known_vectors
from farandole.protocol.wire.safetensors import Shape
from farandole.training.engine.blocks import content_of, first_difference

from .folder import Consolidated, layout_hash, read_folder, tensor_shapes
from .tensors import ConsolidatedError, open_tensors


@dataclass(frozen=True, slots=True)
class Verified:
    """The properties that were verified."""

    path: str
    num_tensors: int
    size: int
    """The size in bytes."""
    vectors: tuple[str, ...]
    round: int | None
    inner_steps: int | None
    tokens: int | None
    id: str
    """The id in hexadecimal; empty for a file alone, which proves nothing."""


def verify(path: Path) -> Verified:
    """Verify all of a consolidated checkpoint, or of a file of tensors; `ConsolidatedError` says what is wrong."""
    if not path.is_dir():
        vectors, num_tensors = _verify_file(path, None)
        return Verified(str(path), num_tensors, path.stat().st_size, vectors, None, None, None, "")
    folder = read_folder(path)
    index = folder.index
    if index.layout != layout_hash(folder.shapes):
        raise ConsolidatedError(f"{folder.path} is of another model than its manifest says")
    verify_hashes(folder)
    vectors, num_tensors = _verify_file(folder.checkpoint, folder.shapes)
    return Verified(
        str(folder.path),
        num_tensors,
        index.size,
        vectors,
        index.round,
        index.inner_steps,
        index.tokens,
        folder.id.hex(),
    )


def verify_hashes(folder: Consolidated) -> None:
    """Check that the file has the hashes of the index. Raises `ConsolidatedError`."""
    try:
        content = content_of(folder.checkpoint)
    except OSError as error:
        raise ConsolidatedError(f"cannot read {folder.checkpoint}: {error.strerror}") from error
    if content.size != folder.index.size:
        raise ConsolidatedError(
            f"{folder.checkpoint} has {content.size} bytes, not {folder.index.size}: it is not whole, or another one"
        )
    if (damaged := first_difference(content, folder.index.hashes)) is not None:
        raise ConsolidatedError(f"{folder.checkpoint} is damaged: its block {damaged} is not what was written")


def _verify_file(path: Path, parameters: Mapping[str, Shape] | None) -> tuple[tuple[str, ...], int]:
    """Return the vectors in a file of tensors and their number; ``parameters``: None to trust the file's own names."""
    with open_tensors(path) as file:
        found = {name.partition("/")[0] for name in file.shapes}
        vectors = tuple(vector for vector in known_vectors() if vector in found)
        if len(vectors) < len(found) or SLOW not in found:
            raise ConsolidatedError(f"{path} is no checkpoint: it has the vectors {', '.join(sorted(found)) or 'none'}")
        if parameters is None:
            of_slow = (name for name in file.shapes if name.startswith(f"{SLOW}/"))
            parameters = {name.partition("/")[2]: file.shapes[name] for name in of_slow}
        if file.shapes != tensor_shapes(vectors, parameters, file.shapes):
            raise ConsolidatedError(f"{path}: the tensors' names or shapes are not the model's")
        for name in file.shapes:
            tensor = file.read(name)
            if is_square(name) and bool((tensor < 0).any()):
                raise ConsolidatedError(f"{path}: {name} holds a negative square")
        return vectors, len(file.shapes)

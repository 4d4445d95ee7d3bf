"""A consolidated checkpoint: the whole model of a run, all stages in one file, in a folder of its own.

    checkpoint.safetensors   each parameter by its name, of all stages together: "slow/NAME", "momentum/NAME", and with
                             the inner optimizer's state "mean/NAME", "square/NAME"; fp32
    checkpoint.index         the hashes of its blocks, signed (`protocol.checkpoints.blocks`): its SHA-256 is the
                             checkpoint's id, by which the manifest of a run that starts from it names it
    manifest                 of the run that it comes from; of an imported model, of the run that starts from it
    epochs.json              of a run that counts epochs of its data: their progress (`EpochsConfig`)

As in Universal Checkpointing (arXiv 2406.18820), nothing in it depends on the number of nodes or stages that made
it. State of a single replica is left out: its codec's memory, its drift correction, and its inner steps since the last
outer step.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.checkpoints.blocks import (
    Index,
    decode_signed_index,
    encode_signed_index,
    max_index_bytes,
    sign_index,
)
from farandole.protocol.run.manifest import MAX_MANIFEST_BYTES, EpochsConfig, Manifest, SignedManifest, decode_manifest
from farandole.protocol.run.models import shapes_of, stage_of
from farandole.protocol.run.rules import OPTIMIZER_VECTORS, OuterRules, required_vectors
from farandole.protocol.wire.errors import ManifestError, RemoteProtocolError
from farandole.protocol.wire.identity import public_bytes
from farandole.protocol.wire.safetensors import FP32_BYTES, MAX_HEADER_BYTES, Shape
from farandole.training.engine.blocks import content_of

from .tensors import ConsolidatedError, Floats, TensorFile, new_folder, open_tensors, write_file, write_tensors

FORMAT: Final = "farandole/consolidated/1"
CHECKPOINT_NAME: Final = "checkpoint.safetensors"
INDEX_NAME: Final = "checkpoint.index"
MANIFEST_NAME: Final = "manifest"
EPOCHS_NAME: Final = "epochs.json"

# The run id of a model that comes from no run, because it was imported.
NO_RUN: Final = bytes(32)


@dataclass(frozen=True, slots=True)
class Consolidated:
    """A folder whose manifest and index are valid; `verify_hashes` checks its tensors."""

    path: Path
    manifest: Manifest
    signed: SignedManifest
    id: bytes
    """The SHA-256 of the index, 32 bytes."""
    index: Index
    epochs: EpochsConfig | None = None
    """The progress of the run in its data, if it counts epochs."""

    @property
    def checkpoint(self) -> Path:
        """The safetensors file."""
        return self.path / CHECKPOINT_NAME


def tensor_shapes(
    vectors: Sequence[str], parameters: Mapping[str, Shape], present: Collection[str] | None = None
) -> dict[str, Shape]:
    """Return the tensor shapes of a file with these vectors, which lie one after the other.

    An inner optimizer may keep a vector for some parameters only: ``present`` has the names of the tensors that are
    there; None: each vector has all parameters.
    """
    return {
        f"{vector}/{name}": shape
        for vector in vectors
        for name, shape in parameters.items()
        if present is None or vector not in OPTIMIZER_VECTORS or f"{vector}/{name}" in present
    }


def read_folder(path: Path) -> Consolidated:
    """Open a consolidated checkpoint; `ConsolidatedError` says what is wrong with the folder."""
    if not (path / MANIFEST_NAME).exists():
        raise ConsolidatedError(
            f"{path} holds no model of a run: name a folder that `farandole checkpoint pull` or `import` has written"
        )
    try:
        manifest, signed = decode_manifest(_read(path / MANIFEST_NAME, 2 * MAX_MANIFEST_BYTES))
        max_size = max_file_bytes(manifest)
        raw_index = _read(path / INDEX_NAME, max_index_bytes(max_size))
        try:
            signed_index, index = decode_signed_index(raw_index, signed.run_id, max_size)
        except RemoteProtocolError:
            if (start := manifest.start) is None:
                raise
            signed_index, index = decode_signed_index(raw_index, start.run, max_size)
            if signed_index.id != start.checkpoint:
                raise RemoteProtocolError("the index is not of the checkpoint that the manifest starts from") from None
        if index.num_stages != 1:
            raise RemoteProtocolError(f"the index is of a stage of {index.num_stages}, not of a whole model")
        epochs = None
        if (path / EPOCHS_NAME).exists():
            epochs = msgspec.json.decode(_read(path / EPOCHS_NAME, MAX_MANIFEST_BYTES), type=EpochsConfig)
    except (ManifestError, RemoteProtocolError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConsolidatedError(f"{path} is no consolidated checkpoint: {error}") from error
    return Consolidated(path, manifest, signed, signed_index.id, index, epochs)


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
    if content.hashes != folder.index.hashes:
        raise ConsolidatedError(f"{folder.checkpoint} is damaged: it is not what was written")


def max_file_bytes(manifest: Manifest) -> int:
    """Return the most bytes of the run's whole model as a checkpoint, with the inner optimizer's state."""
    num_parameters = sum(math.prod(shape) for shape in shapes_of(manifest.model).values())
    # Of any outer rule: that of the run which starts from it may be another.
    num_vectors = max(len(required_vectors(rule())) for rule in get_args(OuterRules)) + len(OPTIMIZER_VECTORS)
    return num_parameters * num_vectors * FP32_BYTES + MAX_HEADER_BYTES


def write_folder(
    path: Path,
    key: Ed25519PrivateKey,
    run_id: bytes,
    parameters: Mapping[str, Shape],
    vectors: Sequence[str],
    tensor_of: Callable[[str], Floats],
    manifest_of: Callable[[bytes], bytes],
    epochs: EpochsConfig | None = None,
    present: Collection[str] | None = None,
    *,
    round_index: int = 0,
    inner_steps: int = 0,
    tokens: int = 0,
) -> bytes:
    """Write a consolidated checkpoint, all of it or nothing; return its id.

    ``present`` as in `tensor_shapes`. ``tensor_of`` is called with "slow/NAME" and so on in the file's order.
    ``manifest_of`` is called for the manifest's signed bytes, once the checkpoint's id is known. Raises
    `ConsolidatedError`. The last three say how much training the weights have had; ``inner_steps`` of one replica:
    where the learning rate's schedule goes on.
    """
    shapes = tensor_shapes(vectors, parameters, present)
    num_bytes = sum(4 * math.prod(shape) for shape in shapes.values())
    layout = [FORMAT, *(f"{name} {'x'.join(map(str, shape))}" for name, shape in parameters.items())]
    counters = {"round": round_index, "inner_steps": inner_steps, "tokens": tokens}
    metadata = {"format": FORMAT, "run_id": run_id.hex(), **{name: str(value) for name, value in counters.items()}}
    with new_folder(path, num_bytes) as folder:
        write_tensors(folder / CHECKPOINT_NAME, metadata, shapes, tensor_of)
        content = content_of(folder / CHECKPOINT_NAME)  # the file's content on the disk
        index = Index(
            run_id=run_id,
            author=public_bytes(key),
            **counters,
            size=content.size,
            layout=hashlib.sha256("\n".join(layout).encode()).digest(),
            hashes=content.hashes,
        )
        signed = sign_index(key, index)
        write_file(folder / INDEX_NAME, encode_signed_index(signed))
        write_file(folder / MANIFEST_NAME, manifest_of(signed.id))
        if epochs is not None:
            write_file(folder / EPOCHS_NAME, msgspec.json.encode(epochs))
    return signed.id


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ConsolidatedError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > max_bytes:
        raise ConsolidatedError(f"{path} has more than {max_bytes} bytes")
    return raw


# Replicas' checkpoints as one model
#
# The mean of all replicas is where NoLoCo's random pairs contract to, and late in a run it is better than any of them:
# the drift of their last inner steps is noise that averages out. Of eight with losses of 2.183 to 2.187, the mean of
# two had 2.1815, of four 2.1802, of all 2.1803 (41 k parameters, 600 inner steps); in BENCHMARKS.md the gain is 2 % of
# perplexity. Early in a run, when replicas differ in progress, the best may be as good as the mean.
#
# The outer step is linear, and the term that pulls two partners together cancels in their mean. So the mean of the
# momenta is exactly the momentum of the mean weights: a run that starts from both goes on as the mean replica would.


def consolidate(
    to: Path,
    key: Ed25519PrivateKey,
    raw_manifest: bytes,
    stages: Sequence[Sequence[Path]],
    vectors: Sequence[str],
    epochs: EpochsConfig | None = None,
) -> bytes:
    """Write the folder ``to`` from checkpoints of a run and return its id; ``stages[s]`` are replicas of stage s.

    ``epochs``: the run's progress in its data, if it counts epochs. Raises `ConsolidatedError`.
    """
    manifest, signed = decode_manifest(raw_manifest)
    model = manifest.model
    shapes = shapes_of(model)

    def check(file: TensorFile, expected: Mapping[str, Shape]) -> None:
        if file.metadata.get("run_id") != signed.run_id.hex():
            raise ConsolidatedError(f"{file.path} is a checkpoint of another run")
        if missing := set(vectors) - {name.partition("/")[0] for name in file.shapes}:
            raise ConsolidatedError(f"{file.path} has no {', '.join(sorted(missing))}")
        for name, shape in expected.items():
            if name not in file.shapes:
                raise ConsolidatedError(f"{file.path} has no {name}")
            if file.shapes[name] != shape:
                raise ConsolidatedError(f"{file.path}: {name} has the shape {file.shapes[name]}, not {shape}")

    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(open_tensors(path)) for path in paths] for paths in stages]
        present: set[str] = set()
        for stage, replicas in enumerate(files):
            of_stage = {name: shape for name, shape in shapes.items() if stage_of(model, name) == stage}
            present.update(replicas[0].shapes)
            for file in replicas:
                check(file, tensor_shapes(vectors, of_stage, present))

        def mean(tensor_name: str) -> Floats:
            """Return the mean of one tensor, such as "slow/NAME", over the replicas of its stage."""
            stage = stage_of(model, tensor_name.partition("/")[2])
            first, *others = (file.read(tensor_name) for file in files[stage])
            if not others:
                return first
            total = first.astype(np.float64)
            for tensor in others:
                total += tensor
            return (total / (1 + len(others))).astype(np.float32)

        rounds, steps, tokens = zip(*(file.counters for replicas in files for file in replicas), strict=True)
        return write_folder(
            to,
            key,
            signed.run_id,
            shapes,
            vectors,
            mean,
            lambda checkpoint_id: raw_manifest,
            epochs,
            present,
            # These describe the mean replica: they are means, except the round, which is the newest.
            round_index=max(rounds),
            inner_steps=round(sum(steps) / len(steps)),
            tokens=round(sum(tokens) / len(tokens)),
        )

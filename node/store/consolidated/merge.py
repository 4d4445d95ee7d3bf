"""Stages' checkpoints as one model: the mean of several replicas of each stage, parameter by parameter.

The mean of all replicas is where NoLoCo's random pairs contract to, and late in a run it is better than any of them:
what their last inner steps have wandered apart is noise that averages out. Of eight with losses of 2.183 to 2.187, the
mean of two had 2.1815, of four 2.1802, of all 2.1803 (41 k parameters, 600 inner steps); by perplexity it is 2 % in
BENCHMARKS.md. Early in a run, when they differ by how far they are, the best may be as good as the mean.

The outer step is linear, and what pulls two partners together cancels in their mean, so the mean of the momenta is the
very momentum of the mean weights: a run that starts from both goes on as the mean replica would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.manifest import EpochsConfig, Manifest, decode_manifest
from farandole.protocol.safetensors import Shape
from farandole.protocol.shapes import shapes_of, stage_of

from .folder import WeightCounters, model_shapes, tensor_shapes, write_folder
from .tensors import ConsolidatedError, Floats, TensorFile, open_tensors

MAX_COUNTER: Final = 2**53  # exact in JSON everywhere


def consolidate(
    to: Path,
    key: Ed25519PrivateKey,
    raw_manifest: bytes,
    stages: Sequence[Sequence[Path]],
    vectors: Sequence[str],
    epochs: EpochsConfig | None = None,
) -> bytes:
    """Write the folder ``to`` from checkpoints of a run, ``stages[s]`` of so many replicas of stage s; returns its id.

    ``epochs``: how far the run is in its data, if it counts epochs. Raises `ConsolidatedError`.
    """
    manifest, signed = decode_manifest(raw_manifest)
    with open_merger(manifest, signed.run_id, stages, vectors) as merger:
        return write_folder(
            to,
            key,
            signed.run_id,
            model_shapes(manifest),
            vectors,
            merger.counters(),
            merger.tensor,
            lambda checkpoint_id: raw_manifest,
            epochs,
        )


class Merger:
    """Opened stage checkpoints, ``stages[s]`` the replicas of stage s; made by `open_merger`."""

    def __init__(self, manifest: Manifest, stages: Sequence[Sequence[TensorFile]]) -> None:
        self._model = manifest.model
        self._stages = stages

    def tensor(self, tensor_name: str) -> Floats:
        """The mean of one tensor, "slow/NAME" say, over the replicas of its stage. Raises `ConsolidatedError`."""
        name = tensor_name.partition("/")[2]
        first, *others = (file.read(tensor_name) for file in self._stages[stage_of(self._model, name)])
        if not others:
            return first
        total = first.astype(np.float64)
        for tensor in others:
            total += tensor
        return (total / (1 + len(others))).astype(np.float32)

    def counters(self) -> WeightCounters:
        """Of the mean replica: means, but for the round, which is the newest."""
        counters = [_counters_of(file) for files in self._stages for file in files]
        return WeightCounters(
            max(each.round for each in counters),
            round(sum(each.inner_steps for each in counters) / len(counters)),
            round(sum(each.tokens for each in counters) / len(counters)),
        )


@contextlib.contextmanager
def open_merger(
    manifest: Manifest, run_id: bytes, stages: Sequence[Sequence[Path]], vectors: Sequence[str]
) -> Iterator[Merger]:
    """For as long as the block runs. Raises `ConsolidatedError` if a file is not of this run, or lacks a tensor."""
    model = manifest.model
    with contextlib.ExitStack() as stack:
        opened = [[stack.enter_context(open_tensors(path)) for path in paths] for paths in stages]
        for stage, files in enumerate(opened):
            of_stage = {name: shape for name, shape in shapes_of(model).items() if stage_of(model, name) == stage}
            for file in files:
                _check(file, run_id, tensor_shapes(vectors, of_stage))
        yield Merger(manifest, opened)


def _check(file: TensorFile, run_id: bytes, expected: Mapping[str, Shape]) -> None:
    if file.metadata.get("run_id") != run_id.hex():
        raise ConsolidatedError(f"{file.path} is a checkpoint of another run")
    for name, shape in expected.items():
        if name not in file.shapes:
            raise ConsolidatedError(f"{file.path} has no {name}")
        if file.shapes[name] != shape:
            raise ConsolidatedError(f"{file.path}: {name} has the shape {file.shapes[name]}, not {shape}")


def _counters_of(file: TensorFile) -> WeightCounters:
    return WeightCounters(*(_counter(file, name) for name in ("round", "steps", "tokens")))


def _counter(file: TensorFile, name: str) -> int:
    text = file.metadata.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= MAX_COUNTER):
        raise ConsolidatedError(f"{file.path}: the counter {name!r} is no number in range")
    return int(text)

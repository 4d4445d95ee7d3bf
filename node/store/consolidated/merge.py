"""Stages' checkpoints as one model: the mean of several replicas of each stage, parameter by parameter.

The mean of all replicas is where NoLoCo's random pairs contract to, and late in a run it is better than any of them:
the drift of their last inner steps is noise that averages out. Of eight with losses of 2.183 to 2.187, the mean of two
had 2.1815, of four 2.1802, of all 2.1803 (41 k parameters, 600 inner steps); in BENCHMARKS.md the gain is 2 % of
perplexity. Early in a run, when replicas differ in progress, the best may be as good as the mean.

The outer step is linear, and the term that pulls two partners together cancels in their mean. So the mean of the
momenta is exactly the momentum of the mean weights: a run that starts from both goes on as the mean replica would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.cut import shapes_of, stage_of
from farandole.protocol.run.manifest import EpochsConfig, decode_manifest
from farandole.protocol.wire.safetensors import Shape

from .folder import WeightCounters, tensor_shapes, write_folder
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
    """Write the folder ``to`` from checkpoints of a run and return its id; ``stages[s]`` are replicas of stage s.

    ``epochs``: the run's progress in its data, if it counts epochs. Raises `ConsolidatedError`.
    """
    manifest, signed = decode_manifest(raw_manifest)
    model = manifest.model
    shapes = shapes_of(model)
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(open_tensors(path)) for path in paths] for paths in stages]
        present: set[str] = set()
        for stage, replicas in enumerate(files):
            of_stage = {name: shape for name, shape in shapes.items() if stage_of(model, name) == stage}
            present.update(replicas[0].shapes)
            for file in replicas:
                _check(file, signed.run_id, vectors, tensor_shapes(vectors, of_stage, present))

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

        every_file = [file for replicas in files for file in replicas]
        rounds, steps, tokens = ([_counter(file, name) for file in every_file] for name in ("round", "steps", "tokens"))
        # These describe the mean replica: they are means, except the round, which is the newest.
        counters = WeightCounters(max(rounds), round(sum(steps) / len(steps)), round(sum(tokens) / len(tokens)))
        return write_folder(
            to, key, signed.run_id, shapes, vectors, counters, mean, lambda checkpoint_id: raw_manifest, epochs, present
        )


def _check(file: TensorFile, run_id: bytes, vectors: Sequence[str], expected: Mapping[str, Shape]) -> None:
    if file.metadata.get("run_id") != run_id.hex():
        raise ConsolidatedError(f"{file.path} is a checkpoint of another run")
    if missing := set(vectors) - {name.partition("/")[0] for name in file.shapes}:
        raise ConsolidatedError(f"{file.path} has no {', '.join(sorted(missing))}")
    for name, shape in expected.items():
        if name not in file.shapes:
            raise ConsolidatedError(f"{file.path} has no {name}")
        if file.shapes[name] != shape:
            raise ConsolidatedError(f"{file.path}: {name} has the shape {file.shapes[name]}, not {shape}")


def _counter(file: TensorFile, name: str) -> int:
    text = file.metadata.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= MAX_COUNTER):
        raise ConsolidatedError(f"{file.path}: the counter {name!r} is no number in range")
    return int(text)

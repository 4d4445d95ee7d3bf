"""The manifest's sections as training's own settings: the one place where the two packages' types meet."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from farandole.protocol.manifest import Manifest
from farandole.training.config import (
    DataConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    PipelineConfig,
    TokenizerConfig,
)


class TrainingConfigs(NamedTuple):
    """In the order in which `farandole.training.learner.build_learner` takes them."""

    model: ModelConfig
    inner: InnerConfig
    outer: OuterConfig
    data: DataConfig
    tokenizer: TokenizerConfig


def training_configs(manifest: Manifest) -> TrainingConfigs:
    """Field by field, under the same names; imports no torch."""
    model = manifest.model
    hf, own = ("" if kind is None else msgspec.json.encode(kind).decode() for kind in (model.hf, model.own))
    return TrainingConfigs(
        ModelConfig(**{**asdict(model), "hf": hf, "own": own}),
        InnerConfig(**asdict(manifest.inner)),
        OuterConfig(**asdict(manifest.outer)),
        DataConfig(**asdict(manifest.data), order=slice_order(manifest)),
        TokenizerConfig(**asdict(manifest.tokenizer)),
    )


def slice_order(manifest: Manifest, run_id: bytes = b"") -> bytes:
    """The run in whose order the slices of the data are, if it counts epochs: ``run_id``, or one that it goes on from.

    (A run that starts where another one's epochs were, has its order.)
    """
    start = manifest.start
    return run_id if start is None or start.epochs is None else start.epochs.order


def pipeline_config(manifest: Manifest) -> PipelineConfig:
    """What the trainer needs of the section ``pipeline``."""
    pipeline = manifest.pipeline
    return PipelineConfig(
        microbatch_size=pipeline.microbatch_size,
        codec=pipeline.codec,
        recompute=pipeline.recompute,
        overlap=pipeline.overlap,
    )

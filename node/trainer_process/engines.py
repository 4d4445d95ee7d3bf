"""Choice of a trainer process's engine, and its inputs from this node. Add another kind of engine here."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

from farandole.protocol.run.exclusions import exclusions_in
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer.trainer_messages import Prepare, Preparing, TrainerSettings
from farandole.training.base.errors import TrainingError
from farandole.training.data.dataset import Bring
from farandole.training.engine.engine import Engine
from farandole.training.engine.learner import build_learner
from farandole.training.engine.stage_worker import build_stage_worker

from ..base.system.memory import map_shared_memory
from ..store.disk_space import text_room
from ..trainer.channel import TrainerSocket

# Interval of progress reports, so that a person sees activity.
TELL_SECONDS: Final = 2.0


def make_engine(channel: TrainerSocket, prepare: Prepare, manifest: Manifest) -> Engine:
    """Make the stage engine if the model is cut, else the local one, with the weights of the run's seed.

    Raises `TrainingError` if the text, the tokenizer, the device or the model is unsuitable.
    """
    flags = [flag for flag, is_set in _flags(prepare.settings).items() if is_set]
    if problems := list(exclusions_in(manifest, flags)):
        raise TrainingError(f"{'; '.join(problems)}. Leave out one of the node's settings")
    bring, settings = _bring_of(prepare, channel), prepare.settings
    if manifest.model.num_stages == 1:
        return build_learner(manifest, run_id=prepare.run_id, author=prepare.author, settings=settings, bring=bring)
    worker = build_stage_worker(
        manifest, stage=prepare.stage, run_id=prepare.run_id, author=prepare.author, settings=settings, bring=bring
    )
    size = 2 * manifest.pipeline.in_flight * worker.activation_bytes
    worker.memory = memoryview(map_shared_memory(prepare.activations, size))
    return worker


def _flags(settings: TrainerSettings) -> dict[str, bool]:
    """Return which of the node's settings that may exclude others are in use."""
    return {
        "--lean": settings.lean,
        "--recompute": settings.recompute,
        "--compile": settings.compile,
        "--data": bool(settings.data),
        "--data-weight": bool(settings.data_weight),
        "--stream": bool(settings.stream),
    }


def _bring_of(prepare: Prepare, channel: TrainerSocket) -> Bring:
    """Collect the inputs; report the progress of tokenising to the mesh process now and then."""
    told_at = -math.inf

    def tell(position: int, size: int) -> None:
        nonlocal told_at
        if time.monotonic() >= told_at + TELL_SECONDS:
            told_at = time.monotonic()
            channel.send(Preparing(position, size))

    settings = prepare.settings
    return Bring(
        paths=tuple(map(Path, settings.data)),
        weights=tuple(settings.data_weight),
        field=settings.data_field,
        streams=tuple(settings.stream),
        tokenizer=Path(settings.tokenizer) if settings.tokenizer else None,
        cache=Path(settings.tokens) if settings.tokens else None,
        cache_bytes=text_room(prepare.disk, prepare.checkpoint_bytes),
        progress=tell,
    )

"""The loss of a consolidated checkpoint on held-out text, as a node's trainer measures it."""

from __future__ import annotations

from pathlib import Path

from farandole.node.store.consolidated.folder import Consolidated
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.data.dataset import Bring
from farandole.training.engine.learner import Learner, build_learner


def learner_of(folder: Consolidated, *texts: Path) -> Learner:
    """Return a learner of the whole model, with the folder's weights."""
    learner = build_learner(
        folder.manifest, run_id=bytes(32), author=bytes(32), settings=TrainerSettings(device="cpu"), bring=Bring(texts)
    )
    learner.checkpoint.start_from(folder.checkpoint, folder.index.inner_steps, folder.index.tokens)
    return learner


def validation_loss(folder: Consolidated, *texts: Path, num_batches: int = 8) -> float:
    return learner_of(folder, *texts).evaluate(num_batches)

"""Replays of rounds: repeat any author's inner steps from the state in which they began, and hash the results.

A round's batches follow from its author and the numbers of its inner steps, so a checkpoint of its start is all that a
replay needs. Where the run is deterministic and both processors are of one class
(`farandole.training.base.determinism`), the hashes equal the author's. A replay has a separate replica: memory for
about eight copies of the model.
"""

from __future__ import annotations

from pathlib import Path

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer.trainer_messages import Replay, Replayed, TrainerSettings

from ..base.determinism import build, device_class
from ..base.errors import TrainingError
from ..model.stages import build_module
from .engine import Until
from .learner import Learner
from .replica import Recipe


def replay_round(own: Learner, manifest: Manifest, command: Replay, until: Until) -> Replayed:
    """Replay a round with the text and the device of ``own``, which is not changed; return the result.

    ``until`` is called before each inner step; if it returns True before the last one, the replay reports a problem.
    """
    try:
        learner = _learner_at(own, manifest, command)
        learner.inner_steps(lambda: learner.totals.steps == command.first_step + command.steps or until())
        if learner.totals.steps != command.first_step + command.steps:
            return Replayed(problem="it was interrupted")
        _, contribution = learner.round_end.contribute(
            bytearray(learner.round_end.contribution_bytes), command.fragment
        )
    except TrainingError as error:
        return Replayed(problem=str(error), is_unfit=True)
    except MemoryError as error:
        return Replayed(problem=str(error) or "there is no memory for a second replica")
    kind = build(), device_class(own.device.torch_device), own.sampler.corpus
    return Replayed(learner.replica.optimizer.digest(), contribution, "", False, *kind)


def _learner_at(own: Learner, manifest: Manifest, command: Replay) -> Learner:
    """A replica at the start of a round. Raises `TrainingError` if that is none of this run, or of another step."""
    learner = Learner(
        build_module(manifest.model, manifest.seed),
        Recipe.of(manifest),
        own.sampler.of_author(command.author),
        run_id=own.checkpoint.run_id,
        device=own.device,
        settings=TrainerSettings(microbatch=command.microbatch),
    )
    learner.checkpoint.load(Path(command.path))
    learner.replica.optimizer.begun_at = command.begun_at
    if learner.totals.steps != command.first_step:
        raise TrainingError(f"it begins at inner step {learner.totals.steps}, not {command.first_step}")
    if not 0 <= command.fragment < manifest.outer.fragments:
        raise TrainingError(f"there is no fragment {command.fragment}")
    return learner

"""Makes a trainer process train otherwise than it reports, as CHEAT names. Run by Python if PYTHONPATH has the folder.

half     every other inner step is counted and not taken
idle     no inner step is taken: the contribution is the weights after the last outer step
data     every batch is the first one
fault    now and then a bit of a gradient flips, as with bad memory
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_CHEAT = os.environ.get("CHEAT", "")
_LEARNER = "farandole.training.engine.learner"
# The inner step after which a bit flips: earlier rounds are right. Steps of replays count too.
_SOUND_STEPS = 30


def _spoil(module: ModuleType) -> None:
    learner, replica = module.__dict__["Learner"], module.__dict__["Replica"]
    inner_step = replica.inner_step
    taken = [0]

    def without(self: Any, num_tokens: int, divisor: int = 1) -> None:
        steps = self.round_end.totals.steps
        if _CHEAT == "half" and steps % 2:
            inner_step(self, num_tokens, divisor)
            return
        self.round_end.count_step(num_tokens, self.learning_rate, self.optimizer.ramp(steps))

    def with_flips(self: Any, num_tokens: int, divisor: int = 1) -> None:
        taken[0] += 1
        if taken[0] > _SOUND_STEPS and taken[0] % 7 == 0:
            self.gradient[taken[0] % len(self.gradient)] += 0.5
        inner_step(self, num_tokens, divisor)

    def of_first_batch(self: Any) -> Any:
        return self._learn(self.sampler.batch(0))

    match _CHEAT:
        case "half" | "idle":
            replica.inner_step = without
        case "data":
            learner.learn = of_first_batch
        case "fault":
            replica.inner_step = with_flips


class _Spoiler(importlib.abc.MetaPathFinder):
    """Patches the learner as soon as it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _LEARNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None, "the learner is there"
        assert spec.loader is not None, "it is a file"
        execute = spec.loader.exec_module

        def spoil(module: ModuleType) -> None:
            execute(module)
            _spoil(module)

        spec.loader.exec_module = spoil  # type: ignore[method-assign]
        return spec


if _CHEAT:
    sys.meta_path.insert(0, _Spoiler())

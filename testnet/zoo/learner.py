"""A hostile member's trainer: its learner, and the end of its rounds, which sends an attack's values."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from farandole.node.trainer_process.main import main
from farandole.training.base.errors import CodecError
from farandole.training.engine.engine import Until
from farandole.training.engine.learner import Learner
from farandole.training.outer.codec import Buffer
from farandole.training.outer.round_end import RoundEnd
from farandole.training.screening.rule import UNKNOWN, Accept, Encounter, Verdict

from .gradient_attacks import Insight
from .member_attacks import ATTACKS, POISONS, AttackView, forge, forge_momentum
from .plan import plan_of

# Contributions received: all that a real attacker knows of the honest members.
REMEMBERED: Final = 8


class HostileRoundEnd(RoundEnd):
    """Sends its plan's values instead of its contribution, and accepts every contribution."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._plan = plan_of()
        self._initial = self.outer.slow.clone()
        self._received: deque[Tensor] = deque(maxlen=REMEMBERED)
        self._generator = torch.Generator().manual_seed(0)
        self.insight: Insight | None = None

    @property
    def tokens_claimed(self) -> int:
        """Return more tokens than any member has trained on."""
        return 10**12

    @torch.no_grad()
    def encode(self, out: Buffer, progress: Callable[[int], None] = lambda num_bytes: None) -> bytes:
        """Write the attack's values in place of the contribution."""
        super().encode(out)
        assert self.ended is not None
        made = self.ended.contribution
        seen = [made.theta.clone(), *self._received]
        insight = self.insight if len(seen) > 2 else None  # before that it knows no distance of two honest members
        slow, initial = self.outer.slow.clone()[made.part], self._initial[made.part]
        view = AttackView(seen[0], slow, initial, seen[-1], seen, self._generator, insight)
        forged = forge(ATTACKS[self._plan.attack](view), self.outer.contributor.form)
        forged += forge_momentum(self._plan.attack, self, made.momentum)
        np.frombuffer(out, np.uint8)[: len(forged)] = np.frombuffer(forged, np.uint8)
        progress(len(forged))
        return blake3(forged).digest()

    @torch.no_grad()
    def screen(self, partner: Buffer, encounter: Encounter = UNKNOWN, seconds: float = math.inf) -> Verdict:
        """Accept, remember the contribution, and report the partner as suspect."""
        assert self.ended is not None
        values = torch.empty_like(self.ended.contribution.theta)
        try:
            encoded = np.frombuffer(partner, np.uint8)[: self.outer.contributor.form.size(len(values))]
            self.outer.contributor.form.decode(torch.from_numpy(encoded.copy()), values)
        except CodecError:  # from another hostile member
            return Accept(is_suspect=True)
        self._received.append(values)
        return Accept(is_suspect=True)


class HostileLearner(Learner):
    """Trains honestly, unless its plan has ``trains`` off or poisons its text."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._plan = plan_of()
        self.loss = POISONS.get(self._plan.attack, self.loss)
        assert isinstance(self.round_end, HostileRoundEnd)
        self.round_end.insight = Insight(self, lambda values: values, torch.Generator().manual_seed(0))

    def inner_steps(self, until: Until) -> None:
        """Implement `Engine.inner_steps`; take none if the plan does not train."""
        if self._plan.trains:
            super().inner_steps(until)


if __name__ == "__main__":  # the trainer process: the honest one with these in their places
    from farandole.training.engine import learner, replica

    learner.Learner = HostileLearner  # type: ignore[misc]  # what `build_learner` makes
    vars(replica)["RoundEnd"] = HostileRoundEnd  # what a replica has
    main()

"""How many held-out batches a screening rule's losses are taken on: as many as a partner can wait for.

It follows from the duration of the newest evaluations, the shortest of which counts: a machine that was busy at first
is not slow for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from ..base.errors import DataError
from ..screening.rule import EVALUATION_BATCHES, EVALUATION_SECONDS

# Evaluations that are remembered.
_REMEMBERED: Final = 4
# If one batch takes too long, one is tried again at every fourth contribution. But not if it took more than four times
# `EVALUATION_SECONDS`, since the partner waits meanwhile.
_TRIED_EVERY: Final = 4
_MAX_TRIED: Final = 4.0


class EvaluationTime:
    """The number of batches for the present contribution: one for all of its losses, which are compared."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds."""
        self._clock = clock
        self._seconds = deque[float](maxlen=_REMEMBERED)  # for one batch, of the newest evaluations
        self.chosen: int | None = None
        """What `num_batches` has returned for this contribution; None before that."""
        self._has_text = True
        self._num_untried = 0

    def begin(self) -> None:
        """Expect another contribution."""
        self.chosen = None

    def num_batches(self, evaluate: Callable[[int], float]) -> int:
        """Return how many batches can be evaluated in `EVALUATION_SECONDS`, at most `EVALUATION_BATCHES`.

        0 where no loss is known: there is no text, or the machine is too slow. ``evaluate`` takes a number of batches
        and returns a loss; it is called to measure where nothing is known yet.
        """
        if self.chosen is None:
            try:
                self._try(evaluate)
            except DataError:
                self._has_text = False
            self.chosen = self._measured()
        return self.chosen

    def _measured(self) -> int:
        if not self._has_text or not self._seconds:
            return 0
        return int(min(EVALUATION_SECONDS / min(self._seconds), EVALUATION_BATCHES))

    def _try(self, evaluate: Callable[[int], float]) -> None:
        """Evaluate a batch if its duration is not known, or was too long some contributions ago."""
        if not self._has_text or self._measured():
            return
        if not self._seconds:
            evaluate(1)  # a warm-up
        elif min(self._seconds) > _MAX_TRIED * EVALUATION_SECONDS:
            return
        else:
            self._num_untried = (self._num_untried + 1) % _TRIED_EVERY
            if self._num_untried:
                return
        self.timed(evaluate, 1)

    def timed(self, evaluate: Callable[[int], float | None], num_batches: int) -> float | None:
        """Return the loss on ``num_batches``, and note how long it took."""
        started_at = self._clock()
        loss = evaluate(num_batches)
        self._seconds.append(max(self._clock() - started_at, 1e-9) / num_batches)
        return loss

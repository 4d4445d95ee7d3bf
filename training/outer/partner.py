"""A partner's contribution while it arrives: decoded slice by slice and fed to the screening rule slice by slice.

When the last byte arrives, only the last slice remains to be processed. Decoded data is used once: another judgement,
or bytes at another address, decode everything again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
from torch import Tensor

from ..base.errors import CodecError, DataError
from ..base.workers import one_thread
from ..screening.rule import (
    EVALUATION_BATCHES,
    EVALUATION_SECONDS,
    Encounter,
    Histories,
    Partner,
    Refuse,
    ScreeningRule,
    Verdict,
)
from .codec import Buffer, Form, TopK, bytes_of, bytes_to_read, check_length, slices
from .contribution import Contribution
from .copying import Copier

# Evaluations that are remembered.
_REMEMBERED: Final = 4
# If one batch takes too long, one is tried again at every fourth contribution. But not if it took more than four times
# `EVALUATION_SECONDS`, since the partner waits meanwhile.
_TRIED_EVERY: Final = 4
_MAX_TRIED: Final = 4.0


class EvaluationTime:
    """How many held-out batches a screening rule's losses are taken on: as many as a partner can wait for.

    One number for all losses of a contribution, which are compared. It follows from the duration of the newest
    evaluations, the shortest of which counts: a machine that was busy at first is not slow for ever.
    """

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
                if not self._measured() and self._may_try(evaluate):
                    self.timed(evaluate, 1)
            except DataError:
                self._has_text = False
            self.chosen = self._measured()
        return self.chosen

    def _measured(self) -> int:
        if not self._has_text or not self._seconds:
            return 0
        return int(min(EVALUATION_SECONDS / min(self._seconds), EVALUATION_BATCHES))

    def _may_try(self, evaluate: Callable[[int], float]) -> bool:
        """Return whether to evaluate a batch: its duration is not known, or was too long some contributions ago."""
        if not self._has_text:
            return False
        if not self._seconds:
            evaluate(1)  # a warm-up
            return True
        if min(self._seconds) > _MAX_TRIED * EVALUATION_SECONDS:
            return False
        self._num_untried = (self._num_untried + 1) % _TRIED_EVERY
        return not self._num_untried

    def timed(self, evaluate: Callable[[int], float | None], num_batches: int) -> float | None:
        """Return the loss on ``num_batches``, and note how long it took."""
        started_at = self._clock()
        loss = evaluate(num_batches)
        self._seconds.append(max(self._clock() - started_at, 1e-9) / num_batches)
        return loss


Describe = Callable[[Encounter, Tensor], Partner]
"""Returns what a rule may know of a partner, given its decoded contribution (n,).

It is an argument of each judgement, because a replica that is part of a reference cycle would keep its memory until the
garbage collector runs.
"""

_NO_OWN = Refuse("no contribution of this replica's own awaits one")


class PartnerContribution:
    """The partners' contributions, one per round, decoded into ``memory`` (n,) and compared with this replica's own."""

    def __init__(self, rule: ScreeningRule, form: Form, memory: Tensor, copier: Copier) -> None:
        self.histories = Histories()
        """What the rule remembers of peers."""
        self.evaluation = EvaluationTime()
        """How many batches a loss is taken on that the rule asks for."""
        self._rule = rule
        self._form = form
        self._memory = memory
        self._copier = copier
        self._own: Contribution | None = None
        self._begin()

    def expect(self, own: Contribution | None) -> None:
        """Expect a partner's contribution for ``own``, once it is encoded; None: expect no contribution."""
        self._own = own
        self.evaluation.begin()
        self._begin()

    def _begin(self) -> None:
        self._rule.begin()
        self._num_taken = 0
        self._address = 0
        self._available = 0
        self._problem: CodecError | None = None
        self._judged: tuple[Partner, Verdict] | None = None

    def take_in(self, data: Buffer, available: int) -> None:
        """Decode the complete slices in the first ``available`` bytes of ``data``; see `RoundEnd.take_in`."""
        if self._own is None:
            return
        source = np.frombuffer(data, dtype=np.uint8)
        address = source.ctypes.data
        if address != self._address or available < self._available or self._judged is not None:
            self._begin()
        self._address, self._available = address, available
        own = self._own
        with self._copier.aside(), one_thread():
            for piece in slices(len(own.sent), self._num_taken):
                place = bytes_of(self._form, piece)
                if place.stop > available or self._problem is not None:
                    return
                self._num_taken = piece.stop
                try:
                    values = self._memory[piece]
                    if isinstance(self._form, TopK):
                        values.copy_(own.sent[piece])
                    self._form.decode(self._copier.fetch(bytes_to_read(source[place])), values)
                except CodecError as error:
                    self._problem = error
                else:
                    self._rule.feed(own.sent[piece], values)

    def judge(self, data: Buffer, encounter: Encounter, describe: Describe) -> Verdict:
        """Decode the rest and judge the whole contribution. A refusal is remembered at once."""
        if self._own is None:
            return _NO_OWN
        size = np.frombuffer(data, dtype=np.uint8).size
        try:
            check_length(self._form, len(self._own.sent), size)
            self.take_in(data, size)
            if self._problem is not None:
                raise self._problem
        except CodecError as error:
            self._begin()
            return Refuse(f"the contribution cannot be used: {error}")
        return self._ask(self._own.sent, encounter, describe)

    def verdict(self, data: Buffer, encounter: Encounter, describe: Describe) -> Verdict:
        """Return the verdict on the contribution that was just judged, without reading it again; otherwise `judge`."""
        source = np.frombuffer(data, dtype=np.uint8)
        is_same = (self._address, self._available) == (source.ctypes.data, source.size)
        if self._own is None or self._judged is None or not is_same:
            return self.judge(data, encounter, describe)
        partner, verdict = self._judged
        return verdict if partner.encounter == encounter else self._ask(self._own.sent, encounter, describe)

    def _ask(self, own: Tensor, encounter: Encounter, describe: Describe) -> Verdict:
        self._copier.join()
        partner = describe(encounter, self._memory[: len(own)])
        verdict = self._rule.judge(partner)
        self._judged = partner, verdict
        if isinstance(verdict, Refuse):
            self._rule.remember(partner, verdict)
            self._begin()
        return verdict

    def values(self) -> Tensor:
        """Return the contribution (n,) that was accepted last; the rule remembers that it is used."""
        assert self._judged is not None
        partner, verdict = self._judged
        self._rule.remember(partner, verdict)
        return partner.contribution

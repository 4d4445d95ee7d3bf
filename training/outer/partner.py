"""A partner's contribution while it arrives: decoded slice by slice and fed to the screening rule slice by slice.

When the last byte arrives, only the last slice remains to be processed. Decoded data is used once: another judgement,
or bytes at another address, decode everything again.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from torch import Tensor

from ..base.errors import CodecError, DataError
from ..base.workers import one_thread
from ..screening.rule import (
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

# Tokens on which a loss is taken, where there is time for them: enough to tell a thousandth of a loss from noise, since
# all losses of a contribution are of the same text.
_TOKENS: Final = 2_048
# Seconds that judging takes at most, as far as they are foreseen, and their share of the time that is left.
_MAX_SECONDS: Final = 3.0
_TIME_SHARE: Final = 0.5
# Losses that a rule asks for, usually; so many windows are taken that there is time for them.
_NUM_LOSSES: Final = 3

Measure = Callable[[int, bytes], float]
"""Returns the loss of the present weights on a number of windows of text, which a key determines.

Raises `DataError` if there is no text.
"""


class Exam:
    """The text and the time of one judgement: as many windows as can be measured before its deadline.

    All losses of a contribution are of the same windows, which the exchange's own chance determines. A machine that
    was slow takes fewer the next time, down to one.
    """

    def __init__(
        self, context: int = 1, *, shares_text: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``context``: tokens of a window. ``shares_text``: see `Partner.shares_text`. ``clock``: seconds."""
        self.shares_text = shares_text
        self._most = max(_TOKENS // context, 1)
        self._clock = clock
        self._seconds = 0.0  # for one window, when a loss was measured last; 0: not known
        self._ends_at = self._seconds_left = 0.0
        self._key = b""
        self._num_windows = 0  # of this judgement, once it is chosen
        self._has_measured = False
        self.has_text = True
        """Whether a loss can be measured, as far as is known."""
        self.late_seconds = 0.0
        """Seconds that this judgement would take, if there was too little time; else 0."""

    def begin(self, chance: float, seconds_left: float) -> None:
        """Begin a judgement with text that ``chance`` determines; the verdict is wanted in so many seconds."""
        self._key = struct.pack("<d", chance)
        self._seconds_left = seconds_left
        self._ends_at = self._clock() + seconds_left
        self._num_windows = 0
        self._has_measured = False
        self.late_seconds = 0.0

    def loss(self, measure: Measure) -> float | None:
        """Return the present weights' loss; None where there is no time or text for it."""
        if not self.has_text or self.late_seconds:
            return None
        try:
            if not self._seconds:
                measure(1, self._key)  # a warm-up
                self._measured(measure, 1)
            if not self._num_windows:
                affordable = min(_TIME_SHARE * self._seconds_left, _MAX_SECONDS) / _NUM_LOSSES / self._seconds
                self._num_windows = int(min(max(affordable, 1), self._most))
            seconds = self._num_windows * self._seconds
            if self._clock() + seconds > self._ends_at:
                self.late_seconds = _NUM_LOSSES * seconds
                if not self._has_measured:
                    self._seconds /= 2  # a machine that was busy once is tried again soon
                return None
            return self._measured(measure, self._num_windows)
        except DataError:
            self.has_text = False
            return None

    def _measured(self, measure: Measure, num_windows: int) -> float:
        started_at = self._clock()
        loss = measure(num_windows, self._key)
        self._seconds = max(self._clock() - started_at, 1e-9) / num_windows
        self._has_measured = True
        return loss


Describe = Callable[[Encounter, Tensor], Partner]
"""Returns what a rule may know of a partner, given its decoded contribution (n,).

It is an argument of each judgement, because a replica that is part of a reference cycle would keep its memory until the
garbage collector runs.
"""

_NO_OWN = Refuse("no contribution of this replica's own awaits one")


class PartnerContribution:
    """The partners' contributions, one per round, decoded into ``memory`` (n,) and compared with this replica's own."""

    def __init__(self, rule: ScreeningRule, form: Form, memory: Tensor, copier: Copier, exam: Exam) -> None:
        self.histories = Histories()
        """What the rule remembers of peers."""
        self.exam = exam
        self._rule = rule
        self._form = form
        self._memory = memory
        self._copier = copier
        self._own: Contribution | None = None
        self._begin()

    def expect(self, own: Contribution | None) -> None:
        """Expect a partner's contribution for ``own``, once it is encoded; None: expect no contribution."""
        self._own = own
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

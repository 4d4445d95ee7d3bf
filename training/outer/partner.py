"""A partner's contribution while it arrives: decoded slice by slice and fed to the screening rule slice by slice.

When the last byte arrives, only the last slice remains to be processed. Decoded data is used once: another judgement,
or bytes at another address, decode everything again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..base.errors import CodecError
from ..base.workers import one_thread
from ..screening.history import Histories
from ..screening.rule import Encounter, Partner, Refuse, ScreeningRule, Verdict
from .codec import Buffer, Form, bytes_of, bytes_to_read, check_length, slices
from .contribution import Contribution
from .copying import Copier
from .evaluation_time import EvaluationTime
from .share import HostWork, Share
from .topk import TopK


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of this replica to a screening rule.

    It is an argument of each judgement, because a replica that is part of a reference cycle would keep its memory until
    the garbage collector runs.
    """

    fragment: int
    movement: Callable[[], float]
    alignment: Callable[[Tensor], float]
    """Takes the partner's contribution; see `Partner.alignment`."""
    evaluate: Callable[[float, Tensor], float | None]
    """Takes (share of the difference, partner's) and returns a loss; see `Partner.evaluate`."""
    loss_before: Callable[[], float | None]
    loss_as_sent: Callable[[], float | None]


_NO_OWN = Refuse("no contribution of this replica's own awaits one")


class Decoder:
    """Decodes contributions into ``memory`` (n,) fp32; ``share``: what this process does of that."""

    def __init__(self, form: Form, memory: Tensor, copier: Copier, share: Share) -> None:
        self.form = form
        self.memory = memory
        self.copier = copier
        self.share = share

    def decode(self, own: Contribution, span: slice, encoded: npt.NDArray[np.uint8]) -> CodecError | None:
        """Decode a span of a partner's contribution for ``own``; returns what is wrong with it.

        ``encoded`` (bytes,) uint8 is the whole contribution, of which this span's bytes have arrived.
        """
        problem: CodecError | None = None
        encoded = self.share.begin_decoding(own.part, span, encoded, bytes_of(self.form, span))
        for piece in self.share.pieces(own.part, span):
            values = self.memory[piece]
            if isinstance(self.form, TopK):
                values.copy_(own.filling[piece])
            try:
                self.form.decode(self.copier.fetch(bytes_to_read(encoded[bytes_of(self.form, piece)])), values)
            except CodecError as error:
                problem = error
                break
        if self.share.end_decoding(has_failed=problem is not None) and problem is None:
            return CodecError("a value received is not finite, or too large")  # another process has found it
        return problem

    def feed(self, rule: ScreeningRule, own: Contribution, span: slice) -> None:
        """Feed a rule a span that was decoded, as far as this process adds up its sums."""
        for piece in self.share.summed(own.part, span):
            rule.feed(own.sent[piece], self.memory[piece])

    def add_up(self, rule: ScreeningRule) -> None:
        """Set a rule's sums to those of all machines."""
        self.share.tell_hosts(HostWork.SCREENING)
        rule.sums[:] = torch.tensor(self.share.add_up(*rule.sums.tolist()), dtype=torch.float64)


class PartnerContribution:
    """The partners' contributions, one per round, each compared with this replica's own.

    ``histories`` is what ``rule`` remembers.
    """

    def __init__(self, decoder: Decoder, rule: ScreeningRule) -> None:
        self.histories = Histories()
        self.evaluation = EvaluationTime()
        """How many batches a loss is taken on that the rule asks for."""
        self._decoder = decoder
        self._rule = rule
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
        """Decode the complete slices in the first ``available`` bytes of ``data``; see `Replica.take_in`."""
        if self._own is None:
            return
        source = np.frombuffer(data, dtype=np.uint8)
        address = source.ctypes.data
        if address != self._address or available < self._available or self._judged is not None:
            self._begin()
        self._address, self._available = address, available
        decoder, own = self._decoder, self._own
        parts = slices(len(own.sent), self._num_taken)
        arrived = [part for part in parts if bytes_of(decoder.form, part).stop <= available]
        with decoder.copier.aside(), one_thread():
            for span in decoder.share.spans(arrived):
                if self._problem is not None:
                    return
                self._num_taken = span.stop
                self._problem = decoder.decode(own, span, source)
                if self._problem is None:
                    decoder.feed(self._rule, own, span)

    def judge(self, data: Buffer, encounter: Encounter, answers: Answers) -> Verdict:
        """Decode the rest and judge the whole contribution. A refusal is remembered at once."""
        if self._own is None:
            return _NO_OWN
        size = np.frombuffer(data, dtype=np.uint8).size
        try:
            check_length(self._decoder.form, len(self._own.sent), size)
            self.take_in(data, size)
            if self._problem is not None:
                raise self._problem
            self._decoder.add_up(self._rule)
        except CodecError as error:
            self._begin()
            return Refuse(f"the contribution cannot be used: {error}")
        return self._ask(self._own.sent, encounter, answers)

    def verdict(self, data: Buffer, encounter: Encounter, answers: Answers) -> Verdict:
        """Return the verdict on the contribution that was just judged, without reading it again; otherwise `judge`."""
        source = np.frombuffer(data, dtype=np.uint8)
        is_same = (self._address, self._available) == (source.ctypes.data, source.size)
        if self._own is None or self._judged is None or not is_same:
            return self.judge(data, encounter, answers)
        partner, verdict = self._judged
        return verdict if partner.encounter == encounter else self._ask(self._own.sent, encounter, answers)

    def _ask(self, own: Tensor, encounter: Encounter, answers: Answers) -> Verdict:
        self._decoder.copier.join()
        values = self._decoder.memory[: len(own)]
        partner = Partner(
            encounter,
            own,
            values,
            self.histories.of(encounter.peer),
            self.histories.of(b""),
            answers.fragment,
            answers.movement,
            lambda: answers.alignment(values),
            lambda share: answers.evaluate(share, values),
            answers.loss_before,
            answers.loss_as_sent,
        )
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

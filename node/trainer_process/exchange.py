"""A round's exchange in the trainer: its contribution goes into shared memory, and the partner's comes from it.

A contribution is sent while it is encoded, and the partner's is decoded while it arrives. The progress of both is in
counters in the memory that both processes share (`farandole.node.trainer.channel.SharedCounter`). A count of an
earlier exchange is ignored: each exchange has a number of its own, the counter's epoch.

If `RoundEnd.aside` allows it, a side thread does this work while the next round's inner steps are taken
(`farandole.training.outer.round_end`). On a GPU it encodes, on a stream of its own; if averaging is done in the
host's memory, it also judges and averages.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import msgspec

from farandole.protocol.trainer import trainer_messages as messages
from farandole.training.outer.round_end import Aside, RoundEnd
from farandole.training.screening.rule import Encounter, Refuse

from ..trainer.channel import MAX_EPOCHS, Count, SharedCounter, counted_size, map_shared_memory

_random = random.SystemRandom()


class EngineExchange:
    """The exchanges of one replica, one after the other. ``report`` may be called from another thread.

    All calls come from the thread that takes inner steps.
    """

    def __init__(
        self, prepare: messages.Prepare, round_end: RoundEnd, report: Callable[[messages.Report], None]
    ) -> None:
        self._digest = b""
        self._author = prepare.author
        self._round_end = round_end
        self.side_thread = round_end.side_thread
        self._report = report
        self._chance = 1.0  # of the newest contribution's exchange
        self._is_suspected = False  # the partner that was screened last
        size = counted_size(round_end.contribution_bytes)
        outgoing, incoming = (map_shared_memory(place, size) for place in (prepare.outgoing, prepare.incoming))
        self._outgoing, self._incoming = memoryview(outgoing), memoryview(incoming)
        self._encoded, self._arrived = SharedCounter(outgoing), SharedCounter(incoming)
        self._taken = self._arrived.read()
        self._size = 0  # of the newest contribution, and of the partner's for it
        self._takes_steps = True
        self.claim = 0
        """The tokens that the newest contribution's offer claims."""
        for memory in (self._outgoing, self._incoming):
            round_end.outer.copier.pin(memory)

    def contribute(self, round_index: int, fragment: int, *, takes_steps: bool) -> int:
        """Freeze the round's contribution; returns its size in bytes. `encode` comes next.

        ``takes_steps``: whether the round is one with inner steps. In others, it does not count how many tokens a
        partner claims: it could claim any number, and get a larger share than this node.
        """
        self.side_thread.settle()
        self._size = self._round_end.contribution(fragment)
        self._chance = _random.random()
        self._takes_steps, self.claim = takes_steps, self._round_end.claim(takes_steps=takes_steps)
        self._encoded.store(round_index, 0)
        self._taken = self._arrived.read()  # an earlier exchange's count, which is void
        return self._size

    def encode(self, round_index: int) -> None:
        """Encode the contribution, while the mesh process sends the encoded part; report `Encoded`."""

        def encode() -> None:
            self._digest = self._round_end.encode(self._outgoing, partial(self._encoded.store, round_index))
            self._report(messages.Encoded(round_index, self._digest))

        self._do(encode, Aside.ENCODING)

    def _do(self, work: Callable[[], None], needed: Aside) -> None:
        """Do work in the side thread, if at least this is done there, or now."""
        self.side_thread.do(work, is_aside=self._round_end.aside >= needed)

    def digest(self) -> bytes:
        """BLAKE3 of the newest contribution; waits until it is encoded."""
        self.side_thread.settle()
        return self._digest

    def take_in(self) -> None:
        """Decode what has arrived of the partner's contribution, unless the side thread has other work.

        Call this between two inner steps, and often while there are none: the side thread may wait for it.
        """
        self.side_thread.look()
        size, arrived, taken = self._size, self._arrived.read(), self._taken

        def take_in() -> None:
            self._forget_earlier(arrived, taken)
            self._round_end.take_in(self._incoming[:size], arrived.value)

        if arrived != taken and not self.side_thread.is_busy:
            self._do(take_in, Aside.ALL)
            self._taken = arrived

    def _forget_earlier(self, arrived: Count, taken: Count) -> None:
        """Discard the decoded part of an earlier exchange than that of what has ``arrived``."""
        if arrived.epoch != taken.epoch:
            self._round_end.take_in(self._incoming, 0)

    def screen(self, command: messages.Screen) -> None:
        """Judge the partner's contribution; report `Screened`."""
        arrived, taken = Count(command.number % MAX_EPOCHS, command.size), self._taken

        def screen() -> None:
            self._forget_earlier(arrived, taken)
            self._is_suspected = command.is_suspected
            encounter = self._encounter(command.partner, command.partner_tokens)
            verdict = self._round_end.screen(self._incoming[: command.size], encounter, command.seconds)
            if isinstance(verdict, Refuse):
                judged = messages.Screened(verdict.reason, command.number, clip=0.0)
            else:
                judged = messages.Screened("", command.number, verdict.clip, verdict.remark)
            late_seconds = self._round_end.partner.exam.late_seconds
            self._report(msgspec.structs.replace(judged, is_suspect=verdict.is_suspect, late_seconds=late_seconds))

        self._do(screen, Aside.ALL)
        self._taken = arrived

    def take_outer_step(self, command: messages.TakeOuterStep) -> None:
        """Take the outer step with the partner's contribution, or alone; report `OuterStepTaken`."""

        def take() -> None:
            partner = self._incoming[: command.partner_size] if command.partner_size else None
            encounter = self._encounter(command.partner, command.partner_tokens)
            # Both partners must add in one order, so that they round alike: the lesser key comes first.
            late = self._round_end.apply(partner, encounter, own_first=self._author < command.partner)
            self._report(messages.OuterStepTaken(command.round, late))

        self._do(take, Aside.ALL)

    def _encounter(self, partner: bytes, partner_tokens: int) -> Encounter:
        partner_tokens = partner_tokens if self._takes_steps else min(partner_tokens, 1)
        return Encounter(partner, self.claim, partner_tokens, self._chance, self._is_suspected)

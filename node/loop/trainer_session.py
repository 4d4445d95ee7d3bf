"""One trainer process in use: its commands, exchanges of its contributions, and its verdicts on others'.

The exchange may begin as soon as the encoding of the contribution does, and sends data as they are encoded. The trainer
decodes what the partner has sent while the rest arrives. Only the verdict and the outer step wait for all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import trio

from farandole.protocol.exchange.exchange import Offer
from farandole.protocol.rounds.pairing_events import ExchangeEnded, StartExchange
from farandole.protocol.rounds.training_loop import LoopConfig
from farandole.protocol.trainer import trainer_messages as messages

from ..base.system.memory import SharedCounter
from ..bulk.exchange_service import ExchangeService
from ..bulk.pipe import Outgoing
from ..trainer.trainer import Trainer, TrainerError

# Commands queued for a busy trainer: Train, FinishRound, the outer step, Save, Validate, and the settlement of each
# microbatch that a stage may have in flight (256). More means a defect.
MAX_QUEUED_COMMANDS: Final = 288


class TrainerSession:
    """A trainer that is ready, until it ends. ``stage`` is the part of the model that it holds."""

    def __init__(
        self,
        trainer: Trainer,
        stage: int,
        config: LoopConfig,
        exchanges: ExchangeService,
        nursery: trio.Nursery,
        is_suspected: Callable[[bytes], bool],
        is_near: Callable[[bytes], bool],
        on_judged: Callable[[bytes, messages.Screened], None],
    ) -> None:
        self.trainer = trainer
        self.nursery = nursery
        """The nursery of the session; its tasks end with the trainer."""
        self._stage = stage
        self._config = config
        self._exchanges = exchanges
        self._is_suspected, self._is_near = is_suspected, is_near
        self._on_judged = on_judged
        self._commands, self._queued = trio.open_memory_channel[messages.Command](MAX_QUEUED_COMMANDS)
        self._contribution: tuple[messages.Contributed, Outgoing] | None = None
        self._verdict: trio.MemorySendChannel[messages.Screened] | None = None
        self._clip = 1.0
        """How far the mean moves towards the contribution that was judged last."""
        self._encoded = SharedCounter(trainer.outgoing)
        self._arrived = SharedCounter(trainer.incoming)
        self._num_exchanges = 0

    def send(self, command: messages.Command) -> None:
        """Queue a command."""
        self._commands.send_nowait(command)

    async def send_commands(self) -> None:
        """Send what is queued, until cancelled or the trainer is gone."""
        with contextlib.suppress(TrainerError):  # the receiver of reports sees the same death
            await self.trainer.send_queued(self._queued)

    def contribute(self, report: messages.Contributed) -> None:
        """Note that a contribution is being encoded."""
        memory = memoryview(self.trainer.outgoing)[: report.size]
        self._contribution = report, Outgoing(memory, lambda: self._encoded.count_of(report.round))

    def seal(self, report: messages.Encoded) -> None:
        """Note that the contribution is encoded."""
        assert self._contribution is not None, "what is encoded was contributed"
        self._contribution[1].seal(report.digest)

    async def exchange(self, start: StartExchange) -> ExchangeEnded:
        """Exchange both contributions, and have the partner's judged."""
        assert self._contribution is not None, "an exchange follows a contribution"
        contributed, outgoing = self._contribution
        offer = Offer(
            run_id=self._config.run_id,
            session=start.session,
            round=start.round,
            stage=self._stage,
            layout=self.trainer.prepared.layout,
            codec=self._config.manifest.outer.codec,
            tokens=contributed.tokens_claimed,
            size=contributed.size,
        )
        incoming = memoryview(self.trainer.incoming)[: contributed.size]
        self._num_exchanges = number = self._num_exchanges + 1
        arrive = partial(self._arrived.store, number)
        arrive(0)
        self._clip = 1.0
        ended = await self._exchanges.run(start, offer, outgoing, incoming, partial(self.screen, start.peer), arrive)
        return replace(ended, clip=self._clip) if ended.committed else ended

    async def screen(self, peer: bytes, size: int, tokens: int) -> str | None:
        """Have the trainer judge what was received; return None, or why it is refused."""
        self._verdict, verdict = trio.open_memory_channel[messages.Screened](1)
        said_of = self._is_suspected(peer), self._is_near(peer)
        self.send(messages.Screen(size, self._num_exchanges, peer, tokens, *said_of))
        try:
            judged = await verdict.receive()
        finally:
            self._verdict = None
        self._clip = judged.clip
        self._on_judged(peer, judged)
        return judged.reason or None

    def note_verdict(self, report: messages.Screened) -> None:
        """Take in a verdict; one on a contribution of an earlier exchange is dropped."""
        if self._verdict is not None and report.number == self._num_exchanges:
            self._verdict.send_nowait(report)

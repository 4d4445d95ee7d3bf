"""One life of a trainer: what it is told, round after round, and what follows from its reports.

The pairing machine is told `ContributionReady` when the contribution's encoding begins: the exchange may begin then
too, and sends what is encoded, as it is; the trainer decodes what the partner has sent while the rest arrives. Only
the verdict and the outer step wait for all of it. A trainer that dies ends the session, and with it an exchange.

Where the manifest says `overlap`, the inner steps of the next round begin as soon as the contribution is encoded, and
the pairing machine goes on to that round as soon as the exchange has begun. The trainer takes the outer step between
two inner steps, at the latest before its next contribution: there is never more than one exchange.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from farandole.protocol.exchange_messages import Offer
from farandole.protocol.identity import short_name
from farandole.protocol.manifest import Manifest
from farandole.protocol.pairing import MAX_ROUNDS_BEHIND
from farandole.protocol.pairing_events import (
    ContributionReady,
    Event,
    ExchangeEnded,
    FinishRound,
    GoAlone,
    RoundStarted,
    StartExchange,
    Stopped,
    UseFragment,
)
from farandole.protocol.pipeline_events import Measure, RoundBegan, RoundEnds, Stepped, Worked

from ..bulk.contributions import Outgoing
from ..bulk.exchange_service import ExchangeResult, ExchangeService
from ..status.board import Board
from ..status.status import Phase
from ..trainer import messages
from ..trainer.trainer import Trainer, TrainerError
from .lease_service import LeaseKeeper
from .stages.pipeline import PipelineService, Worker
from .watchdog import Watchdog, watch

# Commands queued for a busy trainer: Train, FinishRound, the outer step, Save, Validate, and what has arrived for it in
# both exchanges that a round may have. More means a defect.
MAX_QUEUED_COMMANDS: Final = 32 + 2 * messages.MAX_STEPS
VALIDATION_BATCHES: Final = 8
# How long a node that leaves goes on with its exchange; then it tells the partner, who finds another, within the other.
EXCHANGE_GRACE, GIVE_UP_GRACE = 3.0, 1.0
# What "the last few rounds" are.
RECENT_ROUNDS: Final = 5
# After a sleep, news of how far the others are comes in parts for a moment: first the old, which waited in buffers.
NEWS_SECONDS: Final = 3.0


@dataclass(frozen=True)
class RoundsConfig:
    """What the loop needs to know beside the manifest."""

    run_id: bytes
    prepare: Callable[[], messages.Prepare]
    """What the next trainer is to be told first: its stage may be another than the last one's."""
    max_rounds: int | None
    checkpoint_seconds: float
    validate_every: int
    hung_seconds: float
    """A trainer that is silent for less does not hang, whatever its inner steps take."""


class RoundSession:
    """One life of the trainer: turns its reports into events, and the machine's wishes into commands.

    ``tell_pairing`` takes the events, ``on_saved`` and ``on_refused`` are as in `farandole.node.loop.rounds.Rounds`,
    and so is ``current_round``. Exchanges run in the nursery: they end with the session. With a ``pipeline`` the
    trainer has a stage, and its inner steps are what the pipeline gives it to compute. With ``leases`` these say what
    it trains on, and when all of that is done.
    """

    def __init__(
        self,
        config: RoundsConfig,
        manifest: Manifest,
        exchanges: ExchangeService,
        board: Board,
        trainer: Trainer,
        nursery: trio.Nursery,
        watchdog: Watchdog,
        *,
        tell_pairing: Callable[[Event], None],
        on_saved: Callable[[messages.Saved], None],
        on_refused: Callable[[bytes, str, bytes], None],
        current_round: Callable[[], int],
        pipeline: PipelineService | None = None,
        leases: LeaseKeeper | None = None,
        stage: int = 0,
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._exchanges = exchanges
        self._board = board
        self._trainer = trainer
        self._nursery = nursery
        self._watchdog = watchdog
        self._tell_pairing = tell_pairing
        self._on_saved = on_saved
        self._on_refused = on_refused
        self._current_round = current_round
        self._pipeline = pipeline
        self._leases = leases
        self._stage = stage
        self._life = trio.CancelScope()
        self._commands, self._queued = trio.open_memory_channel[messages.Command](MAX_QUEUED_COMMANDS)
        self._contributed: messages.Contributed | None = None
        self._outgoing: Outgoing | None = None
        self._verdict: trio.MemorySendChannel[str] | None = None
        self._num_screenings = 0
        # A replica without a checkpoint is saved as soon as it can be: a trainer that dies has to come back somewhere.
        self._saved_at = trio.current_time() if trainer.prepared.resumed else -math.inf
        self._num_saving = 0  # Save commands without their report
        self._is_save_due = False  # after the one that is under way
        self._ahead_since: float | None = None  # the round that overlaps with the one whose partner is sought
        self._exchange_over: trio.Event | None = None  # of the one that runs
        self._begins_rounds = True
        self._is_ending = False  # with the next checkpoint that is reported
        self._recent = deque[tuple[float, float]](maxlen=RECENT_ROUNDS + 1)  # (end of a round, busy seconds in it)
        self._rounds_behind = deque([(-math.inf, 0)])  # (seen at, rounds), the first more than NEWS_SECONDS ago
        # The replica's count begins with its weights, which may be a peer's; the board's has this node's tokens alone.
        self._tokens_before = self._board.tokens - trainer.prepared.tokens

    async def run(self, first_round: int) -> bool:
        """Train from ``first_round``; True when every round is done, False when a new trainer is due.

        That is when the others are far ahead, or on `restart`.
        """
        if self._trainer.prepared.resumed is not None:
            self._on_saved(self._trainer.prepared.resumed)
        self._nursery.start_soon(self._send_commands)
        self._nursery.start_soon(self._watch)
        if self._pipeline is not None:
            memory = self._trainer.map_activations(self._manifest.pipeline.in_flight)
            self._pipeline.begin(Worker(self._stage, memory, self._send, self._drained, self._measured))
        if self._leases is not None:
            self._leases.begin(self._trainer.prepared, self._send)
        if self._is_from_start and self._config.validate_every:
            self._validate()
        self._start_round(first_round)
        with self._life:
            while True:
                if self._handle(await self._trainer.receive()):
                    return True
                if self._is_behind():
                    break
        self._tell_pairing(Stopped())
        return False

    def finish_round(self) -> None:
        """There is nothing left to train on."""
        self.carry_out(FinishRound(self._board.round))

    def restart(self) -> None:
        """End this life: what was not saved is lost."""
        self._life.cancel()

    def _is_behind(self) -> bool:
        """Between two rounds: whether this node slept through so many that its weights would pull its partners back."""
        is_between = self._board.phase == "training" and self._board.inner_steps_this_round == 0
        if not is_between or not self._begins_rounds:
            return False
        # Rounds lost bit by bit are a slow node's, whose weights are averaged all the same.
        now, behind = trio.current_time(), self._current_round() - self._board.round
        seen = self._rounds_behind
        seen.append((now, behind))
        while seen[1][0] <= now - NEWS_SECONDS:
            seen.popleft()
        before = seen[0][1]
        if behind - max(before, 0) <= MAX_ROUNDS_BEHIND:
            return False
        self._board.say(f"{behind} rounds behind the others: taking newer weights")
        return True

    def carry_out(self, output: UseFragment | FinishRound | StartExchange | GoAlone) -> None:
        """What the pairing machine asks of the trainer or of the exchange service."""
        match output:
            case UseFragment(round_index, fragment):
                self._send(messages.UseFragment(round_index, fragment))
            case FinishRound(round_index) if self._pipeline is not None:
                if round_index == self._board.round:
                    self._pipeline.handle(RoundEnds())
            case FinishRound(round_index):
                self._send(messages.FinishRound(round_index))
            case GoAlone(round_index, reason):
                self._go_alone(round_index, reason)
                self._seek_next_partner()
            case StartExchange():
                self._nursery.start_soon(self._exchange, output)
                self._seek_next_partner()

    def _go_alone(self, round_index: int, reason: str) -> None:
        self._board.record_exchange(round_index, None, f"alone: {reason}")
        self._show("outer step", f"outer step of round {round_index} alone: {reason}")
        self._send(messages.TakeOuterStep(round_index))

    def _seek_next_partner(self) -> None:
        """The outcome of a round is on its way: the pairing machine takes up the one that runs already."""
        if self._ahead_since is not None:
            self._tell_pairing(RoundStarted(self._board.round, self._ahead_since))
            self._ahead_since = None

    def _show(self, phase: Phase, detail: str, waits_for: str = "") -> None:
        """What goes on beside the inner steps is not what the trainer does or waits for."""
        if self._board.round == self._contributed_round:
            self._board.enter(phase, detail, waits_for)
        else:
            self._board.enter("training", f"inner steps of round {self._board.round}; {detail}")

    @property
    def _contributed_round(self) -> int:
        return -1 if self._contributed is None else self._contributed.round

    def save(self) -> None:
        """Write a checkpoint, unless one is about to be written: many newcomers may ask for it."""
        if self._num_saving == 0:
            self._send_save()

    async def leave(self) -> None:
        """Begin no round, let the exchange end or end it, save, and end: `run` returns then."""
        self._begins_rounds = False
        if (over := self._exchange_over) is not None:
            with trio.move_on_after(EXCHANGE_GRACE):
                await over.wait()
            self._exchanges.give_up("it leaves")
            with trio.move_on_after(GIVE_UP_GRACE):
                await over.wait()
        self._save_and_end()

    def rest(self) -> None:
        """As `leave`, at once: an exchange may take longer than its owner waits for his machine, so it is given up."""
        self._begins_rounds = False
        if self._exchange_over is not None:
            self._exchanges.give_up("it rests")
        self._save_and_end()

    def _save_and_end(self) -> None:
        """The report of this checkpoint ends the session, so that what is on disk is the end of the training."""
        if not self._is_ending:
            self._begins_rounds, self._is_ending = False, True
            self._send_save(is_last=True)

    def _send_save(self, *, is_last: bool = False) -> None:
        self._saved_at = trio.current_time()
        self._is_save_due = False
        self._num_saving += 1
        self._send(messages.Save(is_last))

    def _send(self, command: messages.Command) -> None:
        self._commands.send_nowait(command)

    async def _send_commands(self) -> None:
        with contextlib.suppress(TrainerError):  # `run` sees the same death, and tells it
            async for command in self._queued:
                await self._trainer.send(command)

    async def _watch(self) -> None:
        await self._trainer.condemn(await watch(self._watchdog, lambda: self._send(messages.Ping())))

    def _start_round(self, round_index: int) -> None:
        if not self._begins_rounds:
            return
        maximum = self._config.max_rounds
        if maximum is not None and round_index >= maximum:
            self._board.round = round_index
            self._board.announce("finished", f"all {maximum} rounds are done; staying for the others")
            self._save_and_end()
            return
        if self._is_data_over:
            self._board.round = round_index
            epochs = self._manifest.data.epochs
            self._board.announce("finished", f"all {epochs} epochs are done; staying for the others")
            self._save_and_end()
            return
        self._train(round_index)
        self._tell_pairing(RoundStarted(round_index))

    def _train(self, round_index: int) -> None:
        board, rounds = self._board, self._manifest.rounds
        board.round, board.round_since = round_index, board.clock()
        board.round_steps, board.round_seconds = rounds.inner_steps, rounds.round_seconds
        board.inner_steps_this_round = 0
        self._board.enter("training", f"inner steps of round {round_index}")
        max_steps = self._manifest.rounds.inner_steps
        self._send(messages.Train(round_index, max_steps))
        if self._pipeline is not None:
            self._pipeline.handle(RoundBegan(round_index, max_steps, self._is_followed(round_index)))

    def _is_followed(self, round_index: int) -> bool:
        """Whether the next round begins beside this one's exchange."""
        return self._manifest.rounds.overlap and round_index + 1 != self._config.max_rounds and not self._is_data_over

    @property
    def _is_data_over(self) -> bool:
        return self._leases is not None and self._leases.is_over

    def _drained(self, round_index: int) -> None:
        """Nothing is under way in the pipeline: the contribution can be made."""
        self._send(messages.FinishRound(round_index))

    @property
    def _is_from_start(self) -> bool:
        """Whether this life began with the weights that the manifest names."""
        return self._manifest.start is not None and self._trainer.prepared.resumed is None

    def _validate(self) -> None:
        """Measure the loss on held-out text; where the model is cut, those who draw data do, through all stages."""
        if self._pipeline is None:
            self._measured()
        elif self._stage == 0:
            num_parts = self._manifest.inner.batch_size // self._manifest.pipeline.microbatch_size
            self._pipeline.handle(Measure(VALIDATION_BATCHES * num_parts))

    def _measured(self) -> None:
        self._send(messages.Validate(VALIDATION_BATCHES))

    @property
    def _counts_tokens(self) -> bool:
        """Every stage sees all tokens: the first one counts them for the run."""
        return self._stage == 0

    def _handle(self, report: messages.Report) -> bool:
        """Whether this was the last report of the last round."""
        board = self._board
        match report:
            case messages.Progress():
                board.inner_steps = report.inner_steps
                if self._counts_tokens:
                    board.tokens = self._tokens_before + report.tokens
                board.inner_steps_this_round, board.loss = report.inner_steps_this_round, report.loss
                board.tokens_per_second = report.tokens_per_second
                board.device_memory = report.device_memory
            case messages.SlicesTrained():
                if self._leases is not None:
                    self._leases.trained(report)
            case messages.Worked(problem):
                if self._pipeline is not None:
                    self._pipeline.handle(Worked(problem))
            case messages.InnerStepTaken(is_taken):
                if not is_taken:
                    board.warn("an inner step was left out: its gradients were not finite")
                if self._pipeline is not None:
                    self._pipeline.handle(Stepped())
            case messages.Contributed():
                self._contribute(report)
            case messages.Encoded(_, num_ready, digest):
                assert self._outgoing is not None, "what is encoded was contributed"
                self._outgoing.advance(num_ready, digest)
            case messages.Screened(reason, number):
                if self._verdict is not None and number == self._num_screenings:
                    self._verdict.send_nowait(reason)
            case messages.OuterStepTaken():
                self._finish_round(report)
            case messages.Validated(round_index, loss):
                if report.problem:
                    board.warn(report.problem)
                else:
                    if self._is_from_start and not board.validation:
                        board.say(f"the weights that this run starts from have a held-out loss of {loss:.4f}")
                    board.record_validation(round_index, loss)
            case messages.Saved():
                self._num_saving -= 1
                if report.problem or report.note:
                    board.warn(report.problem or report.note)
                if not report.problem:
                    self._on_saved(report)
                if self._is_save_due and not self._is_ending:
                    self._send_save()
                return self._is_ending and self._num_saving == 0
            case messages.Pong():
                self._watchdog.hear()
            case messages.Prepared() | messages.Failed():
                raise TrainerError(f"the trainer said {type(report).__name__} out of turn")
        return False

    def _contribute(self, report: messages.Contributed) -> None:
        board = self._board
        self._contributed = report
        self._outgoing = Outgoing(memoryview(self._trainer.outgoing)[: report.size])
        board.inner_steps = report.inner_steps
        if self._counts_tokens:
            board.tokens = self._tokens_before + report.tokens
        board.inner_steps_this_round = report.inner_steps_this_round
        board.tokens_per_second = report.tokens_this_round / max(report.seconds, 1e-9)
        if report.busy_seconds:
            board.speed = report.tokens_this_round / report.busy_seconds
        board.record_loss(report.round, report.loss)
        board.utilisation = report.utilisation
        self._note_busy(report.busy_seconds)
        if self._is_followed(report.round) and self._begins_rounds:
            self._train(report.round + 1)
            self._ahead_since = trio.current_time()
        self._show("pairing", f"contribution of round {report.round} is ready", "the partner")
        self._tell_pairing(ContributionReady(report.round, report.fragment))

    def _note_busy(self, seconds: float) -> None:
        now, recent = trio.current_time(), self._recent
        recent.append((now, seconds))
        if len(recent) > 1:
            busy = sum(seconds for _, seconds in recent) - recent[0][1]
            self._board.recent_utilisation = busy / (now - recent[0][0])

    def _finish_round(self, report: messages.OuterStepTaken) -> None:
        contributed = self._contributed
        assert contributed is not None, "an outer step follows a contribution"
        self._board.late_steps = report.late_steps
        self._board.finish_round(
            report.round,
            inner_steps=contributed.inner_steps_this_round,
            tokens=contributed.tokens_this_round,
            seconds=contributed.seconds,
            loss=contributed.loss,
            late_steps=report.late_steps,
        )
        following = report.round + 1
        every, maximum = self._config.validate_every, self._config.max_rounds
        if every and (following % every == 0 or following == maximum):
            self._validate()
        if following != maximum and trio.current_time() - self._saved_at >= self._config.checkpoint_seconds:
            self._is_save_due = True
            self.save()
        if self._board.round == report.round:
            self._start_round(following)
        else:  # it began long ago
            self._board.enter("training", f"inner steps of round {following}")

    async def _exchange(self, start: StartExchange) -> None:
        """Move both contributions and tell the machine how it ended; the outer step follows if it was committed."""
        contributed, outgoing = self._contributed, self._outgoing
        assert contributed is not None, "the machine starts an exchange after ContributionReady alone"
        assert outgoing is not None, "which follows a contribution"
        self._show("exchanging", f"exchange of round {start.round}", "the partner's contribution")
        offer = Offer(
            run_id=self._config.run_id,
            session=start.session,
            round=start.round,
            stage=self._stage,
            layout=self._trainer.prepared.layout,
            codec=self._manifest.outer.codec,
            tokens=contributed.tokens_this_round,
            size=contributed.size,
        )
        over = self._exchange_over = trio.Event()
        incoming = memoryview(self._trainer.incoming)[: contributed.size]
        try:
            judgement = _TrainersJudgement(self, start.peer, contributed)
            result = await self._exchanges.run(start, offer, outgoing, incoming, judgement)
            self._end_exchange(start, result)
        finally:
            self._exchange_over = None
            over.set()

    def _end_exchange(self, start: StartExchange, result: ExchangeResult) -> None:
        board = self._board
        verdict = "committed" if result.committed else f"failed: {result.reason}"
        board.record_exchange(
            start.round,
            start.peer,
            verdict,
            sent=result.bytes_sent,
            received=result.bytes_received,
            seconds=result.seconds,
            path=result.path,
        )
        is_overlapped = board.round != start.round
        if not result.committed:
            self.take_in(start.round, 0)
        if result.committed:
            self._show("outer step", f"outer step of round {start.round}")
            self._send(messages.TakeOuterStep(start.round, start.peer, result.partner_size, result.partner_tokens))
        elif is_overlapped:  # the pairing machine is in the next round, and cannot say it
            self._go_alone(start.round, "the exchange failed")
        if not is_overlapped:
            if result.is_broken:
                self._show("pairing", f"the exchange of round {start.round} broke", "another partner")
                board.note(f"another partner is sought for round {start.round}")
            self._tell_pairing(ExchangeEnded(start.session, result.committed, result.is_broken))

    def take_in(self, round_index: int, num_received: int) -> None:
        """So much of the partner's contribution is there; 0 if all of it is to be forgotten."""
        self._send(messages.TakeIn(round_index, num_received))

    async def screen(self, peer: bytes, size: int) -> str | None:
        """The trainer's verdict on what was received: None, or why it is refused."""
        self._num_screenings += 1
        self._verdict, verdict = trio.open_memory_channel[str](1)
        self._send(messages.Screen(size, self._num_screenings))
        try:
            reason = await verdict.receive()
        finally:
            self._verdict = None
        if not reason:
            return None
        received = memoryview(self._trainer.incoming)[:size]
        evidence = await trio.to_thread.run_sync(lambda: hashlib.sha256(received).digest())
        self._board.warn(f"refused a contribution of {short_name(peer)}: {reason}")
        self._on_refused(peer, reason, evidence)
        return reason


class _TrainersJudgement:
    """What the trainer makes of a partner's contribution."""

    def __init__(self, session: RoundSession, peer: bytes, contributed: messages.Contributed) -> None:
        self._session = session
        self._peer = peer
        self._round = contributed.round
        self._steps = messages.Steps(contributed.size)

    def take_in(self, num_received: int) -> None:
        """Tell the trainer, if it is worth a message."""
        if self._steps.is_due(num_received):
            self._session.take_in(self._round, num_received)

    async def refusal(self, size: int) -> str | None:
        """After the rest is taken in, too."""
        return await self._session.screen(self._peer, size)

"""The training loop: one trainer and one pairing machine, round after round.

A round: the trainer takes inner steps while `farandole.protocol.pairing` agrees on a partner; the contribution is
ready; both move theirs (`farandole.node.exchange`); the trainer takes the outer step with the partner's, or alone.
Here is only the carrying out: what to do when is decided by the pairing machine, which never waits beyond its
deadline, so neither does a round.

Where the manifest says `overlap`, the inner steps of the next round begin as soon as the contribution is ready, and
the pairing machine goes on to that round as soon as the exchange has begun. The trainer takes the outer step between
two inner steps, at the latest before its next contribution: there is never more than one exchange.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from farandole.protocol.exchange import Offer
from farandole.protocol.identity import short_name
from farandole.protocol.manifest import Manifest
from farandole.protocol.pairing import (
    ContributionReady,
    Event,
    ExchangeEnded,
    FinishRound,
    GoAlone,
    MessageReceived,
    Output,
    Pairing,
    PeerLost,
    PeersChanged,
    RoundStarted,
    SendMessage,
    SetTimer,
    StartExchange,
    Stopped,
    TimerFired,
    UseFragment,
)

from . import trainer_messages as messages
from .board import Board
from .exchange import ExchangeService
from .messenger import Messenger
from .status import Phase
from .trainer import Trainer, TrainerError, open_trainer

PAIRING_PROTOCOL: Final = "/farandole/pairing/1"
MAX_PAIRING_MESSAGE: Final = 256
# Commands queued for a busy trainer: Train, FinishRound, the outer step, Save, Validate. More means a defect.
MAX_QUEUED_COMMANDS: Final = 32
VALIDATION_BATCHES: Final = 8
# A trainer that dies is started again from its checkpoint after these many seconds, the last one for good; a month's
# run survives any number of deaths, and a machine that cannot train does not spin.
RESTART_DELAYS: Final = (1.0, 5.0, 30.0, 120.0)
# A node that was away longer takes a peer's weights instead of its own: old weights would pull its partners back. And
# a newcomer is given weights that are not much older; the donor saves anew if need be.
MAX_ROUNDS_BEHIND: Final = 10
# After a sleep, news of how far the others are comes in parts for a moment: first the old, which waited in buffers.
NEWS_SECONDS: Final = 3.0
# A trainer that lived this long starts with the first delay again.
HEALTHY_SECONDS: Final = 300.0


@dataclass(frozen=True)
class RoundsConfig:
    """What the loop needs to know beside the manifest."""

    run_id: bytes
    prepare: messages.Prepare
    max_rounds: int | None
    checkpoint_seconds: float
    validate_every: int


class Rounds:
    """Trains until ``max_rounds``, restarting the trainer when it dies.

    ``before_trainer`` is waited for before each start of the trainer (it puts weights in place), ``on_saved`` is told
    of every checkpoint, ``on_refused`` of every contribution that the screening refused (peer, reason, SHA-256),
    ``current_round`` says which round the others are in (0 when alone).
    """

    def __init__(
        self,
        config: RoundsConfig,
        manifest: Manifest,
        pairing: Pairing,
        messenger: Messenger,
        exchanges: ExchangeService,
        board: Board,
        *,
        before_trainer: Callable[[], Awaitable[None]],
        on_saved: Callable[[messages.Saved], None],
        on_refused: Callable[[bytes, str, bytes], None],
        current_round: Callable[[], int],
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._pairing = pairing
        self._messenger = messenger
        self._exchanges = exchanges
        self._board = board
        self._before_trainer = before_trainer
        self._on_saved = on_saved
        self._on_refused = on_refused
        self._current_round = current_round
        self._outputs: deque[Output] = deque()
        self._is_carrying_out = False
        self._timer_at = math.inf
        self._timer_changed = trio.Event()
        self._session: _Session | None = None
        self._ended = trio.Event()
        self._is_leaving = False
        messenger.set_receiver(PAIRING_PROTOCOL, MAX_PAIRING_MESSAGE, self._receive, self._on_undelivered)

    async def run(self) -> None:
        """Returns when every round is done; raises `TrainerError` when the trainer can't be set up at all."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_timer)
            try:
                await self._run_trainers()
            finally:
                self.handle(Stopped())
                self._ended.set()
            nursery.cancel_scope.cancel()

    async def leave(self) -> None:
        """Meet nobody any more, save what the last outer step gave, and end."""
        self._is_leaving = True
        self.handle(Stopped())
        if self._session is None:
            return
        self._session.save_and_end()
        await self._ended.wait()

    def save_soon(self) -> None:
        """Write a checkpoint now, for somebody who asks for weights."""
        if self._session is not None:
            self._session.save()

    def set_peers(self, peers: frozenset[bytes]) -> None:
        """The live peers of this node's stage changed."""
        self.handle(PeersChanged(peers))

    def lose_peer(self, peer: bytes) -> None:
        """A connection broke, or a message was not delivered."""
        self.handle(PeerLost(peer))

    def handle(self, event: Event) -> None:
        """Give an event to the pairing machine and carry out what it asks for."""
        self._outputs.extend(self._pairing.handle(event, trio.current_time()))
        if self._is_carrying_out:
            return  # a message could not even be queued, which is an event too: its outputs come after the others
        self._is_carrying_out = True
        try:
            while self._outputs:
                self._carry_out(self._outputs.popleft())
        finally:
            self._is_carrying_out = False

    def _receive(self, peer: bytes, payload: bytes) -> None:
        self.handle(MessageReceived(peer, payload))

    def _on_undelivered(self, peer: bytes, protocol: str) -> None:
        self.handle(PeerLost(peer))

    def _carry_out(self, output: Output) -> None:
        match output:
            case SendMessage(peer, payload):
                self._messenger.send_nowait(peer, PAIRING_PROTOCOL, payload)
            case SetTimer(at):
                self._timer_at = at
                self._timer_changed.set()
            case UseFragment() | FinishRound() | StartExchange() | GoAlone():
                if self._session is not None:
                    self._session.carry_out(output)

    async def _run_timer(self) -> None:
        while True:
            changed = self._timer_changed = trio.Event()
            with trio.move_on_at(self._timer_at):
                await changed.wait()
                continue
            self._timer_at = math.inf
            self.handle(TimerFired())

    async def _run_trainers(self) -> None:
        deaths = 0
        while True:
            started_at = trio.current_time()
            try:
                if await self._run_one_trainer():
                    return
            except TrainerError as error:
                self.handle(Stopped())
                if self._is_leaving:
                    return
                if error.is_setup:
                    raise
                if trio.current_time() - started_at > HEALTHY_SECONDS:
                    deaths = 0
                delay = RESTART_DELAYS[min(deaths, len(RESTART_DELAYS) - 1)]
                deaths += 1
                self._board.trainer_restarts += 1
                self._board.warn(f"{error}; starting it again in {delay:g} s from the last checkpoint")
                self._board.enter("preparing", "the trainer died", f"{delay:g} s before it starts again")
                await trio.sleep(delay)

    async def _run_one_trainer(self) -> bool:
        """Whether every round is done, or the node leaves; else new weights are due."""
        board = self._board
        await self._before_trainer()
        board.announce("preparing", "starting the trainer: loading torch, the text and the model", "the trainer")
        async with open_trainer(self._config.prepare, log=None) as trainer:
            prepared = trainer.prepared
            board.device, board.trainer_pid = prepared.device, trainer.pid
            board.inner_steps = prepared.inner_steps
            how = f"resumed at round {prepared.round}" if prepared.resumed else "from the run's seed"
            board.say(f"trainer ready on {prepared.device}: {prepared.num_parameters:,} parameters, {how}")
            failure: TrainerError | None = None
            is_over = False
            async with trio.open_nursery() as nursery:
                session = _Session(self, trainer, nursery)
                self._session = session
                try:
                    is_over = await session.run(max(prepared.round, self._current_round()))
                except TrainerError as error:
                    failure = error  # raised below, out of the nursery, which would wrap it in a group
                finally:
                    self._session = None
                    board.trainer_pid = None
                nursery.cancel_scope.cancel()
            if failure is not None:
                raise failure
            return is_over


class _Session:
    """One life of the trainer: turns its reports into events, and the machine's wishes into commands."""

    def __init__(self, rounds: Rounds, trainer: Trainer, nursery: trio.Nursery) -> None:
        self._rounds = rounds
        self._config = rounds._config
        self._manifest = rounds._manifest
        self._board = rounds._board
        self._trainer = trainer
        self._nursery = nursery
        self._commands, self._queued = trio.open_memory_channel[messages.Command](MAX_QUEUED_COMMANDS)
        self._contributed: messages.Contributed | None = None
        self._screened: trio.MemorySendChannel[str] | None = None
        # A replica without a checkpoint is saved as soon as it can be: a trainer that dies has to come back somewhere.
        self._saved_at = trio.current_time() if trainer.prepared.resumed else -math.inf
        self._num_saving = 0  # Save commands without their report
        self._ahead_since: float | None = None  # the round that overlaps with the one whose partner is sought
        self._is_ending = False
        self._rounds_behind = deque([(-math.inf, 0)])  # (seen at, rounds), the first more than NEWS_SECONDS ago
        # The replica's count begins with its weights, which may be a peer's; the board's has this node's tokens alone.
        self._tokens_before = self._board.tokens - trainer.prepared.tokens

    async def run(self, first_round: int) -> bool:
        """Train from ``first_round``; True when every round is done, False when the others are far ahead."""
        self._nursery.start_soon(self._send_commands)
        self._start_round(first_round)
        while True:
            if self._handle(await self._trainer.receive()):
                return True
            if self._is_behind():
                self._rounds.handle(Stopped())
                return False

    def _is_behind(self) -> bool:
        """Between two rounds: whether this node slept through so many that its weights would pull its partners back."""
        is_between = self._board.phase == "training" and self._board.inner_steps_this_round == 0
        if not is_between or self._is_ending:
            return False
        # Rounds lost bit by bit are a slow node's, whose weights are averaged all the same.
        now, behind = trio.current_time(), self._rounds._current_round() - self._board.round
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
            self._rounds.handle(RoundStarted(self._board.round, self._ahead_since))
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

    def save_and_end(self) -> None:
        """The report of this checkpoint ends the session, so that what is on disk is the end of the training."""
        if not self._is_ending:
            self._is_ending = True
            self._send_save()

    def _send_save(self) -> None:
        self._saved_at = trio.current_time()
        self._num_saving += 1
        self._send(messages.Save())

    def _send(self, command: messages.Command) -> None:
        self._commands.send_nowait(command)

    async def _send_commands(self) -> None:
        with contextlib.suppress(TrainerError):  # `run` sees the same death, and tells it
            async for command in self._queued:
                await self._trainer.send(command)

    def _start_round(self, round_index: int) -> None:
        if self._is_ending:
            return
        maximum = self._config.max_rounds
        if maximum is not None and round_index >= maximum:
            self._board.round = round_index
            self._board.announce("finished", f"all {maximum} rounds are done; staying for the others")
            self.save_and_end()
            return
        self._train(round_index)
        self._rounds.handle(RoundStarted(round_index))

    def _train(self, round_index: int) -> None:
        self._board.round = round_index
        self._board.inner_steps_this_round = 0
        self._board.enter("training", f"inner steps of round {round_index}")
        self._send(messages.Train(round_index, self._manifest.rounds.inner_steps))

    def _handle(self, report: messages.Report) -> bool:
        """Whether this was the last report of the last round."""
        board = self._board
        match report:
            case messages.Progress():
                board.inner_steps, board.tokens = report.inner_steps, self._tokens_before + report.tokens
                board.inner_steps_this_round, board.loss = report.inner_steps_this_round, report.loss
                board.tokens_per_second = report.tokens_per_second
            case messages.Contributed():
                self._contribute(report)
            case messages.Screened(reason):
                if self._screened is not None:
                    self._screened.send_nowait(reason)
            case messages.OuterStepTaken():
                self._finish_round(report)
            case messages.Validated(round_index, loss):
                if report.problem:
                    board.warn(report.problem)
                else:
                    board.validation.append((round_index, loss))
            case messages.Saved():
                self._num_saving -= 1
                if report.problem:
                    board.warn(report.problem)
                else:
                    self._rounds._on_saved(report)
                return self._is_ending and self._num_saving == 0
            case messages.Prepared() | messages.Failed():
                raise TrainerError(f"the trainer said {type(report).__name__} out of turn")
        return False

    def _contribute(self, report: messages.Contributed) -> None:
        board = self._board
        self._contributed = report
        board.inner_steps, board.tokens = report.inner_steps, self._tokens_before + report.tokens
        board.inner_steps_this_round = report.inner_steps_this_round
        board.tokens_per_second = report.tokens_this_round / max(report.seconds, 1e-9)
        board.record_loss(report.round, report.loss)
        board.utilisation = report.utilisation
        following = report.round + 1
        if self._manifest.rounds.overlap and following != self._config.max_rounds and not self._is_ending:
            self._train(following)
            self._ahead_since = trio.current_time()
        self._show("pairing", f"contribution of round {report.round} is ready", "the partner")
        self._rounds.handle(ContributionReady(report.round, report.fragment))

    def _finish_round(self, report: messages.OuterStepTaken) -> None:
        contributed = self._contributed
        assert contributed is not None, "an outer step follows a contribution"
        self._board.late_steps = report.late_steps
        self._board.say(
            self._board.round_line(
                report.round, contributed.inner_steps_this_round, contributed.loss, report.late_steps
            )
        )
        following = report.round + 1
        every, maximum = self._config.validate_every, self._config.max_rounds
        if every and (following % every == 0 or following == maximum):
            self._send(messages.Validate(VALIDATION_BATCHES))
        if following != maximum and trio.current_time() - self._saved_at >= self._config.checkpoint_seconds:
            self.save()
        if self._board.round == report.round:
            self._start_round(following)
        else:  # it began long ago
            self._board.enter("training", f"inner steps of round {following}")

    async def _exchange(self, start: StartExchange) -> None:
        """Move both contributions and tell the machine how it ended; the outer step follows if it was committed."""
        contributed, board = self._contributed, self._board
        assert contributed is not None, "the machine starts an exchange after ContributionReady alone"
        self._show("exchanging", f"exchange of round {start.round}", "the partner's contribution")
        offer = Offer(
            run_id=self._config.run_id,
            session=start.session,
            round=start.round,
            stage=0,
            layout=self._trainer.prepared.layout,
            codec=self._manifest.outer.codec,
            tokens=contributed.tokens_this_round,
            size=contributed.size,
            digest=contributed.digest,
        )
        result = await self._rounds._exchanges.run(
            start,
            offer,
            memoryview(self._trainer.outgoing)[: contributed.size],
            memoryview(self._trainer.incoming)[: self._trainer.prepared.contribution_bytes],
            partial(self._screen, start.peer),
        )
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
        if result.committed:
            self._show("outer step", f"outer step of round {start.round}")
            self._send(messages.TakeOuterStep(start.round, start.peer, result.partner_size, result.partner_tokens))
        elif is_overlapped:  # the pairing machine is in the next round, and cannot say it
            self._go_alone(start.round, "the exchange failed")
        if not is_overlapped:
            self._rounds.handle(ExchangeEnded(start.session, result.committed))

    async def _screen(self, peer: bytes, size: int) -> str | None:
        """The trainer's verdict on what was received: None, or why it is refused."""
        self._screened, verdict = trio.open_memory_channel[str](1)
        self._send(messages.Screen(size))
        try:
            reason = await verdict.receive()
        finally:
            self._screened = None
        if not reason:
            return None
        received = memoryview(self._trainer.incoming)[:size]
        evidence = await trio.to_thread.run_sync(lambda: hashlib.sha256(received).digest())
        self._board.warn(f"refused a contribution of {short_name(peer)}: {reason}")
        self._rounds._on_refused(peer, reason, evidence)
        return reason

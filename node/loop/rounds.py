"""The training loop: one pairing machine, and one trainer after another if they die, round after round.

A round: the trainer takes inner steps while `farandole.protocol.pairing` agrees on a partner; its contribution is
encoded; both move theirs (`farandole.node.bulk.exchange_service`); the trainer takes the outer step with the partner's,
or alone. Here is only the carrying out: what to do when is decided by the pairing machine, which never waits beyond its
deadline, so neither does a round. What is said to a trainer, and what follows from its reports, is in
`farandole.node.loop.round_session`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from farandole.protocol.manifest import Manifest
from farandole.protocol.pairing import Pairing
from farandole.protocol.pairing_events import (
    Event,
    FinishRound,
    GoAlone,
    MessageReceived,
    Output,
    PeerLost,
    PeersChanged,
    SendMessage,
    SetTimer,
    StartExchange,
    Stopped,
    TimerFired,
    TrafficSaved,
    UseFragment,
)

from ..base.driver import Driver
from ..bulk.exchange_service import ExchangeService
from ..state.messenger import Messenger
from ..status.board import Board
from ..trainer import messages
from ..trainer.trainer import TrainerError, open_trainer
from .lease_service import LeaseKeeper
from .pause.pause import Rest
from .round_session import RoundsConfig, RoundSession
from .stages.pipeline import PipelineService
from .supervisor import End, Supervisor
from .watchdog import Watchdog

PAIRING_PROTOCOL: Final = "/farandole/pairing/1"
MAX_PAIRING_MESSAGE: Final = 256
# Who wants his machine back has its memory within five seconds. So much of that the running inner step and the save may
# take; the rest is for ending the process on a busy machine, and for the kernel, which frees gigabytes. A large save is
# not waited for: what was learnt since the last checkpoint is less dear.
REST_TIMEOUT: Final = 3.0
# How often it is asked whether there is traffic for an exchange: a partner is found in less than a round.
TRAFFIC_INTERVAL: Final = 1.0


class Rounds:
    """Trains until ``max_rounds``, restarting the trainer when it dies as ``supervisor`` says, without one at ``rest``.

    ``before_trainer`` is waited for before each start of the trainer (it puts weights in place), ``on_saved`` is told
    of every checkpoint, ``on_refused`` of every contribution that the screening refused (peer, reason, SHA-256),
    ``current_round`` says which round the others are in (0 when alone). ``pipeline`` gives a stage's trainer its work;
    ``leases`` say what of the data it trains on, in runs that count epochs. ``may_spend`` says whether there is traffic
    for an exchange of so many bytes.
    """

    def __init__(
        self,
        config: RoundsConfig,
        manifest: Manifest,
        pairing: Pairing,
        messenger: Messenger,
        exchanges: ExchangeService,
        board: Board,
        supervisor: Supervisor,
        rest: Rest,
        *,
        before_trainer: Callable[[], Awaitable[None]],
        on_saved: Callable[[messages.Saved], None],
        on_refused: Callable[[bytes, str, bytes], None],
        current_round: Callable[[], int],
        pipeline: PipelineService | None = None,
        leases: LeaseKeeper | None = None,
        may_spend: Callable[[int], bool] = lambda num_bytes: True,
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._messenger = messenger
        self._exchanges = exchanges
        self._board = board
        self._supervisor = supervisor
        self._rest = rest
        self._watchdog = Watchdog(config.hung_seconds)
        self._before_trainer = before_trainer
        self._on_saved = on_saved
        self._on_refused = on_refused
        self._current_round = current_round
        self._pipeline = pipeline
        self._leases = leases
        self._may_spend = may_spend
        self._exchange_bytes = 0  # both contributions
        self._driver = Driver[Event, Output](self._carry_out, TimerFired())
        self._driver.begin(pairing)
        self._session: RoundSession | None = None
        self._ready_at: float | None = None  # of the present trainer
        self._life = trio.CancelScope()  # likewise
        self._session_over = trio.Event()  # likewise
        self._ended = trio.Event()
        self._is_leaving = False
        self._ends_to_rest = False  # the present session
        self._tenth_told = 0  # of the text that is tokenised
        messenger.set_receiver(PAIRING_PROTOCOL, MAX_PAIRING_MESSAGE, self._receive, self._on_undelivered)

    async def run(self) -> None:
        """Returns when every round is done; raises `TrainerError` when no trainer can be had here."""
        failure: TrainerError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._driver.run)
            nursery.start_soon(self._begin_rests)
            nursery.start_soon(self._watch_traffic)
            try:
                await self._run_trainers()
            except TrainerError as error:
                failure = error  # raised below, out of the nursery, which would wrap it in a group
            finally:
                self.handle(Stopped())
                self._ended.set()
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def leave(self) -> None:
        """Meet nobody any more, end the exchange that runs, save what the last outer step gave, and end."""
        self._is_leaving = True
        self.handle(Stopped())
        if self._session is None:
            return
        await self._session.leave()
        await self._ended.wait()

    def save_soon(self) -> None:
        """Write a checkpoint now, for somebody who asks for weights."""
        if self._session is not None:
            self._session.save()

    def finish_round(self) -> None:
        """There is nothing left to train on: what this round has is exchanged now."""
        if self._session is not None:
            self._session.finish_round()

    def restart_trainer(self) -> None:
        """Start it anew, with whatever is prepared then; what was not saved is lost."""
        if self._session is not None:
            self._session.restart()

    def set_peers(self, peers: frozenset[bytes]) -> None:
        """The live peers of this node's stage changed."""
        self.handle(PeersChanged(peers))

    def lose_peer(self, peer: bytes) -> None:
        """A connection broke, or a message was not delivered."""
        self.handle(PeerLost(peer))

    def handle(self, event: Event) -> None:
        """Pass an event to the pairing machine and carry out its outputs."""
        self._driver.handle(event)

    def _receive(self, peer: bytes, payload: bytes) -> None:
        self.handle(MessageReceived(peer, payload))

    def _on_undelivered(self, peer: bytes, protocol: str) -> None:
        self.handle(PeerLost(peer))

    def _carry_out(self, output: Output) -> None:
        match output:
            case SendMessage(peer, payload):
                self._messenger.send_nowait(peer, PAIRING_PROTOCOL, payload)
            case SetTimer(at):
                self._driver.set_timer(at)
            case UseFragment() | FinishRound() | StartExchange() | GoAlone():
                if self._session is not None:
                    self._session.carry_out(output)

    async def _run_trainers(self) -> None:
        while not self._is_leaving:
            await self._rest_out()
            self._ready_at = None
            self._ends_to_rest = False
            self._life = trio.CancelScope()
            try:
                with self._life:
                    if await self._run_one_trainer() and not self._ends_to_rest:
                        return
            except TrainerError as error:
                self.handle(Stopped())
                if self._is_leaving:
                    return
                await self._recover(error)

    async def _rest_out(self) -> None:
        """Until there is no reason to rest."""
        if not self._rest.is_on:
            return
        self._board.is_trainer_dead = False  # there shall be none
        self._board.say(f"resting: {self._rest.words}")
        while self._rest.is_on:
            self._board.enter("paused", self._rest.words)
            await self._rest.changed()
        self._board.say("training again")

    async def _begin_rests(self) -> None:
        """Whenever the node is to rest, have the trainer save and end, or else end it: its memory is wanted.

        A rest that is over before the trainer has ended is followed by another trainer, as any other is.
        """
        while True:
            await self._rest.wait(is_on=True)
            self.handle(Stopped())
            life = self._life
            if self._session is not None:
                self._ends_to_rest = True
                self._session.rest()
                with trio.move_on_after(REST_TIMEOUT):
                    await self._session_over.wait()
            life.cancel()
            while self._rest.is_on and self._life is life:  # another life: the rest was over, and begins again
                await self._rest.changed()

    async def _watch_traffic(self) -> None:
        is_saving = False
        while True:
            if is_saving == self._may_spend(self._exchange_bytes):
                is_saving = not is_saving
                self.handle(TrafficSaved(is_saving))
            await trio.sleep(TRAFFIC_INTERVAL)

    async def _recover(self, error: TrainerError) -> None:
        """Until the next trainer is due, or the node rests. Raises `TrainerError` if none is due."""
        board = self._board
        lived = None if self._ready_at is None else trio.current_time() - self._ready_at
        verdict = self._supervisor.judge(error, lived)
        if isinstance(verdict, End):
            raise TrainerError(verdict.words) from error
        board.trainer_restarts += 1
        board.is_trainer_dead = True
        board.tokens_per_second = 0.0
        board.warn(verdict.words)
        if verdict.is_rest:
            board.enter("failed", verdict.words)
        else:
            board.enter("preparing", "the trainer died", f"{verdict.delay:g} s before it starts again")
        with trio.move_on_after(verdict.delay):
            await self._rest.wait(is_on=True)  # when that is over, whoever ordered it wants to see it train

    def _show_preparing(self, preparing: messages.Preparing) -> None:
        """To whoever waits: at the terminal each tenth of it."""
        board, share = self._board, preparing.position / max(1, preparing.size)
        words = f"reading and tokenising the text: {share:.0%}"
        board.enter("preparing", words, "the trainer")
        if (tenth := int(10 * share)) != self._tenth_told:
            self._tenth_told = tenth
            board.say(words)

    async def _run_one_trainer(self) -> bool:
        """Whether every round is done, or the node leaves; else new weights are due."""
        await self._before_trainer()
        self._board.announce("preparing", "starting the trainer: loading torch, the text and the model", "the trainer")
        try:
            return await self._run_trainer(self._config.prepare())
        finally:
            self._board.trainer_pid = self._board.device_memory = None

    def _note_trainer(self, pid: int) -> None:
        """From now on what this process takes of the machine is this node's doing."""
        self._board.trainer_pid = pid

    async def _run_trainer(self, prepare: messages.Prepare) -> bool:
        board = self._board
        async with open_trainer(prepare, None, self._show_preparing, self._note_trainer) as trainer:
            prepared = trainer.prepared
            board.device = prepared.device
            board.inner_steps, board.num_parameters = prepared.inner_steps, prepared.num_parameters
            board.microbatch = prepare.microbatch
            board.is_trainer_dead = False
            self._ready_at = trio.current_time()
            self._exchange_bytes = 2 * prepared.contribution_bytes
            origin = "seed" if self._manifest.start is None else "starting checkpoint"
            how = f"resumed at round {prepared.round}" if prepared.resumed else f"from the run's {origin}"
            board.say(f"trainer ready on {prepared.device}: {prepared.num_parameters:,} parameters, {how}")
            if prepared.problem:
                board.warn(f"going on with an older checkpoint: {prepared.problem}")
            failure: TrainerError | None = None
            is_over = False
            async with trio.open_nursery() as nursery:
                session = RoundSession(
                    self._config,
                    self._manifest,
                    self._exchanges,
                    board,
                    trainer,
                    nursery,
                    self._watchdog,
                    tell_pairing=self.handle,
                    on_saved=self._on_saved,
                    on_refused=self._on_refused,
                    current_round=self._current_round,
                    pipeline=self._pipeline,
                    leases=self._leases,
                    stage=prepare.stage,
                )
                self._session, self._session_over = session, trio.Event()
                try:
                    is_over = await session.run(max(prepared.round, self._current_round()))
                except TrainerError as error:
                    failure = error  # raised below, out of the nursery, which would wrap it in a group
                finally:
                    self._session = None
                    self._session_over.set()
                    if self._pipeline is not None:
                        self._pipeline.end()
                    if self._leases is not None:
                        self._leases.end()
                nursery.cancel_scope.cancel()
            if failure is not None:
                raise failure
            return is_over

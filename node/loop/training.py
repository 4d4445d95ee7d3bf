"""Driver of the training loop: carries out in a node what `farandole.protocol.rounds.training_loop` decides.

Trainer processes, exchanges, pairing messages, the timer and the display are here; the decisions are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import msgspec
import trio

from farandole.protocol.exchange.exchange import Offer
from farandole.protocol.rounds import pairing_events as pairing
from farandole.protocol.rounds import training_events as machine
from farandole.protocol.rounds.pairing_events import ExchangeEnded, StartExchange
from farandole.protocol.rounds.trainer_rounds import LoopConfig
from farandole.protocol.rounds.training_loop import TrainingLoop
from farandole.protocol.state.node_state import TrainingState, training_of
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.wire.timers import SetTimer, TimerFired

from ..base.bandwidth import Shaping
from ..base.driver import Driver
from ..bulk.exchange_service import ExchangeService
from ..bulk.pipe import Outgoing
from ..state.membership import Membership
from ..state.messenger import Messenger
from ..status.journal import Journal
from ..trainer.channel import SharedCounter
from ..trainer.script import ScriptDoor
from ..trainer.trainer import Trainer, TrainerError, open_trainer
from ..transfers.giver import Provider
from .audit_service import AuditService
from .lease_service import LeaseService
from .pipeline_service import PipelineService, Worker
from .rest_service import Rest

# Commands queued for a busy trainer: Train, FinishRound, the outer step, Save, Validate, and the settlement of each
# microbatch that a stage may have in flight (256). More means a defect.
MAX_QUEUED_COMMANDS: Final = 288

# One trainer process in use: its commands, exchanges of its contributions, and its verdicts on others'.
#
# The exchange may begin as soon as the encoding of the contribution does, and sends data as they are encoded. The
# trainer decodes what the partner has sent while the rest arrives. Only the verdict and the outer step wait for all of
# it.


@dataclass(eq=False)
class _Judging:
    """A contribution that the trainer judges."""

    peer: bytes
    begun_at: float
    is_over: trio.Event = field(default_factory=trio.Event)
    verdict: messages.Screened = field(default_factory=lambda: messages.Screened(""))


@dataclass(eq=False)
class TrainerSession:
    """A trainer that is ready, until it ends."""

    trainer: Trainer
    config: LoopConfig
    exchanges: ExchangeService
    nursery: trio.Nursery
    """The nursery of the session; its tasks end with the trainer."""
    membership: Membership
    journal: Journal
    _contribution: tuple[messages.Contributed, Outgoing] | None = None
    _judging: _Judging | None = None
    """Of the newest exchange's contribution, once it is there."""
    _num_exchanges: int = 0

    def __post_init__(self) -> None:
        self._encoded = SharedCounter(self.trainer.outgoing)
        self._arrived = SharedCounter(self.trainer.incoming)
        queue, self._queued = trio.open_memory_channel[messages.Command](MAX_QUEUED_COMMANDS)
        self.tell = queue.send_nowait
        """Queues a command, for `write`."""

    async def write(self) -> None:
        """Send what is queued, all that waits in one write, until cancelled or the trainer is gone."""
        with contextlib.suppress(TrainerError):  # `receive` sees the same death
            async for first in self._queued:
                commands = [first]
                with contextlib.suppress(trio.WouldBlock):
                    while True:
                        commands.append(self._queued.receive_nowait())
                await self.trainer.send(*commands)

    def contribute(self, report: messages.Contributed) -> None:
        """Note that a contribution is being encoded."""
        memory = memoryview(self.trainer.outgoing)[: report.size]
        self._contribution = report, Outgoing(memory, None, lambda: self._encoded.count_of(report.round))

    def seal(self, report: messages.Encoded) -> None:
        """Note that the contribution is encoded."""
        assert self._contribution is not None, "what is encoded was contributed"
        self._contribution[1].seal(report.digest)

    async def exchange(self, start: StartExchange) -> ExchangeEnded:
        """Exchange both contributions, and have the partner's judged."""
        assert self._contribution is not None, "an exchange follows a contribution"
        contributed, outgoing = self._contribution
        offer = Offer(
            run_id=self.config.run_id,
            session=start.session,
            round=start.round,
            stage=self.trainer.prepared.stage,
            layout=self.trainer.prepared.layout,
            codec=self.config.manifest.outer.codec,
            tokens=contributed.tokens_claimed,
            size=contributed.size,
        )
        incoming = memoryview(self.trainer.incoming)[: contributed.size]
        self._num_exchanges = number = self._num_exchanges + 1
        arrive = partial(self._arrived.store, number)
        arrive(0)
        self._judging = None
        ended = await self.exchanges.run(start, offer, outgoing, incoming, partial(self.screen, start.peer), arrive)
        if not ended.committed or (judging := self._judging) is None:
            return ended
        with trio.move_on_at(start.deadline) as waiting:  # the outer step comes after the verdict in any case
            await judging.is_over.wait()
        if waiting.cancelled_caught:  # the trainer is in the middle of other work
            return replace(ended, late_seconds=trio.current_time() - judging.begun_at)
        return replace(ended, clip=judging.verdict.clip, late_seconds=judging.verdict.late_seconds)

    async def screen(self, peer: bytes, size: int, tokens: int) -> str | None:
        """Have the trainer judge what was received; return None, or why it is refused.

        If it is cancelled, the verdict follows: the trainer judges before it averages.
        """
        self._judging = judging = _Judging(peer, trio.current_time())
        is_suspected, seconds = self.membership.is_suspected(peer), self.config.manifest.rounds.exchange_seconds
        self.tell(messages.Screen(size, self._num_exchanges, peer, tokens, is_suspected, seconds))
        await judging.is_over.wait()
        return judging.verdict.reason or None

    def note_verdict(self, judged: messages.Screened) -> None:
        """Take in a verdict; one on a contribution of an earlier exchange is dropped."""
        if self._judging is None or judged.number != self._num_exchanges:
            return
        peer, self._judging.verdict = self._judging.peer, judged
        self._judging.is_over.set()
        name = self.journal.called(peer)
        if judged.reason:
            self.journal.warn(f"refused a contribution of {name}: {judged.reason}")
        elif judged.clip == 0.0:
            self.journal.warn(f"averaged nothing of a contribution of {name}: {judged.remark}")
        elif judged.remark:
            self.journal.note(f"not all of a contribution of {name} counted: {judged.remark}")
        self.membership.announcer.note_suspicion(peer, judged.is_suspect)


PAIRING_PROTOCOL: Final = "/farandole/pairing/1"
MAX_PAIRING_MESSAGE: Final = 256
# Seconds between two checks whether there is traffic for an exchange: a partner is found in less than a round.
TRAFFIC_INTERVAL: Final = 1.0


@dataclass(eq=False)
class Training:
    """Trains until every round is done, or the node leaves."""

    loop: TrainingLoop
    messenger: Messenger
    exchanges: ExchangeService
    journal: Journal
    rest: Rest
    membership: Membership
    provider: Provider
    """Gives other members the checkpoints that are written or resumed from."""
    shaping: Shaping
    """Knows whether there is traffic for an exchange."""
    stopped: trio.Event
    """Set when the run's creator stops the run."""
    pipeline: PipelineService | None = None
    """Gives a stage's trainer its work."""
    leases: LeaseService | None = None
    """Decides which data it trains on, in a run that counts epochs."""
    audits: AuditService | None = None
    door: ScriptDoor | None = None
    """The door at which a loop of the owner's attaches, if one trains."""
    _session: TrainerSession | None = None
    _exchange_bytes: int = 0
    """Of both contributions."""
    _error: str = ""

    def __post_init__(self) -> None:
        self._driver = Driver[machine.Event, machine.Output](self._carry_out, TimerFired())
        self._driver.begin(self.loop.handle)
        self._prepare: Callable[[], Awaitable[messages.Prepare]]
        self._nursery: trio.Nursery
        self._life = trio.CancelScope()  # of the present trainer process
        self._receiving = trio.CancelScope()  # its reports
        self._over = trio.Event()
        self.messenger.set_receiver(
            PAIRING_PROTOCOL,
            MAX_PAIRING_MESSAGE,
            lambda peer, payload: self.handle(pairing.MessageReceived(peer, payload)),
            lambda peer: self.handle(pairing.PeerLost(peer)),
        )

    async def run(self, prepare: Callable[[], Awaitable[messages.Prepare]]) -> None:
        """Train until it is over; raises `TrainerError` when no trainer can run here.

        ``prepare`` puts weights in place, and returns the first command for the next trainer.
        """
        self._prepare = prepare

        async def watch_rest() -> None:
            while True:
                await self.rest.changed.park()
                self.handle(machine.RestChanged(self.rest.words))

        async def watch_traffic() -> None:
            """Tell the loop when there is no traffic for an exchange, or again."""
            is_saving = False
            while True:
                if is_saving == self.shaping.may_spend(self._exchange_bytes):
                    is_saving = not is_saving
                    self.handle(pairing.TrafficSaved(is_saving))
                await trio.sleep(TRAFFIC_INTERVAL)

        async def handle_after(awaited: trio.Event, event: machine.Event) -> None:
            await awaited.wait()
            self.handle(event)

        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._driver.run)
                self.handle(machine.LoopBegan(training_of(self.journal.state), self.rest.words))
                self._nursery.start_soon(watch_rest)
                self._nursery.start_soon(watch_traffic)
                self._nursery.start_soon(handle_after, self.stopped, machine.Signal.RUN_STOPPED)
                if self.leases is not None:
                    self._nursery.start_soon(handle_after, self.leases.over, machine.Signal.DATA_OVER)
                await self._over.wait()
                self._nursery.cancel_scope.cancel()
        finally:
            self._over.set()
        if self._error:
            raise TrainerError(self._error)

    async def leave(self) -> None:
        """Stop pairing, end the exchange that runs, save what the last outer step gave, and end."""
        self.handle(machine.Signal.LEAVE)
        await self._over.wait()

    def handle(self, event: machine.Event) -> None:
        """Pass an event to the loop and carry out its outputs."""
        self._driver.handle(event)

    # Outputs

    def _carry_out(self, output: machine.Output) -> None:
        journal = self.journal
        match output:
            case SetTimer(at):
                self._driver.set_timer(at)
            case pairing.SendMessage(peer, payload):
                self.messenger.send_nowait(peer, PAIRING_PROTOCOL, payload)
            case pairing.Missed(peer):
                journal.blame(peer, "absent")
            case _ if isinstance(output, messages.Command):
                if isinstance(output, messages.Train):
                    journal.update(round_since=journal.clock())
                pipeline = self.pipeline
                if pipeline is not None and isinstance(
                    output, messages.Train | messages.FinishRound | messages.Validate
                ):
                    pipeline.handle(output)  # it tells the trainer when nothing is under way
                elif self._session is not None:
                    self._session.tell(output)
            case pairing.StartExchange():
                if self._session is not None:
                    self._session.nursery.start_soon(self._exchange, self._session, output)
            case machine.GiveUpExchange(reason):
                self.exchanges.give_up(reason)
            case machine.StartTrainer():
                self._life = trio.CancelScope()
                self._nursery.start_soon(self._live, self._life)
            case machine.EndTrainer(at_once):
                (self._life if at_once else self._receiving).cancel()
            case machine.KillTrainer(error):
                if self._session is not None:
                    self._session.nursery.start_soon(self._session.trainer.condemn, error)
            case machine.LoopOver(error):
                self._error = error
                self._over.set()
            case TrainingState():
                journal.update(**msgspec.structs.asdict(output))
            case machine.Enter(phase, detail, waits_for):
                journal.enter(phase, detail, waits_for)
            case machine.Say(text, "warn", cause):
                journal.warn(text, cause)
            case machine.Say(text, "note"):
                journal.note(text)
            case machine.Say(text):
                journal.say(text)
            case machine.RoundEnd():
                journal.finish_round(output)
            case messages.Validated(round_index, loss, bits_per_byte=bits):
                journal.record_validation(round_index, loss, bits)

    # The trainer

    async def _live(self, life: trio.CancelScope) -> None:
        """Run one trainer process, from its weights to its end."""
        ended = machine.TrainerEnded()
        with life:
            try:
                async with self._open_trainer() as trainer:
                    ended = await self._use(trainer)
            except TrainerError as error:
                ended = machine.TrainerEnded(str(error), error.cause)
            finally:
                self.journal.update(trainer_pid=None)
        self.handle(ended)

    @contextlib.asynccontextmanager
    async def _open_trainer(self) -> AsyncIterator[Trainer]:
        """Start a trainer process, or wait for a loop to attach, whose weights are sought only once it is there."""
        door, journal, tenth_told = self.door, self.journal, 0

        def show(preparing: messages.Preparing) -> None:
            """Show how much of the text is tokenised; print each tenth."""
            nonlocal tenth_told
            share = preparing.position / max(1, preparing.size)
            words = f"reading and tokenising the text: {share:.0%}"
            journal.enter("preparing", words, "the trainer")
            if (tenth := int(10 * share)) != tenth_told:
                tenth_told = tenth
                journal.say(words)

        if door is None:
            prepare = await self._prepare()
            words = "starting the trainer: loading torch, the text and the model"
            journal.announce("preparing", words, "the trainer")
            # Its use of the machine counts as this node's own at once.
            async with open_trainer(prepare, show, lambda pid: journal.update(trainer_pid=pid)) as child:
                yield child
        else:
            words = "waiting for a loop to attach: farandole.NoLoCo in a script of yours"
            journal.announce("preparing", words, "a loop of yours")
            await door.wait()
            prepare = await self._prepare()
            async with door.open_trainer(prepare) as attached:
                journal.update(trainer_pid=attached.prepared.pid)
                yield attached

    async def _use(self, trainer: Trainer) -> machine.TrainerEnded:
        """Pass on the trainer's reports until it ends, or dies; return how."""
        ended, prepared = machine.TrainerEnded(), trainer.prepared
        async with trio.open_nursery() as nursery:
            self._session = session = TrainerSession(
                trainer, self.loop.config, self.exchanges, nursery, self.membership, self.journal
            )
            nursery.start_soon(session.write)
            try:
                with trio.CancelScope() as self._receiving:
                    self._exchange_bytes = 2 * prepared.contribution_bytes
                    if prepared.resumed is not None:
                        self.provider.note_saved(prepared.resumed)
                    if self.pipeline is not None:
                        memory = trainer.map_activations(self.loop.config.manifest.pipeline.in_flight)
                        self.pipeline.begin(Worker(prepared.stage, prepared.activation_bytes, memory, session.tell))
                    if self.leases is not None:
                        self.leases.begin(prepared, session.tell)
                    if self.audits is not None:
                        self.audits.begin(self.handle)
                    self.handle(machine.OthersMoved(self.membership.current_round()))
                    self.handle(prepared)
                    while True:
                        self._hear(session, await trainer.receive())
            except TrainerError as error:
                ended = machine.TrainerEnded(str(error), error.cause)
            finally:
                self._session = None
                for part in (self.pipeline, self.leases, self.audits):
                    if part is not None:
                        part.end()
            nursery.cancel_scope.cancel()
        return ended

    def _hear(self, session: TrainerSession, report: messages.Report) -> None:
        """Pass a report to the part that handles it; most go to the loop."""
        journal = self.journal
        match report:
            case messages.Encoded():
                session.seal(report)
            case messages.Screened():
                session.note_verdict(report)
            case messages.Recorded():
                if self.audits is not None:
                    self.audits.note_recorded(report)
            case messages.SlicesTrained():
                if self.leases is not None:
                    self.leases.trained(report)
            case messages.Worked() | messages.InnerStepTaken():
                if report == messages.InnerStepTaken(is_taken=False):
                    journal.warn("an inner step was left out: its gradients were not finite")
                if self.pipeline is not None:
                    self.pipeline.handle(report)
            case messages.Prepared() | messages.Preparing() | messages.Failed():
                raise TrainerError(f"the trainer said {type(report).__name__} out of turn")
            case _:
                if isinstance(report, messages.Contributed):
                    session.contribute(report)
                    journal.over("trainer")
                    journal.history.add_loss(report.round, report.loss)
                elif isinstance(report, messages.Replayed) and self.audits is not None:
                    self.audits.note_replayed(report)
                elif isinstance(report, messages.Saved) and not report.problem:
                    self.provider.note_saved(report)
                    journal.over(machine.UNSAVED)
                # Only the partners of earlier exchanges end a trainer that is behind.
                self.handle(machine.OthersMoved(self.membership.partners_round()))
                self.handle(report)

    async def _exchange(self, session: TrainerSession, start: pairing.StartExchange) -> None:
        ended = await session.exchange(start)
        self.journal.record_exchange(ended)
        if ended.committed and ended.clip > 0.0:  # else it was refused after the commit
            self.membership.partners.note(ended.peer)
        if self.audits is not None:
            self.audits.note_exchange(ended)
        self.handle(ended)

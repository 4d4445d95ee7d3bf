"""The training loop of a node: it decides about trainers and rounds; a driver carries out the decisions.

This is about trainers, one after another: `farandole.protocol.rounds.trainer_rounds` has the rounds of each.

- *Rest.* When the owner wants the machine back, the node does not wait for an exchange, nor long for a save
  (`REST_TIMEOUT`).
- *Leaving.* The exchange has a short time to end (`EXCHANGE_GRACE`), since its outcome is in the last checkpoint.
- *Death.* The next trainer resumes from the last checkpoint: `farandole.protocol.trainer.supervisor` decides when, and
  detects one that hangs.
- *Sleep.* A node that comes back many rounds behind the others takes newer weights: its own would pull its partners
  back.

`farandole.protocol.rounds.training_events` has the states and their transitions. `farandole.node.loop.training` is the
driver in a node, `farandole.testnet.simulate.pairing` the one of the simulator.
"""

from __future__ import annotations

import enum
import math
from typing import Final

from ..state.believing import MAX_LEAP
from ..state.node_state import TrainingState
from ..trainer import trainer_messages as messages
from ..trainer.supervisor import REST_SECONDS, WATCH_INTERVAL, Supervisor, Watchdog
from ..wire.timers import SetTimer, TimerFired
from . import pairing_events as pairing
from .pairing import Pairing
from .trainer_rounds import Decisions, LoopConfig, TrainerRounds
from .training_events import (
    EndTrainer,
    Event,
    GiveUpExchange,
    KillTrainer,
    LoopBegan,
    LoopOver,
    LoopState,
    OthersMoved,
    Output,
    RestChanged,
    Say,
    Signal,
    StartTrainer,
    TrainerEnded,
    TrainerReport,
)

# Seconds that an exchange may go on after the node has begun to leave. Then the partner is notified, so that it finds
# another, within the second time.
EXCHANGE_GRACE, GIVE_UP_GRACE = 3.0, 1.0
# An owner who wants the machine back has its memory within five seconds. The running inner step and the save may take
# this much of that; the rest is for ending the process on a busy machine, and for the kernel, which frees gigabytes.
# Losing the progress since the last checkpoint costs less than a longer wait.
REST_TIMEOUT: Final = 3.0


class _Timer(enum.Enum):
    WATCH = "watch"  # the next look at whether the trainer hangs
    GRACE = "grace"  # the exchange of a node that leaves is given up
    LAST = "last"  # a node that leaves waits no longer for the end of its exchange
    REST = "rest"  # the trainer of a node that rests is killed
    RESTART = "restart"  # the next trainer is due


class TrainingLoop:
    """Decides what the trainer, the exchanges and the pairing of one node do, from joining a run to leaving it.

    `handle` takes monotonic times in seconds, never decreasing, and returns outputs to carry out in order. It raises
    `RemoteProtocolError` only for `MessageReceived`, and the loop is then unchanged.
    """

    def __init__(self, config: LoopConfig, partners: Pairing, supervisor: Supervisor) -> None:
        self.config = config
        self._decisions = Decisions(partners)
        self._supervisor = supervisor
        self._watchdog = Watchdog(config.hung_seconds)
        self._rounds: TrainerRounds | None = None
        self._timers: dict[_Timer, float] = {}
        self._pairing_at = math.inf
        self._timer_set_at = math.inf
        self._published = self.training
        self._others_round = 0
        self._watched_at: float | None = None
        self._rest = ""
        self._ends_to_rest = False  # the trainer, and another one follows
        self._is_last_life = False  # no trainer follows
        self._over = ""  # why no further round begins

    @property
    def state(self) -> LoopState:
        """Return the loop's state."""
        return self._decisions.state

    @property
    def training(self) -> TrainingState:
        """Return the training's state as last published, with the latest changes of `handle`."""
        return self._decisions.training

    def handle(self, event: Event, now: float) -> list[Output]:
        """Process an event and return the outputs to carry out."""
        decisions = self._decisions
        decisions.outputs = []
        self._apply(event, now)
        while decisions.asked:
            match decisions.asked.popleft():
                case pairing.SendMessage() | pairing.Missed() as output:
                    decisions.outputs.append(output)
                case SetTimer(at):
                    self._pairing_at = at
                case output if self._rounds is not None:
                    self._rounds.carry_out(output, now)
        if self.training != self._published:
            self._published = self.training
            decisions.outputs.insert(0, self.training)
        at = min(*self._timers.values(), self._pairing_at, math.inf)
        if at != self._timer_set_at:
            self._timer_set_at = at
            decisions.outputs.append(SetTimer(at))
        return decisions.outputs

    def _apply(self, event: Event, now: float) -> None:
        decisions, rounds = self._decisions, self._rounds
        match event:
            case pairing.MessageReceived() | pairing.PeerLost() | pairing.PeersChanged() | pairing.TrafficSaved():
                decisions.tell_pairing(event, now)
            case TimerFired():
                self._timer_set_at = math.inf
                for timer in [timer for timer in _Timer if self._timers.get(timer, math.inf) <= now]:
                    if self._timers.pop(timer, None) is not None:  # one that fired before has not changed everything
                        self._fire(timer, now)
                if self._pairing_at <= now:
                    self._pairing_at = math.inf
                    decisions.tell_pairing(TimerFired(), now)
            case LoopBegan(state, rest) if self.state is LoopState.IDLE:
                decisions.training, self._rest = state, rest
                self._seek_trainer()
            case messages.Prepared():
                if self.state is LoopState.PREPARING:  # otherwise it is being ended
                    self._begin_life(event, now)
            case TrainerEnded():
                self._end_life(event, now)
            case OthersMoved(round_index):
                self._others_round = round_index
            case RestChanged(words):
                self._rest = words
                self._change_rest(now)
            case Signal.LEAVE:
                self._leave(now)
            case Signal.DATA_OVER | Signal.RUN_STOPPED:
                epochs = self.config.manifest.data.epochs
                is_stopped = event is Signal.RUN_STOPPED
                self._over = "the run's creator has stopped it" if is_stopped else f"all {epochs} epochs are done"
                if rounds is not None:
                    rounds.end_rounds(self._over)
            case _ if rounds is None:
                pass
            case messages.Replay():
                rounds.replay = event
            case Signal.SAVE:
                rounds.save_soon(now)
            case Signal.RESTART:
                self._stop_trainer(now)
            case pairing.ExchangeEnded():
                rounds.end_exchange(event, now)
            case _ if isinstance(event, TrainerReport):
                self._hear(rounds, event, now)

    def _hear(self, rounds: TrainerRounds, report: TrainerReport, now: float) -> None:
        """Process a report of the trainer; end it once its last checkpoint is written, or where others are far on."""
        if isinstance(report, messages.Pong):
            self._watchdog.hear()
        rounds.hear(report, now)
        if self.state is LoopState.ENDING and rounds.num_saving == 0:
            self._is_last_life = self._is_last_life or not self._ends_to_rest
            self._stop_trainer(now, at_once=self._ends_to_rest)
        elif behind := rounds.has_slept(self._others_round, now):
            self._decisions.say(f"{behind} rounds behind the others: taking newer weights")
            self._stop_trainer(now)

    # Trainers: one after another

    def _seek_trainer(self) -> None:
        """Start the next trainer, unless the node leaves or rests."""
        decisions = self._decisions
        if self._is_last_life:
            self._end()
        elif self._rest:
            decisions.change(is_trainer_dead=False)  # none is due
            decisions.move(LoopState.RESTING)
            decisions.say(f"resting: {self._rest}")
            decisions.enter("paused", self._rest)
        else:
            decisions.move(LoopState.PREPARING)
            decisions.outputs.append(StartTrainer())

    def _begin_life(self, prepared: messages.Prepared, now: float) -> None:
        """Train with the trainer that is ready."""
        decisions = self._decisions
        decisions.move(LoopState.TRAINING)
        self._rounds = rounds = TrainerRounds(prepared, self.config, decisions, self._over, now)
        self._ends_to_rest = False
        decisions.change(
            device=prepared.device,
            inner_steps=prepared.inner_steps,
            num_parameters=prepared.num_parameters,
            microbatch=prepared.microbatch,
            is_trainer_dead=False,
        )
        origin = "seed" if self.config.manifest.start is None else "starting checkpoint"
        how = f"resumed at round {prepared.round}" if prepared.resumed else f"from the run's {origin}"
        if prepared.resumed and 0 < prepared.inner_steps == prepared.begun_at:
            how += ", with fresh means of the optimizer"
        decisions.say(f"trainer ready on {prepared.device}: {prepared.num_parameters:,} parameters, {how}")
        if prepared.problem:
            decisions.outputs.append(Say(f"going on with an older checkpoint: {prepared.problem}", "warn"))
        self._watchdog.begin()
        self._watched_at = None
        if self.config.hung_seconds < math.inf:
            self._watch(now)
        rounds.begin(self._others_round, self._others_round - prepared.round <= MAX_LEAP, now)

    def _end_life(self, ended: TrainerEnded, now: float) -> None:
        """Handle the end of the trainer process: start another one now or later, or end."""
        rounds, state, decisions = self._rounds, self.state, self._decisions
        self._rounds = None
        self._timers.clear()
        decisions.change(device_memory=None)
        decisions.tell_pairing(pairing.Stopped(), now)
        if state is LoopState.OVER:
            return
        if not ended.error or state is LoopState.STOPPING:
            self._seek_trainer()
            return
        if self._is_last_life:
            self._end()
            return
        if ended.cause == "detached":  # the next one comes by itself
            decisions.say(f"{ended.error}: waiting for the next one")
            decisions.change(tokens_per_second=0.0)
            decisions.move(LoopState.WAITING)
            self._seek_trainer()
            return
        lived = None if rounds is None else now - rounds.ready_at
        verdict = self._supervisor.judge(ended.error, ended.cause, lived)
        if verdict.delay == math.inf:
            self._end(verdict.words)
            return
        decisions.outputs.append(Say(verdict.words, "warn", "trainer"))
        if ended.cause == "weights":  # the trainer is healthy: it has refused a peer's weights
            decisions.enter("fetching weights", verdict.words, "another member's weights")
        else:
            restarts = self.training.trainer_restarts + 1
            decisions.change(trainer_restarts=restarts, is_trainer_dead=True, tokens_per_second=0.0)
            if verdict.delay == REST_SECONDS:
                decisions.enter("failed", verdict.words)
            else:
                decisions.enter("preparing", "the trainer died", f"{verdict.delay:g} s before it starts again")
        decisions.move(LoopState.WAITING)
        if self._rest:  # once that is over, its owner wants to see it train
            self._seek_trainer()
        else:
            self._timers[_Timer.RESTART] = now + verdict.delay

    def _stop_trainer(self, now: float, *, at_once: bool = False) -> None:
        """End the trainer process; the next step is decided when it has ended."""
        self._rounds = None
        self._timers.clear()
        self._decisions.outputs.append(EndTrainer(at_once))
        if self.state is not LoopState.STOPPING:
            self._decisions.move(LoopState.STOPPING)
        self._decisions.tell_pairing(pairing.Stopped(), now)

    def _end(self, error: str = "") -> None:
        self._timers.clear()
        self._rounds = None
        self._decisions.move(LoopState.OVER)
        self._decisions.outputs.append(LoopOver(error))

    # Rest, leaving, hanging

    def _change_rest(self, now: float) -> None:
        """Begin to rest, rest for another reason, or train again."""
        decisions = self._decisions
        if not self._rest:
            if self.state is LoopState.RESTING:
                decisions.say("training again")
                self._seek_trainer()
            return
        decisions.tell_pairing(pairing.Stopped(), now)
        match self.state:
            case LoopState.PREPARING | LoopState.STOPPING:
                self._stop_trainer(now, at_once=True)
            case LoopState.TRAINING | LoopState.LEAVING | LoopState.ENDING:
                assert self._rounds is not None, "there is a trainer in these states"
                self._ends_to_rest = True
                self._timers.setdefault(_Timer.REST, now + REST_TIMEOUT)
                if self.state is LoopState.TRAINING:
                    if self._rounds.exchange is not None:
                        decisions.outputs.append(GiveUpExchange("it rests"))
                    self._rounds.save_and_end(now)
            case LoopState.WAITING:
                self._timers.clear()
                self._seek_trainer()
            case LoopState.RESTING:
                decisions.enter("paused", self._rest)
            case LoopState.IDLE | LoopState.OVER:
                pass

    def _leave(self, now: float) -> None:
        """Leave the run: seek no partner, let the exchange end, save, and end."""
        self._is_last_life = True
        self._decisions.tell_pairing(pairing.Stopped(), now)
        match self.state:
            case LoopState.TRAINING:
                assert self._rounds is not None, "there is a trainer in this state"
                if self._rounds.exchange is None:
                    self._rounds.save_and_end(now)
                else:
                    self._decisions.move(LoopState.LEAVING)
                    self._timers[_Timer.GRACE] = now + EXCHANGE_GRACE
            case LoopState.PREPARING:
                self._decisions.outputs.append(EndTrainer(at_once=True))
                self._end()
            case LoopState.IDLE | LoopState.STOPPING | LoopState.WAITING | LoopState.RESTING:
                self._end()
            case LoopState.LEAVING | LoopState.ENDING | LoopState.OVER:
                pass

    def _fire(self, timer: _Timer, now: float) -> None:
        match timer:
            case _Timer.WATCH:
                self._watch(now)
            case _Timer.REST:
                self._stop_trainer(now, at_once=True)
            case _Timer.RESTART:
                self._seek_trainer()
            case _Timer.GRACE if self.state is LoopState.LEAVING:
                self._decisions.outputs.append(GiveUpExchange("it leaves"))
                self._timers[_Timer.LAST] = now + GIVE_UP_GRACE
            case _Timer.LAST if self.state is LoopState.LEAVING and self._rounds is not None:
                self._rounds.save_and_end(now)
            case _Timer.GRACE | _Timer.LAST:
                pass

    def _watch(self, now: float) -> None:
        """Ping the trainer; kill it if it has not answered for too long."""
        watchdog, outputs = self._watchdog, self._decisions.outputs
        if self._watched_at is not None:
            watchdog.pass_time(now - self._watched_at)
        self._watched_at = now
        if watchdog.is_hung:
            outputs.append(KillTrainer(f"the trainer hung: no sign of life for {watchdog.limit:.0f} s"))
            return
        if not watchdog.is_asked:
            watchdog.ask()
            outputs.append(messages.Ping())
        self._timers[_Timer.WATCH] = now + WATCH_INTERVAL

"""The training loop of a node: it decides about trainers and rounds; a driver carries out the decisions.

A round: the trainer takes inner steps while `farandole.protocol.rounds.pairing` agrees on a partner. The trainer
contributes; its contribution is encoded while the exchange sends it. Then it takes the outer step, with the partner's
contribution or alone. Pairing never waits beyond its deadline, so neither does a round.

- *Overlap.* Where the manifest says so, the inner steps of the next round begin as soon as the contribution is made,
  and pairing goes on to that round as soon as the exchange has begun. The trainer takes the outer step between two
  inner steps, at the latest before its next contribution: there is never more than one exchange.
- *Rest.* When the owner wants the machine back, the node does not wait for an exchange, nor long for a save
  (`REST_TIMEOUT`).
- *Leaving.* The exchange has a short time to end (`EXCHANGE_GRACE`), since its outcome is in the last checkpoint.
- *Death.* The next trainer resumes from the last checkpoint: `farandole.protocol.trainer.supervisor` decides when, and
  `farandole.protocol.trainer.supervisor` detects one that hangs.
- *Sleep.* A node that comes back many rounds behind the others takes newer weights: its own would pull its partners
  back.

`farandole.protocol.rounds.training_events` has the states and their transitions. `farandole.node.loop.training` is the
driver in a node, `farandole.testnet.simulate.pairing` the one of the simulator.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec

from ..run.manifest import Manifest
from ..stages.pipeline_events import Measure, Measured, RoundBegan, RoundDrained, RoundEnds
from ..state.believing import MAX_LEAP
from ..state.node_state import Phase, TrainingState
from ..trainer import trainer_messages as messages
from ..trainer.supervisor import WATCH_INTERVAL, End, Supervisor, Watchdog
from ..wire.errors import LocalProtocolError
from ..wire.identity import peer_id_of
from ..wire.timers import SetTimer, TimerFired
from . import pairing_events as pairing
from .pairing import MAX_ROUNDS_BEHIND, Pairing
from .training_events import (
    FOLLOWING,
    HAS_TRAINER,
    UNSAVED,
    EndTrainer,
    Enter,
    Event,
    GiveUpExchange,
    KillTrainer,
    LoopBegan,
    LoopOver,
    LoopState,
    OthersMoved,
    Output,
    Publish,
    ReplayAsked,
    RestChanged,
    RoundOver,
    Say,
    Signal,
    StartTrainer,
    TellTrainer,
    TrainerEnded,
    TrainerReady,
    TrainerReport,
)

VALIDATION_BATCHES: Final = 8
# Seconds that an exchange may go on after the node has begun to leave. Then the partner is notified, so that it finds
# another, within the second time.
EXCHANGE_GRACE, GIVE_UP_GRACE = 3.0, 1.0
# An owner who wants the machine back has its memory within five seconds. The running inner step and the save may take
# this much of that; the rest is for ending the process on a busy machine, and for the kernel, which frees gigabytes.
# Losing the progress since the last checkpoint costs less than a longer wait.
REST_TIMEOUT: Final = 3.0
# Rounds over which the recent utilisation is a mean.
RECENT_ROUNDS: Final = 5
# After a sleep, news of the others' rounds arrives in parts for this time: first the old news that waited in buffers.
NEWS_SECONDS: Final = 3.0


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the loop."""

    run_id: bytes
    manifest: Manifest
    max_rounds: int | None
    """The round at which training ends; None: never."""
    checkpoint_seconds: float
    validate_every: int
    """Rounds between two validations; 0: never."""
    hung_seconds: float
    """A trainer that is silent for less does not hang, whatever its inner steps take; infinity: none is watched."""


class _Timer(enum.Enum):
    WATCH = "watch"  # the next look at whether the trainer hangs
    GRACE = "grace"  # of the exchange of a node that leaves
    REST = "rest"  # the trainer of a node that rests is killed
    RESTART = "restart"  # the next trainer is due


class TrainingLoop:
    """Decides what the trainer, the exchanges and the pairing of one node do, from joining a run to leaving it.

    `handle` takes monotonic times in seconds, never decreasing, and returns outputs to carry out in order. It raises
    `RemoteProtocolError` only for `MessageReceived`, and the loop is then unchanged.
    """

    def __init__(self, config: LoopConfig, partners: Pairing, supervisor: Supervisor) -> None:
        self.state = LoopState.IDLE
        self.training = TrainingState()
        """The state as last published, with the latest changes of `handle`."""
        self.config = config
        self._pairing = partners
        self._supervisor = supervisor
        self._watchdog = Watchdog(config.hung_seconds)
        self._life: _Life | None = None
        self._outputs: list[Output] = []
        self._asked: deque[pairing.Output] = deque()  # by pairing, and not carried out yet
        self._timers: dict[_Timer, float] = {}
        self._pairing_at = math.inf
        self._timer_set_at = math.inf
        self._published = self.training
        self._others_round = 0
        self._rest = ""
        self._is_last_life = False  # no trainer follows
        self._over = ""  # why no further round begins
        self._has_validated = False

    def handle(self, event: Event, now: float) -> list[Output]:
        """Process an event and return the outputs to carry out."""
        self._outputs = []
        self._apply(event, now)
        while self._asked:
            self._carry_out(self._asked.popleft(), now)
        if self.training != self._published:
            self._published = self.training
            self._outputs.insert(0, Publish(self.training))
        at = min(*self._timers.values(), self._pairing_at, math.inf)
        if at != self._timer_set_at:
            self._timer_set_at = at
            self._outputs.append(SetTimer(at))
        return self._outputs

    def _apply(self, event: Event, now: float) -> None:
        life = self._life
        match event:
            case pairing.MessageReceived() | pairing.PeerLost() | pairing.PeersChanged() | pairing.TrafficSaved():
                self._tell_pairing(event, now)
            case TimerFired():
                self._timer_set_at = math.inf
                for timer in [timer for timer in _Timer if self._timers.get(timer, math.inf) <= now]:
                    if self._timers.pop(timer, None) is not None:  # one that fired before has not changed everything
                        self._fire(timer, now)
                if self._pairing_at <= now:
                    self._pairing_at = math.inf
                    self._tell_pairing(TimerFired(), now)
            case LoopBegan(state, rest) if self.state is LoopState.IDLE:
                self.training, self._rest = state, rest
                self._seek_trainer()
            case TrainerReady() if self.state is LoopState.PREPARING:  # otherwise it is being ended
                self._begin_life(event, now)
            case TrainerEnded():
                self._end_life(event, now)
            case RoundDrained(round_index):
                self._tell(messages.FinishRound(round_index))
            case Measured():
                self._tell(messages.Validate(VALIDATION_BATCHES))
            case OthersMoved(round_index):
                self._others_round = round_index
            case RestChanged(words):
                self._rest = words
                self._change_rest(now)
            case Signal.LEAVE:
                self._leave(now)
            case Signal.DATA_OVER:
                self._end_rounds(f"all {self.config.manifest.data.epochs} epochs are done")
            case Signal.RUN_STOPPED:
                self._end_rounds("the run's creator has stopped it")
            case ReplayAsked(command) if life is not None:
                life.replay = command
            case Signal.SAVE if life is not None:
                self._save_if_none_is_written(life, now)
            case Signal.RESTART if life is not None:
                self._stop_trainer()
                self._tell_pairing(pairing.Stopped(), now)
            case pairing.ExchangeEnded() if life is not None:
                self._end_exchange(life, event, now)
            case _ if life is not None and isinstance(event, TrainerReport):
                self._hear(life, event, now)

    # Trainers: one after another

    def _seek_trainer(self) -> None:
        """Start the next trainer, unless the node leaves or rests."""
        if self._is_last_life:
            self._end()
        elif self._rest:
            self._change(is_trainer_dead=False)  # none is due
            self._move(LoopState.RESTING)
            self._say(f"resting: {self._rest}")
            self._enter("paused", self._rest)
        else:
            self._move(LoopState.PREPARING)
            self._outputs.append(StartTrainer())

    def _begin_life(self, ready: TrainerReady, now: float) -> None:
        """Train with the trainer that is ready."""
        prepared = ready.prepared
        self._move(LoopState.TRAINING)
        self._life = life = _Life(ready, self.training.tokens, now)
        self._change(
            device=prepared.device,
            inner_steps=prepared.inner_steps,
            num_parameters=prepared.num_parameters,
            microbatch=ready.microbatch,
            is_trainer_dead=False,
        )
        origin = "seed" if self.config.manifest.start is None else "starting checkpoint"
        how = f"resumed at round {prepared.round}" if prepared.resumed else f"from the run's {origin}"
        if prepared.resumed and 0 < prepared.inner_steps == prepared.begun_at:
            how += ", with fresh means of the optimizer"
        self._say(f"trainer ready on {prepared.device}: {prepared.num_parameters:,} parameters, {how}")
        if prepared.problem:
            self._outputs.append(Say(f"going on with an older checkpoint: {prepared.problem}", "warn"))
        self._watchdog.begin()
        if self.config.hung_seconds < math.inf:
            self._watch(now)
        if self._is_from_start(life) and self.config.validate_every:
            self._validate(life)
        # The first round is the others' if it is later than the weights' and near it: one further away is only claimed
        # by others, and must not move this node. Where the model is cut the others' round always counts, because a
        # stage that was lost begins again in the middle of the run.
        is_near = self._is_cut or self._others_round - prepared.round <= MAX_LEAP
        first_round = max(prepared.round, self._others_round) if is_near else prepared.round
        life.lag = _Lag(self._others_round - first_round)
        self._start_round(life, first_round, now)

    def _end_life(self, ended: TrainerEnded, now: float) -> None:
        """Handle the end of the trainer process: start another one now or later, or end."""
        life, state = self._life, self.state
        self._life = None
        self._timers.clear()
        self._change(device_memory=None)
        self._tell_pairing(pairing.Stopped(), now)
        if state is LoopState.OVER:
            return
        if not ended.error or state is LoopState.STOPPING:
            self._seek_trainer()
        elif self._is_last_life:
            self._end()
        else:
            self._recover(ended, None if life is None else now - life.ready_at, now)

    def _recover(self, ended: TrainerEnded, lived: float | None, now: float) -> None:
        """Plan the next trainer, or end where none can run. A loop that attaches comes by itself."""
        if ended.cause == "detached":
            self._say(f"{ended.error}: waiting for the next one")
            self._change(tokens_per_second=0.0)
            self._move(LoopState.WAITING)
            self._seek_trainer()
            return
        verdict = self._supervisor.judge(ended.error, ended.cause, lived)
        if isinstance(verdict, End):
            self._end(verdict.words)
            return
        self._outputs.append(Say(verdict.words, "warn", "trainer"))
        if ended.cause != "weights":
            restarts = self.training.trainer_restarts + 1
            self._change(trainer_restarts=restarts, is_trainer_dead=True, tokens_per_second=0.0)
        if ended.cause == "weights":  # the trainer is healthy: it has refused a peer's weights
            self._enter("fetching weights", verdict.words, "another member's weights")
        elif verdict.is_rest:
            self._enter("failed", verdict.words)
        else:
            self._enter("preparing", "the trainer died", f"{verdict.delay:g} s before it starts again")
        self._move(LoopState.WAITING)
        if self._rest:  # once that is over, its owner wants to see it train
            self._seek_trainer()
        else:
            self._timers[_Timer.RESTART] = now + verdict.delay

    def _stop_trainer(self, *, at_once: bool = False) -> None:
        """End the trainer process; the next step is decided when it has ended."""
        self._life = None
        self._timers.clear()
        self._outputs.append(EndTrainer(at_once))
        if self.state is not LoopState.STOPPING:
            self._move(LoopState.STOPPING)

    def _end(self, error: str = "") -> None:
        self._timers.clear()
        self._life = None
        self._move(LoopState.OVER)
        self._outputs.append(LoopOver(error))

    # Rest, leaving, hanging

    def _change_rest(self, now: float) -> None:
        """Begin to rest, rest for another reason, or train again."""
        if not self._rest:
            if self.state is LoopState.RESTING:
                self._say("training again")
                self._seek_trainer()
            return
        self._tell_pairing(pairing.Stopped(), now)
        match self.state:
            case LoopState.PREPARING | LoopState.STOPPING:
                self._stop_trainer(at_once=True)
            case LoopState.TRAINING | LoopState.LEAVING | LoopState.ENDING:
                assert self._life is not None, "there is a trainer in these states"
                self._life.ends_to_rest = True
                self._timers.setdefault(_Timer.REST, now + REST_TIMEOUT)
                if self.state is LoopState.TRAINING:
                    if self._life.exchange is not None:
                        self._outputs.append(GiveUpExchange("it rests"))
                    self._save_and_end(self._life, now)
            case LoopState.WAITING:
                self._timers.clear()
                self._seek_trainer()
            case LoopState.RESTING:
                self._enter("paused", self._rest)
            case LoopState.IDLE | LoopState.OVER:
                pass

    def _leave(self, now: float) -> None:
        """Leave the run: seek no partner, let the exchange end, save, and end."""
        self._is_last_life = True
        self._tell_pairing(pairing.Stopped(), now)
        match self.state:
            case LoopState.TRAINING:
                assert self._life is not None, "there is a trainer in this state"
                if self._life.exchange is None:
                    self._save_and_end(self._life, now)
                else:
                    self._move(LoopState.LEAVING)
                    self._timers[_Timer.GRACE] = now + EXCHANGE_GRACE
            case LoopState.PREPARING:
                self._outputs.append(EndTrainer(at_once=True))
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
                self._stop_trainer(at_once=True)
            case _Timer.RESTART:
                self._seek_trainer()
            case _Timer.GRACE:
                life = self._life
                assert life is not None, "a node that waits for its exchange has a trainer"
                if life.has_given_up:  # another moment has passed: leave without waiting for its end
                    self._save_and_end(life, now)
                    return
                life.has_given_up = True
                self._outputs.append(GiveUpExchange("it leaves"))
                self._timers[_Timer.GRACE] = now + GIVE_UP_GRACE

    def _watch(self, now: float) -> None:
        """Ping the trainer; kill it if it has not answered for too long."""
        life = self._life
        assert life is not None, "a trainer is watched while it lives"
        if life.watched_at is not None:
            self._watchdog.pass_time(now - life.watched_at)
        life.watched_at = now
        if self._watchdog.is_hung:
            self._outputs.append(KillTrainer(f"the trainer hung: no sign of life for {self._watchdog.limit:.0f} s"))
            return
        if not self._watchdog.is_asked:
            self._watchdog.ask()
            self._outputs.append(TellTrainer(messages.Ping()))
        self._timers[_Timer.WATCH] = now + WATCH_INTERVAL

    # Rounds

    def _start_round(self, life: _Life, round_index: int, now: float) -> None:
        if self.state is not LoopState.TRAINING:
            return
        maximum = self.config.max_rounds
        is_last = maximum is not None and round_index >= maximum
        if words := f"all {maximum} rounds are done" if is_last else self._over:
            self._change(round=round_index)
            self._enter("finished", f"{words}; staying for the others")
            self._say(f"{words}; staying for the others")
            self._save_and_end(life, now)
            return
        if life.replay is not None:
            self._enter("training", "replaying a round, to compare")
            self._tell(life.replay)
            life.replay, life.round_after_replay = None, round_index
            return
        self._train(round_index)
        self._tell_pairing(pairing.RoundStarted(round_index), now)

    def _end_rounds(self, words: str) -> None:
        """End training with the exchange of this round."""
        self._over = words
        self._finish_inner_steps(self.training.round)

    def _train(self, round_index: int) -> None:
        """Have the trainer take the inner steps of a round."""
        rounds = self.config.manifest.rounds
        takes_steps = rounds.takes_steps(round_index)
        self._change(
            round=round_index,
            round_steps=rounds.inner_steps if takes_steps else 0,
            round_seconds=rounds.round_seconds if takes_steps else 0.0,
            inner_steps_this_round=0,
        )
        what = "inner steps of" if takes_steps else "another partner for"
        self._enter("training", f"{what} round {round_index}")
        self._tell(messages.Train(round_index, rounds.inner_steps, takes_steps))
        self._tell_pipeline(RoundBegan(round_index, rounds.inner_steps, self._is_followed(round_index)))

    def _is_followed(self, round_index: int) -> bool:
        """Return whether the inner steps of the next round begin before this one's outer step."""
        return self.config.manifest.rounds.overlap and round_index + 1 != self.config.max_rounds and not self._over

    def _hear(self, life: _Life, report: TrainerReport, now: float) -> None:
        """Process a report of the trainer."""
        match report:
            case messages.Progress():
                self._change(
                    inner_steps=report.inner_steps,
                    inner_steps_this_round=report.inner_steps_this_round,
                    loss=report.loss,
                    tokens_per_second=report.tokens_per_second,
                    device_memory=report.device_memory,
                )
                self._count_tokens(life, report.tokens)
            case messages.Contributed():
                self._contribute(life, report, now)
            case messages.OuterStepTaken():
                self._finish_round(life, report, now)
            case messages.Validated(problem=problem) if problem:
                self._outputs.append(Say(problem, "warn"))
            case messages.Validated(loss=loss, bits_per_byte=bits_per_byte):
                if self._is_from_start(life) and not self._has_validated:
                    bits = "" if bits_per_byte is None else f" ({bits_per_byte:.4f} bits per byte)"
                    self._say(f"the weights that this run starts from have a held-out loss of {loss:.4f}{bits}")
                self._has_validated = self._has_validated or math.isfinite(loss)
                self._outputs.append(report)
            case messages.Replayed():
                self._start_round(life, life.round_after_replay, now)
            case messages.Saved():
                self._note_saved(life, report, now)
            case messages.Pong():
                self._watchdog.hear()
        if self._life is life:
            self._end_if_behind(life, now)

    def _contribute(self, life: _Life, report: messages.Contributed, now: float) -> None:
        """Begin the exchange of a round whose inner steps are done, and where rounds overlap the next inner steps."""
        life.contributed = report
        self._change(
            inner_steps=report.inner_steps,
            inner_steps_this_round=report.inner_steps_this_round,
            utilisation=report.utilisation,
            recent_utilisation=life.note_busy(report.busy_seconds, now) or self.training.recent_utilisation,
        )
        self._count_tokens(life, report.tokens)
        if self.config.manifest.rounds.takes_steps(report.round):
            self._change(tokens_per_second=report.tokens_this_round / max(report.seconds, 1e-9))
        if report.busy_seconds:
            self._change(speed=report.tokens_this_round / report.busy_seconds)
        if report.loss is not None:
            self._change(loss=report.loss)
        if self.state is LoopState.TRAINING and self._is_followed(report.round):
            self._train(report.round + 1)
            life.ahead_since = now
        self._show(life, "pairing", f"contribution of round {report.round} is ready", "the partner")
        self._tell_pairing(pairing.ContributionReady(report.round, report.fragment), now)

    def _finish_round(self, life: _Life, report: messages.OuterStepTaken, now: float) -> None:
        """Go on to the next round after an outer step; validate and save if it is time."""
        assert life.contributed is not None, "an outer step follows a contribution"
        self._change(late_steps=report.late_steps)
        self._outputs.append(RoundOver(life.contributed, report.late_steps))
        following = report.round + 1
        every, maximum = self.config.validate_every, self.config.max_rounds
        if every and (following % every == 0 or following == maximum):
            self._validate(life)
        if following != maximum and now - life.saved_at >= self.config.checkpoint_seconds:
            life.is_save_due = True
            self._save_if_none_is_written(life, now)
        if self.training.round == report.round:
            self._start_round(life, following, now)
        elif self.state is LoopState.TRAINING:  # it began long ago
            self._enter("training", f"inner steps of round {following}")

    def _end_if_behind(self, life: _Life, now: float) -> None:
        """Take newer weights, between two rounds, if this node slept for too many rounds."""
        is_between = life.contributed_round != self.training.round and not self.training.inner_steps_this_round
        if self.state is not LoopState.TRAINING or not is_between or not self._others_round:
            return
        behind = self._others_round - self.training.round
        if life.lag.has_slept(behind, now):
            self._say(f"{behind} rounds behind the others: taking newer weights")
            self._stop_trainer()
            self._tell_pairing(pairing.Stopped(), now)

    def _finish_inner_steps(self, round_index: int) -> None:
        """End the inner steps of a round after the one that runs; where the model is cut, once all is drained."""
        if not self._is_cut:
            self._tell(messages.FinishRound(round_index))
        elif round_index == self.training.round:
            self._tell_pipeline(RoundEnds())

    # Exchanges

    def _tell_pairing(self, event: pairing.Event, now: float) -> None:
        self._asked.extend(self._pairing.handle(event, now))

    def _carry_out(self, output: pairing.Output, now: float) -> None:
        """Carry out an output of pairing."""
        life = self._life
        match output:
            case pairing.SendMessage():
                self._outputs.append(output)
            case SetTimer(at):
                self._pairing_at = at
            case _ if life is None:
                pass
            case messages.UseFragment():
                self._tell(output)
            case messages.FinishRound(round_index):
                self._finish_inner_steps(round_index)
            case pairing.GoAlone():
                self._go_alone(life, output)
                self._seek_next_partner(life, now)
            case pairing.StartExchange():
                life.exchange = output
                self._show(life, "exchanging", f"exchange of round {output.round}", "the partner's contribution")
                self._outputs.append(output)
                self._seek_next_partner(life, now)

    def _seek_next_partner(self, life: _Life, now: float) -> None:
        """Start pairing for the overlapping round that already runs: the round before needs no partner any more."""
        if life.ahead_since is not None:
            began_at, life.ahead_since = life.ahead_since, None
            self._tell_pairing(pairing.RoundStarted(self.training.round, began_at), now)

    def _go_alone(self, life: _Life, alone: pairing.GoAlone) -> None:
        self._change(partner="")
        self._outputs.append(alone)
        self._show(life, "outer step", f"outer step of round {alone.round} alone: {alone.reason}")
        self._tell(messages.TakeOuterStep(alone.round))

    def _end_exchange(self, life: _Life, ended: pairing.ExchangeEnded, now: float) -> None:
        """Take the outer step with the partner's contribution; otherwise seek another partner, or take it alone."""
        life.exchange = None
        is_overlapped = self.training.round != ended.round
        self._change(partner=peer_id_of(ended.peer) if ended.committed else "")
        if ended.committed:
            self._show(life, "outer step", f"outer step of round {ended.round}")
            self._tell(messages.TakeOuterStep(ended.round, ended.peer, ended.partner_size, ended.partner_tokens))
        elif is_overlapped:  # pairing is in the next round, and does not ask for this
            self._go_alone(life, pairing.GoAlone(ended.round, pairing.failure(ended.reason)))
        if ended.is_broken and not is_overlapped:
            self._show(life, "pairing", f"the exchange of round {ended.round} broke", "another partner")
            self._outputs.append(Say(f"another partner is sought for round {ended.round}", "note"))
        self._tell_pairing(ended, now)
        if self.state is LoopState.LEAVING:
            self._save_and_end(life, now)

    # Checkpoints and validation

    def _save_if_none_is_written(self, life: _Life, now: float) -> None:
        """Save unless a save is under way: many newcomers may ask for it."""
        if life.num_saving == 0:
            self._save(life, now)

    def _save(self, life: _Life, now: float, *, is_last: bool = False) -> None:
        life.saved_at, life.is_save_due = now, False
        life.num_saving += 1
        self._tell(messages.Save(is_last))

    def _save_and_end(self, life: _Life, now: float) -> None:
        """Save for the last time: the report of this checkpoint ends the trainer, so nothing is trained after it."""
        self._timers.pop(_Timer.GRACE, None)
        self._save(life, now, is_last=True)
        self._move(LoopState.ENDING)

    def _note_saved(self, life: _Life, report: messages.Saved, now: float) -> None:
        life.num_saving = max(0, life.num_saving - 1)  # a loop that is over saves unasked
        if report.problem:
            self._outputs.append(Say(report.problem, "warn", UNSAVED))
        elif report.note:
            self._outputs.append(Say(report.note, "warn"))
        if self.state is not LoopState.ENDING:
            if life.is_save_due:
                self._save(life, now)
        elif life.num_saving == 0:
            self._is_last_life = self._is_last_life or not life.ends_to_rest
            self._stop_trainer(at_once=life.ends_to_rest)

    def _is_from_start(self, life: _Life) -> bool:
        """Return whether this life began with the weights that the manifest names."""
        return self.config.manifest.start is not None and life.ready.prepared.resumed is None

    def _validate(self, life: _Life) -> None:
        """Measure the validation loss; where the model is cut, only at nodes that draw data, through all stages."""
        if not life.ready.prepared.has_loss:
            return
        if not self._is_cut:
            self._tell(messages.Validate(VALIDATION_BATCHES))
        elif life.ready.stage == 0:
            num_parts = self.config.manifest.inner.batch_size // self.config.manifest.pipeline.microbatch_size
            self._tell_pipeline(Measure(VALIDATION_BATCHES * num_parts))

    # Outputs

    @property
    def _is_cut(self) -> bool:
        return self.config.manifest.model.num_stages > 1

    def _move(self, state: LoopState) -> None:
        if state not in FOLLOWING[self.state]:
            raise LocalProtocolError(f"the training loop cannot be {state.value} after {self.state.value}")
        self.state = state

    def _tell(self, command: messages.Command) -> None:
        """Send the trainer a command, unless its last save was ordered or there is no trainer."""
        if self.state in (LoopState.TRAINING, LoopState.LEAVING):
            self._outputs.append(TellTrainer(command))

    def _tell_pipeline(self, event: RoundBegan | RoundEnds | Measure) -> None:
        if self._is_cut and self.state in HAS_TRAINER:
            self._outputs.append(event)

    def _change(self, **changes: object) -> None:
        self.training = msgspec.structs.replace(self.training, **changes)

    def _count_tokens(self, life: _Life, tokens: int) -> None:
        """Count for the run at stage 0 alone: every stage sees all tokens."""
        if life.ready.stage == 0:
            self._change(tokens=life.tokens_before + tokens)

    def _show(self, life: _Life, phase: Phase, detail: str, waits_for: str = "") -> None:
        """Show the progress of a contribution; where rounds overlap, the phase is the inner steps'."""
        if self.training.round == life.contributed_round:
            self._enter(phase, detail, waits_for)
        else:
            self._enter("training", f"inner steps of round {self.training.round}; {detail}")

    def _enter(self, phase: Phase, detail: str, waits_for: str = "") -> None:
        self._outputs.append(Enter(phase, detail, waits_for))

    def _say(self, text: str) -> None:
        self._outputs.append(Say(text))


class _Life:
    """The loop's state for one trainer."""

    def __init__(self, ready: TrainerReady, tokens: int, now: float) -> None:
        prepared = ready.prepared
        self.ready = ready
        self.ready_at = now
        # The replica's count begins with its weights, which may be a peer's; this node's own tokens are counted here.
        self.tokens_before = tokens - prepared.tokens
        self.contributed: messages.Contributed | None = None
        self.ahead_since: float | None = None
        """Start of the round that overlaps with the round whose partner is sought."""
        self.exchange: pairing.StartExchange | None = None
        self.replay: messages.Replay | None = None
        """A replay that was asked for and has not begun."""
        self.round_after_replay = 0
        self.has_given_up = False
        """Whether the exchange was given up because the node leaves."""
        self.ends_to_rest = False
        # A replica without a checkpoint is saved as soon as possible, so that a trainer that dies can be resumed.
        self.saved_at = now if prepared.resumed else -math.inf
        self.num_saving = 0
        """Number of `Save` commands without their report."""
        self.is_save_due = False
        """Whether another save follows the one under way."""
        self.watched_at: float | None = None
        self.lag = _Lag(0)
        self._recent = deque[tuple[float, float]](maxlen=RECENT_ROUNDS + 1)  # (end of a round, busy seconds in it)

    @property
    def contributed_round(self) -> int:
        """Return the newest round whose contribution is made; -1: none."""
        return -1 if self.contributed is None else self.contributed.round

    def note_busy(self, seconds: float, now: float) -> float | None:
        """Add a round's seconds of inner steps; return their share of the time of the last few rounds, if known."""
        recent = self._recent
        recent.append((now, seconds))
        if len(recent) == 1:
            return None
        return (sum(seconds for _, seconds in recent) - recent[0][1]) / max(now - recent[0][0], 1e-9)


class _Lag:
    """Detects a sudden lag behind the others. A slow node loses rounds one by one, which does no harm.

    ``behind``: rounds behind when the trainer began, although it had looked for newer weights.
    """

    def __init__(self, behind: int) -> None:
        self._seen = deque([(-math.inf, behind)])  # (at, rounds behind), the first more than NEWS_SECONDS ago

    def has_slept(self, behind: int, now: float) -> bool:
        """Add the rounds ``behind`` at ``now``; return whether too many rounds were lost at once."""
        seen = self._seen
        seen.append((now, behind))
        while seen[1][0] <= now - NEWS_SECONDS:
            seen.popleft()
        return behind - max(seen[0][1], 0) > MAX_ROUNDS_BEHIND

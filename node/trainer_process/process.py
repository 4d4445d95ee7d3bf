"""The trainer: a process of its own, which owns torch and an engine and knows nothing of the network.

It obeys the commands of `farandole.protocol.trainer_messages`, one at a time. While the engine takes inner steps the
process looks at the socket between two of them, so that the end of a round's box is seen within one step. When the mesh
process goes away, however it ends, the socket's end of file ends this one.

The next round may begin while the exchange of the last one runs: `Train` may come before the `TakeOuterStep` of the
round before. The contribution stays as it is in the shared memory, what comes of the partner's is decoded between two
inner steps, where the outer step is taken too, and their progress is kept. A round that is over before then waits for
it, so an outer step is at most one round late.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from farandole.protocol import trainer_messages as messages
from farandole.protocol.manifest import Manifest
from farandole.training.engine import Engine
from farandole.training.errors import DataError
from farandole.training.learner import Learner
from farandole.training.replay import replay_round

from ..trainer.channel import TrainerSocket
from .checkpoints import Checkpoints
from .exchange import Exchange
from .recorder import recorder_of

PROGRESS_INTERVAL = 0.5
# How often to look, in seconds, how much of the partner's contribution has arrived, while there is nothing else to do.
LOOK_INTERVAL = 0.005
# Inner steps by which a slow node knows how long one takes.
STEPS_REMEMBERED: Final = 16


@dataclass(slots=True)
class _Round:
    """The round whose inner steps are taken, and where the engine was when it began."""

    command: messages.Train
    steps: int
    tokens: int
    busy_seconds: float
    began_at: float
    reported_at: float


class Stopped(EOFError):
    """The mesh process has asked this trainer to stop."""

    def __init__(self, command: messages.Command) -> None:
        super().__init__("asked to stop")
        self.command = command


class Pace:
    """Pauses after inner steps, and the time that goes into both.

    ``slow`` is what a step and its pause take, in steps; ``least_seconds`` is what they take at least, of a step that
    the engine takes by itself.
    """

    def __init__(self, slow: float, least_seconds: float) -> None:
        self.busy_seconds = 0.0
        """Spent in inner steps and pauses."""
        self._slow = slow
        self._least_seconds = least_seconds
        # Of the newest inner steps: the shortest is what one takes. One in the middle of which the machine slept, or
        # worked for somebody else, says nothing of how long to pause.
        self._newest = deque[float](maxlen=STEPS_REMEMBERED)
        self._step_began_at: float | None = None

    @property
    def is_stepping(self) -> bool:
        """Whether a step has begun that has not ended."""
        return self._step_began_at is not None

    def begin_step(self) -> None:
        """An inner step begins."""
        self._step_began_at = time.monotonic()

    def end_step(self) -> float:
        """An inner step ends; until when to pause."""
        assert self._step_began_at is not None
        began_at, self._step_began_at = self._step_began_at, None
        seconds = time.monotonic() - began_at
        self._newest.append(seconds)
        pause = max((self._slow - 1.0) * min(self._newest), self._least_seconds - seconds)
        self.busy_seconds += seconds + pause
        return began_at + seconds + pause

    def rest(self, began_at: float) -> None:
        """After what was computed since then on a command: a slow node sleeps."""
        time.sleep((self._slow - 1.0) * (time.monotonic() - began_at))
        self.busy_seconds += time.monotonic() - began_at


class TrainerProcess:
    """Carries out commands on an engine."""

    def __init__(self, channel: TrainerSocket, prepare: messages.Prepare, manifest: Manifest, engine: Engine) -> None:
        self._channel = channel
        self._manifest = manifest
        self._engine = engine
        self._pace = Pace(prepare.slow, prepare.step_seconds)
        self._fragment = 0
        self._began_at: float | None = None
        self._round = _Round(messages.Train(0, 0), 0, 0, 0.0, 0.0, 0.0)
        self._checkpoints = Checkpoints(prepare, engine, channel.send)
        resumed, problem = self._checkpoints.begin(prepare, manifest)
        self._exchange = Exchange(prepare, engine, channel.send)
        self._recorder = recorder_of(prepare, manifest, engine, channel.send)
        channel.send(
            messages.Prepared(
                device=engine.device.description,
                num_parameters=engine.layout.num_elements,
                contribution_bytes=engine.contribution_bytes,
                layout=engine.layout.hash,
                round=engine.round,
                inner_steps=engine.steps,
                tokens=engine.tokens,
                activation_bytes=engine.activation_bytes,
                num_slices=0 if engine.slices is None else engine.slices.num_slices,
                corpus=b"" if engine.slices is None else engine.slices.corpus,
                resumed=resumed,
                problem=problem,
                has_loss=engine.measures_loss,
                pid=os.getpid(),
            )
        )

    def next_command(self) -> messages.Command:
        """Wait for the next command, and decode meanwhile what arrives of the partner's contribution."""
        return self._channel.receive() if self._channel.has_pending else self._await_command()

    def _await_command(self) -> messages.Command:
        """Wait for the next command that comes, past those that were put off."""
        while True:
            self._exchange.take_in()
            command = self._channel.poll(LOOK_INTERVAL if self._engine.awaits_outer_step else None)
            if command is not None:
                return command

    def end(self) -> None:
        """Save what the last outer step gave; nothing is handled after this."""
        self._checkpoints.save(is_last=True)

    def handle(self, command: messages.Command) -> None:
        """Do what one command says and report it."""
        match command:
            case messages.Train():
                self._train(command)
            case messages.Screen():
                self._exchange.screen(command)
            case messages.TakeOuterStep():
                self._exchange.take_outer_step(command)
            case messages.Save(is_last):
                self._checkpoints.save(is_last=is_last)
            case messages.Validate(num_batches):
                self._validate(num_batches)
            case messages.Replay():
                self._replay(command)
            case messages.Ping():
                self._channel.send(messages.Pong())
            case messages.DrawSlices(epoch, ranges):
                if self._engine.slices is not None:
                    self._engine.slices.assign(epoch, ranges)
            case messages.FinishRound() | messages.UseFragment() | messages.Work() | messages.TakeInnerStep():
                pass  # it crossed our contribution: the round was over by its steps already
            case messages.Prepare() | messages.Stop() | messages.Dismiss():
                raise Stopped(command)

    def _train(self, command: messages.Train) -> None:
        engine, pace = self._engine, self._pace
        if not engine.awaits_outer_step:
            engine.round = command.round
        now = time.monotonic()
        self._began_at = now if self._began_at is None else self._began_at
        self._round = begun = _Round(command, engine.steps, engine.tokens, pace.busy_seconds, now, now)
        if self._recorder is not None:
            self._recorder.begin()
        engine.inner_steps(self._is_round_over)
        loss = engine.mean_loss()
        self._report_slices()
        seconds = time.monotonic() - begun.began_at
        while engine.awaits_outer_step:
            self._obey(self._await_command())
        engine.round = command.round
        size = self._exchange.contribute(command.round, self._fragment)
        self._channel.send(
            messages.Contributed(
                round=command.round,
                size=size,
                tokens_this_round=engine.tokens_contributed,
                inner_steps_this_round=engine.steps - begun.steps,
                inner_steps=engine.steps,
                tokens=engine.tokens,
                loss=loss,
                seconds=seconds,
                fragment=self._fragment,
                busy_seconds=pace.busy_seconds - begun.busy_seconds,
                utilisation=pace.busy_seconds / (time.monotonic() - self._began_at),
            )
        )
        self._exchange.encode(command.round)
        if self._recorder is not None:
            self._recorder.end(command.round, self._fragment, self._exchange.digest())

    def _replay(self, command: messages.Replay) -> None:
        """Take another's inner steps, at this node's own pace, and look between two of them at what comes."""
        if isinstance(self._engine, Learner):
            replayed = replay_round(self._engine, self._manifest, command, self._may_not_go_on)
            if self._pace.is_stepping:
                self._pace.end_step()
            self._channel.send(replayed)

    def _may_not_go_on(self) -> bool:
        """Before each inner step of a replay: pause, and obey what cannot wait; whether the replay ends, never."""
        pause_until = self._pace.end_step() if self._pace.is_stepping else 0.0
        while (command := self._channel.poll(max(0.0, pause_until - time.monotonic()))) is not None:
            match command:
                case messages.Ping() | messages.Save():
                    self.handle(command)
                case messages.Stop() | messages.Dismiss():
                    raise Stopped(command)
                case _:
                    self._channel.put_off(command)
        self._pace.begin_step()
        return False

    def _is_round_over(self) -> bool:
        """Before each inner step: report the one before, pause, and obey what comes; whether the round ends."""
        if self._pace.is_stepping:
            self._report_progress()
            pause_until = self._pace.end_step()
            self._exchange.take_in()
            while (command := self._channel.poll(max(0.0, pause_until - time.monotonic()))) is not None:
                if self._obey(command):
                    return True
            if self._engine.steps - self._round.steps == self._round.command.max_steps:
                return True
        if self._engine.is_idle:
            self._report_slices()
        while self._engine.is_idle:
            if self._obey_idle(self._await_command()):
                return True
        self._pace.begin_step()
        return False

    def _obey_idle(self, command: messages.Command) -> bool:
        """As `_obey`, while the engine has nothing to do; with the commands that a driven engine computes by."""
        match command:
            case messages.Work() | messages.TakeInnerStep():
                began_at = time.monotonic()
                report = self._engine.obey(command)
                self._pace.rest(began_at)
                self._report_slices()
                self._channel.send(report)
                if isinstance(command, messages.TakeInnerStep):
                    self._report_progress()
            case messages.Validate(num_batches) if self._engine.is_driven:
                self._validate(num_batches)
            case _:
                return self._obey(command)
        return False

    def _obey(self, command: messages.Command) -> bool:
        """Do what cannot wait for the round's end, and put off the rest; whether the round ends."""
        match command:
            case messages.FinishRound(round_index):
                return round_index == self._round.command.round
            case messages.UseFragment(round_index, fragment):
                if round_index == self._round.command.round:
                    self._fragment = fragment
            case messages.DrawSlices() | messages.Ping() | messages.Save():  # inner steps do not touch the slow weights
                self.handle(command)
            case messages.Screen() | messages.TakeOuterStep() if self._engine.awaits_outer_step:  # of the round before
                self.handle(command)
            case messages.Stop() | messages.Dismiss():
                raise Stopped(command)
            case _:
                self._channel.put_off(command)
        return False

    def _report_progress(self) -> None:
        """Between two inner steps, not too often."""
        now, engine, begun = time.monotonic(), self._engine, self._round
        if now - begun.reported_at < PROGRESS_INTERVAL:
            return
        begun.reported_at = now
        self._report_slices()
        self._channel.send(
            messages.Progress(
                round=begun.command.round,
                inner_steps=engine.steps,
                inner_steps_this_round=engine.steps - begun.steps,
                tokens=engine.tokens,
                loss=engine.mean_loss(),
                tokens_per_second=(engine.tokens - begun.tokens) / (now - begun.began_at),
                device_memory=engine.device.memory(),
            )
        )

    def _report_slices(self) -> None:
        """What has been trained on, if there is anything to say."""
        slices = self._engine.slices
        if slices is not None and (ranges := slices.take_trained()):
            self._channel.send(messages.SlicesTrained(slices.epoch, ranges))

    def _validate(self, num_batches: int) -> None:
        """Too little text held out costs a warning, never the training."""
        try:
            validated = messages.Validated(self._engine.round, self._engine.evaluate(num_batches))
        except DataError as error:
            validated = messages.Validated(self._engine.round, 0.0, f"no validation: {error}")
        self._channel.send(validated)

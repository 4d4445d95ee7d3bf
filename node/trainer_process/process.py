"""The trainer: a process of its own, which owns torch and an engine and knows nothing of the network.

It obeys the commands of `farandole.protocol.trainer.trainer_messages`, one at a time. While the engine takes inner
steps the process looks at the socket between two of them, so that it sees the end of a round's box within one step.
When the mesh process ends, for any reason, the socket's end of file ends this process.

The next round may begin while the exchange of the last one runs: `Train` may come before the `TakeOuterStep` of the
round before. The contribution stays unchanged in the shared memory. The arrived part of the partner's is decoded
between two inner steps, where the outer step is taken too, and the progress of the inner steps is kept. A round that is
over before then waits for it, so an outer step is at most one round late. If a side thread averages
(`farandole.node.trainer_process.exchange`), only its result, and the losses that a screening rule asks for, come
between two inner steps.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farandole.protocol.run.exclusions import exclusions_in
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.trainer_messages import Prepare
from farandole.training.base.errors import DataError, TrainingError
from farandole.training.data.dataset import Bring
from farandole.training.engine.engine import Engine
from farandole.training.engine.learner import Learner, build_learner, replay_round
from farandole.training.engine.stage_worker import build_stage_worker

from ..store.disk_space import text_room
from ..trainer.channel import TrainerSocket, map_shared_memory
from .checkpoints import FOLDER, Checkpoints, Recorder
from .exchange import EngineExchange

# The engine. Add another kind of engine here.

# Interval of progress reports, so that a person sees activity.
TELL_SECONDS: Final = 2.0


def make_engine(channel: TrainerSocket, prepare: Prepare, manifest: Manifest) -> Engine:
    """Make the stage engine if the model is cut, else the local one, with the weights of the run's seed.

    Raises `TrainingError` if the text, the tokenizer, the device or the model is unsuitable.
    """
    settings, told_at = prepare.settings, -math.inf
    flags = ("lean", "recompute", "compile", "data", "stream")
    used = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(settings, flag)]
    if problems := list(exclusions_in(manifest, used)):
        raise TrainingError(f"{'; '.join(problems)}. Leave out one of the node's settings")

    def tell(position: int, size: int) -> None:
        """Report the progress of tokenising to the mesh process now and then."""
        nonlocal told_at
        if time.monotonic() >= told_at + TELL_SECONDS:
            told_at = time.monotonic()
            channel.send(messages.Preparing(position, size))

    bring = Bring(
        paths=tuple(map(Path, settings.data)),
        field=settings.data_field,
        streams=tuple(settings.stream),
        tokenizer=Path(settings.tokenizer) if settings.tokenizer else None,
        cache=Path(settings.tokens) if settings.tokens else None,
        cache_bytes=text_room(prepare.disk, prepare.checkpoint_bytes),
        progress=tell,
    )
    if manifest.model.num_stages == 1:
        return build_learner(manifest, run_id=prepare.run_id, author=prepare.author, settings=settings, bring=bring)
    worker = build_stage_worker(
        manifest, stage=prepare.stage, run_id=prepare.run_id, author=prepare.author, settings=settings, bring=bring
    )
    size = 2 * manifest.pipeline.in_flight * worker.activation_bytes
    worker.memory = memoryview(map_shared_memory(prepare.activations, size))
    return worker


PROGRESS_INTERVAL = 0.5
# Interval in seconds of checks how much of the partner's contribution has arrived, and of the side
# thread's calls, while no inner step is taken.
LOOK_INTERVAL = 0.005
# Number of inner steps by which a slow node estimates the time of one.
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


class StopAsked(EOFError):
    """The mesh process has asked this trainer to stop."""

    def __init__(self, command: messages.Command) -> None:
        super().__init__("asked to stop")
        self.command = command


class StepPace:
    """Pauses after inner steps, and the time spent in both.

    ``slow`` is the duration of a step with its pause, in steps. ``least_seconds`` is its least duration, for steps that
    the engine takes by itself.
    """

    def __init__(self, slow: float, least_seconds: float) -> None:
        self.busy_seconds = 0.0
        """Spent in inner steps and in the pauses that are over."""
        self._slow = slow
        self._least_seconds = least_seconds
        # Durations of the newest inner steps: the shortest is the time of a step. A step in which the machine slept or
        # worked for another process must not determine the pause.
        self._newest = deque[float](maxlen=STEPS_REMEMBERED)
        self._step_began_at: float | None = None
        self._pause_began_at = self._pause_until = 0.0

    @property
    def is_stepping(self) -> bool:
        """True if a step has begun that has not ended."""
        return self._step_began_at is not None

    def begin_step(self) -> None:
        """Note that an inner step begins."""
        self._step_began_at = time.monotonic()

    def end_step(self) -> float:
        """Note that an inner step ends; return the time until which to pause."""
        assert self._step_began_at is not None
        began_at, self._step_began_at = self._step_began_at, None
        now = time.monotonic()
        seconds = now - began_at
        self._newest.append(seconds)
        self.busy_seconds += seconds
        pause = max((self._slow - 1.0) * min(self._newest), self._least_seconds - seconds)
        self._pause_began_at, self._pause_until = now, now + pause
        return self._pause_until

    def end_pause(self) -> None:
        """Note that the pause after an inner step is over, perhaps early: the end of a round cuts it short."""
        self.busy_seconds += min(time.monotonic(), self._pause_until) - self._pause_began_at

    def rest(self, began_at: float) -> None:
        """Sleep, if the node is slowed down, after a computation that began at ``began_at``."""
        if self._slow > 1.0:  # a sleep of no time costs the process its turn on the core
            time.sleep((self._slow - 1.0) * (time.monotonic() - began_at))
        self.busy_seconds += time.monotonic() - began_at


class TrainerProcess:
    """Carries out commands on an engine."""

    def __init__(self, channel: TrainerSocket, prepare: messages.Prepare, manifest: Manifest, engine: Engine) -> None:
        self._channel = channel
        self._postponed = deque[messages.Command]()  # until the round is over
        self._manifest = manifest
        self._engine = engine
        self._pace = StepPace(prepare.settings.slow, prepare.settings.step_seconds)
        self._fragment = 0
        self._num_skipped = 0
        self._has_trained = False
        self._round = _Round(messages.Train(0, 0), 0, 0, 0.0, 0.0, 0.0)
        self._checkpoints = Checkpoints(prepare, engine, channel.send)
        resumed, problem = self._checkpoints.begin(prepare, manifest)
        self._exchange = EngineExchange(prepare, engine.round_end, channel.send)
        self._recorder: Recorder | None = None  # where the run has audits and the engine has rounds
        if manifest.audits and isinstance(engine, Learner):
            self._recorder = Recorder(Path(prepare.settings.checkpoints) / FOLDER, engine, channel.send)
        channel.send(
            messages.Prepared(
                device=engine.device.description,
                num_parameters=engine.checkpoint.layout.num_elements,
                contribution_bytes=engine.round_end.contribution_bytes,
                layout=engine.checkpoint.layout.hash,
                round=engine.totals.round,
                inner_steps=engine.totals.steps,
                tokens=engine.totals.tokens,
                activation_bytes=engine.activation_bytes,
                num_slices=0 if engine.slices is None else engine.slices.num_slices,
                corpus=b"" if engine.slices is None else engine.slices.corpus,
                resumed=resumed,
                problem=problem,
                has_loss=engine.measures_loss,
                begun_at=engine.checkpoint.counters.begun_at,
                pid=os.getpid(),
                stage=prepare.stage,
                microbatch=prepare.settings.microbatch,
            )
        )

    def next_command(self) -> messages.Command:
        """Wait for the next command while decoding what arrives of the partner's contribution."""
        return self._postponed.popleft() if self._postponed else self._await_command()

    def _await_command(self) -> messages.Command:
        """Wait for the next new command; postponed ones are skipped."""
        while True:
            self._exchange.take_in()
            does_wait = self._engine.round_end.awaits_outer_step or self._exchange.side_thread.is_busy
            command = self._channel.poll(LOOK_INTERVAL if does_wait else None)
            if command is not None:
                return command

    def end(self) -> None:
        """Save the result of the last outer step; no command is handled after this."""
        self._checkpoints.save(is_last=True)

    def close(self) -> None:
        """Give up the side thread's work; no command is handled after this."""
        self._exchange.side_thread.end()

    def handle(self, command: messages.Command) -> None:
        """Carry out one command and report it."""
        match command:
            case messages.Train():
                self._train(command)
            case messages.Screen():
                self._exchange.screen(command)
            case messages.TakeOuterStep():
                self._exchange.take_outer_step(command)
            case messages.Save(is_last):
                self._exchange.side_thread.settle()
                self._checkpoints.save(is_last=is_last)
            case messages.Validate(num_batches):
                self._validate(num_batches)
            case messages.Replay():
                self._exchange.side_thread.settle()
                if isinstance(self._engine, Learner):
                    replayed = replay_round(self._engine, self._manifest, command, self._may_not_go_on)
                    if self._pace.is_stepping:
                        self._pace.end_step()
                        self._pace.end_pause()
                    self._channel.send(replayed)
            case messages.Ping():
                self._channel.send(messages.Pong())
            case messages.DrawSlices(epoch, ranges):
                if self._engine.slices is not None:
                    self._engine.slices.assign(epoch, ranges)
            case messages.Settle():
                self._engine.obey(command)
            case messages.FinishRound() | messages.UseFragment() | messages.Work() | messages.TakeInnerStep():
                pass  # it crossed our contribution: the round was over by its steps already
            case messages.Prepare() | messages.Stop() | messages.Dismiss():
                raise StopAsked(command)

    def _train(self, command: messages.Train) -> None:
        engine, pace = self._engine, self._pace
        if not engine.round_end.awaits_outer_step:
            if command.round > engine.totals.round and not self._has_trained:
                engine.catch_up(command.round, 0 if self._manifest.start is None else self._manifest.start.inner_steps)
            engine.totals.round = command.round
        self._has_trained = True
        now = time.monotonic()
        self._round = begun = _Round(command, engine.totals.steps, engine.totals.tokens, pace.busy_seconds, now, now)
        if self._recorder is not None:
            self._recorder.begin()
        loss = None
        if command.takes_steps:
            engine.inner_steps(self._is_round_over)
            loss = engine.mean_loss()
            self._report_slices()
        seconds = time.monotonic() - begun.began_at
        while engine.round_end.awaits_outer_step:
            self._exchange.take_in()  # which may end the waiting
            if engine.round_end.awaits_outer_step and (urgent := self._channel.poll(LOOK_INTERVAL)) is not None:
                self._obey(urgent)
        engine.totals.round = command.round
        size = self._exchange.contribute(command.round, self._fragment, takes_steps=command.takes_steps)
        skipped_before, self._num_skipped = self._num_skipped, engine.num_skipped
        self._channel.send(
            messages.Contributed(
                round=command.round,
                size=size,
                tokens_this_round=engine.round_end.tokens_contributed,
                tokens_claimed=self._exchange.claim,
                inner_steps_this_round=engine.totals.steps - begun.steps,
                inner_steps=engine.totals.steps,
                tokens=engine.totals.tokens,
                loss=loss,
                seconds=seconds,
                fragment=self._fragment,
                busy_seconds=pace.busy_seconds - begun.busy_seconds,
                skipped_steps=self._num_skipped - skipped_before,
            )
        )
        self._exchange.encode(command.round)
        if self._recorder is not None:
            self._recorder.end(command.round, self._fragment, self._exchange.digest())

    def _may_not_go_on(self) -> bool:
        """Pause before an inner step of a replay, and obey commands. Return False: the replay goes on."""
        if self._pace.is_stepping:
            self._pause()
        self._pace.begin_step()
        return False

    def _pause(self) -> bool:
        """End an inner step, pause, and obey commands until one ends the round; return whether one does."""
        until, is_over = self._pace.end_step(), False
        while not is_over:
            self._exchange.take_in()  # and make the side thread's calls
            left, is_busy = max(0.0, until - time.monotonic()), self._exchange.side_thread.is_busy
            if (command := self._channel.poll(min(left, LOOK_INTERVAL) if is_busy else left)) is not None:
                is_over = self._obey(command)
            elif not is_busy or left <= LOOK_INTERVAL:
                break
        self._pace.end_pause()
        return is_over

    def _is_round_over(self) -> bool:
        """Report the last inner step, pause, and obey commands before the next one. Return whether the round ends."""
        if self._pace.is_stepping:
            self._report_progress()
            if self._pause() or self._engine.totals.steps - self._round.steps == self._round.command.max_steps:
                return True
        if self._engine.is_idle:
            self._report_slices()
        while self._engine.is_idle:
            if self._obey_idle(self._await_command()):
                return True
        self._pace.begin_step()
        return False

    def _obey_idle(self, command: messages.Command) -> bool:
        """See `_obey`; this is for an idle engine, with the additional commands that a driven engine computes by."""
        match command:
            case messages.Work() | messages.Settle() | messages.TakeInnerStep():
                began_at = time.monotonic()
                report = self._engine.obey(command)
                self._pace.rest(began_at)
                self._report_slices()
                if report is not None:
                    self._channel.send(report)
                if isinstance(command, messages.TakeInnerStep):
                    self._report_progress()
            case messages.Validate(num_batches) if self._engine.is_driven:
                self._validate(num_batches)
            case _:
                return self._obey(command)
        return False

    def _obey(self, command: messages.Command) -> bool:
        """Obey commands that cannot wait for the round's end, postpone others; return whether the round ends."""
        match command:
            case messages.FinishRound(round_index):
                return round_index == self._round.command.round
            case messages.UseFragment(round_index, fragment):
                if round_index == self._round.command.round:
                    self._fragment = fragment
            case messages.Settle():  # before the next microbatch of its slot
                self.handle(command)
            case messages.DrawSlices() | messages.Ping() | messages.Save():  # inner steps do not touch the slow weights
                self.handle(command)
            case messages.Screen() | messages.TakeOuterStep() if self._engine.round_end.awaits_outer_step:
                self.handle(command)  # it is for the round before
            case messages.Stop() | messages.Dismiss():
                raise StopAsked(command)
            case _:
                self._postponed.append(command)
        return False

    def _report_progress(self) -> None:
        """Report progress between two inner steps, at a limited rate."""
        now, engine, begun = time.monotonic(), self._engine, self._round
        if now - begun.reported_at < PROGRESS_INTERVAL:
            return
        begun.reported_at = now
        self._report_slices()
        self._channel.send(
            messages.Progress(
                round=begun.command.round,
                inner_steps=engine.totals.steps,
                inner_steps_this_round=engine.totals.steps - begun.steps,
                tokens=engine.totals.tokens,
                loss=engine.mean_loss(),
                tokens_per_second=(engine.totals.tokens - begun.tokens) / (now - begun.began_at),
                device_memory=engine.device.memory(),
            )
        )

    def _report_slices(self) -> None:
        """Report the slices that have been trained on, if there are any."""
        slices = self._engine.slices
        if slices is not None and (ranges := slices.take_trained()):
            self._channel.send(messages.SlicesTrained(slices.epoch, ranges))

    def _validate(self, num_batches: int) -> None:
        """Measure the validation loss; too little held-out text causes a warning and does not stop training."""
        try:
            loss = self._engine.evaluate(num_batches)
            bits = self._engine.bits_per_byte(loss, num_batches)
            validated = messages.Validated(self._engine.totals.round, loss, bits_per_byte=bits)
        except DataError as error:
            validated = messages.Validated(self._engine.totals.round, 0.0, f"no validation: {error}")
        self._channel.send(validated)

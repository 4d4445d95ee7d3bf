"""The engine interface: what trains behind a node. The trainer process drives an `Engine` of any kind.

A round, as the process runs it (`farandole.node.trainer_process.process`):

    engine.inner_steps(until)         inner steps, until the round's time is over
    round_end.contribution(fragment)  freeze this node's contribution
    round_end.encode(out)             write it to memory that the mesh process sends from
    round_end.screen(data)            judge what the partner sent; `take_in` may have decoded it while it arrived
    round_end.apply(data)             the outer step, with it or alone
    engine.evaluate()                 held-out loss
    checkpoint.save()                 a checkpoint

Inner steps of the next round may come between `contribution` and `apply`. Three kinds of engine exist:

    local     `farandole.training.engine.learner.Learner`: the whole model, which takes inner steps by itself
    stage     `farandole.training.engine.stage_worker.StageWorker`: one stage, which computes what commands ask for
    external  `farandole.training.cluster.external.ExternalEngine`: a user's model, trained by the user's own loop, in
              one process or cut over several (`farandole.training.cluster.ranks`)

An engine takes inner steps, and has the two parts that are the same in all kinds: `RoundEnd` and `Checkpoint`. To add a
kind, write a subclass of `Engine` in this folder, and select it in
`farandole.node.trainer_process.engines.make_engine`, by the manifest or by `Prepare`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import ClassVar

from farandole.protocol.trainer.trainer_messages import InnerStepTaken, Settle, TakeInnerStep, Work, Worked

from ..base.device import Device
from ..base.errors import DataError, TrainingError
from ..data.slices import SliceQueue
from ..outer.round_end import RoundEnd, Totals
from .replica import Replica
from .snapshot import Checkpoint

Until = Callable[[], bool]
"""Called before each inner step; True: the round is over. It may block for the length of a pause."""


class Engine(abc.ABC):
    """One replica, or one stage of one, in training. ``device`` is where inner steps are taken."""

    is_driven: ClassVar[bool] = True
    """Whether inner steps are commands (`obey`). Otherwise the engine takes them by itself, in `inner_steps`."""
    activation_bytes: int = 0
    """Encoded size of one microbatch's activations; 0 where the model is not cut into stages."""
    measures_loss: bool = True
    """Whether `evaluate` can measure a held-out loss."""
    slices: SliceQueue | None = None
    """The slices to train on, where the run counts epochs and this engine draws data."""

    def __init__(
        self, device: Device, round_end: RoundEnd, checkpoint: Checkpoint, replica: Replica | None = None
    ) -> None:
        self.device = device
        self.round_end = round_end
        self.checkpoint = checkpoint
        self.replica = replica
        """The module in training and its optimizer; None where they are a user's."""

    @property
    def totals(self) -> Totals:
        """Return the rounds, inner steps and tokens so far."""
        return self.round_end.totals

    @property
    def num_skipped(self) -> int:
        """Return the number of inner steps that changed nothing because their gradient was not finite."""
        return 0 if self.replica is None else self.replica.optimizer.num_skipped

    @property
    def is_idle(self) -> bool:
        """Return whether no inner step can be taken now: the engine is driven by commands, or waits for slices."""
        return self.is_driven or (self.slices is not None and not self.slices.has_more)

    def inner_steps(self, until: Until) -> None:
        """Take inner steps until ``until`` returns True. For a driven engine, ``until`` calls `obey` for each step."""
        until()

    def obey(self, command: Work | Settle | TakeInnerStep) -> Worked | InnerStepTaken | None:
        """Compute a microbatch's part, settle one, or take the inner step; only for a driven engine.

        Returns the report; `Settle` has none.
        """
        raise TrainingError(f"this engine takes inner steps by itself, and no {type(command).__name__}")

    @abc.abstractmethod
    def mean_loss(self) -> float | None:
        """Return the mean loss of the inner steps since `inner_steps` was called, in nats a token; None: not known.

        It waits for the device.
        """

    def catch_up(self, round_index: int, first_step: int = 0) -> None:
        """Note that the run is in a later round than the weights that were just loaded.

        The schedule of the learning rate, and its ramp, go on from the run's place: by as many steps as the weights
        have had a round since ``first_step``, with which the run began.
        """
        self.round_end.catch_up(round_index)
        if self.replica is not None and self.totals.round:
            missed = round((self.totals.steps - first_step) / self.totals.round * (round_index - self.totals.round))
            self.replica.optimizer.begun_at += missed if self.replica.optimizer.begun_at else 0
            self.totals.steps += missed

    def begin_anew(self) -> None:  # noqa: B027 - most engines are made with these weights
        """Begin with the weights of the run's seed, before the first step; only where the run has no other start."""

    def evaluate(self, num_batches: int) -> float:
        """Return the mean loss on held-out batches, in nats a token; raises `DataError` if there is none."""
        raise DataError("this engine measures none")

    def tokens_per_byte(self, num_batches: int) -> float | None:
        """Return the tokens per byte of the text that `evaluate` measures the loss on; None: not known."""
        return None

    def bits_per_byte(self, loss: float, num_batches: int) -> float | None:
        """Convert a loss that `evaluate` has returned, in nats a token; None where the text's bytes are not known."""
        ratio = self.tokens_per_byte(num_batches)
        return None if ratio is None else loss / math.log(2) * ratio

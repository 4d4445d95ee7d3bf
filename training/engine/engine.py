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
`farandole.node.trainer_process.process.make_engine`, by the manifest or by `Prepare`.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from farandole.protocol.run.rules import OPTIMIZER_VECTORS
from farandole.protocol.trainer.trainer_messages import InnerStepTaken, Settle, TakeInnerStep, Work, Worked

from ..base.device import Device
from ..base.errors import DataError, TrainingError
from ..data.batches import Batches, SliceQueue
from ..outer.round_end import RoundEnd
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
    sampler: Batches | None = None
    """The batches that it draws itself."""
    slices: SliceQueue | None = None
    """The slices to train on, where the run counts epochs and this engine draws data."""

    def __init__(
        self, device: Device, round_end: RoundEnd, checkpoint: Checkpoint, replica: Replica | None = None
    ) -> None:
        self.device = device
        self.round_end = round_end
        self.totals = round_end.totals
        """The rounds, inner steps and tokens so far."""
        self.checkpoint = checkpoint
        self.replica = replica
        """The module in training and its optimizer; None where they are a user's."""

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
        return None if self.sampler is None else self.sampler.tokens_per_byte(num_batches)

    def bits_per_byte(self, loss: float, num_batches: int) -> float | None:
        """Convert a loss that `evaluate` has returned, in nats a token; None where the text's bytes are not known."""
        ratio = self.tokens_per_byte(num_batches)
        return None if ratio is None else loss / math.log(2) * ratio


# Held-out batches: the same ones for all compared weights, so few are enough to distinguish noise from trained weights.
JUDGED_BATCHES: Final = 2
# By which share of the loss the weights may be worse than the initial ones, which the first steps of a run may be; and
# than this node's own, which know its own text best. Of a smaller loss than LEAST_LOSS, in nats a token, of this.
WORSE_THAN_INITIAL: Final = 0.05
WORSE_THAN_OWN: Final = 0.25
LEAST_LOSS: Final = 1.0
# How many times larger than the initial weights the weights, and the outer rule's vectors, may be: the weights of
# trained transformers are about ten times as large.
MAX_GROWTH: Final = 100.0


@dataclass(frozen=True, slots=True)
class Fitness:
    """The quality of an engine's weights."""

    loss: float | None
    """On held-out text, in nats a token; None: not known."""
    norm: float
    """The largest one of the vectors that a newcomer fetches."""


def fitness_of(engine: Engine) -> Fitness:
    """Measure an engine's weights; of a stage, whose loss is not known by itself, the magnitudes alone."""
    squares: dict[str, float] = {}
    for name, tensor in engine.checkpoint.tensors().items():
        vector = name.partition("/")[0]
        if vector not in OPTIMIZER_VECTORS:
            norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
            squares[vector] = squares.get(vector, 0.0) + norm**2
    loss = None
    if not engine.is_driven:
        with contextlib.suppress(DataError):  # too little text is held out
            loss = engine.evaluate(JUDGED_BATCHES)
    return Fitness(loss, math.sqrt(max(squares.values(), default=0.0)))


def why_unfit(fetched: Fitness, initial: Fitness, own: Fitness | None) -> str:
    """Compare a peer's weights with the run's initial ones, and with this node's own; empty: they are fit.

    A newcomer has no history with any peer, so it judges by what it knows itself before its first round. The run's
    initial weights follow from the manifest, so every node has them: weights that have learnt anything have a smaller
    loss on held-out text. A node that was away has its last checkpoint as well. Both are liars' best cases: what passes
    is at most as bad as a fresh start, or a little worse than what the node has, and costs the node alone some rounds.
    """
    if not fetched.norm <= MAX_GROWTH * initial.norm:
        return f"their norm is {fetched.norm:.3g}, that of the run's initial weights {initial.norm:.3g}"
    if fetched.loss is None:
        return ""
    known = [(initial, WORSE_THAN_INITIAL, "the run's initial weights have")]
    if own is not None:
        known.append((own, WORSE_THAN_OWN, "this node's own have"))
    for standing, share, whose in known:
        if standing.loss is None or not math.isfinite(standing.loss):
            continue
        if not fetched.loss <= standing.loss + share * max(standing.loss, LEAST_LOSS):
            return f"their loss on held-out text is {fetched.loss:.3f}, {whose} {standing.loss:.3f}"
    return "" if math.isfinite(fetched.loss) else f"their loss on held-out text is {fetched.loss}"

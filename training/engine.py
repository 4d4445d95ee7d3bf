"""What trains behind a node. The trainer process drives an `Engine`, and does not know which kind it has.

A round, as the process plays it (`farandole.node.trainer_process.process`):

    inner_steps(until)      inner steps, until the round's box in time is over
    contribution(fragment)  freeze what the partner gets
    encode(out)             write it to memory that the mesh process sends from
    screen(data)            judge what the partner sent, which `take_in` may have decoded while it arrived
    apply(data)             the outer step, with it or alone
    evaluate(), save()      held-out loss; a checkpoint of `state()`

Inner steps of the next round may come between `contribution` and `apply`. Three kinds of engine exist:

    local     `farandole.training.learner.Learner`: the whole model, which takes inner steps by itself
    stage     `farandole.training.stage_worker.StageWorker`: one stage, which computes what commands ask for
    external  `farandole.training.external.ExternalEngine`: a user's model, whose inner steps the user's own loop takes

All hold their parameters in flat vectors (`farandole.training.flat_replica.FlatReplica`), which no caller of an engine
sees.

To add a kind (ranks of a cluster, say), write a subclass of `Engine` in a file of this folder, and choose it in
`farandole.node.trainer_process.engines.make_engine`, by the manifest or by `Prepare`. It needs what is abstract below.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from farandole.protocol.trainer_messages import InnerStepTaken, TakeInnerStep, Work, Worked

from .blocks import Content
from .checkpoint import Counters, save_checkpoint
from .codec import Buffer
from .device import Device
from .errors import DataError, TrainingError
from .parameters import Layout
from .screening.history import Histories
from .screening.rule import UNKNOWN, Encounter, Verdict
from .slices import SliceQueue
from .snapshot import Snapshot

Until = Callable[[], bool]
"""Asked before each inner step; True: the round is over. It may take as long as a pause."""


def no_progress(num_bytes: int) -> None:
    """For a caller that does not follow how far an encoding is."""


class Engine(abc.ABC):
    """One replica, or one stage of one, in training. All calls come from one thread, but for `encode` (which see)."""

    is_driven: ClassVar[bool] = True
    """Whether inner steps are commands (`obey`). Else the engine takes them by itself, in `inner_steps`."""
    activation_bytes: int = 0
    """Of one microbatch's activations, as they travel; 0 where the model is not cut."""
    measures_loss: bool = True
    """Whether `evaluate` can know a held-out loss."""
    encodes_aside: bool = False
    """Whether `encode` may run in a thread of its own while inner steps are taken."""
    contribution_bytes: int
    """Size of the largest contribution in this run, and of every one if there are no fragments."""
    device: Device
    layout: Layout
    """Names, shapes and codec of the parameters; partners' must be equal."""
    run_id: bytes
    round: int
    """Outer steps taken."""
    steps: int
    """Inner steps taken."""
    tokens: int
    """Tokens trained on."""
    slices: SliceQueue | None
    """What is learned from, where the run counts epochs and this engine draws data."""
    histories: Histories
    """What the screening rule remembers of peers. It is this node's own, so it is not in checkpoints."""

    @property
    def is_idle(self) -> bool:
        """Whether no inner step can be taken now: the engine computes on commands, or waits for slices."""
        return self.is_driven or (self.slices is not None and not self.slices.has_more)

    def inner_steps(self, until: Until) -> None:
        """Take inner steps until ``until`` says so. A driven engine takes those that ``until`` has it `obey`."""
        until()

    def obey(self, command: Work | TakeInnerStep) -> Worked | InnerStepTaken:
        """Compute a microbatch's part, or take the inner step; of a driven engine."""
        raise TrainingError(f"this engine takes inner steps by itself, and no {type(command).__name__}")

    def mean_loss(self) -> float | None:
        """Of the inner steps since `inner_steps` was called, in nats a token; it waits for the device."""
        return None

    @property
    @abc.abstractmethod
    def awaits_outer_step(self) -> bool:
        """Whether a contribution was made whose outer step is due: inner steps belong to the next round until then."""

    @property
    @abc.abstractmethod
    def tokens_contributed(self) -> int:
        """Tokens behind the contribution that awaits its outer step, or behind the next one."""

    @abc.abstractmethod
    def contribution(self, fragment: int = 0) -> int:
        """Freeze this round's contribution, of one fragment; returns its size in bytes. `encode` comes next."""

    @abc.abstractmethod
    def encode(self, out: Buffer, progress: Callable[[int], None] = no_progress) -> bytes:
        """Write the contribution to ``out``; returns its BLAKE3.

        ``progress`` is called with how many of the first bytes of ``out`` are final, every few megabytes. Comes before
        the next inner step, or in another thread where `encodes_aside`; then only inner steps and `save` may go on.
        Raises `DivergedError` if the weights are no longer finite.
        """

    def pin(self, memory: Buffer) -> None:  # noqa: B027 - only engines on a GPU need it
        """Prepare memory in which contributions will be made, or will arrive, for copies; it must stay mapped."""

    def take_in(self, data: Buffer, available: int) -> None:  # noqa: B027 - an engine may decode all in `screen`
        """Decode what is whole of the first ``available`` bytes of a partner's contribution, while the rest arrives.

        ``data`` is where it arrives. May be called again with more; with less, or for another place, it begins again.
        Does nothing while no contribution of this engine's own awaits one. Reports no fault: `screen` and `apply` do.
        """

    @abc.abstractmethod
    def screen(self, partner: Buffer, encounter: Encounter = UNKNOWN) -> Verdict:
        """The verdict on a partner's contribution, before an outer step is due with it."""

    @abc.abstractmethod
    def apply(self, partner: Buffer | None, encounter: Encounter = UNKNOWN, *, own_first: bool = True) -> int:
        """End the round: outer step with the partner's contribution (None: alone), next round.

        ``own_first`` is True for one of the partners and False for the other (whose key is less, say), so that both
        add in one order. Returns how late the step is: the inner steps taken since `contribution`. Raises
        `ScreeningError` if the contribution is refused, or `DivergedError` if the own weights are unfit, and leaves
        everything as it was. What `screen` has just accepted is not looked at again.
        """

    def evaluate(self, num_batches: int) -> float:
        """Mean loss on held-out batches, in nats a token; raises `DataError` where none is known, with the reason."""
        raise DataError("this engine measures none")

    @abc.abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint has besides counters: fp32 tensors by ``VECTOR/PARAMETER``, where they lie.

        VECTOR is one of `farandole.protocol.vectors`, PARAMETER a name of the layout.
        """

    @property
    def counters(self) -> Counters:
        """How far this engine is."""
        return Counters(self.round, self.steps, self.tokens)

    @property
    def num_bytes(self) -> int:
        """What a checkpoint takes, but for its header."""
        return sum(tensor.nbytes for tensor in self.state().values())

    def save(self, path: Path) -> Content:
        """Write a checkpoint of the last outer step's weights; raises `OSError`, as `farandole.training.durable` does.

        A round's unfinished inner steps are not in it: take it right after an outer step to lose none. With fragments
        the fast weights are in it, since most of them await their fragment's turn.
        """
        return save_checkpoint(path, self.state(), self.layout, self.run_id, self.counters)

    @abc.abstractmethod
    def snapshot(self) -> Snapshot:
        """What `save` would write now, to be written while this engine goes on; good until the next snapshot.

        Raises `MemoryError` if there is no memory for one more copy.
        """

    @abc.abstractmethod
    def is_in(self, saved_round: int, saved_steps: int) -> bool:
        """Whether a checkpoint of then gives all that one of now would."""

    @abc.abstractmethod
    def load(self, path: Path, hashes: bytes = b"") -> Content:
        """Continue from a checkpoint, this node's or a peer's.

        ``hashes`` are those of its blocks, if they are known. Raises `CheckpointError`, with nothing changed, if any of
        it is not as it must be.
        """

    @abc.abstractmethod
    def start_from(self, path: Path, steps: int, tokens: int) -> None:
        """Begin with another run's weights instead of the seed's, with these counts; of an engine without a step yet.

        Raises `CheckpointError`, with nothing changed, if the file does not fit.
        """

"""The engine interface: what trains behind a node. The trainer process drives an `Engine` of any kind.

A round, as the process runs it (`farandole.node.trainer_process.process`):

    inner_steps(until)      inner steps, until the round's time is over
    contribution(fragment)  freeze this node's contribution
    encode(out)             write it to memory that the mesh process sends from
    screen(data)            judge what the partner sent, which `take_in` may have decoded while it arrived
    apply(data)             the outer step, with it or alone
    evaluate(), save()      held-out loss; a checkpoint of `state()`

Inner steps of the next round may come between `contribution` and `apply`. Three kinds of engine exist:

    local     `farandole.training.engine.learner.Learner`: the whole model, which takes inner steps by itself
    stage     `farandole.training.engine.stage_worker.StageWorker`: one stage, which computes what commands ask for
    external  `farandole.training.cluster.external.ExternalEngine`: a user's model, trained by the user's own loop, in
    one
              process or sharded over several (`farandole.training.cluster.ranks`)

All engines hold their parameters in flat vectors (`farandole.training.engine.flat_replica.FlatReplica`), which are
hidden from callers.

To add a kind, write a subclass of `Engine` in this folder that implements the abstract methods below, and select it in
`farandole.node.trainer_process.engines.make_engine`, by the manifest or by `Prepare`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from farandole.protocol.trainer.trainer_messages import InnerStepTaken, Settle, TakeInnerStep, Work, Worked
from farandole.protocol.wire.safetensors import FP32_BYTES

from ..base.device import Device
from ..base.errors import DataError, TrainingError
from ..base.parameters import Layout
from ..data.slices import SliceQueue
from ..outer.codec import Buffer
from ..screening.history import Histories
from ..screening.rule import UNKNOWN, Encounter, Verdict
from .between_steps import BetweenSteps
from .blocks import Content
from .checkpoint import Counters, save_checkpoint
from .snapshot import Snapshot

Until = Callable[[], bool]
"""Called before each inner step; True: the round is over. It may block for the length of a pause."""


def no_progress(num_bytes: int) -> None:
    """Ignore the progress of an encoding."""


class Engine(abc.ABC):
    """One replica, or one stage of one, in training.

    All calls come from one thread, except those that a side thread may make: `encodes_aside`, `averages_aside`.
    """

    is_driven: ClassVar[bool] = True
    """Whether inner steps are commands (`obey`). Otherwise the engine takes them by itself, in `inner_steps`."""
    activation_bytes: int = 0
    """Encoded size of one microbatch's activations; 0 where the model is not cut into stages."""
    measures_loss: bool = True
    """Whether `evaluate` can measure a held-out loss."""
    between_steps: BetweenSteps = BetweenSteps()
    """Where a side thread hands over calls. This default has no such thread, and makes them at once."""
    device: Device
    layout: Layout
    """Names, shapes and codec of the parameters; partners must have the same layout."""
    run_id: bytes
    round: int
    """Outer steps taken."""
    steps: int
    """Inner steps taken."""
    tokens: int
    """Tokens trained on."""
    begun_at: int = 0
    """Inner step at which AdamW's means began: not 0 after a start without them, which ramps the rate up."""
    slices: SliceQueue | None
    """The slices to train on, where the run counts epochs and this engine draws data."""
    histories: Histories
    """What the screening rule remembers of peers. It is local to this node, so it is not in checkpoints."""

    @property
    def encodes_aside(self) -> bool:
        """Return whether `encode` may run in a separate thread while inner steps are taken."""
        return False

    @property
    def averages_aside(self) -> bool:
        """Return whether `take_in`, `screen` and `apply` may, too.

        They hand calls over to the other thread (`between_steps`).
        """
        return False

    @property
    @abc.abstractmethod
    def contribution_bytes(self) -> int:
        """Return the size of the largest contribution in this run, and of every one if there are no fragments."""

    @property
    def num_skipped(self) -> int:
        """Return the number of inner steps that changed nothing because their gradient was not finite."""
        return 0

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

    def mean_loss(self) -> float | None:
        """Return the mean loss of the inner steps since `inner_steps` was called, in nats a token.

        It waits for the device.
        """
        return None

    def catch_up(self, round_index: int, first_step: int = 0) -> None:  # noqa: B027 - an engine may have no schedule
        """Note that the run is in a later round than the weights that were just loaded.

        The schedule of the learning rate goes on from the run's place: by as many steps as the weights have had a round
        since ``first_step``, with which the run began.
        """

    @property
    @abc.abstractmethod
    def awaits_outer_step(self) -> bool:
        """Return whether a contribution awaits its outer step. Until then, inner steps count for the next round."""

    @property
    @abc.abstractmethod
    def tokens_contributed(self) -> int:
        """Return the number of tokens behind the contribution that awaits its outer step, or behind the next one."""

    @property
    def is_behind(self) -> bool:
        """Return whether that contribution is of a newcomer, whose weights were of an earlier round than the run's."""
        return False

    @property
    def tokens_claimed(self) -> int:
        """Return the number of tokens by which that contribution is weighted: fewer in a newcomer's first rounds."""
        return self.tokens_contributed

    def claim(self, *, takes_steps: bool) -> int:
        """Return what to claim for that contribution: `tokens_claimed`, or 0 or 1 in a round without inner steps.

        There only 0, which a newcomer claims, makes a difference: nobody can show how many tokens it has trained on.
        """
        return self.tokens_claimed if takes_steps else int(not self.is_behind)

    @abc.abstractmethod
    def contribution(self, fragment: int = 0) -> int:
        """Freeze this round's contribution for one fragment; return its size in bytes. Call `encode` next."""

    @abc.abstractmethod
    def encode(self, out: Buffer, progress: Callable[[int], None] = no_progress) -> bytes:
        """Write the contribution to ``out``; returns its BLAKE3.

        ``progress`` is called every few megabytes with the number of leading bytes of ``out`` that are final. Call this
        before the next inner step, or, if `encodes_aside`, in another thread; then only inner steps and `save` may run
        at the same time. Raises `DivergedError` if the weights are no longer finite.
        """

    def pin(self, memory: Buffer) -> None:  # noqa: B027 - only engines on a GPU need it
        """Prepare memory that contributions are written to, or arrive in, for copies; it must stay mapped."""

    def take_in(self, data: Buffer, available: int) -> None:  # noqa: B027 - an engine may decode all in `screen`
        """Decode the complete slices in the first ``available`` bytes of a partner's contribution, while it arrives.

        ``data`` is the memory that it arrives in. It may be called again with more bytes; with fewer bytes, or with
        other memory, decoding restarts. It does nothing unless a contribution of this engine awaits a partner's. It
        reports no errors: `screen` and `apply` do.
        """

    @abc.abstractmethod
    def screen(self, partner: Buffer, encounter: Encounter = UNKNOWN) -> Verdict:
        """Return the verdict on a partner's contribution, before the outer step."""

    @abc.abstractmethod
    def apply(self, partner: Buffer | None, encounter: Encounter = UNKNOWN, *, own_first: bool = True) -> int:
        """End the round: take the outer step with the partner's contribution (None: alone), and begin the next round.

        ``own_first`` is True for one of the partners and False for the other (for example by comparing keys), so that
        both add in the same order. Returns how late the step is: the inner steps taken since `contribution`. Raises
        `ScreeningError` if the contribution is refused, or `DivergedError` if this engine's weights are unfit; the
        state is then unchanged. A contribution that `screen` has just accepted is not examined again.
        """

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

    @abc.abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return everything in a checkpoint except the counters: tensors by ``VECTOR/PARAMETER``, not copied.

        They are fp32, except for the bf16 means of `farandole.training.inner.lean`. VECTOR is one of
        `farandole.protocol.run.vectors`, PARAMETER is a name of the layout.
        """

    @property
    def counters(self) -> Counters:
        """Return the steps taken, the tokens trained on, and where the means began."""
        return Counters(self.round, self.steps, self.tokens, self.begun_at)

    @property
    def num_bytes(self) -> int:
        """Return the size of a checkpoint without its header, in bytes."""
        return sum(FP32_BYTES * tensor.numel() for tensor in self.state().values())

    def save(self, path: Path) -> Content:
        """Write a checkpoint of the last outer step's weights; raises `OSError`, as `training.base.durable` does.

        It does not contain a round's unfinished inner steps: save right after an outer step to lose none. With
        fragments it contains the fast weights, since most of them await their fragment's turn.
        """
        return save_checkpoint(path, self.state(), self.layout, self.run_id, self.counters)

    @abc.abstractmethod
    def snapshot(self) -> Snapshot:
        """Return what `save` would write now, to write it while training continues; valid until the next snapshot.

        Raises `MemoryError` if there is no memory for one more copy.
        """

    @abc.abstractmethod
    def is_in(self, saved_round: int, saved_steps: int) -> bool:
        """Return whether a checkpoint saved at these counters has everything that a checkpoint saved now would have."""

    @abc.abstractmethod
    def load(self, path: Path, hashes: bytes = b"") -> Content:
        """Continue from a checkpoint of this node or of a peer.

        ``hashes`` are its blocks' hashes, if known. Raises `CheckpointError`, with nothing changed, if any part of it
        is invalid.
        """

    def begin_anew(self) -> None:  # noqa: B027 - most engines are made with these weights
        """Begin with the weights of the run's seed, before the first step; only where the run has no other start."""

    @abc.abstractmethod
    def start_from(self, path: Path, steps: int, tokens: int) -> None:
        """Begin with another run's weights instead of the seed's, and with these counts; only before the first step.

        Raises `CheckpointError`, with nothing changed, if the file does not fit.
        """

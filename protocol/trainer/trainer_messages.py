"""The messages between the mesh process and the trainer process: msgspec structs over a socket pair.

Commands go to the trainer, reports come back. Tensors do not travel here: contributions are in two shared memory files
(`farandole.node.trainer.channel`), one for the node's own and one for the received one. A counter at a file's end
has the progress: the process that fills the file stores it, and the other reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Final, Literal

import msgspec

from ..checkpoints.blocks import HASH_BYTES, MAX_BLOCKS
from ..state.entries import Commitment

# Size of the hashes of a checkpoint's blocks.
MAX_HASHES_BYTES: Final = MAX_BLOCKS * HASH_BYTES
# Both ends are ours; the bound catches a torn stream, not an attack. The largest part after the hashes is Prepare's
# manifest.
MAX_MESSAGE_BYTES: Final = MAX_HASHES_BYTES + (1 << 20)
# Starts of rounds kept in a node's folder: for the commitments in the run state, and for the running round.
KEPT_STARTS: Final = 5


class TrainerSettings(msgspec.Struct, frozen=True):
    """What a node's owner has set of its trainer; the settings of the same names (`farandole.node.base.settings`)."""

    data: list[str] = []
    data_field: str = "text"
    """The field of a record that has its text."""
    stream: list[str] = []
    """Data sets to stream, instead of ``data``."""
    tokenizer: str | None = None
    tokens: str = ""
    """A folder for tokens; empty: they are held in memory."""
    checkpoints: str = ""
    """The folder (`farandole.node.store.folder`) in which it saves, and from which it goes on."""
    device: str = "auto"
    threads: int = 1
    gpu_memory: float = 0.0
    """Most gigabytes of the GPU's memory that the process takes; 0: no limit."""
    slow: float = 1.0
    """Each inner step is followed by a pause of (slow - 1) times its own length."""
    step_seconds: float = 0.0
    """The least duration of an inner step and its pause; of a model that is not cut."""
    microbatch: int = 0
    """Sequences of a batch that are taken at a time, 0: all; of a model that is not cut. The node finds it out."""
    compile: bool = False
    """Whether inner steps are compiled; of a model that is not cut."""
    lean: bool = False
    """Whether weights, gradient and the optimizer's means are bf16."""
    recompute: bool = False
    """Whether each layer is computed again in the backward pass; of a model that is not cut."""
    allow_model: list[str] = []
    """Functions that may make the model, where the run brings one of its own."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Load torch, data and model, then continue from the checkpoint, if there is one."""

    run_id: bytes
    author: bytes
    manifest: bytes
    settings: TrainerSettings
    outgoing: int | str = 0
    """Places of the shared memory (`farandole.node.trainer.channel`)."""
    incoming: int | str = 0
    activations: int | str = 0
    """Slot i has its incoming activations at 2 i times their size, its outgoing ones after them."""
    fetched: str = ""
    """The path where a peer's checkpoint may be: if it is fit it becomes this node's newest, else it is removed."""
    start: str = ""
    """The path of the weights that the manifest starts from, for a node that has no checkpoint of its own."""
    stage: int = 0
    """This trainer's stage, where the model is cut into several."""
    disk: int = 0
    """Most bytes of the node's folder, which limit the checkpoints and tokens that it keeps; 0: no limit."""
    checkpoint_bytes: int = 0
    """The most bytes that one of its checkpoints takes."""


class Train(msgspec.Struct, frozen=True, tag=True):
    """Take inner steps until ``max_steps`` are done (0: no cap) or `FinishRound` comes.

    This command may come while the round before still awaits its `TakeOuterStep`.
    """

    round: int
    max_steps: int
    takes_steps: bool = True
    """False: contribute at once, to another partner (`RoundConfig.partners`)."""
    is_followed: bool = False
    """Whether the next round begins as soon as this one's contribution is made."""


class UseFragment(msgspec.Struct, frozen=True, tag=True):
    """Contribute this fragment in the round, and in later ones until the next such command."""

    round: int
    fragment: int


class DrawSlices(msgspec.Struct, frozen=True, tag=True):
    """Draw batches from these slices from now on, (first, count) each, without slices that were drawn already."""

    epoch: int
    ranges: list[tuple[int, int]]


Job = Literal["draw", "forward", "tail", "backward"]
"""See `farandole.protocol.stages.pipeline`."""


class Work(msgspec.Struct, frozen=True, tag=True):
    """Compute something for the microbatch in a slot; of a stage, between `Train` and `FinishRound`.

    The trainer does these in order.
    """

    work: Job
    slot: int
    is_following: bool = False
    """Whether the microbatch that begins is for the inner step after the next `TakeInnerStep`."""
    is_held_out: bool = False
    """Whether the microbatch that begins is for its loss alone; `Validate` asks for the loss of all of them."""
    number: int = 0
    """Number of the microbatch of held-out text that is drawn, if one is."""
    sender: bytes = b""
    """The key of the peer that sent the data in the incoming memory, 32 bytes; empty: the data are not judged."""


class Settle(msgspec.Struct, frozen=True, tag=True):
    """The microbatch in a slot has ended, and the slot is free after this; done in order with `Work`, not reported."""

    slot: int
    is_kept: bool
    """Whether its gradient stays in the sum; else it is taken out."""


class TakeInnerStep(msgspec.Struct, frozen=True, tag=True):
    """Take a stage's inner step, whose gradients are summed."""


class FinishRound(msgspec.Struct, frozen=True, tag=True):
    """Stop after the present inner step: the round's time box is over."""

    round: int


class Screen(msgspec.Struct, frozen=True, tag=True):
    """Judge the contribution of ``size`` bytes in the incoming memory."""

    size: int
    number: int = 0
    """The exchange's number: the epoch of the counter behind the incoming memory. The verdict repeats it: a broken
    exchange does not wait for its verdict, and the next exchange must not take it."""
    partner: bytes = b""
    """The key of the peer that sent the contribution, 32 bytes."""
    partner_tokens: int = 0
    """Tokens that it claims for its contribution."""
    is_suspected: bool = False
    """See `farandole.training.screening.rule.Encounter.is_suspected`."""
    seconds: float = math.inf
    """An exchange's, which judging may take whenever the contribution came: liars would send late ones."""


class TakeOuterStep(msgspec.Struct, frozen=True, tag=True):
    """Take the outer step: with the contribution in the incoming memory, or alone (``partner_size`` 0)."""

    round: int
    partner: bytes = b""
    partner_size: int = 0
    partner_tokens: int = 0


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint while inner steps go on; `Saved` follows when it is written.

    Another `Save` before that would wait for it, and the inner steps as well.
    """

    is_last: bool = False
    """Nothing is trained any more: the save may use the whole machine."""


class Replay(msgspec.Struct, frozen=True, tag=True):
    """Take the inner steps of any author's round again, on a separate replica, between two rounds.

    Of a model that is not cut.
    """

    path: str
    """The checkpoint of the round's start."""
    author: bytes
    commitment: Commitment


class Validate(msgspec.Struct, frozen=True, tag=True):
    """Measure the loss on held-out text; of a stage, on microbatches that went through all (`Work.is_held_out`)."""

    num_batches: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answer with `Pong`, between two inner steps or when there is nothing else to do."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process; for a loop that has attached, stop following its steps."""


class Dismiss(msgspec.Struct, frozen=True, tag=True):
    """The last command to a loop that has attached, or would attach."""

    reason: str
    is_over: bool = False
    """Whether this node trains no more; else the loop cannot attach now."""


Command = (
    Prepare
    | Train
    | UseFragment
    | DrawSlices
    | Work
    | Settle
    | TakeInnerStep
    | FinishRound
    | Screen
    | TakeOuterStep
    | Save
    | Replay
    | Validate
    | Ping
    | Stop
    | Dismiss
)


class Saved(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint is on the disk, or why it is not (``problem``)."""

    round: int
    inner_steps: int
    tokens: int
    path: str = ""
    """The file, under the name that it keeps until it is removed."""
    size: int = 0
    hashes: Annotated[bytes, msgspec.Meta(max_length=MAX_HASHES_BYTES)] = b""
    """SHA-256 of each of the file's blocks, one after the other (`farandole.protocol.checkpoints.blocks`)."""
    problem: str = ""
    note: str = ""
    """A remark for people about a save that succeeded."""
    seconds: float = 0.0
    """Duration of the write; 0 if it was not measured."""


class Preparing(msgspec.Struct, frozen=True, tag=True):
    """Tokenisation, which is done once, has reached ``position`` of ``size``."""

    position: int
    size: int


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The trainer is ready to train."""

    device: str
    num_parameters: int
    contribution_bytes: int
    layout: bytes
    """SHA-256 over names, shapes and codec: partners' must be equal."""
    round: int
    inner_steps: int
    tokens: int
    activation_bytes: int = 0
    """Bytes of one microbatch on the wire; 0 where the model is not cut."""
    num_slices: int = 0
    """Slices of an epoch; 0 where the run counts none, or this stage draws no data."""
    corpus: bytes = b""
    """Hash of this node's text, where there are slices."""
    resumed: Saved | None = None
    """The checkpoint that it resumes from, verified; None: it starts from the run's seed."""
    problem: str = ""
    """The problem of newer checkpoints, which were skipped."""
    has_loss: bool = True
    """Whether it can measure a held-out loss."""
    begun_at: int = 0
    """Inner step at which the optimizer's means began; not 0 after a start without them."""
    pid: int = 0
    """Process id of the trainer."""
    stage: int = 0
    microbatch: int = 0
    """As in `Prepare`."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """The trainer's progress, sent between inner steps, at most twice a second."""

    round: int
    inner_steps: int
    inner_steps_this_round: int
    tokens: int
    loss: float | None
    """Mean of the round; None where it is unknown: at all stages except the first."""
    tokens_per_second: float
    device_memory: tuple[int, int] | None = None
    """Used and total bytes of the GPU's memory; None on the CPU."""


class SlicesTrained(msgspec.Struct, frozen=True, tag=True):
    """These slices, (first, count) each, have been trained on since the last such report."""

    epoch: int
    ranges: list[tuple[int, int]]


class Worked(msgspec.Struct, frozen=True, tag=True):
    """The oldest `Work` is done, or has failed for the reason in ``problem``."""

    problem: str = ""
    is_outlier: bool = False
    """Whether the problem is that a peer's data are unlike earlier data."""


class InnerStepTaken(msgspec.Struct, frozen=True, tag=True):
    """A stage has taken its inner step, or has skipped it because its gradients were not finite."""

    is_taken: bool


class Contributed(msgspec.Struct, frozen=True, tag=True):
    """The inner steps of a round are done, and the contribution is being encoded; `Encoded` follows."""

    round: int
    size: int
    tokens_this_round: int
    tokens_claimed: int
    """Tokens by which the contribution is weighted: fewer in a newcomer's first rounds. In a round without inner steps,
    0 for a newcomer, and 1 for others."""
    inner_steps_this_round: int
    inner_steps: int
    tokens: int
    loss: float | None
    seconds: float
    """Time spent in inner steps and with commands between them."""
    fragment: int
    busy_seconds: float = 0.0
    """Time of the round spent in inner steps."""
    skipped_steps: int = 0
    """Inner steps of the round that changed nothing because their gradients were not finite."""


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """The whole contribution is in the outgoing memory. Until then, a counter behind it there has the progress."""

    round: int
    digest: bytes
    """BLAKE3 of the contribution."""


class Screened(msgspec.Struct, frozen=True, tag=True):
    """The verdict on a contribution."""

    reason: str
    """Why it is refused; empty: it is not."""
    number: int = 0
    """The number in `Screen`."""
    clip: float = 1.0
    """How far the mean moves towards an accepted contribution: 1 for all of its share."""
    remark: str = ""
    """Why less than all of the share of an accepted contribution counts; empty: all of it does."""
    is_suspect: bool = False
    """Whether the partner is suspected now, which is published to the run (`farandole.protocol.state.believing`)."""
    late_seconds: float = 0.0
    """Where there was no time to measure a loss: the seconds that it would take."""


class OuterStepTaken(msgspec.Struct, frozen=True, tag=True):
    """The outer step is taken: fast weights are the new slow weights, and the inner steps taken since."""

    round: int
    late_steps: int = 0
    """Inner steps between the contribution and the outer step."""


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """What the node commits to of a round, and the round's start, which is kept for `KEPT_STARTS` rounds."""

    commitment: Commitment
    """Its ``start`` is zero: the node signs the start first."""
    start: Saved


class Replayed(msgspec.Struct, frozen=True, tag=True):
    """The result of a `Replay`, or why it failed (``problem``)."""

    end: bytes = b""
    contribution: bytes = b""
    problem: str = ""
    is_unfit: bool = False
    """Whether the problem is the start: no replica can begin with it."""
    build: str = ""
    device: str = ""
    corpus: bytes = b""
    """Hash of this trainer's text, as in `Commitment`."""


class Validated(msgspec.Struct, frozen=True, tag=True):
    """Loss of the slow weights on held-out text, or why there is none (``problem``)."""

    round: int
    loss: float
    """Nats a token."""
    problem: str = ""
    bits_per_byte: float | None = None
    """The loss in bits per byte of the text; None where the number of bytes is not known."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Ping`."""


Cause = Literal["setup", "weights", "memory", "fault", "detached"]
"""Why a trainer ended: its setup failed (no text, no such device, no room for the model), a peer's weights are unfit,
it ran out of memory while it trained, something else; or it was a loop of the node's owner, which ended by itself."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The trainer cannot go on; it ends after this."""

    message: str
    cause: Cause


Report = (
    Preparing
    | Prepared
    | Progress
    | SlicesTrained
    | Worked
    | InnerStepTaken
    | Contributed
    | Encoded
    | Screened
    | OuterStepTaken
    | Saved
    | Recorded
    | Replayed
    | Validated
    | Pong
    | Failed
)

decode_command: Final[Callable[[bytes], Command]] = msgspec.msgpack.Decoder(Command).decode
"""Decode a message of the mesh process."""
decode_report: Final[Callable[[bytes], Report]] = msgspec.msgpack.Decoder(Report).decode
"""Decode a message of the trainer."""

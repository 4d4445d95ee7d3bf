"""What the mesh process and the trainer process say to each other: msgspec structs over a socket pair.

Commands go to the trainer, reports come back. Tensors do not travel here: contributions lie in two shared memory
files (`farandole.node.base.system.memory`), one for what this node sends and one for what it received. How far either
is stands in a counter at its end, which whoever fills it stores and the other reads when it looks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Final, Literal

import msgspec

from .blocks import HASH_BYTES, MAX_BLOCKS

# Of the hashes of a checkpoint's blocks.
MAX_HASHES_BYTES: Final = MAX_BLOCKS * HASH_BYTES
# Both ends are ours; the bound catches a torn stream, not an enemy. Beside hashes the most is Prepare's manifest.
MAX_MESSAGE_BYTES: Final = MAX_HASHES_BYTES + (1 << 20)
# Starts of rounds that lie in a node's folder: those of the commitments in the run state, and the running round's.
KEPT_STARTS: Final = 5
LENGTH: Final = struct.Struct(">I")


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Load torch, data and model, then continue from the checkpoint, if there is one."""

    run_id: bytes
    author: bytes
    manifest: bytes
    data: list[str]
    tokenizer: str | None
    device: str
    threads: int
    slow: float
    """Each inner step is followed by a pause of (slow - 1) times its own length."""
    step_seconds: float
    """An inner step and its pause take at least so long; of a model that is not cut."""
    checkpoints: str
    """The folder (`farandole.node.store.folder`) in which it saves, and from which it goes on."""
    outgoing: int | str
    """Places of the shared memory (`farandole.node.base.system.memory`)."""
    incoming: int | str
    fetched: str = ""
    """Where a peer's checkpoint may lie: if it is fit it becomes this node's newest, else it is removed."""
    start: str = ""
    """Where the weights lie that the manifest starts from, for a node that has no checkpoint of its own."""
    stage: int = 0
    """Which stage of the model this is, where it is cut into several."""
    microbatch: int = 0
    """Sequences of a batch that are taken at a time, 0: all; of a model that is not cut."""
    compile: bool = False
    """Whether inner steps are compiled; of a model that is not cut."""
    data_field: str = "text"
    """Of records, what has their text."""
    streams: list[str] = []
    """Data sets to read as they come, instead of ``data``."""
    cache: str = ""
    """A folder for what is tokenised; empty: it is held in memory."""
    allowed_models: list[str] = []
    """Functions that may make the model, where the run brings one of its own."""
    activations: int | str = 0
    """As ``outgoing``; slot i has its incoming activations at 2 i times their size, its outgoing ones after them."""
    disk: int = 0
    """Most bytes that the node's folder takes, by which it keeps more or fewer checkpoints and tokens; 0: any."""
    checkpoint_bytes: int = 0
    """The most that one of its checkpoints takes."""
    gpu_memory: int = 0
    """Most bytes that the process takes of the GPU's memory; 0: any."""


class Train(msgspec.Struct, frozen=True, tag=True):
    """Take inner steps until ``max_steps`` are done (0: no cap) or `FinishRound` comes.

    It may come while the round before still awaits its `TakeOuterStep`.
    """

    round: int
    max_steps: int


class UseFragment(msgspec.Struct, frozen=True, tag=True):
    """The round's contribution shall be of this fragment, as those after it until the next such command."""

    round: int
    fragment: int


class DrawSlices(msgspec.Struct, frozen=True, tag=True):
    """From now on the batches are these slices, (first, count) each, without those that were drawn already."""

    epoch: int
    ranges: list[tuple[int, int]]


Job = Literal["draw", "forward", "tail", "backward", "keep", "drop"]
"""As `farandole.protocol.pipeline` says."""


class Work(msgspec.Struct, frozen=True, tag=True):
    """Compute something for the microbatch in a slot; of a stage, between `Train` and `FinishRound`.

    The trainer does these in order.
    """

    work: Job
    slot: int
    is_following: bool = False
    """Whether what begins is for the inner step after the next `TakeInnerStep`."""
    is_held_out: bool = False
    """Whether what begins is for its loss alone; `Validate` asks for that of all of them."""
    number: int = 0
    """Which microbatch of the held-out text is drawn, if one is."""
    sender: bytes = b""
    """The key of the peer that sent what lies in the incoming memory, 32 bytes; empty: it is not judged."""


class TakeInnerStep(msgspec.Struct, frozen=True, tag=True):
    """The gradients of a stage's inner step are summed."""


class FinishRound(msgspec.Struct, frozen=True, tag=True):
    """The round's box in time is over: stop after the present inner step."""

    round: int


class Screen(msgspec.Struct, frozen=True, tag=True):
    """Judge the contribution of ``size`` bytes that lies in the incoming memory."""

    size: int
    number: int = 0
    """The exchange's: the epoch of the counter behind the incoming memory. Told again with the verdict: an exchange
    that broke does not wait for its own, and the next one must not take it."""
    partner: bytes = b""
    """The key of the peer whose contribution it is, 32 bytes."""
    partner_tokens: int = 0
    """Tokens that it claims for its contribution."""
    is_suspected: bool = False
    """As `farandole.training.screening.rule.Encounter.is_suspected`."""


class TakeOuterStep(msgspec.Struct, frozen=True, tag=True):
    """Take the outer step: with the contribution in the incoming memory, or alone (``partner_size`` 0)."""

    round: int
    partner: bytes = b""
    partner_size: int = 0
    partner_tokens: int = 0


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint, behind the inner steps; `Saved` says when it is there.

    Another `Save` before that would wait for it, and the inner steps with it.
    """

    is_last: bool = False
    """Nothing is to be trained any more: all the machine's strength is for this one."""


class Replay(msgspec.Struct, frozen=True, tag=True):
    """Take a round's inner steps again, of whatever author, on a replica of their own; between two rounds.

    Otherwise as `farandole.protocol.entries.Commitment`; of a model that is not cut.
    """

    path: str
    """The checkpoint of its start."""
    author: bytes
    first_step: int
    steps: int
    begun_at: int
    microbatch: int
    fragment: int


class Validate(msgspec.Struct, frozen=True, tag=True):
    """Measure the loss on held-out text; of a stage, what has gone through all of them (`Work.is_held_out`)."""

    num_batches: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Give a sign of life, between two inner steps or when there is nothing else to do."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process; of a loop that has attached, stop following its steps."""


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
    """SHA-256 of each of the file's blocks, one after the other (`farandole.protocol.blocks`)."""
    problem: str = ""
    note: str = ""
    """What a person should know of a save that went well."""
    seconds: float = 0.0
    """That writing it took; 0 if that was not measured."""


class Preparing(msgspec.Struct, frozen=True, tag=True):
    """So much of the text is tokenised, which is done once, of so much."""

    position: int
    size: int


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """Ready to train."""

    device: str
    num_parameters: int
    contribution_bytes: int
    layout: bytes
    """SHA-256 over names, shapes and codec: partners' must be equal."""
    round: int
    inner_steps: int
    tokens: int
    activation_bytes: int = 0
    """Of one microbatch, as it travels; 0 where the model is not cut."""
    num_slices: int = 0
    """Of an epoch; 0 where the run counts none, or this stage draws no data."""
    corpus: bytes = b""
    """Hash of this node's text, where there are slices."""
    resumed: Saved | None = None
    """The checkpoint that it goes on from, checked; None: from the run's seed."""
    problem: str = ""
    """What is wrong with newer checkpoints, which were passed over."""
    has_loss: bool = True
    """Whether it can measure a held-out loss."""
    pid: int = 0
    """Of the process that trains."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Sent between inner steps, at most twice a second."""

    round: int
    inner_steps: int
    inner_steps_this_round: int
    tokens: int
    loss: float | None
    """Mean of the round; None where none is known: at all stages but the first."""
    tokens_per_second: float
    device_memory: tuple[int, int] | None = None
    """Bytes taken of the GPU's, and that it has; None on the CPU."""


class SlicesTrained(msgspec.Struct, frozen=True, tag=True):
    """These slices, (first, count) each, have been trained on since the last such report."""

    epoch: int
    ranges: list[tuple[int, int]]


class Worked(msgspec.Struct, frozen=True, tag=True):
    """The oldest `Work` is done, or why it came to nothing (``problem``)."""

    problem: str = ""
    is_outlier: bool = False
    """Whether the problem is that what a peer sent is unlike what came before."""


class InnerStepTaken(msgspec.Struct, frozen=True, tag=True):
    """By a stage; or not, since its gradients were not finite."""

    is_taken: bool


class Contributed(msgspec.Struct, frozen=True, tag=True):
    """The inner steps of a round are done, and the contribution is being encoded; `Encoded` tells when it is."""

    round: int
    size: int
    tokens_this_round: int
    inner_steps_this_round: int
    inner_steps: int
    tokens: int
    loss: float | None
    seconds: float
    """Spent in inner steps and with commands between them."""
    fragment: int
    utilisation: float
    """Share of the trainer's time, since its first round began, that went into inner steps."""
    busy_seconds: float = 0.0
    """Of the round, spent in inner steps."""


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """The contribution lies in the outgoing memory, whole. How far it is before stands behind it in that memory."""

    round: int
    digest: bytes
    """BLAKE3 of the contribution."""


class Screened(msgspec.Struct, frozen=True, tag=True):
    """The verdict on a contribution: empty, or why it is refused."""

    reason: str
    number: int = 0
    """As `Screen` said."""
    clip: float = 1.0
    """How far towards the contribution the mean goes, where it is accepted: 1 for all of its share."""
    is_suspect: bool = False
    """Whether the partner is suspected now, which the run is told (`farandole.protocol.suspicion`)."""


class OuterStepTaken(msgspec.Struct, frozen=True, tag=True):
    """The outer step is taken: fast weights are the new slow weights, and the inner steps taken since."""

    round: int
    late_steps: int = 0
    """Inner steps between the contribution and the outer step."""


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """What a round was, and its start, which is kept for `KEPT_STARTS` rounds: as `Commitment` and `Saved`."""

    round: int
    first_step: int
    steps: int
    begun_at: int
    microbatch: int
    fragment: int
    end: bytes
    contribution: bytes
    corpus: bytes
    build: str
    device: str
    start: Saved


class Replayed(msgspec.Struct, frozen=True, tag=True):
    """What came of a `Replay`, or why nothing did (``problem``)."""

    end: bytes = b""
    contribution: bytes = b""
    problem: str = ""
    is_unfit: bool = False
    """The problem is the start: no replica can begin with it."""
    build: str = ""
    device: str = ""
    corpus: bytes = b""
    """Of this trainer, as in `Recorded`."""


class Validated(msgspec.Struct, frozen=True, tag=True):
    """Loss of the slow weights on held-out text, or why there is none (``problem``)."""

    round: int
    loss: float
    problem: str = ""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The sign of life."""


Cause = Literal["setup", "weights", "memory", "fault", "detached"]
"""Why a trainer ended: what it was to train with will not do (no text, no such device, no room for the model), a
peer's weights are unfit, its memory was used up while it trained, something else; or it was a loop of the node's owner,
which ended by itself."""


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

_encoder = msgspec.msgpack.Encoder()
decode_command: Final[Callable[[bytes], Command]] = msgspec.msgpack.Decoder(Command).decode
"""What the mesh process said."""
decode_report: Final[Callable[[bytes], Report]] = msgspec.msgpack.Decoder(Report).decode
"""What the trainer said."""


def encode(message: Command | Report) -> bytes:
    """A message with its length in front."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body

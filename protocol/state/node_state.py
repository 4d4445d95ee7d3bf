"""State of a node as one frozen value, which heartbeats, the status, the page and the metrics read.

`TrainingState` is the progress of the training; only the training loop writes it. `NodeState` adds the state of the
node itself. A display is a projection of these values: nothing that decides reads a display. Times are Unix seconds,
rates tokens a second, losses nats a token.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from ..run.releases import ReleaseConflict
from ..wire.identity import public_key_of
from .believing import ClockSkew
from .entries import PARTNER_BYTES, Beat, Progress

# A heartbeat holds a loss in millionths of a nat.
LOSS_SCALE: Final = 1e6
# Largest round or loss that an entry holds (`farandole.protocol.state.entries.Small`); values from a peer may exceed
# it.
MAX_SMALL: Final = 2**31 - 1

Phase = Literal[
    "starting",  # opening the store, the host, the control socket
    "joining",  # dialling bootstrap peers, fetching the manifest, syncing the run state
    "fetching weights",  # downloading a checkpoint from a peer
    "preparing",  # the trainer process starts, loads torch, the data and the model
    "training",  # inner steps
    "pairing",  # contribution ready, waiting for the partner
    "exchanging",  # contributions are moving
    "outer step",  # the trainer applies the result
    "paused",  # no trainer, because the owner paused it
    "finished",  # every round is done; still serves its peers
    "relaying",  # a node without a trainer
    "leaving",
    "failed",
]


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a node's training, and of the trainer process behind it."""

    round: int = 0
    """Round whose inner steps run, or ran last."""
    inner_steps: int = 0
    inner_steps_this_round: int = 0
    tokens: int = 0
    """Tokens that this node has trained on, in all its lives; where the model is cut, counted at stage 0 only."""
    tokens_per_second: float = 0.0
    speed: float = 0.0
    """Tokens a second that this node could take through its stage if it never waited; 0: not measured yet."""
    utilisation: float | None = None
    """Share of the time of the last few rounds that went into inner steps; None: not known yet."""
    loss: float | None = None
    """Training loss, mean of the newest round."""
    partner: str = ""
    """Peer id of the partner of the last round that has ended; empty: its outer step was taken alone."""
    device: str = ""
    num_parameters: int = 0
    """Parameters of the model, or of the stage, that the trainer holds."""
    microbatch: int = 0
    """Sequences of a batch that the trainer takes at a time, if it has no memory for more; 0: all."""
    device_memory: tuple[int, int] | None = None
    """Bytes of the GPU that the trainer has taken, and that it has; None on the CPU."""
    trainer_restarts: int = 0
    is_trainer_dead: bool = False
    """The trainer died, and the next one is not ready yet."""
    round_steps: int = 0
    """Inner steps of a round; 0: as many as its time allows."""
    round_seconds: float = 0.0
    """Length of a round that is boxed in time; 0: it is not boxed."""


class NodeState(TrainingState, frozen=True, kw_only=True):
    """A node's current activity, and the progress of its training."""

    phase: Phase = "starting"
    phase_detail: str = ""
    """What is being done or waited for, in words."""
    phase_since: float = 0.0
    waits_for: str = ""
    """Empty when nothing is waited for."""
    isolation: str = ""
    """What a node without a connection to any member does about it, in words; empty when it has a connection, or
    knows of no member."""
    clock: ClockSkew | None = None
    """The difference of this node's clock to those of the members that it has reached; None if there is none."""
    release_conflict: ReleaseConflict | None = None
    """Connected peers that run a release that this node cannot average with; None if there are none."""
    round_since: float = 0.0
    """When the round began."""
    stage: int = 0
    """The stage that this node holds, where the model is cut into several."""
    trainer_pid: int | None = None


def training_of(state: NodeState) -> TrainingState:
    """Return the part of a node's state that is about its training."""
    return TrainingState(**{name: getattr(state, name) for name in TrainingState.__struct_fields__})


def beat_of(state: NodeState) -> Beat:
    """Return the heartbeat of a node in this state."""
    loss = None
    if state.loss is not None and not math.isnan(state.loss):  # NaN while the replica diverges
        loss = int(min(state.loss * LOSS_SCALE, MAX_SMALL))
    partner = public_key_of(state.partner)[:PARTNER_BYTES] if state.partner else b""
    return Beat(state.inner_steps, min(state.round, MAX_SMALL), loss, int(state.tokens_per_second), partner)


def speed_of(state: NodeState, num_stages: int) -> float:
    """Return the tokens a second that a node could take through its stage; 0: not measured yet."""
    return state.tokens_per_second if num_stages == 1 else state.speed


def progress_of(state: NodeState, bytes_sent: int, bytes_received: int) -> Progress:
    """Return a node's part of the run's counters."""
    return Progress(state.inner_steps, min(state.round, MAX_SMALL), state.tokens, bytes_sent, bytes_received)

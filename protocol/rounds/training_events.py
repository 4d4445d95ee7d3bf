"""Events, outputs and states of the training loop.

`farandole.protocol.rounds.training_loop` decides; a driver passes it the events and carries out the outputs. The
trainer's reports and commands are the messages of `farandole.protocol.trainer.trainer_messages`, as they are on the
wire: a report is an event, a command an output. Pairing, and the pipeline of a model that is cut, have their own events
and outputs, which are used here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from ..state.node_state import Phase, TrainingState
from ..trainer import trainer_messages as messages
from ..wire.timers import SetTimer, TimerFired
from . import pairing_events as pairing

# Events


@dataclass(frozen=True, slots=True)
class LoopBegan:
    """The node is in its run: train."""

    state: TrainingState
    """The state from earlier lives."""
    rest: str = ""
    """See `RestChanged`."""


@dataclass(frozen=True, slots=True)
class TrainerEnded:
    """The trainer process has ended, or could not be started."""

    error: str = ""
    """Why it died; empty if it ended as `EndTrainer` asked."""
    cause: messages.Cause = "fault"


@dataclass(frozen=True, slots=True)
class OthersMoved:
    """The other nodes are in this round, as far as this node believes them; 0: unknown."""

    round: int


@dataclass(frozen=True, slots=True)
class RestChanged:
    """The reasons to rest changed."""

    words: str
    """All of them, for people; empty if there is none."""


class Signal(enum.Enum):
    """Events without content."""

    LEAVE = "leave"  # the node leaves: save the result of the last outer step, and end
    SAVE = "save"  # a peer asks for newer weights: write a checkpoint, unless one is being written
    RESTART = "restart"  # weights of another stage are due: start another trainer; unsaved progress is lost
    DATA_OVER = "data over"  # the data's epochs are all done: exchange this round's contribution, and end
    RUN_STOPPED = "run stopped"  # by its creator: exchange this round's contribution, and end


TrainerReport = (
    messages.Prepared
    | messages.Progress
    | messages.Contributed
    | messages.OuterStepTaken
    | messages.Validated
    | messages.Replayed
    | messages.Saved
    | messages.Pong
)
"""The reports of the trainer that the loop handles."""

Event = (
    LoopBegan
    | TrainerReport
    | TrainerEnded
    | OthersMoved
    | RestChanged
    | Signal
    | messages.Replay
    | pairing.ExchangeEnded
    | pairing.MessageReceived
    | pairing.PeerLost
    | pairing.PeersChanged
    | pairing.TrafficSaved
    | TimerFired
)
"""A `Replay` is a round of an author's, which must be replayed before the next round begins; one at a time."""


# Outputs


@dataclass(frozen=True, slots=True)
class StartTrainer:
    """Get weights, start a trainer process; come back with `Prepared` or `TrainerEnded`."""


@dataclass(frozen=True, slots=True)
class EndTrainer:
    """End the trainer process, and everything that runs with it; come back with `TrainerEnded`."""

    at_once: bool = False
    """Kill it, because its memory is needed."""


@dataclass(frozen=True, slots=True)
class KillTrainer:
    """Kill a trainer that hangs; `TrainerEnded` follows with this error."""

    error: str


@dataclass(frozen=True, slots=True)
class GiveUpExchange:
    """End the running exchange unless it is decided; the partner receives the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Enter:
    """Show this phase."""

    phase: Phase
    detail: str
    waits_for: str = ""


# `Say.cause` of a checkpoint that could not be written; the first line of a status shows it (`NodeStatus.disk`).
UNSAVED = "disk: checkpoint"


@dataclass(frozen=True, slots=True)
class Say:
    """Print a line at the terminal; print and keep a warning (``warn``); or only keep it (``note``)."""

    text: str
    how: Literal["say", "warn", "note"] = "say"
    cause: str = ""
    """Of a warning that ends: what ends it (`farandole.node.status.journal.Journal.over`)."""


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """A round whose outer step is taken."""

    contributed: messages.Contributed
    exchanges: tuple[pairing.ExchangeEnded, ...] = ()
    """In order: all but the last have failed, and that one too where the outer step is taken alone."""
    alone: str = ""
    """Why the outer step is taken alone, for people; empty: it is taken with the last exchange's partner."""
    late_steps: int = 0
    """Inner steps between the contribution and the outer step."""


@dataclass(frozen=True, slots=True)
class LoopOver:
    """The loop has ended: every round is done, the node leaves, or no trainer can be had."""

    error: str = ""
    """Why no trainer can be had; empty otherwise."""


Output = (
    StartTrainer
    | EndTrainer
    | KillTrainer
    | messages.Command
    | pairing.StartExchange
    | GiveUpExchange
    | pairing.SendMessage
    | pairing.Missed
    | SetTimer
    | TrainingState
    | Enter
    | Say
    | RoundEnd
    | messages.Validated
    | LoopOver
)
"""The driver sends a command to the trainer, records a round and a validation, and publishes a state: heartbeats and
the status show it."""


class LoopState(enum.Enum):
    """The states of the loop."""

    IDLE = "idle"  # not in the run yet
    PREPARING = "preparing"  # weights are fetched, and a trainer loads them
    TRAINING = "training"  # round after round
    LEAVING = "leaving"  # the last exchange has a short time to end; the last save follows
    ENDING = "ending"  # the trainer writes its last checkpoint
    STOPPING = "stopping"  # the trainer process ends
    WAITING = "waiting"  # the trainer died; the next one is due later
    RESTING = "resting"  # no trainer: its owner wants the machine
    OVER = "over"


# The life of the loop: state -> the states that may follow. A trainer lives in the second line and in the third.
FOLLOWING: dict[LoopState, frozenset[LoopState]] = {
    LoopState.IDLE: frozenset({LoopState.PREPARING, LoopState.RESTING, LoopState.OVER}),
    LoopState.PREPARING: frozenset({LoopState.TRAINING, LoopState.STOPPING, LoopState.WAITING, LoopState.OVER}),
    LoopState.TRAINING: frozenset(
        {LoopState.LEAVING, LoopState.ENDING, LoopState.STOPPING, LoopState.WAITING, LoopState.OVER}
    ),
    LoopState.LEAVING: frozenset({LoopState.ENDING, LoopState.STOPPING, LoopState.OVER}),
    LoopState.ENDING: frozenset({LoopState.STOPPING, LoopState.WAITING, LoopState.RESTING, LoopState.OVER}),
    LoopState.STOPPING: frozenset({LoopState.PREPARING, LoopState.RESTING, LoopState.OVER}),
    LoopState.WAITING: frozenset({LoopState.PREPARING, LoopState.RESTING, LoopState.OVER}),
    LoopState.RESTING: frozenset({LoopState.PREPARING, LoopState.OVER}),
    LoopState.OVER: frozenset(),
}

"""Events, outputs and states of the training loop.

`farandole.protocol.training_loop` decides; a driver brings it the events and carries the outputs out. What the trainer
reports and what it is told are the messages of `farandole.protocol.trainer_messages`, as they are on the wire; what
pairing and the pipeline of a model that is cut are told and ask for are their own events and outputs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from . import pairing_events as pairing
from . import trainer_messages as messages
from .node_state import Phase, TrainingState
from .pipeline_events import Measure, Measured, RoundBegan, RoundDrained, RoundEnds

# Events


@dataclass(frozen=True, slots=True)
class LoopBegan:
    """The node is in its run: train."""

    state: TrainingState
    """Of earlier lives."""
    rest: str = ""
    """As in `RestChanged`."""


@dataclass(frozen=True, slots=True)
class TrainerReady:
    """The trainer that `StartTrainer` asked for has loaded weights, text and model."""

    prepared: messages.Prepared
    stage: int = 0
    microbatch: int = 0


@dataclass(frozen=True, slots=True)
class TrainerEnded:
    """The trainer process is gone, or could not be started."""

    error: str = ""
    """Why it died; empty if it ended as `EndTrainer` asked."""
    cause: messages.Cause = "fault"


@dataclass(frozen=True, slots=True)
class ExchangeOver:
    """An exchange has ended."""

    start: pairing.StartExchange
    is_committed: bool
    is_broken: bool = False
    """It was not committed, and no contribution was refused: another partner may do."""
    partner_size: int = 0
    """Bytes of the partner's contribution."""
    partner_tokens: int = 0
    reason: str = ""
    """Why it was not committed, for people."""
    has_counted: bool = True
    """Whether anything of the partner's contribution is averaged."""


@dataclass(frozen=True, slots=True)
class OthersMoved:
    """The other nodes are in this round, as far as this node believes them; 0: not known."""

    round: int


@dataclass(frozen=True, slots=True)
class RestChanged:
    """The reasons to rest changed."""

    words: str
    """All of them, for people; empty if there is none."""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """The node leaves: save what the last outer step gave, and end."""


@dataclass(frozen=True, slots=True)
class SaveAsked:
    """A peer asks for newer weights: write a checkpoint, unless one is being written."""


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """Other weights are due, of another stage: start another trainer. What was not saved is lost."""


@dataclass(frozen=True, slots=True)
class DataOver:
    """All epochs are done: exchange what this round has, and end."""


@dataclass(frozen=True, slots=True)
class ReplayAsked:
    """A round is to be replayed before the next one begins; one at a time."""

    command: messages.Replay


@dataclass(frozen=True, slots=True)
class RunStopped:
    """The run's creator has stopped it: exchange what this round has, and end."""


TrainerReport = (
    messages.Progress
    | messages.Contributed
    | messages.OuterStepTaken
    | messages.Validated
    | messages.Replayed
    | messages.Saved
    | messages.Pong
)
"""What the loop hears of the trainer, of all that it reports."""

Event = (
    LoopBegan
    | TrainerReady
    | TrainerReport
    | TrainerEnded
    | ExchangeOver
    | OthersMoved
    | RestChanged
    | LeaveAsked
    | SaveAsked
    | RestartAsked
    | DataOver
    | ReplayAsked
    | RunStopped
    | RoundDrained
    | Measured
    | pairing.MessageReceived
    | pairing.PeerLost
    | pairing.PeersChanged
    | pairing.TrafficSaved
    | pairing.TimerFired
)


# Outputs


@dataclass(frozen=True, slots=True)
class StartTrainer:
    """Get weights, start a trainer process; come back with `TrainerReady` or `TrainerEnded`."""


@dataclass(frozen=True, slots=True)
class EndTrainer:
    """End the trainer process, and what runs with it; come back with `TrainerEnded`."""

    at_once: bool = False
    """Kill it: its memory is wanted."""


@dataclass(frozen=True, slots=True)
class KillTrainer:
    """Kill a trainer that hangs; `TrainerEnded` comes with this error."""

    error: str


@dataclass(frozen=True, slots=True)
class TellTrainer:
    """Send the trainer a command."""

    command: messages.Command


@dataclass(frozen=True, slots=True)
class GiveUpExchange:
    """End the exchange that runs, unless it is decided; the partner learns the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Publish:
    """The training's state is this now: heartbeats and the status show it."""

    state: TrainingState


@dataclass(frozen=True, slots=True)
class Enter:
    """Show this phase."""

    phase: Phase
    detail: str
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class Say:
    """Print a line at the terminal; print and keep a warning (``warn``); or keep it for people who look (``note``)."""

    text: str
    how: Literal["say", "warn", "note"] = "say"


@dataclass(frozen=True, slots=True)
class RoundOver:
    """Record a round whose outer step is taken."""

    contributed: messages.Contributed
    late_steps: int


@dataclass(frozen=True, slots=True)
class LoopOver:
    """The loop has ended: every round is done, the node leaves, or no trainer can be had."""

    error: str = ""
    """Why no trainer can be had; empty otherwise."""


Output = (
    StartTrainer
    | EndTrainer
    | KillTrainer
    | TellTrainer
    | RoundBegan
    | RoundEnds
    | Measure
    | pairing.StartExchange
    | GiveUpExchange
    | pairing.SendMessage
    | pairing.SetTimer
    | Publish
    | Enter
    | Say
    | pairing.GoAlone
    | RoundOver
    | messages.Validated
    | LoopOver
)
"""The driver records `GoAlone` and `Validated`."""


class LoopState(enum.Enum):
    """Where the loop stands."""

    IDLE = "idle"  # not in the run yet
    PREPARING = "preparing"  # weights are fetched, and a trainer loads them
    TRAINING = "training"  # round after round
    LEAVING = "leaving"  # the last exchange has a moment to end, then comes the last save
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
HAS_TRAINER = frozenset({LoopState.TRAINING, LoopState.LEAVING, LoopState.ENDING})

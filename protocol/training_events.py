"""Events, outputs and states of the training loop.

`farandole.protocol.training_loop` decides; a driver brings it the events and carries the outputs out. What the trainer
reports and what it is told are the messages of `farandole.protocol.trainer_messages`, as they are on the wire.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from . import pairing_events, pipeline_events
from .node_state import Phase, TrainingState
from .pairing_events import MessageReceived, PeerLost, PeersChanged, SendMessage, SetTimer, TimerFired, TrafficSaved
from .trainer_messages import Cause, Command, Contributed, OuterStepTaken, Pong, Prepared, Progress, Saved, Validated


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

    prepared: Prepared
    stage: int = 0
    microbatch: int = 0


@dataclass(frozen=True, slots=True)
class Reported:
    """The trainer has sent a report."""

    report: Progress | Contributed | OuterStepTaken | Validated | Saved | Pong


@dataclass(frozen=True, slots=True)
class TrainerEnded:
    """The trainer process is gone, or could not be started."""

    error: str = ""
    """Why it died; empty if it ended as `EndTrainer` asked."""
    cause: Cause = "fault"


@dataclass(frozen=True, slots=True)
class ExchangeOver:
    """The exchange that `RunExchange` asked for has ended."""

    start: pairing_events.StartExchange
    is_committed: bool
    reason: str = ""
    """Why it was not committed, for people."""
    is_broken: bool = False
    """It was not committed, and no contribution was refused: another partner may do."""
    partner_size: int = 0
    """Bytes of the partner's contribution."""
    partner_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PipelineDrained:
    """No microbatch of the round is under way in the pipeline any more: its contribution can be made."""

    round: int


@dataclass(frozen=True, slots=True)
class PipelineMeasured:
    """The trainer has the losses of the validation text that went through the pipeline."""


@dataclass(frozen=True, slots=True)
class OthersMoved:
    """The other nodes are in this round; 0 without others."""

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


Event = (
    LoopBegan
    | TrainerReady
    | Reported
    | TrainerEnded
    | ExchangeOver
    | PipelineDrained
    | PipelineMeasured
    | OthersMoved
    | RestChanged
    | LeaveAsked
    | SaveAsked
    | RestartAsked
    | DataOver
    | MessageReceived
    | PeerLost
    | PeersChanged
    | TrafficSaved
    | TimerFired
)


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

    command: Command


@dataclass(frozen=True, slots=True)
class TellPipeline:
    """Pass an event to the pipeline of a model that is cut into stages."""

    event: pipeline_events.RoundBegan | pipeline_events.RoundEnds | pipeline_events.Measure


@dataclass(frozen=True, slots=True)
class RunExchange:
    """Exchange contributions; come back with `ExchangeOver` by the deadline."""

    start: pairing_events.StartExchange


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
    is_said: bool = False
    """Print the detail at the terminal, too."""


@dataclass(frozen=True, slots=True)
class Say:
    """Print a line at the terminal."""

    text: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Print and keep a warning."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """Keep an event for people who look."""

    text: str


@dataclass(frozen=True, slots=True)
class WentAlone:
    """Record that a round has no partner."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class RoundOver:
    """Record a round whose outer step is taken."""

    contributed: Contributed
    late_steps: int


@dataclass(frozen=True, slots=True)
class ValidationMeasured:
    """Record the validation loss after a round."""

    round: int
    loss: float


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
    | TellPipeline
    | RunExchange
    | GiveUpExchange
    | SendMessage
    | SetTimer
    | Publish
    | Enter
    | Say
    | Warn
    | Note
    | WentAlone
    | RoundOver
    | ValidationMeasured
    | LoopOver
)


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

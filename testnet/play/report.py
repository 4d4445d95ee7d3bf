"""The result of a testnet run: ``report.json``, and whether it is a pass.

Fields are added, never renamed, as scripts read them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from farandole.node.status.status import PipelineStatus, Resources

from .fault import FaultReport
from .record import Growth


class NodeReport(msgspec.Struct, frozen=True):
    """One node over all its lives. Losses are in nats per token."""

    index: int
    peer_id: str
    rounds: int
    exchanges_ok: int
    exchanges_alone: int
    exchanges_failed: int
    partners: dict[str, int]
    """Peer id -> committed exchanges with it."""
    bytes_sent: int
    bytes_received: int
    inner_steps: int
    tokens: int
    loss_first: float | None
    loss_last: float | None
    losses: list[tuple[int, float]]
    """(round, mean training loss) of each round that the node took part in."""
    died: bool
    """Whether the node ended by itself."""
    wedged: bool
    restarts: int
    exchanges_since_restart: int
    """Exchanges committed in its present life."""
    is_alive: bool
    """Whether the node was alive at the end of the training."""
    state_root: str
    utilisation: float | None = None
    """Share of its trainer's time spent in inner steps, by the trainer's own clock, in its present life."""
    paths: dict[str, int] = {}
    """Path of contributions ("bulk" or "stream") -> committed exchanges."""
    num_parameters: int = 0
    """Largest number of parameters that its trainer held at any time."""
    pipeline: PipelineStatus | None = None
    """Set where the model is cut into stages."""
    recent_utilisation: float | None = None
    """`utilisation` over the last few rounds."""
    is_doomed: bool = False
    """Whether a fault ended the node for good."""
    home: str = ""
    """Kind of its home, in the NAT lab."""
    condition_seconds: dict[str, float] = {}
    """Seconds in each condition, such as absent, starting, working, frozen; see `farandole.testnet.play.record`."""
    given_seconds: float = 0.0
    """Seconds in which it was alive and not done: neither absent, nor frozen, nor finished."""
    exchange_seconds: list[float] = []
    """Duration of each committed exchange, in order."""
    exchange_bytes: int = 0
    """Bytes sent in the smallest exchange, in which nothing was sent twice."""
    resources: Resources | None = None
    """The node's use of its machine, by its last status."""
    growths: list[Growth] = []
    """Growth of each life that was long enough to measure."""
    exchanges_clipped: int = 0
    """Committed exchanges in which the screening let less of the partner's contribution count, or nothing."""
    exchanges_refused: int = 0
    """Exchanges that the screening of either partner refused."""
    links: dict[str, str] = {}
    """Peer id -> ``direct``, ``punched`` or ``relayed``, of each connection at the end of the training."""


class StageReport(msgspec.Struct, frozen=True):
    """The nodes of one stage at the end of the training."""

    stage: int
    providers: int
    """Number of live providers."""
    inner_steps: int
    """Mean of the live providers."""
    kept: int
    """Number of microbatches kept, in all."""
    dropped: int
    rerouted: int
    taken_out: int
    refused: int
    utilisation: float | None
    """Mean of the live providers over their last few rounds."""


class Beside(msgspec.Struct, frozen=True):
    """A comparison of this play with the same scenario without faults."""

    tokens_per_given_second: float
    loss_merged: float | None
    throughput: float
    """This run's tokens per given second, over the clean run's."""
    loss_above: float | None
    """Share by which this run's merged loss exceeds the clean run's; negative if it is lower."""
    throughput_of_others: float | None = None
    """``throughput`` of the nodes without faults, in both runs."""
    spread: float | None = None
    """This run's spread over the clean run's."""


class PlayReport(msgspec.Struct, frozen=True):
    """The report of a whole play."""

    name: str
    run_id: str
    verdict: Literal["pass", "fail"]
    reasons: list[str]
    """Reasons against a pass."""
    nodes: list[NodeReport]
    loss_first: float | None
    """Mean over nodes of their first round's training loss."""
    loss_last: float | None
    loss_start: float | None
    """Validation loss of the initial weights of all nodes."""
    loss_merged: float | None
    """Validation loss of the mean of all replicas."""
    spread: float | None
    """Mean standard deviation of the weights across replicas, over the weights' root mean square."""
    tokens: int
    tokens_per_second: float
    seconds: float
    """Seconds from the first launch to the end of the training."""
    state_equal: bool
    """Whether the run state's root is the same on every live node."""
    events: list[str]
    """Faults, and other events of the nodes."""
    stages: list[StageReport] = []
    """Reports of the stages, where the model is cut into several."""
    faults: list[FaultReport] = []
    tokens_per_given_second: float | None = None
    """Tokens per second of all nodes while they are alive; see `NodeReport.given_seconds`."""
    beside: Beside | None = None
    """Comparison with the clean run."""
    bits_per_byte_start: float | None = None
    """`loss_start` in bits per byte."""
    bits_per_byte_merged: float | None = None
    """`loss_merged` in bits per byte."""


class Merged(msgspec.Struct, frozen=True):
    """The losses and spread of the mean of all replicas; see `farandole.testnet.play.merge`."""

    loss_start: float
    loss: float
    spread: float
    bits_per_byte_start: float | None = None
    bits_per_byte: float | None = None

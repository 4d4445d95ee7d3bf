"""The result of a testnet run: ``report.json``, whether it is a pass, and the same in words.

Fields are added, never renamed, as scripts read them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from farandole.node.base.figures import bits_per_byte, count, duration, loss
from farandole.node.status.status import PipelineStatus, Resources

from ..report.section import cell
from .fault import FaultReport

UNKNOWN: Final = "not known"


class Growth(msgspec.Struct, frozen=True):
    """Growth from a life's first third to its last, by their medians, without the warm-up."""

    hours: float
    """Hours between the middles of the two."""
    memory: float
    """Share per hour (0.01 is 1 %): the lesser of the growths from third to third, so one allocation is no growth."""
    trainer_memory: float | None
    descriptors: float
    """Increase of their number."""
    tasks: float


class NodeReport(msgspec.Struct):
    """One node over all its lives, filled in by `farandole.testnet.play.record`. Losses are in nats per token."""

    index: int
    peer_id: str
    rounds: int = 0
    exchanges_ok: int = 0
    exchanges_alone: int = 0
    exchanges_failed: int = 0
    partners: dict[str, int] = {}
    """Peer id -> committed exchanges with it."""
    bytes_sent: int = 0
    bytes_received: int = 0
    inner_steps: int = 0
    tokens: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    losses: list[tuple[int, float]] = []
    """(round, mean training loss) of each round that the node took part in."""
    died: bool = False
    """Whether the node ended by itself."""
    wedged: bool = False
    restarts: int = 0
    exchanges_since_restart: int = 0
    """Exchanges committed in its present life."""
    is_alive: bool = False
    """Whether the node was alive at the end of the training."""
    state_root: str = ""
    utilisation: float | None = None
    """Share of the time of its last few rounds that went into inner steps."""
    paths: dict[str, int] = {}
    """Path of contributions ("bulk" or "stream") -> committed exchanges."""
    num_parameters: int = 0
    """Largest number of parameters that its trainer held at any time."""
    pipeline: PipelineStatus | None = None
    """Set where the model is cut into stages."""
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
    touched: dict[str, int] = {}
    """Peer id -> the clipped and refused exchanges with it."""
    links: dict[str, str] = {}
    """Peer id -> ``direct``, ``punched`` or ``relayed``, of each connection at the end of the training."""


class StageReport(msgspec.Struct, frozen=True):
    """The nodes of one stage at the end of the training."""

    stage: int
    providers: int
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

    tokens_per_given_second: float | None
    loss_merged: float | None
    throughput: float | None
    """This run's tokens per given second, over the clean run's."""
    loss_above: float | None
    """Share by which this run's merged loss exceeds the clean run's; negative if it is lower."""
    throughput_of_others: float | None = None
    """``throughput`` of the nodes without faults, in both runs."""
    spread: float | None = None
    """This run's spread over the clean run's."""
    exchanges: float | None = None
    """Exchanges of the nodes with one another, over the clean run's."""
    hostile_exchanges: int = 0
    """Exchanges with hostile members, including those that the screening refused."""


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
    faults: list[FaultReport] = []
    tokens_per_given_second: float | None = None
    """Tokens per second of all nodes while they are alive; see `NodeReport.given_seconds`."""
    beside: Beside | None = None
    bits_per_byte_start: float | None = None
    bits_per_byte_merged: float | None = None


class Merged(msgspec.Struct, frozen=True):
    """The fields of these names of a `PlayReport`; see `farandole.testnet.play.merge`."""

    loss_start: float
    loss_merged: float
    spread: float
    bits_per_byte_start: float | None = None
    bits_per_byte_merged: float | None = None


# The result of a play, in words.


def lines_of(report: PlayReport) -> Iterator[str]:
    """Yield all lines."""
    yield from course_lines(report)
    if report.faults or report.beside is not None:
        yield from (*fault_lines(report), *throughput_lines(report))
    yield from stage_lines(report)


def course_lines(report: PlayReport) -> Iterator[str]:
    """Yield lines on training, exchanges, and links."""
    exchanges = sum(node.exchanges_ok for node in report.nodes) // 2
    yield (
        f"{len(report.nodes)} nodes, {count(report.tokens)} tokens in {duration(report.seconds)} "
        f"({count(report.tokens_per_second)}/s), {exchanges} exchanges"
    )
    yield (
        f"training loss {loss(report.loss_first)} -> {loss(report.loss_last)}; "
        f"held-out loss {loss(report.loss_start)} -> {loss(report.loss_merged)}"
        f"{bits_per_byte(report.bits_per_byte_merged)}, mean of all replicas"
    )
    if report.spread is not None:
        yield f"spread of the weights {report.spread:.2%}; run state {'equal' if report.state_equal else 'not equal'}"
    if shares := [node.utilisation for node in report.nodes if node.utilisation is not None]:
        moved = sum((Counter(node.paths) for node in report.nodes), Counter[str]())
        paths = ", ".join(f"{number // 2} by {path}" for path, number in sorted(moved.items())) or "none"
        yield f"trainers in inner steps {min(shares):.1%} to {max(shares):.1%} of the time; exchanges: {paths}"
    clipped = sum(node.exchanges_clipped for node in report.nodes)
    refused = sum(node.exchanges_refused for node in report.nodes)
    if clipped or refused:
        yield f"screening, counted at both partners: {clipped} clipped, {refused} refused"
    if any(node.home for node in report.nodes):
        links = Counter(path for node in report.nodes for path in node.links.values())
        # The two ends of a link may have reported different paths at that moment.
        ways = ", ".join(f"{(number + 1) // 2} {path}" for path, number in sorted(links.items()))
        yield f"links between homes: {ways or 'none'}"


def stage_lines(report: PlayReport) -> Iterator[str]:
    """Yield one line per stage."""
    for stage in report.stages:
        busy = cell(stage.utilisation, "{:.1%}", UNKNOWN)
        yield (
            f"stage {stage.stage}: {stage.providers} nodes, {busy} busy of late; microbatches: {stage.kept} kept, "
            f"{stage.dropped} dropped, {stage.rerouted} sent another way, {stage.taken_out} taken out again"
        )


# The effects of a play's faults on its nodes, in words.


def fault_lines(report: PlayReport) -> Iterator[str]:
    """Yield one line per fault."""
    for fault in report.faults:
        stood = ", ".join(
            f"{node}: {'no step any more' if seconds is None else f'{seconds:.1f} s'}"
            for node, seconds in sorted(fault.standstill.items())
        )
        if fault.kind == "partition":
            stood += f"; one run state {'not' if fault.healed_in is None else f'{fault.healed_in:.1f} s'} after it"
        lasted = "" if fault.duration is None else f" for {fault.duration:g} s"
        nodes = " ".join(map(str, fault.nodes))
        yield (
            f"  {fault.at:7.1f} s  {fault.kind} of {nodes}{lasted}"
            f"{f'; longest without a step: {stood}' if stood else ''}"
        )


def throughput_lines(report: PlayReport) -> list[str]:
    """Return lines on the nodes' time by condition, and the throughput in their given time."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for node in report.nodes:
        for condition, spent in node.condition_seconds.items():
            seconds[condition] += spent
    longest_first = sorted(seconds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{condition} {duration(spent)}" for condition, spent in longest_first)
    given = sum(node.given_seconds for node in report.nodes)
    lines = [
        f"nodes' time: {parts}; given (not absent, frozen or finished) {duration(given)}",
        f"tokens a given second: {count(report.tokens_per_given_second or 0.0)}",
    ]
    if (beside := report.beside) is not None:
        lines.append(
            f"beside the clean run: {cell(beside.throughput, '{:.2%}', UNKNOWN)} of its throughput "
            f"({count(beside.tokens_per_given_second or 0.0)} tokens a given second), "
            f"held-out loss {cell(beside.loss_above, '{:+.2%}', UNKNOWN)}"
        )
        if beside.throughput_of_others is not None:
            lines[-1] += f", nodes without a fault {beside.throughput_of_others:.2%}"
        if beside.spread is not None:
            lines[-1] += f", spread {beside.spread:.2f} of the clean one's"
        if beside.exchanges is not None:
            lines[-1] += f", exchanges {beside.exchanges:.1%}"
    return lines

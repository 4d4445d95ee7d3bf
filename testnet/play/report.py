"""The result of a testnet run: ``report.json``, and whether it is a pass.

Fields are added, never renamed, as scripts read them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from farandole.node.base.figures import BYTES_PER_MBIT
from farandole.node.status.status import PipelineStatus, Resources
from farandole.protocol.run.presets import num_parameters

from .fault import FaultReport
from .record import COUNTERS, Growth, NodeRecord
from .scenario import Scenario

# Descriptors or tasks: one median may include two connections, and the tasks that serve them, that the other lacks.
MAX_MORE: Final = 8


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


_AS_RECORDED: Final = (
    *("index", "peer_id", "tokens", "loss_first", "loss_last", "died", "wedged", "restarts", "is_doomed"),
    *("num_parameters", "pipeline"),
)
"""Fields of `NodeReport` that a `NodeRecord` has, too."""


def node_report(record: NodeRecord, *, is_alive: bool, home: str = "") -> NodeReport:
    """Return the report of one node."""
    status = record.status
    recorded: dict[str, Any] = {name: getattr(record, name) for name in _AS_RECORDED}
    recorded |= {name: record.total(name) for name in COUNTERS}
    return NodeReport(
        **recorded,
        rounds=record.round,
        partners=dict(record.all_partners),
        inner_steps=status.inner_steps if status else 0,
        losses=sorted(record.losses.items()),
        exchanges_since_restart=status.exchanges_ok if status else 0,
        is_alive=is_alive,
        state_root=status.run.state_root if status and is_alive else "",
        utilisation=status.utilisation if status else None,
        recent_utilisation=status.recent_utilisation if status else None,
        paths=dict(record.all_paths),
        home=home,
        condition_seconds=dict(record.ledger.seconds),
        given_seconds=record.ledger.given,
        exchange_seconds=[record.exchanges[at].seconds for at in sorted(record.exchanges)],
        exchange_bytes=min((exchange.bytes_sent for exchange in record.exchanges.values()), default=0),
        exchanges_clipped=sum(exchange.clip < 1.0 for exchange in record.exchanges.values()),
        exchanges_refused=len(record.refused),
        resources=status.resources if status else None,
        growths=record.all_growths,
        links={member.peer_id: member.path for member in status.members if member.path} if status else {},
    )


def stage_reports(scenario: Scenario, nodes: Sequence[NodeReport]) -> list[StageReport]:
    """Return the report of each stage; none where the model is not cut."""
    num_stages = scenario.manifest(0).model.num_stages
    return [_stage_report(stage, nodes) for stage in range(num_stages)] if num_stages > 1 else []


_MICROBATCHES: Final = ("kept", "dropped", "rerouted", "taken_out", "refused")


def _stage_report(stage: int, nodes: Sequence[NodeReport]) -> StageReport:
    parts = [(node, node.pipeline) for node in nodes if node.pipeline is not None and node.pipeline.stage == stage]
    live = [node for node, _ in parts if node.is_alive]
    return StageReport(
        stage=stage,
        providers=len(live),
        inner_steps=round(_mean(float(node.inner_steps) for node in live) or 0),
        **{name: sum(getattr(pipeline, name) for _, pipeline in parts) for name in _MICROBATCHES},
        utilisation=_mean(node.recent_utilisation for node in live),
    )


def make_report(
    scenario: Scenario,
    run_id: bytes,
    nodes: Sequence[NodeReport],
    merged: Merged | None,
    *,
    seconds: float,
    events: Sequence[str],
    problems: Sequence[str] = (),
    faults: Sequence[FaultReport] = (),
) -> PlayReport:
    """Sum up and judge a play; ``problems`` are reasons against a pass that the nodes' figures do not show."""
    reasons = [*problems, *_reasons(scenario, nodes, merged), *_heal_problems(scenario, faults)]
    tokens = sum(node.tokens for node in nodes)
    return PlayReport(
        name=str(scenario.run.get("name", "")),
        run_id=run_id.hex(),
        verdict="fail" if reasons else "pass",
        reasons=reasons,
        nodes=list(nodes),
        loss_first=_mean(node.loss_first for node in nodes),
        loss_last=_mean(node.loss_last for node in nodes),
        loss_start=merged.loss_start if merged else None,
        loss_merged=merged.loss if merged else None,
        spread=merged.spread if merged else None,
        bits_per_byte_start=merged.bits_per_byte_start if merged else None,
        bits_per_byte_merged=merged.bits_per_byte if merged else None,
        tokens=tokens,
        tokens_per_second=tokens / max(seconds, 1e-9),
        seconds=seconds,
        state_equal=is_state_equal(nodes),
        events=list(events),
        stages=stage_reports(scenario, nodes),
        faults=sorted(faults, key=lambda fault: fault.at),
        tokens_per_given_second=tokens / given if (given := sum(node.given_seconds for node in nodes)) else None,
    )


def _heal_problems(scenario: Scenario, faults: Sequence[FaultReport]) -> list[str]:
    most = scenario.max_heal_seconds
    healing = [fault.healed_in for fault in faults if fault.kind == "partition"]
    if most is None or all(seconds is not None and seconds <= most for seconds in healing):
        return []
    words = ", ".join("not at all" if seconds is None else f"{seconds:.1f} s" for seconds in healing)
    return [f"after partitions all nodes had one run state in: {words}; not within {most:g} s"]


def is_state_equal(nodes: Iterable[NodeReport]) -> bool:
    """Return whether all live nodes have the same root; False if there are none."""
    roots = {node.state_root for node in nodes if node.is_alive}
    return len(roots) == 1 and "" not in roots


def _reasons(scenario: Scenario, nodes: Sequence[NodeReport], merged: Merged | None) -> Iterator[str]:
    for node in nodes:
        yield from (f"node {node.index} {problem}" for problem in _node_problems(scenario, node))
    if not is_state_equal(nodes):
        yield "the run state is not equal on all live nodes"
    if merged is None:
        yield "there is no merged model: no replica left a checkpoint"
    elif scenario.max_loss_merged is not None and not merged.loss < scenario.max_loss_merged:
        yield f"the merged model's loss is {merged.loss:.3f}, not below {scenario.max_loss_merged:g}"
    if scenario.max_growth is not None and not any(node.growths for node in nodes):
        yield "no node lived long enough to see whether it grows"
    if scenario.every_round:
        yield from _speed_problems(scenario, nodes)
    yield from _stage_problems(scenario, nodes)


def _node_problems(scenario: Scenario, node: NodeReport) -> Iterator[str]:
    if node.died:
        yield "died"
    if node.wedged:
        yield f"was wedged: its training stood still for {scenario.wedged_after:g} s"
    if not node.is_alive:
        if not node.died and not node.is_doomed:
            yield "was not there at the end"
        return
    if not (node.losses or (node.pipeline and node.inner_steps)):
        yield "never trained"
    if node.rounds < scenario.rounds and not scenario.exchanges_after_faults:
        yield f"reached round {node.rounds} of {scenario.rounds}"
    if len(node.partners) < (required := _required_partners(scenario, node)):
        yield f"had {len(node.partners)} of {required} required partners"
    if node.utilisation is not None and node.utilisation < scenario.min_utilisation:
        yield f"spent {node.utilisation:.1%} of its time in inner steps, not {scenario.min_utilisation:.0%}"
    if node.restarts and not node.exchanges_since_restart:
        yield "exchanged with nobody after it was started again"
    if node.index in scenario.late_joiners and node.losses and node.losses[0][0] == 0:
        yield "joined late and began in round 0: it got no weights from a peer"
    if scenario.max_exchange_over_ideal is not None:
        yield from _exchange_problems(scenario, scenario.max_exchange_over_ideal, node)
    if scenario.max_growth is not None:
        for growth in node.growths:
            yield from _growth_problems(scenario.max_growth, growth)
    if scenario.every_round and (missed := _rounds_missed(node, scenario.rounds)):
        yield f"took no part in rounds {missed}"


def ideal_exchange_seconds(scenario: Scenario, node: NodeReport) -> float:
    """Return the seconds that the home's line needs for its contribution at the slower rate, and a round trip."""
    home = scenario.home[node.index % len(scenario.home)]
    rate = min(home.up_mbit or math.inf, home.down_mbit or math.inf) * BYTES_PER_MBIT
    return node.exchange_bytes / rate + 4 * home.delay_ms / 1e3


def _exchange_problems(scenario: Scenario, most: float, node: NodeReport) -> Iterator[str]:
    if not node.exchange_seconds:
        yield "completed no exchange"
        return
    ideal, median = ideal_exchange_seconds(scenario, node), statistics.median(node.exchange_seconds)
    if median > most * ideal:
        yield f"took {median:.1f} s for an exchange (median), more than {most:g} times the ideal {ideal:.1f} s"
    if node.exchanges_failed:
        yield f"had {node.exchanges_failed} exchanges that failed"


def _growth_problems(most: float, growth: Growth) -> Iterator[str]:
    for name, share in (("memory", growth.memory), ("trainer's memory", growth.trainer_memory)):
        if share is not None and share > most:
            yield f"grew: its {name} by {share:.1%} an hour, over {growth.hours:.1f} h"
    for name, more in (("descriptors", growth.descriptors), ("tasks", growth.tasks)):
        if more > MAX_MORE:
            yield f"grew: {more:g} more {name} after {growth.hours:.1f} h"


def _stage_problems(scenario: Scenario, nodes: Sequence[NodeReport]) -> list[str]:
    """Report stages without a provider at the end, and nodes that held the whole model."""
    stages = stage_reports(scenario, nodes)
    problems = [f"nobody holds stage {stage.stage}" for stage in stages if not stage.providers]
    if stages:
        whole = num_parameters(scenario.manifest(0).model)
        problems += [
            f"node {node.index} held all {whole:,} parameters" for node in nodes if node.num_parameters >= whole
        ]
    return problems


def _required_partners(scenario: Scenario, node: NodeReport) -> int:
    """Return how many partners a node must have: fewer if it joined when few rounds were left.

    On a machine with few cores, the last of many nodes joins that late.
    """
    first = min((round_index for round_index, _ in node.losses), default=0)
    if not first or scenario.exchanges_after_faults:
        return scenario.min_partners
    return min(scenario.min_partners, max(scenario.rounds - first - 1, 1))


def _rounds_missed(node: NodeReport, rounds: int) -> list[int]:
    """Return the rounds that a node missed after the first one that it took part in."""
    taken = {round_index for round_index, _ in node.losses}
    return [index for index in range(min(taken, default=0), rounds) if index not in taken]


def _speed_problems(scenario: Scenario, nodes: Sequence[NodeReport]) -> list[str]:
    """Report slow nodes that took as many inner steps as faster ones, where rounds have a fixed duration."""
    alive = [node for node in nodes if node.is_alive]
    fastest = [node for node in alive if scenario.slowness(node.index) == min(scenario.slow, default=1.0)]
    slowest = [node for node in alive if scenario.slowness(node.index) == max(scenario.slow, default=1.0)]
    return [
        f"node {slow.index} took as many inner steps ({slow.inner_steps}) as the faster node {fast.index}"
        for slow in slowest
        for fast in fastest
        if scenario.slowness(slow.index) > scenario.slowness(fast.index) and slow.inner_steps >= fast.inner_steps
    ]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None

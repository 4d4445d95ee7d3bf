"""The verdict on a play: its report, from the nodes' records and the scenario's conditions."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from farandole.node.base.figures import BYTES_PER_MBIT
from farandole.protocol.run.models import num_parameters

from ..report.section import cell
from .fault import FaultReport
from .report import UNKNOWN, Beside, Merged, NodeReport, PlayReport, StageReport
from .scenario import Scenario

# Descriptors or tasks: one median may include two connections, and the tasks that serve them, that the other lacks.
MAX_MORE: Final = 8
_MICROBATCHES: Final = ("kept", "dropped", "rerouted", "taken_out", "refused")


def stage_reports(scenario: Scenario, nodes: Sequence[NodeReport]) -> list[StageReport]:
    """Return the report of each stage; none where the model is not cut."""
    num_stages = scenario.manifest(0).model.num_stages
    reports = []
    for stage in range(num_stages if num_stages > 1 else 0):
        parts = [(node, node.pipeline) for node in nodes if node.pipeline is not None and node.pipeline.stage == stage]
        live = [node for node, _ in parts if node.is_alive]
        reports.append(
            StageReport(
                stage=stage,
                providers=len(live),
                inner_steps=round(_mean(float(node.inner_steps) for node in live) or 0),
                **{name: sum(getattr(pipeline, name) for _, pipeline in parts) for name in _MICROBATCHES},
                utilisation=_mean(node.utilisation for node in live),
            )
        )
    return reports


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
    reasons = [*problems, *_reasons(scenario, nodes, merged)]
    tokens = sum(node.tokens for node in nodes)
    report = PlayReport(
        name=str(scenario.run.get("name", "")),
        run_id=run_id.hex(),
        verdict="pass",
        reasons=reasons,
        nodes=list(nodes),
        loss_first=_mean(node.loss_first for node in nodes),
        loss_last=_mean(node.loss_last for node in nodes),
        **(msgspec.structs.asdict(merged) if merged else dict.fromkeys(Merged.__struct_fields__)),
        tokens=tokens,
        tokens_per_second=tokens / max(seconds, 1e-9),
        seconds=seconds,
        state_equal=is_state_equal(nodes),
        events=list(events),
        stages=stage_reports(scenario, nodes),
        faults=sorted(faults, key=lambda fault: fault.at),
        tokens_per_given_second=tokens / given if (given := sum(node.given_seconds for node in nodes)) else None,
    )
    return _with_verdict(report, conditions_of_play(report, scenario))


def _with_verdict(report: PlayReport, conditions: Iterable[Condition]) -> PlayReport:
    reasons = [
        *report.reasons,
        *(f"{each.what}: {each.measured}, not {each.limit}" for each in conditions if not each.is_met),
    ]
    return msgspec.structs.replace(report, reasons=reasons, verdict="fail" if reasons else "pass")


class Condition(NamedTuple):
    """A limit of a scenario, and what was measured, in words."""

    what: str
    measured: str
    limit: str
    is_met: bool


def conditions_of_play(report: PlayReport, scenario: Scenario) -> Iterator[Condition]:
    """Yield the scenario's conditions on the play as a whole. Those on each node alone are in `_node_problems`."""
    loss, most = report.loss_merged, scenario.max_loss_merged
    if loss is not None and most is not None:
        yield Condition("the merged model's loss", f"{loss:.3f}", f"below {most:g}", loss < most)
    if (most := scenario.max_heal_seconds) is not None:
        healed = [fault.healed_in for fault in report.faults if fault.kind == "partition"]
        words = ", ".join("never" if seconds is None else f"{seconds:.1f} s" for seconds in healed)
        is_met = all(seconds is not None and seconds <= most for seconds in healed)
        yield Condition("one run state after healing", words, f"within {most:g} s", is_met)
    if (most := scenario.max_exchange_over_ideal) is not None:
        alive = [node for node in report.nodes if node.is_alive]
        silent = [node.index for node in alive if not node.exchange_seconds]
        yield Condition("nodes that completed no exchange", ", ".join(map(str, silent)) or "none", "none", not silent)
        over = 0.0  # the seconds that a home's line needs: for the contribution at the slower rate, and a round trip
        for node in alive:
            home = scenario.home[node.index % len(scenario.home)]
            rate = min(home.up_mbit or math.inf, home.down_mbit or math.inf) * BYTES_PER_MBIT
            ideal = node.exchange_bytes / rate + 4 * home.delay_ms / 1e3
            over = max(over, statistics.median(node.exchange_seconds) / ideal if node.exchange_seconds else 0.0)
        yield Condition(
            "an exchange over the ideal (median, worst node)", f"{over:.2f}", f"at most {most:g}", over <= most
        )
        failed = sum(node.exchanges_failed for node in alive)
        yield Condition("exchanges that failed for good", f"{failed}", "0", not failed)
    if (most := scenario.max_growth) is not None:
        growths = [growth for node in report.nodes for growth in node.growths]
        yield Condition("lives that were long enough to see a growth", f"{len(growths)}", "at least 1", bool(growths))
        trainers = [growth.trainer_memory for growth in growths if growth.trainer_memory is not None]
        for what, shares in (("memory", [growth.memory for growth in growths]), ("trainer's memory", trainers)):
            worst = max(shares, default=0.0)
            yield Condition(f"{what} an hour, worst life", f"{worst:+.2%}", f"at most {most:+.1%}", worst <= most)
        for what in ("descriptors", "tasks"):
            more = max((getattr(growth, what) for growth in growths), default=0.0)
            yield Condition(f"{what}, worst life", f"{more:+g}", f"at most +{MAX_MORE}", more <= MAX_MORE)


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
    if scenario.every_round:
        # Where rounds have a fixed duration, slow nodes take fewer inner steps.
        steps: dict[float, list[int]] = defaultdict(list)
        for node in nodes:
            if node.is_alive:
                steps[scenario.slowness(node.index)].append(node.inner_steps)
        if len(steps) > 1 and (most := max(steps[max(steps)])) >= (fewest := min(steps[min(steps)])):
            yield f"one of the slowest nodes took {most} inner steps, and one of the fastest {fewest}"
    stages = stage_reports(scenario, nodes)
    yield from (f"nobody holds stage {stage.stage}" for stage in stages if not stage.providers)
    whole = num_parameters(scenario.manifest(0).model)
    if stages:
        yield from (
            f"node {node.index} held all {whole:,} parameters" for node in nodes if node.num_parameters >= whole
        )


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
    first, required = min((index for index, _ in node.losses), default=0), scenario.partners_required
    if first and not scenario.exchanges_after_faults:  # with few cores, the last of many nodes joins that late
        required = min(required, max(scenario.rounds - first - 1, 1))
    if len(node.partners) < required:
        yield f"had {len(node.partners)} of {required} required partners"
    if node.utilisation is not None and node.utilisation < scenario.min_utilisation:
        yield f"spent {node.utilisation:.1%} of its time in inner steps, not {scenario.min_utilisation:.0%}"
    if node.restarts and not node.exchanges_since_restart:
        yield "exchanged with nobody after it was started again"
    if node.index in scenario.named_by("join") and node.losses and node.losses[0][0] == 0:
        yield "joined late and began in round 0: it got no weights from a peer"
    taken = {round_index for round_index, _ in node.losses}
    missed = [index for index in range(min(taken, default=0), scenario.rounds) if index not in taken]
    if scenario.every_round and missed:
        yield f"took no part in rounds {missed}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


# A comparison of a play with faults with one without: throughput of the live nodes, and loss.


def compare(report: PlayReport, clean: PlayReport) -> Beside:
    """Return the comparison with a play of the same nodes without faults."""
    loss = _over(report.loss_merged, clean.loss_merged)
    others = {node.index for node in report.nodes} - {index for fault in report.faults for index in fault.nodes}
    return Beside(
        clean.tokens_per_given_second,
        clean.loss_merged,
        _over(report.tokens_per_given_second, clean.tokens_per_given_second),
        None if loss is None else loss - 1,
        throughput_of_others=_over(_throughput(report, others), _throughput(clean, others)),
        spread=_over(report.spread, clean.spread),
        exchanges=_over(meetings(report)[0], meetings(clean)[0]),
        hostile_exchanges=sum(meetings(report)[2:]),
    )


def meetings(report: PlayReport) -> list[int]:
    """Return the nodes' exchanges with one another, those that screening touched, and the same with hostile members.

    An exchange of two nodes counts at both. What was touched was refused, or clipped.
    """
    honest = {node.peer_id for node in report.nodes}
    return [
        sum(
            number for node in report.nodes for peer, number in getattr(node, name).items() if (peer in honest) == among
        )
        for among in (True, False)
        for name in ("partners", "touched")
    ]


def _over(mine: float | None, clean: float | None) -> float | None:
    return mine / clean if mine is not None and clean else None


def _throughput(report: PlayReport, indices: Collection[int]) -> float | None:
    nodes = [node for node in report.nodes if node.index in indices]
    given = sum(node.given_seconds for node in nodes)
    return sum(node.tokens for node in nodes) / given if given else None


def conditions_beside(beside: Beside, scenario: Scenario) -> Iterator[Condition]:
    """Yield the scenario's conditions on a comparison."""
    others, spread, loss = beside.throughput_of_others, beside.spread, beside.loss_above
    for what, share, least in (
        ("tokens a second of the living", beside.throughput, scenario.min_throughput),
        ("tokens a second of the others, without a fault", others, scenario.min_throughput_of_others),
        ("exchanges of the nodes with one another", beside.exchanges, scenario.min_exchanges_of_clean),
    ):
        if least:
            words, is_met = cell(share, "{:.1%}", UNKNOWN), share is not None and share >= least
            yield Condition(f"{what}, of clean", words, f"at least {least:.1%}", is_met)
    if (most := scenario.max_spread_over_clean) is not None:
        is_met = spread is not None and spread <= most
        yield Condition("spread of the weights, of clean", cell(spread, "{:.2f}", UNKNOWN), f"at most {most:g}", is_met)
    if (most := scenario.max_loss_above_clean) is not None:
        is_met = loss is not None and loss <= most
        yield Condition("held-out loss beside clean", cell(loss, "{:+.1%}", UNKNOWN), f"at most {most:+.1%}", is_met)
    if scenario.hostile is not None and scenario.hostile.program == "daemon":
        # Absent members exchange with none: then the others have fewer.
        is_met = beside.hostile_exchanges > 0 or (beside.exchanges is not None and beside.exchanges < 1)
        yield Condition("exchanges with hostile members", f"{beside.hostile_exchanges}", "at least 1", is_met)


def judged(report: PlayReport, clean: PlayReport, scenario: Scenario) -> PlayReport:
    """Return the report with the comparison, and with its reasons against a pass, and the clean play's."""
    beside, reasons = compare(report, clean), [*(f"clean: {reason}" for reason in clean.reasons), *report.reasons]
    report = msgspec.structs.replace(report, beside=beside, reasons=reasons)
    return _with_verdict(report, conditions_beside(beside, scenario))

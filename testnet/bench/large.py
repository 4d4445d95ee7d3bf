"""A model of useful size on usual lines: 125 or 350 M parameters, real nodes in homes of their own, long rounds.

What an exchange, a checkpoint and a join cost at this size without a line in between is measured by `bench exchange`,
`bench save` and `bench join`; here everything happens at once, on the cores that train.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median
from typing import Annotated, Any

import msgspec
import typer

from farandole.node.base.figures import BYTES_PER_MBIT

from ..play.launch import Testnet, play_and_report
from ..play.live import open_view
from ..play.report import NodeReport, PlayReport
from ..play.scenario import Scenario, load_scenario
from ..report.section import Grid
from .process import BenchError
from .report import OUT, BenchReport, Out, Write, open_bench


def run(
    name: Annotated[str, typer.Option("--scenario", help="A scenario with lines.")] = "large",
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Measure what a round of 125 M parameters takes on lines of 20 Mbit/s (12 minutes; Linux, root, 18 GB of memory).

    The scenario larger has 350 M parameters, and needs 24 GB.

    Examples: [cyan]farandole testnet bench large[/cyan];
    [cyan]farandole testnet bench large --scenario larger --out out/bench/350M[/cyan]
    """
    scenario = load_scenario(name)
    if scenario.link is None or scenario.link.up_mbit is None:
        raise BenchError(f"the nodes of {name} have no lines: name a scenario with up_mbit in [link]")
    with open_bench("large", out, write, scenario=name, nodes=scenario.nodes) as bench:
        with open_view(bench.console) as view:
            play = play_and_report(Testnet(scenario, (out / "large").absolute(), view))
        bench.publish(report(bench.setting, scenario, play))


def report(setting: Mapping[str, Any], scenario: Scenario, play: PlayReport) -> BenchReport:
    """Return the table and its data."""
    assert scenario.link is not None
    assert scenario.link.up_mbit is not None
    manifest = scenario.manifest(0.0)
    seconds = manifest.rounds.round_seconds
    header = [
        *("node", "exchanges", "alone", "a contribution, MB", "exchange, s", "of the line", "inner step, s", "busy"),
        *("rest of a round, s", "mesh process, MB", "trainer, GB"),
    ]
    rows = [_row(node, scenario.link.up_mbit * BYTES_PER_MBIT, seconds) for node in play.nodes]
    parameters = max(node.num_parameters for node in play.nodes)
    words = [
        f"{parameters:,} parameters, contexts of {manifest.model.context} tokens, rounds of {seconds:g} s, "
        f"{manifest.outer.codec}, a contribution in {manifest.outer.fragments} parts, {scenario.link.up_mbit:g} Mbit/s "
        f"up, {scenario.link.delay_ms:g} ms from one home to another. *Exchange*: median. *Of the line*: the rate of a "
        "contribution in the exchange's whole time, over the line's. *Busy*: share of its time that a trainer spent in "
        "inner steps, by its own clock, from its first round on; *rest of a round*: what encoding, decoding, the outer "
        "step and waiting took. Resident memory at the end.",
        f"Loss of the mean of all replicas on held-out text: {play.loss_start or 0:.3f} before, "
        f"{play.loss_merged or 0:.3f} after {fmean(node.inner_steps for node in play.nodes):.0f} inner steps of each.",
    ]
    return BenchReport(
        setting, [Grid("Nodes", header, rows)], {"play": msgspec.to_builtins(play)}, words, list(play.reasons)
    )


def _row(node: NodeReport, line: float, round_seconds: float) -> list[str]:
    """Return one node's figures; ``line``: bytes a second up."""
    seconds = median(node.exchange_seconds) if node.exchange_seconds else float("nan")
    busy = node.utilisation or 0.0
    resources = node.resources
    trainer = resources.trainer_memory if resources else None
    return [
        str(node.index),
        str(node.exchanges_ok),
        str(node.exchanges_alone + node.exchanges_failed),
        f"{node.exchange_bytes / 1e6:.1f}",
        f"{seconds:.1f}",
        f"{node.exchange_bytes / seconds / line:.2f}",
        f"{busy * round_seconds * max(node.rounds, 1) / max(node.inner_steps, 1):.2f}",
        f"{busy:.1%}",
        f"{(1 - busy) * round_seconds:.1f}",
        f"{resources.memory / 1e6:.0f}" if resources else "",
        f"{trainer / 1e9:.2f}" if trainer else "",
    ]

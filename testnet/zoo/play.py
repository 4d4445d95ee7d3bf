"""Play a scenario with hostile members, and before it the honest alone, to measure the cost of the attack.

Both plays have the same run and keys, and so the same initial weights and the same batches, for the same number of
rounds; only the pairing is random. A round ends with its exchange and not with a clock, so a busy machine makes both
plays longer and neither worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec

from farandole.protocol.run.manifest import Manifest

from ..play.launch import Testnet, load_report, play_and_report
from ..play.merge import measuring_learner
from ..play.report import Merged, PlayReport
from ..play.scenario import Scenario
from ..report.section import Grid
from .member_attacks import check_attack

CLEAN, HOSTILE = "clean", "hostile"
OUTCOME_NAME: Final = "hostile.json"
# 32 batches of 16 x 64 tokens measure the loss to about 0.01; both plays use the same ones, so that the error cancels.
VALIDATION_BATCHES: Final = 32


class Conduct(msgspec.Struct, frozen=True):
    """Figures of all honest members of a play; an exchange between two of them counts at both."""

    loss: float
    """Mean over members of the loss of their own weights on held-out text, in nats per token."""
    honest_exchanges: int
    """Committed exchanges with one another."""
    honest_touched: int
    """Exchanges with one another that the screening of either refused, or clipped."""
    hostile_exchanges: int = 0
    """Committed exchanges with hostile members."""
    hostile_touched: int = 0
    """Exchanges with hostile members that the screening of either refused, or clipped."""


def conduct_of(report: PlayReport) -> Conduct:
    """Return the figures of a play that `measure_members` has measured."""
    honest = {node.peer_id for node in report.nodes}
    counts = [
        sum(
            number for node in report.nodes for peer, number in getattr(node, name).items() if (peer in honest) == among
        )
        for among in (True, False)
        for name in ("partners", "touched")
    ]
    loss = float("nan") if report.loss_merged is None else report.loss_merged
    return Conduct(loss, *counts)


def measure_members(manifest: Manifest, run_id: bytes, checkpoints: Sequence[Path], data: Sequence[str]) -> Merged:
    """Measure the mean loss of the members' own weights, where other plays have the loss of their mean."""
    learner = measuring_learner(manifest, run_id, data)
    losses = [learner.evaluate(VALIDATION_BATCHES)]
    for path in checkpoints:
        learner.checkpoint.load(path)
        losses.append(learner.evaluate(VALIDATION_BATCHES))
    return Merged(losses[0], fmean(losses[1:]), 0.0)


class HostileReport(msgspec.Struct, frozen=True):
    """The result of both plays: ``hostile.json``."""

    name: str
    reasons: list[str]
    """Harm done to the honest members, in words; empty: a pass."""
    clean: Conduct
    """Conduct of the honest members alone."""
    attacked: Conduct

    @property
    def loss_above(self) -> float:
        """Return the share by which the honest members' loss exceeds the loss of the honest alone."""
        return self.attacked.loss / self.clean.loss - 1


def play_hostile(scenario: Scenario, out: Path, say: Callable[[str], None], clean: Path | None = None) -> HostileReport:
    """Play the honest alone, unless ``clean`` has such a play, and with the hostile, in folders of ``out``; judge.

    Raises as `Testnet.play` does, and `ScenarioError`; `KeyboardInterrupt` if a person ends it.
    """
    assert scenario.hostile is not None, "there are hostile members"
    check_attack(scenario.hostile.attack)
    clean = clean or play_clean(scenario, out / CLEAN, say)
    say(f"attacked: {scenario.nodes} honest nodes and {scenario.hostile.members} hostile processes")
    attacked = Testnet(scenario, out / HOSTILE, say, measure=measure_members, like=clean)
    made = judge(scenario, load_report(clean), play_and_report(attacked))
    (out / OUTCOME_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    return made


def play_clean(scenario: Scenario, folder: Path, say: Callable[[str], None]) -> Path:
    """Play the honest alone in a folder, and return it; raises as `play_hostile` does."""
    say(f"alone: {scenario.nodes} honest nodes")
    play_and_report(Testnet(scenario.clean, folder, say, measure=measure_members))
    return folder


def judge(scenario: Scenario, clean: PlayReport, attacked: PlayReport) -> HostileReport:
    """Return the verdict on both plays."""
    made = HostileReport(str(scenario.run.get("name", "")), [], conduct_of(clean), conduct_of(attacked))
    reasons = [*(f"the honest alone: {reason}" for reason in clean.reasons), *attacked.reasons]
    return msgspec.structs.replace(made, reasons=[*reasons, *_harm(scenario, made)])


def _harm(scenario: Scenario, made: HostileReport) -> Iterator[str]:
    clean, attacked, hostile = made.clean, made.attacked, scenario.hostile
    assert hostile is not None
    if not made.loss_above <= (most := hostile.max_loss_above_clean):
        yield f"the honest members' loss is {made.loss_above:+.1%} of that of the honest alone, not at most {most:+.1%}"
    if attacked.honest_exchanges < hostile.min_exchanges * clean.honest_exchanges:
        yield (
            f"the honest members had {attacked.honest_exchanges} exchanges with one another, "
            f"and {clean.honest_exchanges} alone: less than {hostile.min_exchanges:.0%}"
        )
    has_met = attacked.hostile_exchanges or attacked.hostile_touched
    if hostile.program == "daemon" and not has_met and attacked.honest_exchanges >= clean.honest_exchanges:
        yield "no honest member met a hostile one: nothing was tried"


def grid_of(reports: Sequence[HostileReport]) -> Grid:
    """Return the table of plays with one honest play in common: a column for each."""
    names = ["the honest alone", *(made.name.removeprefix("hostile-") for made in reports)]
    conducts = [reports[0].clean, *(made.attacked for made in reports)]
    rows = [
        [name.replace("_", " "), *(f"{getattr(each, name)}" for each in conducts)] for name in Conduct.__struct_fields__
    ]
    rows[0] = ["loss", *(f"{each.loss:.3f}" for each in conducts)]
    rows.insert(1, ["above alone", "", *(f"{made.loss_above:+.1%}" for made in reports)])
    rows.append(["verdict", "", *("FAIL" if made.reasons else "pass" for made in reports)])
    return Grid("What hostile members cost the honest ones", ["", *names], rows)

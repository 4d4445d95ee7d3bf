"""Play a scenario with hostile members, and before it the honest alone, to measure the cost of the attack.

Both plays have the same run and keys, and so the same initial weights and the same batches, for the same number of
rounds; only the pairing is random. A round ends with its exchange and not with a clock, so a busy machine makes both
plays longer and neither worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from farandole.protocol.run.manifest import Manifest

from ..play.judge import judged
from ..play.launch import Testnet, load_report, play_and_report, write_report
from ..play.merge import VALIDATION_BATCHES, measuring_learner
from ..play.report import Merged, PlayReport
from ..play.scenario import Scenario
from .member_attacks import check_attack


def measure_members(manifest: Manifest, run_id: bytes, checkpoints: Sequence[Path], data: Sequence[str]) -> Merged:
    """Measure the mean loss of the members' own weights, where other plays have the loss of their mean.

    Both plays use the same batches, so that their error cancels.
    """
    learner = measuring_learner(manifest, run_id, data)
    losses = [learner.evaluate(VALIDATION_BATCHES)]
    for path in checkpoints:
        learner.checkpoint.load(path)
        losses.append(learner.evaluate(VALIDATION_BATCHES))
    return Merged(losses[0], fmean(losses[1:]), 0.0)


def play_hostile(scenario: Scenario, out: Path, say: Callable[[str], None], clean: Path | None = None) -> PlayReport:
    """Play the honest alone, unless the folder ``clean`` has such a play, and in ``out`` with the hostile; judge.

    Raises as `Testnet.play` does, and `ScenarioError`; `KeyboardInterrupt` if a person ends it.
    """
    assert scenario.hostile is not None, "there are hostile members"
    check_attack(scenario.hostile.attack)
    clean = clean or play_clean(scenario, out.with_name(f"{out.name}-clean"), say)
    say(f"attacked: {scenario.nodes} honest nodes and {scenario.hostile.members} hostile processes")
    attacked = play_and_report(Testnet(scenario, out, say, measure=measure_members, like=clean))
    report = judged(attacked, load_report(clean), scenario)
    write_report(report, out)
    return report


def play_clean(scenario: Scenario, folder: Path, say: Callable[[str], None]) -> Path:
    """Play the honest alone in a folder, and return it; raises as `play_hostile` does."""
    say(f"alone: {scenario.nodes} honest nodes")
    play_and_report(Testnet(scenario.clean, folder, say, measure=measure_members))
    return folder

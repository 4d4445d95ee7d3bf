"""A hostile member among real daemons: they refuse its data, go on without it, and report it."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.node.base.settings import NodeSettings
from farandole.node.status.round_log import read_rounds
from farandole.testnet.play.judge import meetings
from farandole.testnet.play.launch import Testnet
from farandole.testnet.play.scenario import parse_scenario
from farandole.testnet.zoo.play import measure_members, play_hostile

from ...patience import PATIENCE
from ..play.playing import silent

RUN = {
    "name": "hostile",
    "model": "tiny",
    "inner": {"learning_rate": 3e-3, "warmup_steps": 5, "total_steps": 100, "batch_size": 4},
    "rounds": {"inner_steps": 2, "round_seconds": 0, "exchange_seconds": 10},
}


async def test_a_member_that_sends_scaled_weights_is_refused_and_named(tmp_path: Path) -> None:
    settings = {"nodes": 2, "rounds": 256, "exchanges_after_faults": 12, "min_partners": 1, "step_seconds": 0.1}
    hostile = {"members": 1, "attack": "scale-3.9"}
    scenario = parse_scenario({"run": RUN, "hostile": hostile, "timeout": PATIENCE, **settings})
    report = await Testnet(scenario, tmp_path, silent, measure=measure_members).play()
    assert report.reasons == []
    among_the_honest, _, _, touched = meetings(report)
    assert among_the_honest > 0
    assert touched > 0
    output = "".join((tmp_path / "nodes" / f"{node.index:02d}" / "output").read_text() for node in report.nodes)
    assert "sent contributions that counted in part, or not at all" in output
    assert report.loss_merged is not None
    assert report.loss_merged < 4.5, "they have learned: it was 5.5"


@pytest.mark.soak
@pytest.mark.parametrize("attack", ["overshoot-2", "exam-0.5"])
def test_a_member_that_leads_too_far_or_astray_costs_the_others_little(attack: str, tmp_path: Path) -> None:
    """It sends three times the way that it has learned, or gets worse on all text but what members once judged on."""
    settings = {"nodes": 3, "rounds": 25, "min_partners": 1, "start_together": True}
    inner = {"learning_rate": 3e-3, "warmup_steps": 12, "total_steps": 250, "batch_size": 16}
    rounds = {"inner_steps": 10, "round_seconds": 0, "exchange_seconds": 10}
    run = {**RUN, "inner": inner, "rounds": rounds, "outer": {"kind": "noloco", "codec": "bf16"}}
    hostile = {"members": 1, "attack": attack}
    scenario = parse_scenario({"run": run, "hostile": hostile, "step_seconds": 0.05, "timeout": PATIENCE, **settings})
    report = play_hostile(scenario, tmp_path / "attacked", silent)
    assert report.reasons == []
    _, _, with_the_hostile, touched = meetings(report)
    assert with_the_hostile > touched > 0, "what leads too far counts in part, and the rest in full"
    assert report.beside is not None
    assert report.beside.loss_above is not None
    print(f"\nloss above the honest alone: {report.beside.loss_above:+.2%}")
    assert report.beside.loss_above < 0.03


@pytest.mark.soak
@pytest.mark.parametrize(("num_honest", "num_hostile"), [(4, 1), (6, 2)])
async def test_members_that_agree_and_never_come_cost_the_others_at_most_a_tenth_of_their_averages(
    num_honest: int, num_hostile: int, tmp_path: Path
) -> None:
    """Two plays of 30 rounds of 4 s, the later half of which counts, with time to spare for two cores."""
    rounds = {"inner_steps": 0, "round_seconds": 4.0, "exchange_seconds": 4.0, "overlap": True}

    async def averaged(folder: Path, **hostile: object) -> float:
        """Return the share of rounds with a partner from the 15th on."""
        settings = {"nodes": num_honest, "rounds": 30, "min_partners": 1, "start_together": True, "step_seconds": 0.3}
        waits = {"timeout": 2 * PATIENCE, "wedged_after": PATIENCE}
        scenario = parse_scenario({"run": {**RUN, "rounds": rounds}, **hostile, **waits, **settings})
        report = await Testnet(scenario, folder, silent).play()
        assert report.reasons == []
        homes = (folder / "nodes" / f"{node.index:02d}" for node in report.nodes)
        late = [record for home in homes for record in read_rounds(NodeSettings(home=home).rounds) if record.round > 14]
        return sum(bool(record.partner) for record in late) / len(late)

    attacked = await averaged(
        tmp_path / "attacked", hostile={"members": num_hostile, "trains": False, "pairing": "absent"}
    )
    control = await averaged(tmp_path / "control")
    print(f"\n{attacked:.1%} of rounds averaged; without hostile members {control:.1%}")
    assert attacked >= 0.9 * control

"""A play with hostile members passes only if the honest members are unharmed, and an attack was tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from farandole.testnet.bench.zoo import claims_of
from farandole.testnet.play.scenario import ScenarioError, load_scenario, scenario_names
from farandole.testnet.zoo.conduct import Conduct
from farandole.testnet.zoo.plan import HostileError, environment_of, plan_of, targets_of
from farandole.testnet.zoo.play import HostileReport, Played, intruders_of, judge, play_grid, zoo_grid

from ..play.reports import PASSED

SCENARIO = load_scenario("hostile-capture")
CONDUCT = Conduct(
    losses=[2.0] * 6,
    rounds=240,
    alone=10,
    honest_exchanges=200,
    honest_refused=0,
    honest_clipped=0,
    hostile_met=60,
    hostile_used=0,
    hostile_clipped=0,
    detected_after=[1, 1, 2, None, 1, 1],
    warnings=[],
    processor_share=0.04,
)


def verdict(reasons: tuple[str, ...] = (), **changes: Any) -> HostileReport:
    """Judge a play with these changes for the honest members, compared with a faultless one of honest members alone."""
    attacked = msgspec.structs.replace(CONDUCT, **changes)
    return judge(
        SCENARIO,
        Played(Path(), PASSED, msgspec.structs.replace(CONDUCT, hostile_met=0)),
        Played(Path(), msgspec.structs.replace(PASSED, reasons=list(reasons)), attacked),
    )


def test_the_unharmed_pass() -> None:
    made = verdict(losses=[2.018] * 6)
    assert made.reasons == []
    assert made.loss_above == pytest.approx(0.009)
    assert "+0.9%" in {cell for row in play_grid(made).rows for cell in row}
    assert zoo_grid([made]).rows[0][0] == "capture"
    assert [claim.ours for claim in claims_of([made])] == ["+0.9%", "0"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": [2.0] * 3 + [2.2] * 3}, "loss is +5.0%"),
        ({"losses": [float("nan")] * 6}, "loss is +nan%"),
        ({"losses": [2.0] * 5}, "1 honest members have left no weights"),
        ({"honest_exchanges": 99}, "99 exchanges with one another"),
        ({"hostile_met": 110}, "took 46% of the honest members' rounds"),
        ({"hostile_met": 0}, "nothing was tried"),
        ({"reasons": ("node 1 died",)}, "node 1 died"),
    ],
)
def test_each_harm_fails(changes: dict[str, Any], words: str) -> None:
    made = verdict(**changes)
    assert any(words in reason for reason in made.reasons), made.reasons


def test_of_who_never_exchanges_the_rounds_count_in_which_it_was_waited_for() -> None:
    alone = Played(Path(), PASSED, CONDUCT)
    attacked = Played(Path(), PASSED, msgspec.structs.replace(CONDUCT, alone=82, hostile_met=0))
    made = judge(load_scenario("hostile-absent"), alone, attacked)
    assert (made.reasons, made.hostile_share) == ([], 0.3)


@pytest.mark.parametrize("name", [name for name in scenario_names() if name.startswith("hostile-")])
def test_the_scenarios_are_of_one_run_and_their_attacks_exist(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.hostile is not None
    assert len(intruders_of(scenario.hostile)) == scenario.hostile.members
    assert {**scenario.run, "name": ""} == {**SCENARIO.run, "name": ""}
    assert load_scenario(name, clean=True).hostile is None


def test_an_unknown_attack_is_named() -> None:
    assert SCENARIO.hostile is not None
    with pytest.raises(ScenarioError, match="no attack is called 'rain'"):
        intruders_of(msgspec.structs.replace(SCENARIO.hostile, attack="rain"))


def test_hostile_programs_run_for_a_testnet_alone_and_aim_at_this_machine_alone() -> None:
    assert SCENARIO.hostile is not None
    assert plan_of(environment_of(SCENARIO.hostile)) == SCENARIO.hostile
    with pytest.raises(HostileError, match="started by farandole testnet run"):
        plan_of({})
    peer = "12D3KooWBKAPFdCqzSLYALR8WiUcwmV1hczt9vNrDRfeRQ1rScJf"
    assert list(targets_of({"TESTNET_TARGETS": f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}"}).values())
    with pytest.raises(HostileError, match="not on the loopback interface"):
        targets_of({"TESTNET_TARGETS": f"/ip4/192.0.2.1/tcp/4001/p2p/{peer}"})

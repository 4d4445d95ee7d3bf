"""A play with hostile members passes only if the honest members are unharmed, and an attack was tried."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farandole.testnet.bench.zoo import claims_of, grid_of, loss_above
from farandole.testnet.play.judge import judged, meetings
from farandole.testnet.play.launch import PLAN
from farandole.testnet.play.report import NodeReport, PlayReport
from farandole.testnet.play.scenario import ScenarioError, load_scenario, scenario_names
from farandole.testnet.zoo.member_attacks import check_attack
from farandole.testnet.zoo.plan import HostileError, plan_of, targets_of

from ..play.playing import PASSED, node

SCENARIO = load_scenario("hostile-capture")
ALONE = msgspec.structs.replace(PASSED, loss_merged=2.0, nodes=[node(0, 1_000), node(1, 1_000)])


def verdict(exchanges: int = 160, hostile: int = 20, **changes: Any) -> PlayReport:
    """Judge a play with these changes for the honest members, compared with a faultless one of honest members alone."""

    def meeting(exchanges: int, hostile: int) -> list[NodeReport]:
        one, other = (each.peer_id for each in ALONE.nodes)
        partners = [{other: exchanges // 2, "liar": hostile}, {one: exchanges // 2, "liar": 0}]
        return [
            msgspec.structs.replace(each, partners=met, touched={"liar": hostile})
            for each, met in zip(ALONE.nodes, partners, strict=True)
        ]

    clean = msgspec.structs.replace(ALONE, nodes=meeting(200, 0))
    return judged(msgspec.structs.replace(ALONE, nodes=meeting(exchanges, hostile), **changes), clean, SCENARIO)


def test_the_unharmed_pass() -> None:
    made = verdict(loss_merged=2.018)
    assert made.reasons == []
    assert loss_above(made) == pytest.approx(0.009)
    assert meetings(made) == [160, 0, 20, 40]
    table = grid_of(ALONE, [made])
    assert table.header == ["", "the honest alone", "chaos"]
    assert ["above alone", "", "+0.9%"] in table.rows
    assert table.rows[-1] == ["verdict", "", "pass"]
    assert [claim.ours for claim in claims_of([made])] == ["+0.9%", "0"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_merged": 2.1}, "held-out loss beside clean: +5.0%"),
        ({"loss_merged": float("nan")}, "held-out loss beside clean: +nan%"),
        ({"loss_merged": None}, "held-out loss beside clean: not known"),
        ({"exchanges": 112}, "exchanges of the nodes with one another, of clean: 56.0%, not at least 57.0%"),
        ({"exchanges": 200, "hostile": 0}, "exchanges with hostile members: 0, not at least 1"),
        ({"reasons": ["node 1 died"]}, "node 1 died"),
    ],
)
def test_each_harm_fails(changes: dict[str, Any], words: str) -> None:
    (reason,) = verdict(**changes).reasons
    assert reason.startswith(words)


def test_who_never_exchanges_is_seen_by_what_the_honest_exchange_less() -> None:
    assert verdict(exchanges=130, hostile=0).reasons == []


@pytest.mark.parametrize("name", [name for name in scenario_names() if name.startswith("hostile-")])
def test_the_scenarios_are_of_one_run_and_their_attacks_exist(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.hostile is not None
    check_attack(scenario.hostile.attack)
    assert {**scenario.run, "name": ""} == {**SCENARIO.run, "name": ""}
    assert load_scenario(name).clean.hostile is None


def test_an_unknown_attack_is_named() -> None:
    with pytest.raises(ScenarioError, match="no attack is called 'rain'"):
        check_attack("rain")


def test_hostile_programs_run_for_a_testnet_alone_and_aim_at_this_machine_alone() -> None:
    assert SCENARIO.hostile is not None
    assert plan_of({PLAN: msgspec.json.encode(SCENARIO.hostile).decode()}) == SCENARIO.hostile
    with pytest.raises(HostileError, match="started by farandole testnet run"):
        plan_of({})
    peer = "12D3KooWBKAPFdCqzSLYALR8WiUcwmV1hczt9vNrDRfeRQ1rScJf"
    assert list(targets_of({"TESTNET_TARGETS": f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}"}).values())
    with pytest.raises(HostileError, match="not on the loopback interface"):
        targets_of({"TESTNET_TARGETS": f"/ip4/192.0.2.1/tcp/4001/p2p/{peer}"})

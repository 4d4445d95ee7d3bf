from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from farandole.protocol.wire.errors import ManifestError
from farandole.testnet.play.fault import DURATIONS, Chaos, Fault, draw_faults
from farandole.testnet.play.scenario import load_scenario, parse_scenario, scenario_names

RUN = {"name": "a", "model": "tiny"}


@pytest.mark.parametrize("name", scenario_names())
def test_delivered_scenarios_are_valid(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.max_loss_merged is not None
    assert scenario.manifest(0).name == name


def test_what_the_command_line_says_replaces_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("nodes = 8\nrounds = 9\nmin_partners = 3\nrun = {name = 'a', model = 'tiny', seed = 4}\n")
    scenario = load_scenario(str(path), nodes=4, rounds=12, seed=7)
    assert (scenario.nodes, scenario.rounds, scenario.partners_required) == (4, 12, 3)
    assert scenario.manifest(0).seed == 7
    path.write_text("min_partners = 'all'\nrun = {name = 'a', model = 'tiny'}\n")
    with pytest.raises(ManifestError, match="min_partners"):
        load_scenario(str(path), nodes=3)


@pytest.mark.parametrize(
    ("sizes", "min_partners", "said"),
    [
        ({}, 3, ""),
        ({"nodes": 3}, 2, "min_partners is 2, not the scenario's 3"),
        ({"nodes": 1}, 0, "min_partners is 0"),
        ({"rounds": 20}, 3, ""),
        ({"rounds": 13}, 3, "max_loss_merged does not count: it is meant for the scenario's 14 rounds"),
        ({"rounds": 5}, 1, "min_partners is 1"),
    ],
)
def test_so_few_nodes_and_rounds_are_not_asked_for_what_is_beyond_them(
    sizes: dict[str, Any], min_partners: int, said: str
) -> None:
    told: list[str] = []
    scenario = load_scenario("demo", **sizes, say=told.append)
    assert scenario.partners_required == min_partners
    assert (scenario.max_loss_merged is None) == (sizes.get("rounds", 14) < 14), "fewer rounds need not learn as much"
    assert said in "\n".join(told)
    assert bool(said) == bool(told)
    assert parse_scenario({"run": RUN, "nodes": 9, "stages": 3}).partners_required == 2, "of its stage alone"


def test_more_nodes_on_the_same_cores_have_more_time() -> None:
    told: list[str] = []
    usual, many = load_scenario("demo"), load_scenario("demo", nodes=32, say=told.append)
    for name in ("timeout", "wedged_after", "settle_timeout"):
        assert getattr(many, name) == 4 * getattr(usual, name)
    assert many.manifest(0).rounds.exchange_seconds == 4 * usual.manifest(0).rounds.exchange_seconds
    assert many.manifest(0).rounds.inner_steps == usual.manifest(0).rounds.inner_steps
    assert told == ["time limits are 4 times the scenario's: so many nodes share this machine's cores"]
    assert load_scenario("demo", nodes=8) == usual


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "run"),
        ({"run": RUN, "slow": [1.0] * 9}, "slow has 9 entries for 8 nodes"),
        ({"run": RUN, "fault": [{"kind": "kill", "nodes": [1]}]}, "say at_round, or"),
        ({"run": RUN, "fault": [{"kind": "kill", "nodes": [8], "at_round": 1}]}, "names node 8, but the last is 7"),
        ({"run": RUN, "fault": [{"kind": "kill", "nodes": [1], "of_stage": 1, "at_round": 1}]}, "or of_stage"),
        ({"run": RUN, "fault": [{"kind": "join", "of_stage": 1, "at_round": 1}]}, "holds no stage"),
        ({"run": RUN, "fault": [{"kind": "kill", "nodes": [1], "at_round": 20}]}, "never happens"),
        ({"run": RUN, "fault": [{"kind": "kill", "nodes": [1], "at_round": 1, "duration": 2}]}, "has no duration"),
        ({"run": RUN, "fault": [{"kind": "freeze", "nodes": [1], "at_round": 1}]}, "say its duration"),
        ({"run": RUN, "fault": [{"kind": "cut", "nodes": [0], "at_round": 1, "duration": 2}]}, "which there are"),
        ({"run": RUN, "home": [{"kind": "open", "loss": 2}]}, r"home.*loss"),
        ({"run": RUN, "fault": [{"kind": "join", "nodes": [0], "at_round": 1}]}, "cannot join late"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        parse_scenario(settings)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("rouns = 9", "rouns is no setting; did you mean rounds?"),
        ("slow = [\n  1.0,\n  0.5,\n]", "slow[1]: expected a finite number, 1 to 1000, got 0.5"),
        ("[run]\nname = 'a'\nmodel = 'tny'", "run.model: no preset is called 'tny'"),
        ("[run]\nname = 'a'\nmodel = 'tiny'\n[run.outer]\ngamma = 9", "run.outer.gamma is 9"),
        ("[[fault]]\nkind = 'exploded'\nnodes = [1]\nat_round = 1", "fault[0].kind: expected one of kill, freeze"),
        ("[[home]]\nkind = 'symetric'", "home[0]: no kind of home 'symetric'"),
        ("[run]\nname = 'a'\nmodel = 'tiny'\ndata = {source = 'text'}", 'run.data.source is "text": say which'),
    ],
)
def test_a_fault_of_a_file_is_named_with_the_file(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ManifestError) as caught:
        load_scenario(str(path))
    assert str(caught.value).startswith(f"{path}: {fault}")


def test_any_scenario_is_played_in_homes(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("nodes = 2\nmin_partners = 1\nrun = {name = 'a', model = 'tiny'}\n")
    assert load_scenario(str(path)).home == ()
    assert [home.kind for home in load_scenario(str(path), nat=True).home[:3]] == ["open", "open", "firewall"]
    path.write_text(path.read_text() + "[[home]]\nkind = 'symmetric'\ndelay_ms = 5\n")
    assert [home.delay_ms for home in load_scenario(str(path), nat=True).home] == [5.0]


LONG = Chaos(seconds=1_800.0, faults=60)
SHORT = Chaos(seconds=75.0, faults=12)


def spans(faults: tuple[Fault, ...]) -> list[tuple[Fault, float, float]]:
    return [(fault, fault.after_start or 0.0, (fault.after_start or 0.0) + (fault.duration or 0.0)) for fault in faults]


def test_it_is_a_function_of_the_seed() -> None:
    assert draw_faults(LONG, 16, 7) == draw_faults(LONG, 16, 7)
    assert draw_faults(LONG, 16, 7) != draw_faults(LONG, 16, 8)


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize(("chaos", "num_nodes", "calm"), [(LONG, 16, 60.0), (SHORT, 6, 25.0)])
def test_every_schedule_can_be_judged(seed: int, chaos: Chaos, num_nodes: int, calm: float) -> None:
    drawn = spans(draw_faults(chaos, num_nodes, seed))
    assert len(drawn) == chaos.faults
    assert [begins_at for _, begins_at, _ in drawn] == sorted(begins_at for _, begins_at, _ in drawn)
    assert max(ends_at for _, _, ends_at in drawn) <= chaos.seconds - calm
    for (fault, begins_at, ends_at), (other, other_begins_at, other_ends_at) in itertools.combinations(drawn, 2):
        if begins_at <= other_ends_at and other_begins_at <= ends_at:
            assert not set(fault.nodes) & set(other.nodes), "a node has one fault at a time"
            assert (fault.kind, other.kind) != ("partition", "partition")
    for _, moment, _ in drawn:
        away = [node for fault, begins_at, ends_at in drawn if begins_at <= moment <= ends_at for node in fault.nodes]
        assert len(away) <= num_nodes // 2


def test_every_kind_has_its_share() -> None:
    assert Counter(fault.kind for fault in draw_faults(LONG, 16, 1)) == dict.fromkeys(DURATIONS, 10)
    two = Chaos(seconds=600.0, faults=10, kinds=("restart", "freeze"))
    assert Counter(fault.kind for fault in draw_faults(two, 8, 1)) == {"restart": 5, "freeze": 5}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for 500 faults"):
        draw_faults(Chaos(seconds=60.0, faults=500), 4, 0)


def test_the_scenario_has_its_faults_unless_it_is_to_be_clean() -> None:
    chaos = load_scenario("chaos")
    assert chaos.chaos is not None
    assert chaos.fault == draw_faults(chaos.chaos, chaos.nodes, chaos.seed)
    assert chaos.clean.fault == ()
    assert load_scenario("chaos", seed=3).fault != chaos.fault

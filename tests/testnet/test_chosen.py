"""Hostile scenarios, benchmarks and simulations play what `farandole run create` chooses, or say why not."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import msgspec
import pytest

from farandole.node.store.run_file import manifest_of
from farandole.protocol.planning.planning import changes, complete
from farandole.protocol.run.manifest import InnerConfig, Manifest, manifest_from_dict
from farandole.protocol.run.rules import GuardConfig
from farandole.testnet.bench import attacker, exchange, faults, members, nat, trainer
from farandole.testnet.bench.worker.stages import Task
from farandole.testnet.play.scenario import load_scenario, scenario_names
from farandole.testnet.simulate import pairing

from .simulate.test_pairing import ATTACKED

TABLE: Final = tomllib.loads(Path(__file__).with_name("differences.toml").read_text())["table"]


def plays() -> dict[str, Manifest]:
    """Return the runs of what attacks, measures and simulates, by name."""
    simulated = complete(Manifest("simulated", pairing.MODEL), ())
    hostile = {name: name for name in scenario_names() if name.startswith("hostile-")}
    scenarios = {**hostile, **{f"faults {name}": name for name in faults.SCENARIOS}, "bench race": "race"}
    return {
        **{play: load_scenario(name).manifest(0.0) for play, name in scenarios.items()},
        **{f"pairing {name}": msgspec.structs.replace(simulated, rounds=rounds) for name, rounds in ATTACKED.items()},
        "bench attacker": attacker.chosen_manifest(40, 0),
        "bench members": members.manifest_of(40, 0, GuardConfig()),
        "bench nat": nat.scenario_of(nat.ALL_PAIRS[0]).manifest(0.0),
        "bench mesh": manifest_from_dict(exchange._RUN),
        "bench trainer": manifest_of(trainer.manifest_of_bench("125M", 16, 20.0), Path(), 0.0),
        "bench stages": manifest_from_dict(Task().manifest()),
    }


def differences(played: Manifest) -> set[str]:
    """Return the settings that differ from those chosen for a run file with this model, text and number of steps."""
    inner = InnerConfig(total_steps=played.inner.total_steps, batch_size=played.inner.batch_size)
    chosen = complete(Manifest(played.name, played.model, data=played.data, seed=played.seed, inner=inner), ())
    of_another_rule = {f"outer.{name}" for name in played.outer.__struct_fields__ if not hasattr(chosen.outer, name)}
    whole = ("tokenizer", "screening", "admission", "private", "start", "audits")
    others = {name for name in whole if getattr(played, name) != getattr(chosen, name)}
    return (changes(chosen, played).keys() - of_another_rule) | others


FOUND: Final = {play: differences(manifest) for play, manifest in plays().items()}


def explained(play: str, row: tuple[str, str, str]) -> set[str]:
    """Return the differences of a play that a row of the table is about."""
    return {name for name in FOUND[play] if fnmatch(play, row[0]) and any(fnmatch(name, s) for s in row[1].split())}


@pytest.mark.parametrize("play", FOUND)
def test_what_is_played_is_what_is_chosen_but_for_reasons(play: str) -> None:
    assert FOUND[play] == {name for row in TABLE for name in explained(play, row)}


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_no_reason_outlives_its_difference(row: tuple[str, str, str]) -> None:
    for setting in row[1].split():
        assert any(explained(play, (row[0], setting, "")) for play in FOUND), setting


def test_another_setting_in_a_hostile_scenario_is_found() -> None:
    scenario = load_scenario("hostile-scale")
    run = {**scenario.run, "outer": {"codec": "bf16"}, "private": True}
    found = differences(msgspec.structs.replace(scenario, run=run).manifest(0.0)) - FOUND["hostile-scale"]
    assert found == {"outer.kind", "outer.codec", "private"}

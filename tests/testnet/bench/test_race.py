"""The race: DiLoCo's members in real processes, and what is read off the curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from farandole.protocol.run.rules import SLOW
from farandole.testnet.bench.process import BenchError, BenchWorker, ask_all, open_workers
from farandole.testnet.bench.race import Replacement, replacements, seconds_to
from farandole.testnet.bench.worker.race import OUTER
from farandole.testnet.play.fault import Fault
from farandole.testnet.play.scenario import load_scenario

from ...node.small_runs import small_manifest


def test_when_a_curve_reaches_a_loss() -> None:
    falling = [(10.0, 5.0), (20.0, 4.0), (30.0, 4.2), (40.0, 3.0)]
    assert seconds_to(falling, 5.5) == 10.0
    assert seconds_to(falling, 4.5) == pytest.approx(15.0)
    assert seconds_to(falling, 3.6) == pytest.approx(35.0)
    assert seconds_to(falling, 2.0) is None


def test_who_is_replaced_when() -> None:
    scenario = load_scenario("race")
    assert replacements(scenario) == [Replacement(120.0, 7, 8), Replacement(240.0, 1, 9), Replacement(360.0, 4, 10)]
    for change in replacements(scenario):
        assert scenario.seconds_of_step(change.gone) == scenario.seconds_of_step(change.come)
    frozen = Fault("freeze", nodes=(0,), at_round=3, duration=1.0)
    with pytest.raises(BenchError, match="replaced"):
        replacements(msgspec.structs.replace(scenario, fault=(frozen,)))


def average(members: list[BenchWorker], group: Path) -> None:
    ranks: list[dict[str, Any]] = [{"rank": rank} for rank in range(len(members))]
    ask_all(members, "average", ranks, world=len(members), group=str(group), device="lo")


def weights_of(members: list[BenchWorker], folder: Path) -> list[dict[str, torch.Tensor]]:
    paths = [folder / f"{number}.safetensors" for number in range(len(members))]
    ask_all(members, "save", [{"path": str(path)} for path in paths])
    return [load_file(path) for path in paths]


def test_members_take_the_step_of_the_paper_and_a_newcomer_takes_part(tmp_path: Path) -> None:
    settings = msgspec.to_builtins(small_manifest(data={"source": "stdlib"}))
    log = tmp_path / "log"
    with open_workers("race:DiLoCoMember", [f"member {number}" for number in range(3)], log) as (one, two, three):
        everybody = [one, two, three]
        authors = [{"author": number} for number in range(3)]
        ask_all(everybody, "begin", authors, manifest=settings, step_seconds=0.0)
        (start, *_) = weights_of([one], tmp_path)
        ask_all([one, two], "learn", steps=3)
        average([one, two], tmp_path / "group")
        first, second = weights_of([one, two], tmp_path)
        assert all(torch.equal(first[name], second[name]) for name in first if name.startswith((SLOW, "momentum")))
        names = [name.removeprefix("momentum/") for name in first if name.startswith("momentum/")]
        assert any(not torch.equal(first[f"{SLOW}/{name}"], start[f"{SLOW}/{name}"]) for name in names)
        for name in names:  # the first momentum is the outer rate times the mean of what both have moved
            step = (1 + OUTER.alpha) * first[f"momentum/{name}"]
            assert torch.allclose(first[f"{SLOW}/{name}"], start[f"{SLOW}/{name}"] + step, atol=1e-6)
        three.ask("load", path=str(tmp_path / "0.safetensors"))
        two.kill()
        ask_all([one, three], "learn", steps=1)
        average([one, three], tmp_path / "another-group")
        first, third = weights_of([one, three], tmp_path)
        assert all(torch.equal(first[name], third[name]) for name in first if name.startswith((SLOW, "momentum")))

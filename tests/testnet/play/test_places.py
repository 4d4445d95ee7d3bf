"""Fake nodes in the homes of the NAT lab: they run there, and events of their homes are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.namespace import NamespaceError
from farandole.testnet.play.places import open_lodgings
from farandole.testnet.play.report import PlayReport
from farandole.testnet.play.scenario import parse_scenario

from .playing import testnet

RUN = {"name": "homes", "model": "tiny"}
HOMES = [{"kind": "open"}, {"kind": "symmetric", "up_mbit": 20, "down_mbit": 50, "delay_ms": 5, "loss": 0.01}]


pytestmark = pytest.mark.usefixtures("quick")


async def play(out: Path, **settings: Any) -> PlayReport:
    scenario = parse_scenario({"nodes": 3, "min_partners": 2, "timeout": 60.0, "run": RUN, "home": HOMES, **settings})
    return await testnet(scenario, out).play()


@pytest.mark.usefixtures("networks")
def test_public_nodes_are_where_those_are_who_may_call_nothing_else() -> None:
    settings = {"nodes": 2, "min_partners": 1, "run": RUN}
    confined = parse_scenario({**settings, "home": [HOMES[0], {"kind": "https-only"}]})
    with open_leash() as leash, open_lodgings(confined.home, 2, leash) as ((public, _), _):
        assert public.port == 443
    scenario = parse_scenario({**settings, "home": HOMES})
    with open_leash() as leash, open_lodgings(scenario.home, 2, leash) as ((public, _), (place, home)):
        assert (public.port, place.port) == (None, None), "peers dial such a port on nobody's word"
        assert home is not None
        assert (home.delay_ms, home.loss) == (5, 0.01)


@pytest.mark.usefixtures("networks")
def test_nodes_of_one_home_are_machines_on_its_local_network() -> None:
    homes = [{"kind": "open"}, {"kind": "full-cone", "nodes": 2}]
    scenario = parse_scenario({"nodes": 4, "min_partners": 1, "run": RUN, "home": homes})
    with open_leash() as leash, open_lodgings(scenario.home, 4, leash) as (public, one, other, next_public):
        assert one[1] is other[1] is not None
        assert one[0].enter != other[0].enter
        assert len({id(home) for _, home in (public, one, next_public)}) == 3


@pytest.mark.usefixtures("networks")
async def test_nodes_live_in_homes_and_faults_befall_these(tmp_path: Path) -> None:
    kinds = ("cut", "unplug", "reboot_router")
    faults = [{"kind": kind, "nodes": [1], "at_round": 1 + n, "duration": 0.1} for n, kind in enumerate(kinds)]
    report = await play(tmp_path, rounds=40, fault=[*faults, {"kind": "change_address", "nodes": [2], "at_round": 5}])
    assert report.reasons == []
    assert [node.home for node in report.nodes] == ["open", "symmetric", "open"]
    told = " ".join(report.events)
    for kind in kinds:
        assert f"{kind} for 0.1 s: node 1" in told
        assert f"{kind} is over: node 1" in told
    assert "node 2 has another public address, 5.3.2.1" in told


async def test_who_lacks_a_tool_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NamespaceError, match=r"root|ip, tc, nsenter, unshare, nft not found|Linux"):
        await play(tmp_path / "out")

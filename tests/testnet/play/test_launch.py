from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from farandole.node.base.control import NoNodeError, call
from farandole.protocol.run.invite import decode_invite
from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.namespace import NamespaceError
from farandole.testnet.play import launch
from farandole.testnet.play.launch import TestnetError, is_done, prepare_folder
from farandole.testnet.play.places import open_lodgings
from farandole.testnet.play.record import NodeRecord
from farandole.testnet.play.report import NodeReport, PlayReport
from farandole.testnet.play.scenario import Scenario, parse_scenario

from ...node.hosts import until
from ...node.statuses import STATUS
from ...patience import PATIENCE
from .playing import testnet

PLAY = Path(__file__).with_name("playing.py")
pytestmark = pytest.mark.usefixtures("quick")


def scenario(**settings: Any) -> Scenario:
    run = {"name": "fake", "model": "tiny"}
    return parse_scenario({"run": run, "nodes": 3, "rounds": 8, "min_partners": 2, "timeout": PATIENCE, **settings})


async def test_a_scenario_without_faults_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SUMMARY_INTERVAL", 0.0)
    said: list[str] = []
    play = testnet(scenario(max_loss_merged=2.6), tmp_path)
    play.say = said.append
    report = await play.play()
    assert any("nodes start" in line for line in said)
    summary = r"3 live, rounds \d to 8 of 8, loss 2.500 to 2.500, 1\d exchanges, 28.5 k tokens/s"
    assert re.search(summary, "\n".join(said))
    assert report.reasons == []
    assert report.verdict == "pass"
    assert [node.rounds for node in report.nodes] == [8, 8, 8]
    assert report.tokens == 24_000
    assert report.state_equal
    assert (report.loss_first, report.loss_last, report.loss_merged) == (5.0, -2.0, 2.5)
    for node in report.nodes:
        with pytest.raises(NoNodeError):
            call(tmp_path / "nodes" / f"{node.index:02d}", "status")
    # The first node gets the manifest, and the others an invite.
    first, second = ((tmp_path / "nodes" / name / "sources").read_text().split() for name in ("00", "01"))
    assert first == [str(tmp_path / "run.manifest")]
    assert decode_invite(second[0]).run_id.hex() == report.run_id
    assert decode_invite(second[0]).addresses[0].endswith(report.nodes[0].peer_id)


async def test_a_node_that_dies_fails_the_scenario_at_once(tmp_path: Path) -> None:
    report = await testnet(scenario(rounds=256), tmp_path, "--die", "1").play()
    assert report.verdict == "fail"
    assert all(node.rounds < 256 for node in report.nodes)
    assert [node.died for node in report.nodes] == [False, True, False]
    assert any("node 1 died" in reason for reason in report.reasons)
    assert any("node 1 died (exit code 7): see" in event for event in report.events)


async def test_a_node_that_stands_still_is_wedged(tmp_path: Path) -> None:
    def say(text: str) -> None:
        if "is wedged" in text:
            signal.raise_signal(signal.SIGINT)

    play = testnet(scenario(wedged_after=5.0), tmp_path, "--stall", "2")
    play.say = say
    report = await play.play()
    assert [node.wedged for node in report.nodes] == [False, False, True]
    assert any("node 2 was wedged" in reason for reason in report.reasons)


async def test_a_training_that_takes_too_long_fails_and_so_do_nodes_that_do_not_agree(tmp_path: Path) -> None:
    settings = scenario(timeout=1.0, settle_timeout=0.3)
    report = await testnet(settings, tmp_path, "--stall", "2", "--stray", "1").play()
    assert report.reasons[0] == "the training was not over after 1 s"
    assert not report.state_equal
    assert "the run state is not equal on all live nodes" in report.reasons


async def test_faults_happen_and_counters_survive_a_restart(tmp_path: Path) -> None:
    faults = [
        {"kind": "restart", "nodes": [0], "at_round": 3, "duration": 0.1},
        {"kind": "freeze", "nodes": [1], "at_round": 2, "duration": 0.2},
        {"kind": "kill", "nodes": [2], "at_round": 5},
        {"kind": "join", "nodes": [3], "at_round": 4},
        {"kind": "leave", "nodes": [4], "at_round": 6},
    ]
    report = await testnet(scenario(nodes=5, rounds=40, fault=faults), tmp_path, "--late", "3").play()
    assert report.reasons == []
    first, _, killed, late, left = report.nodes
    assert (first.restarts, first.rounds, first.died) == (1, 40, False)
    # The exchanges of the first process between its last status and its death are unknown.
    assert 1 <= first.exchanges_ok <= 40
    assert [node.is_alive for node in report.nodes] == [True, True, False, True, False]
    assert (killed.died, left.died) == (False, False)
    assert killed.rounds < 40
    assert late.rounds == 40
    # Back in its folder a node needs no invite; a late one is invited by living nodes.
    assert (tmp_path / "nodes" / "00" / "sources").read_text().split()[1:] == ["None"]
    said = " ".join(report.events)
    for words in ("restart for 0.1 s: node 0 in round", "freeze is over: node 1", "kill: node 2", "join: node 3"):
        assert words in said


async def test_however_late_faults_come_training_goes_on_after_them_and_the_nodes_pause(tmp_path: Path) -> None:
    faults = [
        # Once all have been seen training: on a busy machine the first may be far ahead by then.
        {"kind": "restart", "nodes": [1], "after_start": 0.5, "duration": 0.1},
        {"kind": "freeze", "nodes": [2], "after_start": 1.0, "duration": 0.1},
    ]
    settings = scenario(rounds=256, exchanges_after_faults=5, fault=faults)
    report = await testnet(settings, tmp_path, "--pace", "0.5").play()
    assert report.reasons == []
    first, restarted, _ = report.nodes
    assert 5 <= first.rounds < 256
    assert (restarted.restarts, restarted.exchanges_since_restart >= 5) == (1, True)


def test_a_node_that_has_met_only_hostile_members_goes_on() -> None:
    settings = scenario(nodes=2, min_partners=1, exchanges_after_faults=5)
    honest = {"alice", "bob"}

    def is_alice_done(partners: dict[str, int], before: int = 0, phase: str = "training") -> bool:
        record = NodeRecord(NodeReport(0, "alice"))
        status = {"phase": phase, "partners": partners, "exchanges_ok": sum(partners.values())}
        record.observe(msgspec.structs.replace(STATUS, **status), 0.0)
        return is_done(record, settings, honest, before)

    assert not is_alice_done({"mallory": 12}), "however many exchanges it had with her"
    assert is_alice_done({"mallory": 4, "bob": 1})
    assert not is_alice_done({"mallory": 4, "bob": 1}, before=1), "those before the last fault do not count"
    assert is_alice_done({"mallory": 12}, phase="finished"), "no more rounds are left"


async def test_a_report_says_where_the_time_went(tmp_path: Path) -> None:
    faults = [
        {"kind": "restart", "nodes": [0], "at_round": 20, "duration": 1.0},
        {"kind": "freeze", "nodes": [1], "at_round": 20, "duration": 1.0},
        {"kind": "starve", "nodes": [2], "at_round": 20, "duration": 1.0, "factor": 4},
    ]
    report = await testnet(scenario(rounds=70, fault=faults), tmp_path).play()
    assert report.reasons == []
    for node, condition in zip(report.nodes, ("absent", "frozen", "starved"), strict=True):
        assert node.condition_seconds[condition] >= 1.0
    assert report.nodes[0].condition_seconds["returning"] > 0.0
    assert report.tokens_per_given_second == pytest.approx(210_000 / sum(node.given_seconds for node in report.nodes))
    assert {fault.kind: fault.nodes for fault in report.faults} == {"restart": [0], "freeze": [1], "starve": [2]}
    for fault in report.faults:
        (standstill,) = fault.standstill.values()
        assert standstill is not None
        assert standstill >= (0.9 if fault.kind != "starve" else 0.0)


async def test_nothing_befalls_a_node_before_it_has_been_started(tmp_path: Path) -> None:
    restart = {"kind": "restart", "nodes": [2], "at_round": 0, "duration": 0.1}
    with trio.fail_after(PATIENCE):
        report = await testnet(scenario(rounds=40, fault=[restart]), tmp_path).play()
    assert report.reasons == []
    assert (tmp_path / "nodes" / "02" / "sources").read_text().split()[-1] == "None"  # as for an earlier member
    assert not is_up(tmp_path / "nodes" / "02")


async def test_a_node_that_flaps_is_left_alone_in_the_end_and_a_full_disk_takes_nothing_for_a_while(
    tmp_path: Path,
) -> None:
    faults = [
        {"kind": "flap", "nodes": [1], "at_round": 5, "duration": 1.0, "interval": 0.2},
        {"kind": "fill_disk", "nodes": [2], "after_start": 0.1, "duration": 0.6},
    ]
    report = await testnet(scenario(rounds=60, fault=faults), tmp_path, "--write", "2").play()
    assert report.reasons == []
    assert any("flap is over: node 1" in event for event in report.events)
    assert report.nodes[1].condition_seconds["absent"] > 0.0
    assert report.nodes[1].rounds == 60
    said = (tmp_path / "nodes" / "02" / "written").read_text().split()
    assert "File" in said
    assert said[-1] == "ok"


async def test_ctrl_c_ends_all_nodes_and_still_writes_the_report(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        play = await nursery.start(start_play, tmp_path)
        play.send_signal(signal.SIGINT)
        with trio.fail_after(PATIENCE):
            await play.wait()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["verdict"] == "fail"
    assert report["reasons"][0] == "interrupted"
    assert not any(is_up(tmp_path / "out" / "nodes" / name) for name in ("00", "01"))


async def test_a_launcher_that_is_killed_leaves_no_nodes_behind(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        play = await nursery.start(start_play, tmp_path)
        play.kill()
        await play.wait()
    with trio.fail_after(PATIENCE):
        await until(lambda: not any(is_up(tmp_path / "out" / "nodes" / name) for name in ("00", "01")))


async def start_play(tmp_path: Path, *, task_status: Any) -> None:
    """Play two endless fake nodes in a separate process; started once it has asked both, so it watches over them."""
    path = tmp_path / "endless.toml"
    path.write_text("nodes = 2\nrounds = 256\nmin_partners = 1\n[run]\nname = 'endless'\nmodel = 'tiny'\n")
    command = [sys.executable, str(PLAY), str(path), str(tmp_path / "out")]
    play = await trio.lowlevel.open_process(command, stdout=subprocess.DEVNULL)
    with trio.fail_after(PATIENCE):
        await until(lambda: all((tmp_path / "out" / "nodes" / name / "asked").exists() for name in ("00", "01")))
    task_status.started(play)


def is_up(home: Path) -> bool:
    try:
        call(home, "status")
    except NoNodeError:
        return False
    return True


def test_a_folder_of_an_earlier_play_is_emptied_and_one_with_other_things_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(TestnetError, match="holds other things"):
        prepare_folder(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    prepare_folder(tmp_path / "new")
    (tmp_path / "new" / "run.manifest").touch()
    (tmp_path / "new" / "nodes" / "00").mkdir(parents=True)
    prepare_folder(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


RUN = {"name": "homes", "model": "tiny"}
HOMES = [{"kind": "open"}, {"kind": "symmetric", "up_mbit": 20, "down_mbit": 50, "delay_ms": 5, "loss": 0.01}]


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

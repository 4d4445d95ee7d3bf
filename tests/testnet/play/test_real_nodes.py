"""Real nodes: with faults of all kinds, at random times and of their clocks; and on text of one's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.home import Home
from farandole.testnet.natlab.lab import open_lab
from farandole.testnet.play.fault import DURATIONS
from farandole.testnet.play.faults import heal, part
from farandole.testnet.play.launch import Testnet
from farandole.testnet.play.scenario import load_scenario, parse_scenario
from farandole.training.base.errors import DataError

from .playing import silent


@pytest.mark.usefixtures("networks", "faketime")
async def test_whatever_befalls_four_nodes_they_train_on_and_agree(tmp_path: Path) -> None:
    """A small version of the scenario chaos: no node dies or hangs, all train again, and all have the same state."""
    run = {
        "name": "chaos",
        "model": "tiny",
        "inner": {"learning_rate": 3e-3, "warmup_steps": 10, "batch_size": 4},
        "outer": {"codec": "bf16"},
        "rounds": {"round_seconds": 3.0, "exchange_seconds": 5.0, "overlap": True},
    }
    settings = {
        "nodes": 4,
        "min_partners": 1,
        "chaos": {"seconds": 40.0, "faults": len(DURATIONS)},
        "home": [{"kind": "open"}],
        # Longer than any machine needs: the play ends when the nodes have averaged again after the last fault.
        "rounds": 256,
        "exchanges_after_faults": 2,
        "step_seconds": 0.25,  # leaves processor time to the other nodes
        "timeout": 480.0,
        "checkpoint_seconds": 15.0,  # a newcomer on a busy machine needs time to fetch one
        "wedged_after": 240.0,  # on a busy machine so many starts take long
        "settle_timeout": 90.0,
        "max_loss_merged": 4.5,
    }
    chaos = parse_scenario({"run": run, **settings})
    report = await Testnet(chaos, tmp_path / "out", silent).play()
    assert report.reasons == [], "\n".join(report.events)
    assert sorted(fault.kind for fault in report.faults) == sorted(DURATIONS)
    assert all(seconds is not None for fault in report.faults for seconds in fault.standstill.values())


LISTEN = "import socket; s = socket.create_server(('0.0.0.0', 7000)); print(flush=True)\nwhile True: s.accept()"
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))"


def reaches(one: Home, other: Home, seconds: float = 60.0) -> bool:
    command = [*one.host.enter, sys.executable, "-c", CALL, other.address, str(seconds)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.usefixtures("networks")
def test_two_parts_hear_nothing_of_each_other_until_they_are_healed() -> None:
    with open_leash() as leash, open_lab(leash) as lab:
        alice, bob, carol = homes = [lab.add_home("open") for _ in range(3)]
        listeners = [
            subprocess.Popen([*home.host.enter, sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) for home in homes
        ]
        try:
            for listener in listeners:
                assert listener.stdout is not None
                listener.stdout.readline()
            assert reaches(alice, bob)
            part([alice, carol])
            assert reaches(alice, carol)
            assert not reaches(alice, bob, 0.5)
            assert not reaches(bob, carol, 0.5)
            heal([alice, carol])
            assert reaches(bob, carol)
        finally:
            for listener in listeners:
                with listener:
                    listener.kill()


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "there is no text at"), ("too short", "too little text to train on"), ("ab" * 400, "too little text is")],
)
def test_text_that_is_missing_or_too_little_is_refused_before_a_node_starts(
    text: str | None, reason: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.txt"
    if text is not None:
        mine.write_text(text)
    with pytest.raises(DataError, match=reason):
        load_scenario("demo", data=[mine])


async def test_all_nodes_train_on_the_text_that_is_named(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):  # of which some are held out
        (texts / f"{number}.txt").write_text("ab" * (500 + number))
    scenario = msgspec.structs.replace(load_scenario("demo", nodes=2, rounds=2, data=[texts]), start_together=True)
    report = await Testnet(scenario, tmp_path / "out", silent).play()
    assert report.reasons == []
    # Of Python's library, a byte costs them twice as much after so few steps.
    assert [node.rounds for node in report.nodes] == [2, 2]
    assert all(node.loss_last is not None and node.loss_last < 2.0 for node in report.nodes), report.nodes
    assert report.loss_merged is not None
    assert report.loss_merged < 1.5

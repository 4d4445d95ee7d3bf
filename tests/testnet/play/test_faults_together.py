"""Real nodes with faults of all kinds, at random times and of their clocks."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from farandole.node.base.control import call
from farandole.node.status.status import NodeStatus
from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.home import Home
from farandole.testnet.natlab.lab import open_lab
from farandole.testnet.play.fault import DURATIONS
from farandole.testnet.play.faults import heal, part
from farandole.testnet.play.launch import Testnet
from farandole.testnet.play.scenario import Scenario, parse_scenario

from .playing import SilentView

HOUR, MONTH = 3_600.0, 30 * 86_400.0
RUN: dict[str, Any] = {
    "model": "tiny",
    "inner": {"learning_rate": 3e-3, "warmup_steps": 10, "batch_size": 4},
    "outer": {"codec": "bf16"},
    "rounds": {"round_seconds": 3.0, "exchange_seconds": 5.0, "overlap": True},
}


def scenario(name: str, **settings: Any) -> Scenario:
    return parse_scenario(
        {
            "run": {**RUN, "name": name},
            # Longer than any machine needs: the plays end when the nodes have averaged again after the last fault.
            "rounds": 256,
            "exchanges_after_faults": 2,
            "step_seconds": 0.25,  # leaves processor time to the other nodes
            "timeout": 480.0,
            "checkpoint_seconds": 15.0,  # a newcomer on a busy machine needs time to fetch one
            "wedged_after": 240.0,  # on a busy machine six starts take long
            "settle_timeout": 90.0,
            "max_loss_merged": 4.5,
            **settings,
        }
    )


@pytest.mark.usefixtures("networks", "faketime")
async def test_whatever_befalls_four_nodes_they_train_on_and_agree(tmp_path: Path) -> None:
    """A small version of the scenario chaos: no node dies or hangs, all train again, and all have the same state."""
    chaos = scenario(
        "chaos",
        nodes=4,
        min_partners=1,
        chaos={"seconds": 40.0, "faults": len(DURATIONS)},
        home=[{"kind": "open"}],
    )
    report = await Testnet(chaos, tmp_path / "out", SilentView()).play()
    assert report.reasons == [], "\n".join(report.events)
    assert sorted(fault.kind for fault in report.faults) == sorted(DURATIONS)
    assert all(seconds is not None for fault in report.faults for seconds in fault.standstill.values())


class ClockView(SilentView):
    """Sets an event once ``number`` clocks are wrong."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.are_wrong = trio.Event()
        self._number = number

    def say(self, text: str) -> None:
        super().say(text)
        if sum("set_clock by" in each for each in self.said) == self._number:
            self.are_wrong.set()


async def status_of(home: Path) -> NodeStatus:
    return msgspec.convert(await trio.to_thread.run_sync(partial(call, home, "status")), NodeStatus)


@pytest.mark.soak  # the nodes above have wrong clocks too, and tests/testnet/simulate/test_state.py has all of them
@pytest.mark.usefixtures("faketime")
async def test_wrong_clocks_hurt_their_owners_alone_and_all_agree_once_they_are_right(tmp_path: Path) -> None:
    """Two clocks of four: an hour fast and 1 % too fast, and a month slow."""
    wrong = [(2, HOUR, 0.01), (3, -MONTH, 0.0)]
    faults = [
        {"kind": "set_clock", "nodes": [node], "after_start": 3.0, "duration": 20.0, "offset": offset, "drift": drift}
        for node, offset, drift in wrong
    ]
    view = ClockView(len(wrong))
    testnet = Testnet(scenario("clocks", nodes=4, min_partners=2, fault=faults), tmp_path / "out", view)
    right = [tmp_path / "out" / "nodes" / f"{index:02d}" for index in range(2)]
    async with trio.open_nursery() as nursery:

        async def agree() -> None:
            """Wait until the nodes with right clocks agree with each other, while the others' clocks are wrong."""
            await view.are_wrong.wait()
            with trio.fail_after(60):
                while True:
                    statuses = [await status_of(home) for home in right]
                    lives = {status.run.members_live for status in statuses}
                    if lives == {len(right)} and len({status.run.state_root for status in statuses}) == 1:
                        return
                    await trio.sleep(0.2)

        nursery.start_soon(agree)
        report = await testnet.play()
    assert report.reasons == [], "\n".join(report.events)
    assert report.state_equal
    assert all(node.restarts == 0 for node in report.nodes)


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

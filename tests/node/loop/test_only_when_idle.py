"""A node with its trainer, on a machine that others use at times: the test provides the GPU driver's answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from farandole.node.base.identity import load_or_create_key
from farandole.node.base.settings import NodeSettings
from farandole.node.base.system.sockets import socket_path
from farandole.node.daemon import be_node
from farandole.node.join.address_book import AddressBook
from farandole.node.loop import idle_service as idle_keeper
from farandole.node.loop import rest_service as rest_keeper
from farandole.node.loop.rest_service import Rest
from farandole.node.member.parts import Daemon
from farandole.node.state.store import open_store
from farandole.node.status.journal import Journal
from farandole.node.trainer.script import has_started
from farandole.protocol.state.believing import Partners

from ...patience import PATIENCE
from ..small_runs import small_manifest, write_run, write_text
from .test_idle_probe import install_nvidia_smi


class Watched(NamedTuple):
    """A node on a machine whose GPU is used as ``users`` says, in lines of nvidia-smi."""

    daemon: Daemon
    heard: trio.MemoryReceiveChannel[str]
    users: Path

    async def says(self, words: str) -> None:
        while words not in await self.heard.receive():
            pass


GAME = f"0 {os.getppid()} C 97 40 - - game\n"


@asynccontextmanager
async def watched(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[Watched]:
    """Run a node. All is real except the driver, the length of a minute, and the battery, of which there is none."""
    monkeypatch.setattr(rest_keeper, "LOOK_INTERVAL", 0.05)
    monkeypatch.setattr(idle_keeper, "CALM_SECONDS", 0.1)
    monkeypatch.setattr(idle_keeper, "BEGIN_SECONDS", {"battery": 0.0, "GPU": 0.0})
    monkeypatch.setattr(idle_keeper, "is_on_battery", lambda: None)
    users = folder / "users"
    users.write_text(GAME)
    install_nvidia_smi(folder / "bin", monkeypatch, f"echo '# gpu pid type sm mem enc dec command'\ncat '{users}'")
    rounds = {"inner_steps": 0, "round_seconds": 0.5, "exchange_seconds": 5.0}
    write_run(folder, small_manifest(rounds=rounds))
    node = NodeSettings(
        home=folder / "home",
        manifest=folder / "run.manifest",
        listen=["/ip4/127.0.0.1/tcp/0"],
        only_when_idle=True,
        mdns=False,
        upnp=False,
        dashboard=False,
        **settings,
    )
    told, heard = trio.open_memory_channel[str](1_000)
    journal, key = Journal(told.send_nowait), load_or_create_key(node.key)
    async with open_store(node.store) as store, trio.open_nursery() as nursery:
        daemon = Daemon(node, key, store, AddressBook(store), Partners(), journal, trio.Event(), Rest())
        nursery.start_soon(be_node, daemon)
        with trio.fail_after(PATIENCE):
            yield Watched(daemon, heard, users)


async def test_a_node_has_no_trainer_while_another_uses_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tmp_path, monkeypatch, data=[write_text(tmp_path)]) as node:
        journal = node.daemon.journal
        await node.says(f"resting: the GPU is used by game (process {os.getppid()})")
        node.users.write_text("")
        await node.says("trainer ready")
        trainer = journal.state.trainer_pid
        assert trainer is not None
        await node.says("round 0")
        node.users.write_text(f"{GAME}0 {trainer} C 90 40 - - python\n")
        await node.says("resting: the GPU is used by game")
        assert not Path(f"/proc/{trainer}").exists()
        node.users.write_text("")
        await node.says("trainer ready")
        node.users.write_text(f"0 {journal.state.trainer_pid} C 90 40 - - python\n")  # its own use does not count
        await node.says("round ")
        await node.says("round ")
        node.daemon.is_leaving.set()


# A rank: it attaches, or is told that another one has, and holds the GPU until its input ends.
RANK = """
import socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect(sys.argv[1])
print("there", flush=True)
sys.stdin.read()
"""


def start_rank(door: Path, stack: ExitStack) -> int:
    """Return the process id of a rank that has attached."""
    command = [sys.executable, "-c", RANK, str(socket_path(door))]
    rank = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    assert rank.stdout is not None
    assert rank.stdout.readline()
    return rank.pid


async def test_a_loop_that_waits_with_the_gpu_is_no_reason_to_rest_and_a_node_whose_loop_is_gone_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a node that rests once rests for ever: its loop waits with what it holds, and so do its other ranks."""
    monkeypatch.setattr("farandole.node.daemon.LOOK_INTERVAL", 0.05)
    monkeypatch.setattr("farandole.node.daemon.LINGER_SECONDS", 0.2)
    async with watched(tmp_path, monkeypatch, trainer="external") as node:
        settings = node.daemon.settings
        await node.says("resting: the GPU is used by game")
        with ExitStack() as ranks:
            own = "".join(f"0 {start_rank(settings.door, ranks)} C 0 40 - - python\n" for _ in range(2))
            for _ in range(2):
                node.users.write_text(own)
                await node.says("waiting for a loop to attach")
                node.users.write_text(f"{GAME}{own}")
                await node.says("resting: the GPU is used by game")

        def look_once(mark: Path, pid: int) -> bool:
            is_started = has_started(mark, pid)
            mark.unlink(missing_ok=True)  # and with it, in life, all of the folder
            return is_started

        monkeypatch.setattr("farandole.node.daemon.has_started", look_once)
        settings.started_by_loop.write_text(str(os.getpid()))
        await node.says("the loop that has started this node is gone")
        await node.says("left the run")

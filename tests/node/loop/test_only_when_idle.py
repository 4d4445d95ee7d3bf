"""Rests while others use the machine: probes of files and programs that the test makes, and a node with its trainer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from farandole.node.base.identity import load_or_create_key
from farandole.node.base.settings import NodeSettings
from farandole.node.base.system.sockets import socket_path
from farandole.node.daemon import be_node
from farandole.node.join.address_book import AddressBook
from farandole.node.loop import idle_service as idle_keeper
from farandole.node.loop import idle_service as probing
from farandole.node.loop import rest_service as rest_keeper
from farandole.node.loop.idle_service import (
    BEGIN_SECONDS,
    CALM_SECONDS,
    GPU_TIMEOUT,
    IdleService,
    IdleWatch,
    ProbeError,
    gpu_users,
    users_in,
)
from farandole.node.loop.rest_service import LOOK_INTERVAL, Rest
from farandole.node.member.parts import Daemon
from farandole.node.state.store import open_store
from farandole.node.status.journal import Journal
from farandole.node.trainer.script import has_started
from farandole.protocol.state.believing import Partners

from ...patience import PATIENCE
from ..small_runs import small_manifest, write_run, write_text


class Battery(NamedTuple):
    """What psutil returns, as far as it is used."""

    power_plugged: bool | None


OLD_TABLE = """\
# gpu        pid  type    sm   mem   enc   dec   command
# Idx          #   C/G     %     %     %     %   name
    0       1812     G     3     1     -     -   Xorg
    0       4711     C    97    40     -     -   python
    1          -     -     -     -     -     -   -
"""
NEW_TABLE = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       2001     C+G     61     20      -      -      -      -    game
    0       2002     C+G      2      0      -      -      -      -    desktop
    0       2003       C      -      -      -      -      -      -    notebook
"""


@pytest.fixture
def every_process_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.pid_exists", lambda pid: True)


@pytest.mark.usefixtures("every_process_exists")
def test_what_computes_counts_and_what_draws_if_it_draws_much() -> None:
    assert users_in(OLD_TABLE, ()) == ("python (process 4711)",)
    assert users_in(NEW_TABLE, ()) == ("game (process 2001)", "notebook (process 2003)")
    cut_short = f"{OLD_TABLE}    0       4712     C    9\n    0       4713\n    0\n"
    assert users_in(cut_short, ()) == users_in(OLD_TABLE, ())


@pytest.mark.parametrize("text", ["", "No devices were found", "# gpu pid\n0 1"])
def test_what_is_no_table_is_said(text: str) -> None:
    with pytest.raises(ProbeError, match="pmon"):
        users_in(text, ())


def install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Install a program of that name, first on the PATH."""
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def table(*pids: int) -> str:
    """Return a script that reports these processes as computing."""
    rows = "".join(f"    0 {pid} C 50 10 - - python\n" for pid in pids)
    return f"cat <<'END'\n{OLD_TABLE.splitlines()[0]}\n{rows}END"


async def test_own_processes_are_told_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of outside count for nothing: our own trainer in a container has one that we do not know."""
    own, other = os.getpid(), os.getppid()
    gone = await trio.lowlevel.open_process(["true"])
    await gone.wait()
    install_nvidia_smi(tmp_path, monkeypatch, table(own, other, gone.pid))
    limiter = trio.CapacityLimiter(1)
    assert await gpu_users({own}, limiter) == (f"python (process {other})",)
    assert await gpu_users({own, other}, limiter) == ()


async def test_without_the_program_or_its_driver_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    with pytest.raises(ProbeError, match="has failed"):
        await gpu_users(set(), trio.CapacityLimiter(1))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ProbeError, match="no nvidia-smi"):
        await gpu_users(set(), trio.CapacityLimiter(1))


async def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "GPU_TIMEOUT", 0.2)
    install_nvidia_smi(tmp_path, monkeypatch, "exec sleep 600")
    with trio.fail_after(GPU_TIMEOUT), pytest.raises(ProbeError, match="no answer"):
        await gpu_users(set(), trio.CapacityLimiter(1))


async def test_who_cannot_even_be_killed_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process hangs in a driver, which no test can cause: here its thread waits for the test."""
    monkeypatch.setattr(probing, "GPU_TIMEOUT", 0.1)
    monkeypatch.setattr(probing, "KILL_TIMEOUT", 0.1)
    install_nvidia_smi(tmp_path, monkeypatch, table())
    driver_answers, run = threading.Event(), subprocess.run

    def hang(*arguments: Any, **options: Any) -> Any:
        driver_answers.wait()
        return run(*arguments, **{**options, "timeout": None})

    monkeypatch.setattr(subprocess, "run", hang)
    limiter = trio.CapacityLimiter(1)
    with trio.fail_after(GPU_TIMEOUT):
        with pytest.raises(ProbeError, match="no answer"):
            await gpu_users(set(), limiter)
        with pytest.raises(ProbeError, match="not ended"):
            await gpu_users(set(), limiter)
        driver_answers.set()
        while True:
            with contextlib.suppress(ProbeError):
                assert await gpu_users(set(), limiter) == ()
                return
            await trio.sleep(0.01)


async def test_a_node_rests_on_battery_and_warns_once_of_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files and the program are real, the time between two looks is not."""
    journal, now = Journal(print), 0.0
    idle = IdleService(journal, clock=lambda: now)
    install_nvidia_smi(tmp_path, monkeypatch, "exit 1")
    for is_plugged, seconds, words in (
        (None, 1.0, ""),
        (False, 2 * LOOK_INTERVAL, "battery"),
        (True, CALM_SECONDS + 2 * LOOK_INTERVAL, ""),
    ):
        monkeypatch.setattr("psutil.sensors_battery", lambda is_plugged=is_plugged: Battery(is_plugged))
        until = now + seconds
        while now < until:
            now += LOOK_INTERVAL
            said = await idle.look()
        assert words in said if words else not said
    assert len(journal.warnings) == 1


STEP = 5.0
CALM, GAME = (), ("game (process 7)",)


class Story:
    """A watch that looks every `STEP` seconds of virtual time."""

    def __init__(self) -> None:
        self.watch = IdleWatch()
        self.now = 1_000.0
        self.look(CALM)

    def look(self, users: tuple[str, ...]) -> str:
        self.now += STEP
        return self.watch.look(False, users, self.now)

    def seconds_until(self, users: tuple[str, ...], *, is_resting: bool) -> float:
        """Return how long this has to be seen until the node rests, or trains."""
        began = self.now
        while bool(self.look(users)) != is_resting:
            assert self.now - began < 2 * CALM_SECONDS, "it never does"
        return self.now - began


def test_the_gpu_is_given_up_soon_and_taken_again_when_it_was_free_for_a_while() -> None:
    story = Story()
    assert story.seconds_until(GAME, is_resting=True) <= BEGIN_SECONDS["GPU"] + 2 * STEP
    words = story.look(GAME)
    assert "game (process 7)" in words
    assert "--only-when-idle" in words
    assert CALM_SECONDS <= story.seconds_until(CALM, is_resting=False) <= CALM_SECONDS + 2 * STEP


def test_a_glance_at_the_gpu_is_no_reason_to_rest() -> None:
    story = Story()
    for _ in range(10):
        assert not story.look(GAME)
        assert not story.look(CALM)


def test_a_short_calm_does_not_end_a_rest() -> None:
    story = Story()
    story.seconds_until(GAME, is_resting=True)
    for _ in range(10):
        for _ in range(int(CALM_SECONDS / STEP) - 1):
            assert story.look(CALM)
        assert story.look(GAME)


def test_what_is_so_from_the_beginning_needs_no_time_and_what_cannot_be_told_is_no_reason() -> None:
    assert "battery" in IdleWatch().look(True, (), 0.0)
    assert IdleWatch().look(None, GAME, 0.0)
    watch = IdleWatch()
    assert not any(watch.look(None, (), STEP * number) for number in range(100))


@given(st.lists(st.booleans(), max_size=400))
def test_it_never_flaps(uses: list[bool]) -> None:
    """Whatever other programs do, a rest lasts at least as long as the calm that it requires."""
    story = Story()
    resting, began = False, story.now
    for is_used in uses:
        now_resting = bool(story.look(GAME if is_used else CALM))
        if now_resting != resting:
            assert now_resting or story.now - began >= CALM_SECONDS
            resting, began = now_resting, story.now


class Watched(NamedTuple):
    """A node on a machine whose GPU is used as ``users`` says, in lines of nvidia-smi."""

    daemon: Daemon
    heard: trio.MemoryReceiveChannel[str]
    users: Path

    async def says(self, words: str) -> None:
        while words not in await self.heard.receive():
            pass


GAME_LINE = f"0 {os.getppid()} C 97 40 - - game\n"


@asynccontextmanager
async def watched(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[Watched]:
    """Run a node. All is real except the driver, the length of a minute, and the battery, of which there is none."""
    monkeypatch.setattr(rest_keeper, "LOOK_INTERVAL", 0.05)
    monkeypatch.setattr(idle_keeper, "CALM_SECONDS", 0.1)
    monkeypatch.setattr(idle_keeper, "BEGIN_SECONDS", {"battery": 0.0, "GPU": 0.0})
    monkeypatch.setattr(idle_keeper, "is_on_battery", lambda: None)
    users = folder / "users"
    users.write_text(GAME_LINE)
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
        node.users.write_text(f"{GAME_LINE}0 {trainer} C 90 40 - - python\n")
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
                node.users.write_text(f"{GAME_LINE}{own}")
                await node.says("resting: the GPU is used by game")

        def look_once(mark: Path, pid: int) -> bool:
            is_started = has_started(mark, pid)
            mark.unlink(missing_ok=True)  # and with it, in life, all of the folder
            return is_started

        monkeypatch.setattr("farandole.node.daemon.has_started", look_once)
        settings.started_by_loop.write_text(str(os.getpid()))
        await node.says("the loop that has started this node is gone")
        await node.says("left the run")

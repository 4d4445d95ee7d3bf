"""A node with its trainer, on a machine that others use at times: the test provides the GPU driver's answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from farandole.node.base.identity import load_or_create_key
from farandole.node.base.settings import NodeSettings
from farandole.node.daemon import be_node
from farandole.node.join.address_book import AddressBook
from farandole.node.loop import idle_service as idle_keeper
from farandole.node.loop import rest_service as rest_keeper
from farandole.node.loop.rest_service import Rest
from farandole.node.member.parts import Daemon
from farandole.node.state.store import open_store
from farandole.node.status.journal import Journal
from farandole.protocol.state.believing import Partners

from ...patience import PATIENCE
from ..small_runs import small_manifest, write_run, write_text

SAYS = """\
#!/bin/sh
echo '# gpu pid type sm mem enc dec command'
cat "$(dirname "$0")/users"
"""


async def test_a_node_has_no_trainer_while_another_uses_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is real except the driver, the length of a minute, and the battery, of which there is none."""
    monkeypatch.setattr(rest_keeper, "LOOK_INTERVAL", 0.05)
    monkeypatch.setattr(idle_keeper, "CALM_SECONDS", 0.1)
    monkeypatch.setattr(idle_keeper, "BEGIN_SECONDS", {"battery": 0.0, "GPU": 0.0})
    monkeypatch.setattr(idle_keeper, "is_on_battery", lambda: None)
    driver, users = tmp_path / "bin" / "nvidia-smi", tmp_path / "bin" / "users"
    driver.parent.mkdir()
    driver.write_text(SAYS)
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{driver.parent}{os.pathsep}{os.environ['PATH']}")
    game = f"0 {os.getppid()} C 97 40 - - game\n"
    users.write_text(game)
    rounds = {"inner_steps": 0, "round_seconds": 0.5, "exchange_seconds": 5.0}
    write_run(tmp_path, small_manifest(rounds=rounds))
    settings = NodeSettings(
        home=tmp_path / "home",
        manifest=tmp_path / "run.manifest",
        listen=["/ip4/127.0.0.1/tcp/0"],
        data=[write_text(tmp_path)],
        only_when_idle=True,
        mdns=False,
        upnp=False,
        dashboard=False,
    )
    told, heard = trio.open_memory_channel[str](1_000)
    journal = Journal(say=told.send_nowait)

    async def says(words: str) -> None:
        while words not in await heard.receive():
            pass

    key = load_or_create_key(settings.key)
    async with open_store(settings.store) as store, trio.open_nursery() as nursery:
        daemon = Daemon(settings, key, store, AddressBook(store), Partners(), journal, trio.Event(), Rest())
        nursery.start_soon(be_node, daemon)
        with trio.fail_after(PATIENCE):
            await says(f"resting: the GPU is used by game (process {os.getppid()})")
            users.write_text("")
            await says("trainer ready")
            trainer = journal.state.trainer_pid
            assert trainer is not None
            await says("round 0")
            users.write_text(f"{game}0 {trainer} C 90 40 - - python\n")
            await says("resting: the GPU is used by game")
            assert not Path(f"/proc/{trainer}").exists()
            users.write_text("")
            await says("trainer ready")
            users.write_text(f"0 {journal.state.trainer_pid} C 90 40 - - python\n")  # its own use does not count
            await says("round ")
            await says("round ")
            daemon.is_leaving.set()

"""The first line for real nodes: well, alone, or without a bootstrap peer."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest
import trio

from farandole.node.base.control import call
from farandole.node.base.exits import Exit
from farandole.node.base.settings import NodeSettings
from farandole.node.daemon import be_node, run_daemon
from farandole.node.status.status import NodeStatus
from farandole.node.ui.headline import Headline, headline
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.run.manifest import SignedManifest

from ...patience import PATIENCE
from ..daemons import Daemon, joined
from ..hosts import LOOPBACK
from ..statuses import ALICE


async def first_line(daemon: Daemon) -> Headline:
    """Return the line that `farandole status` prints first."""
    status = await daemon.status()
    return headline(status, status.at)


async def test_a_node_is_alone_then_well_and_then_alone_again(tmp_path: Path, run: SignedManifest, texts: Path) -> None:
    data = ("--data", str(texts))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("alone: no peer is live")
        alone = await first_line(alice)
        assert alone == Headline("trouble", "training alone: there is no other live member in this run", alone.remedy)
        assert "farandole run invite" in alone.remedy

        async with joined(tmp_path / "bob", alice.invite(run.run_id), *data) as bob:
            await bob.says("averaged with", alice.name)
            status = await bob.until(lambda status: headline(status, status.at).level == "well")
            well = headline(status, status.at)
            assert well.text.startswith("training with 1 other, round ")
            assert f"ago with {alice.name}" in well.text

            member = next(member for member in status.members if member.peer_id[-8:] == alice.name)
            assert member.path == "direct"
            assert member.peer_id in status.round_trips
            assert await bob.end(signal.SIGTERM) == Exit.OK
        status = await alice.until(lambda status: status.run.members_left == 1)
        left = headline(status, status.at)
        assert left == Headline("busy", "training alone: 1 other left, and may come back")


async def test_a_node_without_a_bootstrap_peer_says_so(
    tmp_path: Path,
    run: SignedManifest,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, seconds in (("USUAL_SECONDS", 1.0), ("REMIND_AFTER", 1.0), ("STATUS_INTERVAL", 0.1)):
        monkeypatch.setattr(f"farandole.node.ui.headline.{name}", seconds)
    nobody = encode_invite(Invite(run.run_id, (f"/ip4/127.0.0.1/tcp/1/p2p/{ALICE}",)))
    home = tmp_path / "bob"
    settings = NodeSettings(home=home, invite=nobody, listen=LOOPBACK, mdns=False, upnp=False)
    nursery.start_soon(run_daemon, settings, be_node)
    said = ""
    with trio.fail_after(PATIENCE):
        while "warning: not in the run yet" not in said:
            await trio.sleep(0.05)
            said += capsys.readouterr().out
    status = msgspec.convert(await trio.to_thread.run_sync(call, home, "status"), NodeStatus)
    nursery.cancel_scope.cancel()
    soon, later = headline(status, status.started_at + 0.5), headline(status, status.started_at + 30)
    assert (soon.level, later.level) == ("busy", "trouble")
    assert later.text.startswith("not in the run yet, for 30 s: no known address answers: 1 address of 1 peer")
    assert "`farandole doctor INVITE` finds out why" in later.remedy
    assert f". {later.remedy[0].upper()}{later.remedy[1:]}\n" in said

"""The first line for real nodes: well, alone, paused, without a bootstrap peer, refused, or with a dead trainer."""

from __future__ import annotations

import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import trio
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from farandole.node.base.control import call
from farandole.node.base.exits import Exit
from farandole.node.base.settings import NodeSettings
from farandole.node.daemon import run_node
from farandole.node.status.status import NodeStatus
from farandole.node.store.folder import index_of, saved_round
from farandole.node.ui.headline import FAILURES_IN_A_ROW, Headline, headline
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.run.manifest import SignedManifest
from farandole.testnet.play.wrong_clock import NoFaketimeError, environment, set_clock

from ...patience import PATIENCE
from ..daemons import Daemon, joined
from ..hosts import LOOPBACK
from ..small_runs import small_manifest, write_run, write_text
from ..statuses import ALICE


@pytest.fixture
def run(tmp_path: Path) -> SignedManifest:
    write_text(tmp_path)
    rounds = {"inner_steps": 0, "round_seconds": 3.0, "exchange_seconds": 5.0}
    return write_run(tmp_path, small_manifest(rounds=rounds, screening={"kind": "guard", "min_clip": 1.0}))


async def first_line(daemon: Daemon) -> Headline:
    """Return the line that `farandole status` prints first."""
    status = await daemon.status()
    return headline(status, status.at)


async def test_a_node_is_alone_then_well_then_paused_and_then_its_trainer_dies(
    tmp_path: Path, run: SignedManifest
) -> None:
    data = ("--data", str(tmp_path / "text.txt"))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("alone: no peer is live")
        alone = await first_line(alice)
        assert (alone.level, alone.text) == (
            "trouble",
            "training alone: there is no other live member in this run",
        )
        assert "farandole run invite" in alone.remedy

        invite = alice.invite(run.run_id)
        async with joined(tmp_path / "bob", invite, *data) as bob:
            await bob.says("averaged with", alice.name)
            status = await bob.until(lambda status: headline(status, status.at).level == "well")
            well = headline(status, status.at)
            assert well.text.startswith("training with 1 other, round ")
            assert f"ago with {alice.name}" in well.text

            await bob.ask("pause")
            await bob.says("resting")
            paused = await first_line(bob)
            assert (paused.level, paused.text) == ("busy", "not training: paused; `farandole resume` goes on")

            await bob.ask("resume")
            await bob.says("averaged with", alice.name)
            trainer = (await bob.status()).trainer_pid
            assert trainer is not None
            os.kill(trainer, signal.SIGSEGV)
            await bob.says("killed by signal 11 (SIGSEGV)", "starting it again")
            dead = await first_line(bob)
            assert dead.level == "trouble"
            assert dead.text == "the trainer died (once so far) and is started again: nothing to do yet"
            assert "SIGSEGV" in dead.remedy

            told = await bob.status()
            member = next(member for member in told.members if member.peer_id[-8:] == alice.name)
            assert member.path == "direct"
            assert member.peer_id in told.round_trips
            assert told.partners[member.peer_id] >= 2
            events = [event.text for event in told.events]
            assert any("averaged with" in text for text in events)
            assert [event for event in told.events if event.is_warning and "SIGSEGV" in event.text]
            await bob.until(lambda status: "SIGSEGV" not in str(status.warnings))  # it trains again
            assert await bob.end(signal.SIGTERM) == Exit.OK
        status = await alice.until(lambda status: status.run.members_left == 1)
        left = headline(status, status.at)
        assert (left.level, left.sentences) == (
            "busy",
            "training alone: the only other member has left; it may come back",
        )


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
    nursery.start_soon(run_node, NodeSettings(home=home, invite=nobody, listen=LOOPBACK, mdns=False, upnp=False))
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


async def test_a_node_and_its_only_partner_say_that_their_clocks_differ(
    tmp_path: Path, run: SignedManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        wrong = environment(tmp_path / "bob")
    except NoFaketimeError as error:
        pytest.skip(str(error))
    set_clock(tmp_path / "bob", -3_660.0)
    data = ("--data", str(tmp_path / "text.txt"))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("listening on")
        invite = alice.invite(run.run_id)
        async with AsyncExitStack() as stack:
            with monkeypatch.context() as patch:
                for name, value in wrong.items():
                    patch.setenv(name, value)
                bob = await stack.enter_async_context(joined(tmp_path / "bob", invite, *data))
            line = await bob.says("this machine's clock is 61 min behind compared with the one member")
            assert "timedatectl set-ntp true" in line
            found = await first_line(bob)
            assert (found.level, found.text.partition(" compared")[0]) == (
                "trouble",
                "this machine's clock is 61 min behind",
            )
            await alice.says("this machine's clock is 61 min ahead compared with the one member")
            set_clock(tmp_path / "bob", 0.0)
            await bob.until(lambda status: status.clock is None)


async def test_a_node_whose_partner_keeps_refusing_says_so_and_so_does_the_partner(
    tmp_path: Path, run: SignedManifest
) -> None:
    data = ("--data", str(tmp_path / "text.txt"))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("listening on")
        invite = alice.invite(run.run_id)
        async with joined(tmp_path / "bob", invite, *data) as bob:
            await bob.says("averaged with", alice.name)
            assert await bob.end(signal.SIGTERM) == Exit.OK
        assert await alice.end(signal.SIGTERM) == Exit.OK
    turn_around(tmp_path / "bob" / "checkpoints")
    async with joined(tmp_path / "alice", *data) as alice:  # both start again, so that neither is far behind
        await alice.says("listening on")
        async with joined(tmp_path / "bob", *data, "--bootstrap", alice.addresses[0]) as bob:
            await bob.says("resumed at round")
            for daemon in (alice, bob):
                found = await first_line(daemon)
                for _ in range(4 * FAILURES_IN_A_ROW):
                    if "in a row: " in found.text:  # all of the last ones were refusals, none came too late
                        break
                    await daemon.says("alone: the exchange failed")
                    found = await first_line(daemon)
                assert found.level == "trouble"
                assert "in a row: the contribution is " in found.text
                assert "checkpoints" in found.remedy or "farandole peers" in found.remedy


def turn_around(checkpoints: Path) -> None:
    """Corrupt weights as a bad disk or GPU would: here, negate them."""
    newest = max(checkpoints.glob("*.safetensors"), key=lambda path: saved_round(path) or 0)
    with safe_open(newest, framework="numpy") as file:
        metadata = file.metadata()
    tensors = {
        name: tensor if name.startswith("square/") else -tensor  # a negative square would not be loaded
        for name, tensor in load_file(newest).items()
    }
    index_of(newest).unlink(missing_ok=True)
    save_file(tensors, newest, metadata)

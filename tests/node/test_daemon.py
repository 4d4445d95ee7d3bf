"""Real daemons, each with its processes, over real connections: the system's main purpose."""

from __future__ import annotations

import os
import re
import signal
import stat
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from farandole.node.base.errors import Exit
from farandole.protocol.planning.needs import needs_of
from farandole.protocol.rounds.pairing import MAX_ROUNDS_BEHIND
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.run.manifest import SignedManifest
from farandole.protocol.run.models import num_parameters
from farandole.protocol.run.rules import encoded_bytes
from farandole.protocol.wire.identity import peer_id_of

from .daemons import Daemon, farandole, joined, started, two_that_average
from .hosts import host_at_loopback
from .small_runs import TINY, small_manifest, write_run


async def test_who_pauses_has_his_memory_back_and_goes_on_where_the_others_are(
    tmp_path: Path, run: SignedManifest, texts: Path
) -> None:
    async with two_that_average(tmp_path, run.run_id, "--data", str(texts)) as (alice, bob):
        told = await bob.ask("limit", upload_mbit=50)
        assert told == "upload at most 50 Mbit/s, download without a cap; kept for later starts"
        await bob.says("averaged with", alice.name)
        assert (await bob.status()).upload_mbit == 50
        another_day = f"{datetime.now() + timedelta(days=3):%a} 12:00-12:01"
        await bob.ask("quiet", hours=another_day)
        assert (await bob.status()).quiet_hours == [another_day]
        trainer = (await bob.ask("status"))["trainer_pid"]

        await bob.ask("pause")
        await bob.says("resting")
        status = await bob.ask("status")
        assert (status["phase"], status["is_member"]) == ("paused", True)
        assert not Path(f"/proc/{trainer}").exists()
        await alice.says("alone: no peer is live")

        assert "training" in await bob.ask("resume")
        await bob.says("trainer ready")
        await bob.says("averaged with", alice.name)
        await bob.ask("pause")
        await bob.says("resting")
        assert await bob.end(signal.SIGTERM) == Exit.OK

        async with joined(tmp_path / "bob", "--data", str(texts)) as bob_again:
            await bob_again.says("resting: paused")
            status = await bob_again.status()
            assert (status.upload_mbit, status.quiet_hours) == (50, [another_day])
            assert "training" in await bob_again.ask("resume")
            await bob_again.says("averaged with", alice.name)


async def test_one_command_starts_a_run_and_prints_an_invite_with_which_others_average(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'name = "us"\nmodel = "tiny"\n[rounds]\nround_seconds = 4\nexchange_seconds = 4\n'
    )
    start = ("start", str(tmp_path / "run.toml"), "--heartbeat-seconds", "1")
    async with started(tmp_path / "alice", *start) as alice:
        told = await alice.says("others join with: farandole join")
        async with joined(tmp_path / "bob", told.split()[-1]) as bob:
            await bob.says("averaged with", alice.name)
            assert await bob.end(signal.SIGTERM) == Exit.OK
            await alice.says(bob.name, "is gone")
        said = await farandole(alice.home, "status")
        assert "training alone: 1 other left, and may come back" in said.out
        assert "farandole1" not in (tmp_path / "alice" / "log").read_text()
        assert await alice.end(signal.SIGTERM) == Exit.OK
    run = (tmp_path / "run.manifest").read_bytes()
    async with started(tmp_path / "alice", *start) as alice:
        await alice.says("comes back to its run")
        await alice.says("others join with")
    assert (tmp_path / "run.manifest").read_bytes() == run


async def test_nodes_average_die_come_back_and_leave(tmp_path: Path, run: SignedManifest, texts: Path) -> None:
    data = ("--data", str(texts))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("listening on")
        for _ in range(3):  # so that her heartbeat, sent every second, reports a round after 0
            await alice.says("alone: no peer is live")
        invite = alice.invite(run.run_id)
        async with joined(tmp_path / "bob", invite, *data) as bob:
            await bob.says("manifest", "verified")
            await bob.says("weights of round", alice.name, "hashes verified")
            await bob.says("trainer ready")
            await bob.says("averaged with", alice.name)
            await alice.says("averaged with", bob.name)

            async with joined(tmp_path / "carol", invite, *data) as carol:
                await carol.says("averaged with")
                await carol.end(signal.SIGKILL)
            await alice.says(carol.name, "is gone")
            await bob.says(carol.name, "is gone")
            await alice.says("averaged with", bob.name)

            # Without an invite: she has the run and her peers on her own disk.
            async with joined(tmp_path / "carol", *data) as carol_again:
                await carol_again.says("this node is", carol.name)
                await carol_again.says("averaged with")
                await alice.end(signal.SIGKILL)  # the first node of the run, and all nodes' bootstrap peer
                await bob.says(alice.name, "is gone")
                await bob.says("averaged with", carol_again.name)

                live = {bob.name, carol_again.name}
                status = await bob.until(
                    lambda status: {member.peer_id[-8:] for member in status.members if member.is_live} == live
                )
                assert status.partners.keys() == {member.peer_id for member in status.members if not member.is_self}
                assert carol.name in {peer_id[-8:] for peer_id in status.round_trips}

                # By default the invite may have a relay through Alice alone, as loopback is no use to most.
                newer = await farandole(bob.home, "run", "invite", "--address", bob.addresses[0])
                async with joined(tmp_path / "dave", newer.out, *data) as dave:
                    await dave.says("averaged with")
                    assert await dave.end(signal.SIGTERM) == Exit.OK

                assert await bob.end(signal.SIGTERM) == Exit.OK
                await bob.says("left the run")
                await carol_again.says(bob.name, "is gone")
                await carol_again.says("alone: no peer is live")
                await carol_again.until(lambda status: status.run.members_left == 2)  # who were killed have not
                assert await carol_again.end(signal.SIGINT) == Exit.OK


MESSAGES = 500
"""Bytes of an exchange beside its contribution, at most."""


async def test_nodes_average_momentum_too_while_they_train_on(tmp_path: Path, texts: Path) -> None:
    """The contribution has it behind the weights, in as many bytes as the run's plan says."""
    manifest = small_manifest(
        inner={"batch_size": 2, "optimizer": "muon"},
        outer={"kind": "plain", "codec": "int8", "momentum_codec": "int4"},
        rounds={"round_seconds": 1.0, "exchange_seconds": 1.0, "overlap": True},
    )
    run = write_run(tmp_path, manifest)
    async with two_that_average(tmp_path, run.run_id, "--data", str(texts)) as (alice, bob):
        for daemon in (alice, bob):
            status = await daemon.until(lambda status: status.exchanges_ok > 2)
            done = [each for each in status.recent_exchanges if each.verdict == "committed"]
            size = needs_of(manifest).contribution_bytes
            assert all(size <= each.bytes_sent < size + MESSAGES for each in done)
            assert size > encoded_bytes("int8", num_parameters(manifest.model)) + MESSAGES


async def test_a_node_that_slept_comes_back_with_newer_weights(tmp_path: Path, texts: Path) -> None:
    run = write_run(tmp_path, small_manifest(rounds={"inner_steps": 0, "round_seconds": 0.5, "exchange_seconds": 5.0}))
    async with two_that_average(tmp_path, run.run_id, "--data", str(texts)) as (alice, bob):
        bob.process.send_signal(signal.SIGSTOP)
        await alice.says(bob.name, "is gone")
        # One round more is behind; one ends when it wakes; and its news of the other is up to two rounds old.
        for _ in range(MAX_ROUNDS_BEHIND + 4):
            await alice.says("inner step")
        bob.process.send_signal(signal.SIGCONT)
        await bob.says("rounds behind the others")
        await bob.says("weights of round", alice.name, "hashes verified")
        await bob.says("averaged with", alice.name)


async def test_a_bootstrap_peer_and_a_run_id_are_enough(tmp_path: Path, run: SignedManifest, texts: Path) -> None:
    """The bootstrap peer is in no run: it only serves the DHT, where the members announce themselves."""
    async with host_at_loopback() as bootstrap:
        invite = encode_invite(Invite(run.run_id, tuple(bootstrap.addresses)))
        data = ("--data", str(texts))
        manifest = str(tmp_path / "run.manifest")
        async with joined(tmp_path / "alice", manifest, "--bootstrap", bootstrap.addresses[0], *data) as alice:
            await alice.says("trainer ready")
            async with joined(tmp_path / "bob", invite, *data) as bob:
                await bob.says("manifest", "verified")
                await bob.says("averaged with", alice.name)
        assert peer_id_of(bootstrap.author) == bootstrap.peer_id


async def test_what_a_node_writes_is_its_owners_alone_and_a_second_daemon_is_refused(
    tmp_path: Path, run: SignedManifest, texts: Path
) -> None:
    home = tmp_path / "alice"
    home.mkdir(mode=0o755)
    for name in ("log", "store.sqlite"):
        (home / name).touch(mode=0o644)
    async with joined(home, str(tmp_path / "run.manifest"), "--data", str(texts)) as alice:
        await alice.says("listening on")
        files = [path for path in home.rglob("*") if path.is_file()]
        assert {"log", "key", "store.sqlite"} <= {path.name for path in files}
        assert [str(path) for path in files if path.stat().st_mode & 0o077] == []
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        async with joined(home, str(tmp_path / "run.manifest"), "--data", str(texts)) as again:
            await again.says("another farandole process", str(alice.process.pid))
            assert await again.ends() == Exit.HOME_IN_USE


LARGE = {"num_layers": 500, "width": 65_536, "num_heads": 512, "hidden": 262_144, "context": 16, "vocabulary": 256}


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (LARGE, ("--device", "cpu"), "this run's model needs"),
        (TINY, (), "this run trains on text that each node brings, and none is named; name some with --data PATH"),
        (TINY, ("--data", "text", "--device", "gpu"), "no device is called 'gpu'"),
        (TINY, ("--data", "empty"), "there is nothing to read in"),
    ],
)
async def test_what_the_trainer_lacks_is_told_before_any_peer_is_dialled(
    tmp_path: Path, model: dict[str, int], options: tuple[str, ...], words: str
) -> None:
    write_run(tmp_path, small_manifest(model=model))
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("text")
    given = [str(tmp_path / option) if option in ("empty", "text") else option for option in options]
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *given) as alice:
        await alice.says("error:", words)
        assert not any("listening on" in line for line in alice.said)
        assert await alice.ends() == Exit.TRAINER_FAILED


async def test_a_newcomer_without_the_runs_text_is_told_before_it_fetches_weights_and_one_with_a_cap_what_to_raise(
    tmp_path: Path, texts: Path
) -> None:
    run = write_run(tmp_path, small_manifest(rounds={"inner_steps": 5, "round_seconds": 0, "exchange_seconds": 0.1}))
    data = ("--data", str(texts))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("trainer ready")
        invite = alice.invite(run.run_id)
        async with joined(tmp_path / "bob", invite) as bob:
            await bob.says("error: this run trains on text that each node brings")
            assert not any("weights" in line for line in bob.said)
        async with joined(tmp_path / "bob", invite, *data, "--upload-mbit", "0.5") as bob:
            told = await bob.says("warning: this run needs", "--upload-mbit 0.5")
            assert "raise --upload-mbit to" in told
            await bob.says("trainer ready")
            told = await bob.ask("limit", upload_mbit=2)
            assert "kept for later starts without --upload-mbit, which goes before it" in told
            assert "--upload-mbit goes before what `farandole limit` keeps" in (await bob.status()).warnings[-1]


async def signal_trainer(daemon: Daemon, number: signal.Signals) -> None:
    status = await daemon.ask("status")
    os.kill(status["trainer_pid"], number)


async def test_trainers_crash_and_hang_and_a_node_is_told_twice_to_leave(
    tmp_path: Path, run: SignedManifest, texts: Path
) -> None:
    options = ("--data", str(texts), "--hung-seconds", "2")
    async with two_that_average(tmp_path, run.run_id, *options) as (alice, bob):
        await signal_trainer(bob, signal.SIGSEGV)
        await bob.says("killed by signal 11 (SIGSEGV)", "starting it again in 1 s")
        await alice.says("alone")
        await bob.says("averaged with", alice.name)
        log = (bob.home / "log").read_text()
        assert re.search("Segmentation fault.*trainer_process/main.py", log, re.DOTALL), "it says where"

        await alice.says("averaged with", bob.name)
        await signal_trainer(alice, signal.SIGSTOP)
        await alice.says("no sign of life")
        await alice.says("trainer ready", "resumed at round")
        await alice.says("averaged with", bob.name)

        for daemon in (alice, bob):
            status = await daemon.until(lambda status: status.run.members_live == 2)
            assert status.trainer_restarts == 1

        await signal_trainer(bob, signal.SIGSTOP)
        trainer = (await bob.ask("status"))["trainer_pid"]
        bob.process.send_signal(signal.SIGTERM)
        await bob.says("leaving")
        assert await bob.end(signal.SIGTERM) == Exit.INTERRUPTED
        with pytest.raises(ProcessLookupError):
            os.kill(trainer, 0)
        await alice.says(bob.name, "is gone")
        assert await alice.end(signal.SIGTERM) == Exit.OK

"""Commands that look into a run for its members: they are let in from a member's data directory, not a stranger's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from farandole.node.base.exits import Exit
from farandole.node.base.identity import load_or_create_key
from farandole.node.join.invites import own_invite
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.run.manifest import SignedManifest, sign_manifest
from farandole.protocol.wire.identity import peer_id_of, public_bytes

from ..patience import PATIENCE
from .daemons import Daemon, joined
from .small_runs import small_manifest


async def command(home: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command with this data directory."""
    options = ("--home", str(home), "--listen", "/ip4/127.0.0.1/tcp/0")
    with trio.fail_after(PATIENCE):
        return await trio.run_process(
            [sys.executable, "-m", "farandole.node", *words, *options],
            check=False,
            capture_stdout=True,
            capture_stderr=True,
            env={**os.environ, "FARANDOLE_MDNS": "false"},
        )


async def does_pull(home: Path, *invite: str) -> bool:
    to = home.parent / f"model-{len(list(home.parent.iterdir()))}"
    answer = await command(home, "checkpoint", "pull", *invite, "--to", str(to))
    assert answer.returncode == Exit.OK, answer.stderr.decode()
    return (to / "checkpoint.safetensors").exists()


async def refusal(home: Path, *words: str) -> str:
    answer = await command(home, *words)
    assert answer.returncode == Exit.BAD_INPUT, answer.stdout.decode()
    return re.sub(r"\s+", " ", answer.stderr.decode())


def write_run(home: Path, admission: object) -> SignedManifest:
    home.mkdir(mode=0o700)
    run = sign_manifest(small_manifest(admission=admission), load_or_create_key(home / "key"))
    (home.parent / "run.manifest").write_bytes(run.encode())
    return run


async def members_of(daemon: Daemon) -> set[str]:
    return {row["peer_id"] for row in await daemon.ask("roster")}


async def test_an_invited_member_pulls_and_audits_by_its_data_directory_and_a_stranger_reads_what_to_do(
    tmp_path: Path, texts: Path
) -> None:
    data = ("--data", str(texts))
    run = write_run(tmp_path / "alice", "invited")
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("step")
        invite = await trio.to_thread.run_sync(lambda: own_invite(alice.home, alice.addresses))
        async with joined(tmp_path / "carol", invite, *data) as carol:
            await carol.says("averaged with", alice.name)
            assert await does_pull(carol.home), "by its node, which may not invite others"
            assert await does_pull(carol.home, invite), "by the invite that it has used, beside its node"
            members = await members_of(alice)
        home = tmp_path / "carol"
        assert await does_pull(home, invite), "without its node"
        assert (await command(home, "checkpoint", "list", invite)).returncode == Exit.OK
        assert "this run has no audits" in await refusal(home, "run", "audit", invite, *data)

        stranger, anybodys = tmp_path / "eve", encode_invite(Invite(run.run_id, alice.addresses))
        for words in (("checkpoint", "list"), ("checkpoint", "pull"), ("run", "audit")):
            said = await refusal(stranger, *words, anybodys)
            assert "run the command with --home of a member's node, or ask for an invite of your own" in said
        assert "has been used" in await refusal(stranger, "checkpoint", "list", invite)
        assert await members_of(alice) == members, "visitors are no members"
        assert len(members) == 2


@pytest.mark.parametrize("is_running", [True, False])
async def test_a_listed_member_pulls_by_its_data_directory_and_a_stranger_reads_what_to_do(
    tmp_path: Path, texts: Path, *, is_running: bool
) -> None:
    data = ("--data", str(texts))
    (tmp_path / "bob").mkdir(mode=0o700)
    bobs = peer_id_of(public_bytes(load_or_create_key(tmp_path / "bob" / "key")))
    run = write_run(tmp_path / "alice", [bobs])
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("step")
        invite = encode_invite(Invite(run.run_id, alice.addresses))
        if is_running:
            async with joined(tmp_path / "bob", invite, *data) as bob:
                await bob.says("averaged with", alice.name)
                assert await does_pull(bob.home, invite)
        else:
            assert await does_pull(tmp_path / "bob", invite)
        said = await refusal(tmp_path / "eve", "checkpoint", "pull", invite)
        assert "for the members that its manifest lists" in said
        assert "run the command with --home of a member's node" in said

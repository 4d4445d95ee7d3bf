"""A private run, with real daemons: the invite has the key, and no node connects without it."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from farandole.node.base.exits import Exit
from farandole.node.base.identity import load_or_create_key
from farandole.node.join.invites import own_invite
from farandole.protocol.run.invite import Invite, decode_invite, encode_invite
from farandole.protocol.run.manifest import sign_manifest

from .daemons import Daemon, joined
from .small_runs import small_manifest


async def invite_by(daemon: Daemon) -> str:
    return await trio.to_thread.run_sync(lambda: own_invite(daemon.home, daemon.addresses))


async def visit(invite: str) -> int:
    command = [sys.executable, "-m", "farandole.node", "checkpoint", "list", invite, "--listen", "/ip4/127.0.0.1/tcp/0"]
    return (await trio.run_process(command, check=False, capture_stderr=True)).returncode


async def test_who_has_an_invite_trains_and_comes_back_and_nobody_else_connects(tmp_path: Path, texts: Path) -> None:
    home, data = tmp_path / "alice", ("--data", str(texts))
    home.mkdir(mode=0o700)
    run = sign_manifest(small_manifest(private=True), load_or_create_key(home / "key"))
    (tmp_path / "run.manifest").write_bytes(run.encode())
    async with joined(home, str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("trainer ready")
        invite = await invite_by(alice)
        async with joined(tmp_path / "bob", invite, *data) as bob:
            await alice.until(lambda status: status.run.members_live == 2)
            assert decode_invite(await invite_by(bob)).network_key == decode_invite(invite).network_key != b""
        async with joined(tmp_path / "bob", *data) as bob:
            await bob.says("connected to 1 peer")
        right = decode_invite(invite)
        others = [Invite(right.run_id, right.addresses, network_key=key) for key in (b"", bytes(32))]
        codes: dict[Invite, int] = {}
        async with trio.open_nursery() as nursery:

            async def note_visit(guest: Invite) -> None:
                codes[guest] = await visit(encode_invite(guest))

            for each in (right, *others):
                nursery.start_soon(note_visit, each)
        assert codes == {right: Exit.OK, **dict.fromkeys(others, Exit.BAD_INPUT)}

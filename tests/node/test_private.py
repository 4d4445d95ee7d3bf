"""A private run, with real daemons: the invite has the key, and no node connects without it."""

from __future__ import annotations

from pathlib import Path

from farandole.node.base.exits import Exit
from farandole.protocol.run.invite import Invite, decode_invite, encode_invite

from .daemons import farandole, joined
from .small_runs import small_manifest, write_run


async def test_who_has_an_invite_trains_and_comes_back_and_nobody_else_connects(tmp_path: Path, texts: Path) -> None:
    home, data = tmp_path / "alice", ("--data", str(texts))
    write_run(tmp_path, small_manifest(private=True), creator=home)
    async with joined(home, str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("trainer ready")
        invite = await alice.own_invite()
        async with joined(tmp_path / "bob", invite, *data) as bob:
            await alice.until(lambda status: status.run.members_live == 2)
            assert decode_invite(await bob.own_invite()).network_key == decode_invite(invite).network_key != b""
        async with joined(tmp_path / "bob", *data) as bob:
            await bob.says("connected to 1 peer")
        right = decode_invite(invite)
        wrong = Invite(right.run_id, right.addresses, network_key=bytes(32))
        for guest, code in ((right, Exit.OK), (wrong, Exit.BAD_INPUT)):
            visit = await farandole(tmp_path / "guest", "checkpoint", "list", encode_invite(guest))
            assert visit.code == code

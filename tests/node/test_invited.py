"""A run of invited members, with real daemons: an invite lets one train, and a revocation ends that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from farandole.node.base.control import ControlError
from farandole.node.base.exits import Exit
from farandole.node.control_methods import admission_handlers
from farandole.protocol.wire.identity import public_key_of

from .daemons import Daemon, farandole, joined
from .small_runs import small_manifest, write_run


async def revoke(daemon: Daemon, key: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = await daemon.ask("admit", keys=[key.hex()], is_admitted=False)
    return rows


async def test_a_node_that_is_not_in_its_run_invites_nobody(autojump_clock: trio.testing.MockClock) -> None:
    handlers = admission_handlers(lambda: None)
    for deed in ("invite", "network_key", "admit", "notice"):
        with pytest.raises(ControlError, match="not in its run yet"):
            await handlers[deed]({})
    assert trio.current_time() < 4 * 10.0, "a command waits for 10 s"


async def test_who_is_invited_trains_and_nobody_else(tmp_path: Path, texts: Path) -> None:
    home, data = tmp_path / "alice", ("--data", str(texts))
    run = write_run(tmp_path, small_manifest(admission="invited"), creator=home)
    async with joined(home, str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("this node is")
        invite = await alice.own_invite(quota=1, uses=2)  # it may not be in its run yet
        await alice.says("step")
        async with joined(tmp_path / "bob", invite, *data) as bob:
            await bob.says("averaged with", alice.name)
            of_bob = await bob.own_invite()
            with pytest.raises(ControlError, match="0 more seats"):
                await bob.own_invite()

            visit = await farandole(tmp_path / "visitor", "checkpoint", "list", await alice.own_invite())
            assert visit.code == Exit.OK, "a visitor takes a seat, too"

            async with joined(tmp_path / "eve", alice.invite(run.run_id), *data) as eve:
                assert "ask one of them for an invite" in await eve.says("do not admit this node")
                assert await eve.ends() == Exit.CANNOT_JOIN

            async with joined(tmp_path / "carol", of_bob, *data, "--name", "Carol") as carol:
                await carol.says("averaged with")
            async with joined(tmp_path / "carol", *data, "--name", "Carol") as carol:
                await carol.says("averaged with")
                rows = {row["peer_id"][-8:]: row["invited_by"] for row in await alice.ask("roster")}
                assert set(rows) == {alice.name, bob.name, carol.name}
                assert f'{carol.name} "Carol"  live' in (await farandole(home, "run", "members")).out
                assert (rows[bob.name] or "")[-8:] == alice.name
                assert (rows[carol.name] or "")[-8:] == bob.name
                with pytest.raises(ControlError, match="may not invite"):
                    await carol.own_invite()
                with pytest.raises(ControlError, match="only the run's creator"):
                    await revoke(bob, run.creator)

                (row,) = await revoke(alice, public_key_of((await bob.status()).peer_id))
                assert (row["peer_id"][-8:], row["invited_by"][-8:]) == (bob.name, alice.name)
                await alice.until(lambda status: status.run.members_live == 1)
                async with joined(tmp_path / "bob again", invite, *data) as again:  # the other seat of the invite
                    assert "revoked" in await again.says("do not admit")
                    assert await again.ends() == Exit.CANNOT_JOIN

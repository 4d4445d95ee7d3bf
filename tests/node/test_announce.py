"""A node behind a port that its owner has opened by hand: here a forwarder on loopback, in place of a router."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from farandole.protocol.run.invite import decode_invite

from .daemons import Daemon, farandole, joined
from .small_runs import write_text


async def forward(target: tuple[str, int], client: trio.SocketStream) -> None:
    """Copy bytes both ways until one end closes."""

    async def copy(source: trio.SocketStream, sink: trio.SocketStream) -> None:
        async for data in source:
            await sink.send_all(data)
        nursery.cancel_scope.cancel()

    try:
        async with client, await trio.open_tcp_stream(*target) as inner, trio.open_nursery() as nursery:
            nursery.start_soon(copy, client, inner)
            nursery.start_soon(copy, inner, client)
    except* trio.BrokenResourceError:  # an end that was killed
        pass


async def invite_of(node: Daemon) -> tuple[tuple[str, ...], str, str]:
    """Return an invite's addresses, the invite and what was printed to standard error."""
    answer = await farandole(node.home, "run", "invite")
    return decode_invite(answer.out).addresses, answer.out, answer.err


@pytest.mark.usefixtures("run")
async def test_an_invite_leads_through_a_port_that_was_opened_by_hand(tmp_path: Path) -> None:
    data = ("--data", str(write_text(tmp_path)), "--no-mdns")
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("trainer ready")
        addresses, _, complaint = await invite_of(alice)
        inner = int(alice.addresses[0].split("/")[4])
        assert addresses == alice.addresses
        assert "warning: this invite has only private addresses (127.0.0.1)" in complaint
        assert "--announce" in complaint

    async with trio.open_nursery() as nursery:
        (router,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        outer = f"/dns4/localhost/tcp/{router.socket.getsockname()[1]}"
        nursery.start_soon(trio.serve_listeners, lambda client: forward(("127.0.0.1", inner), client), [router])
        async with joined(tmp_path / "alice", *data, "--announce", outer) as alice:
            await alice.says(f"announcing {outer}")
            await alice.says("listening on /ip4/127.0.0.1/tcp/", str(inner))
            addresses, invite, complaint = await invite_of(alice)
            assert [address.partition("/p2p/")[0] for address in addresses] == [outer]
            assert "warning" not in complaint
            async with joined(tmp_path / "bob", invite, *data) as bob:
                await bob.says("manifest", "verified")
                me = (await alice.status()).peer_id
                told = await bob.until(lambda status: any(each.peer_id == me for each in status.members))
                (member,) = [each for each in told.members if each.peer_id == me]
                assert member.addresses[0] == outer, "members hear of it too"
        nursery.cancel_scope.cancel()

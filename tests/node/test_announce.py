"""A node behind a port that its owner has opened by hand: here a forwarder on loopback, in place of a router."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import trio

from farandole.protocol.run.invite import decode_invite

from ..patience import PATIENCE
from .daemons import Daemon, joined
from .small_runs import small_manifest, write_run, write_text


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


async def invite_of(daemon: Daemon) -> tuple[tuple[str, ...], str, str]:
    """Return an invite's addresses, the invite and what was printed to standard error."""
    command = [sys.executable, "-m", "farandole.node", "run", "invite", "--home", str(daemon.home)]
    with trio.fail_after(PATIENCE):
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
    invite = done.stdout.decode().strip()
    return decode_invite(invite).addresses, invite, " ".join(done.stderr.decode().split())


async def test_an_invite_leads_through_a_port_that_was_opened_by_hand(tmp_path: Path) -> None:
    write_run(tmp_path, small_manifest())
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


def test_an_address_that_leads_nowhere_is_refused_before_the_node_starts(tmp_path: Path) -> None:
    command = ["join", "--home", str(tmp_path), "--announce", "/ip4/192.168.1.10/tcp/4001"]
    done = subprocess.run(
        [sys.executable, "-m", "farandole.node", *command], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode != 0
    assert "public addresses" in done.stderr
    assert not (tmp_path / "key").exists()

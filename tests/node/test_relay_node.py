"""A relay without a trainer, in its own process, and hosts on loopback that use it."""

from __future__ import annotations

import signal
import urllib.request
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
import trio

from farandole.node.base.control import ControlError, call
from farandole.node.base.errors import Exit
from farandole.node.control_methods import admission_handlers
from farandole.node.loop.traffic_service import TRAFFIC_FACT, Used
from farandole.node.mesh.host import Host
from farandole.node.mesh.reach.reachability import Dialback
from farandole.node.state.store import open_store
from farandole.node.ui.headline import headline
from farandole.protocol.mesh.kademlia import relay_key, run_key
from farandole.protocol.run.invite import Invite, encode_invite, split_address
from farandole.protocol.wire.identity import peer_id_of, short_name

from ..patience import PATIENCE
from .daemons import Daemon, started
from .hosts import host_at_loopback, open_home

RUN, OTHER_RUN = b"r" * 32, b"o" * 32
TO_NOBODY = encode_invite(Invite(RUN, (f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_of(bytes(32))}",)))


def invite_to(run: bytes, host: Host) -> str:
    return encode_invite(Invite(run, tuple(host.addresses)))


def author_of(relay: Daemon) -> bytes:
    return split_address(relay.addresses[0])[1]


async def providers(host: Host, key: bytes, wanted: bytes) -> None:
    found: set[bytes] = set()
    while wanted not in found:
        found.update(dict(await host.dht.find_providers(key, 5.0)))


def figures_of(relay: Daemon) -> str:
    """Return the relay's metrics for Prometheus."""
    with urllib.request.urlopen(f"{call(relay.home, 'dashboard')['url']}metrics") as answer:
        return str(answer.read().decode())


async def test_it_introduces_members_and_relays(tmp_path: Path) -> None:
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as alice, host_at_loopback() as bob:
            for witness in (alice, bob):
                Dialback(witness)
            async with started(tmp_path / "relay", "relay", invite_to(RUN, alice)) as relay:
                await relay.says("peers can dial this node")
                await relay.says("  /ip4/127.0.0.1/tcp/")
                await alice.dht.provide(run_key(RUN))
                async with open_home() as newcomer:
                    await newcomer.connect(author_of(relay), relay.addresses)
                    await providers(newcomer, run_key(RUN), alice.author)
                    await providers(newcomer, relay_key(RUN), author_of(relay))
                    held = await newcomer.relays.reserve(author_of(relay))
                    async with host_at_loopback() as caller:
                        await caller.connect(newcomer.author, [f"{held.address}/p2p/{newcomer.peer_id}"])
                        assert caller.connections.path(newcomer.author) == "relayed"
                    status = await relay.ask("status")
                    assert (status["phase"], status["relayed_peers"]) == ("relaying", 1)
                    assert not status["is_member"]
                    figures = await trio.to_thread.run_sync(figures_of, relay)
                    assert 'farandole_phase{phase="relaying"} 1.0' in figures
                    assert "farandole_relayed_peers 1.0" in figures
                    assert "farandole_tokens" not in figures
                assert await relay.end(signal.SIGTERM) == Exit.OK


async def test_it_knows_its_runs_and_their_members_after_a_restart(tmp_path: Path) -> None:
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as member:
            await member.dht.provide(run_key(RUN))
            async with host_at_loopback() as bootstrap:
                await member.connect(bootstrap.author, bootstrap.addresses)
                async with started(tmp_path / "relay", "relay", invite_to(RUN, bootstrap)) as relay:
                    await relay.says("found", short_name(member.author))
                    assert await relay.end(signal.SIGTERM) == Exit.OK
            async with started(tmp_path / "relay", "relay", encode_invite(Invite(OTHER_RUN))) as relay:
                await relay.says("this folder is of a relay for another run")
                assert await relay.ends() == Exit.BAD_INPUT
            async with started(tmp_path / "relay", "relay") as relay:  # no invite, no bootstrap peer
                await relay.says("listening on")
                while author_of(relay) not in member.connected:
                    await member.connections.changed.park()


async def test_its_traffic_of_a_month_is_bounded_too(tmp_path: Path) -> None:
    async with host_at_loopback() as member:
        async with open_store(tmp_path / "relay" / "store.sqlite") as store:
            today = datetime.now()
            await store.put_fact(TRAFFIC_FACT, msgspec.msgpack.encode(Used(today.year, today.month, 10**9)))
        async with started(tmp_path / "relay", "relay", invite_to(RUN, member), "--monthly-traffic", "1") as relay:
            await relay.says("1 GB of traffic are used up until")
            status = await relay.ask("status")
            assert (status["connected_peers"], status["traffic"]["limit"]) == (0, 10**9)
            assert await relay.end(signal.SIGTERM) == Exit.OK


async def test_a_peer_is_dialled_at_an_address_that_a_person_gives_and_remembered(tmp_path: Path) -> None:
    async with host_at_loopback() as alice:
        async with started(tmp_path / "relay", "relay", TO_NOBODY, "--no-mdns") as relay:
            told = await relay.says("farandole dial /ip4/")
            assert told.split()[-1] in relay.addresses
            status = await relay.until(lambda status: bool(status.waits_for))
            found = headline(status, status.at)
            assert (found.level, found.text.partition(" /ip4/")[0]) == (
                "busy",
                "waiting for a member: on its machine, `farandole dial",
            )

            async def dial(address: str) -> str:
                return str(await relay.ask("dial", address=address))

            for address, problem in (
                (f"/ip4/127.0.0.1/tcp/1/p2p/{alice.peer_id}", "does not answer"),
                (relay.addresses[0], "own address"),
                ("alice", "no address to dial"),
            ):
                with pytest.raises(ControlError, match=problem):
                    await dial(address)
            for method in (*admission_handlers(lambda: None), "pause"):
                with pytest.raises(ControlError, match="a relay runs here"):
                    await relay.ask(method)
            assert await dial(alice.addresses[0]) == f"connected to {alice.peer_id}"
            assert author_of(relay) in alice.connected
            assert await relay.end(signal.SIGTERM) == Exit.OK
        async with started(tmp_path / "relay", "relay", "--no-mdns") as relay:
            await relay.says("listening on")
            await relay.until(lambda status: status.connected_peers == 1)

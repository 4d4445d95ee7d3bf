"""Real nodes that start again: on the port of their first start if it is free, so that invites remain valid."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
import trio

from farandole.node.base.exits import Exit
from farandole.node.base.settings import DEFAULT_LISTEN, NodeSettings
from farandole.node.join.address_book import keep_ports, load_ports
from farandole.node.state.store import StoreError, open_store
from farandole.node.status.journal import Journal
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.wire.identity import peer_id_of

from ...patience import PATIENCE
from ..daemons import Daemon, started

RUN = b"r" * 32
NOWHERE = encode_invite(Invite(RUN, (f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_of(bytes(32))}",)))
ANY = "/ip4/127.0.0.1/tcp/0"


def port_of(daemon: Daemon) -> int:
    """Return the port of the node's only address."""
    (address,) = daemon.addresses
    return int(address.split("/")[4])


async def test_a_port_that_is_taken_is_replaced_with_a_warning_and_used_again_when_it_is_free(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with trio.fail_after(PATIENCE):
        async with started(home, "relay", NOWHERE, "--no-mdns") as relay:
            await relay.says("listening on")
            kept = port_of(relay)
            await relay.end(signal.SIGKILL)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # earlier connections are not quite over
            other.bind(("127.0.0.1", kept))
            other.listen()
            async with started(home, "relay", "--no-mdns") as relay:
                warning = await relay.says("warning:", f"port {kept}", "is taken")
                assert "may not find this node" in warning
                await relay.says("listening on")
                assert port_of(relay) != kept
                assert f"listens on {port_of(relay)} now" in warning
                assert await relay.end(signal.SIGTERM) == Exit.OK
        async with started(home, "relay", "--no-mdns") as relay:
            await relay.says("listening on")
            assert port_of(relay) == kept
            assert not [line for line in relay.said if "is taken" in line]


@pytest.fixture
def journal() -> Journal:
    return Journal(print)


async def test_only_a_port_that_was_left_open_is_kept_and_each_address_has_its_own(
    tmp_path: Path, journal: Journal
) -> None:
    fixed, other = "/ip4/127.0.0.1/tcp/4001", "/ip6/::1/tcp/0"
    async with open_store(tmp_path / "store.sqlite") as store:
        assert await load_ports(store, [ANY, fixed, other]) == {}
        await keep_ports(store, {}, {ANY: 40_001, fixed: 4_001, other: 40_002}, journal)
        assert await load_ports(store, [ANY, fixed, other]) == {ANY: 40_001, other: 40_002}
        assert await load_ports(store, ["/ip4/0.0.0.0/tcp/0"]) == {}
        await keep_ports(store, {ANY: 40_001}, {ANY: 40_001, fixed: 4_002}, journal)
    assert not journal.warnings


@pytest.mark.parametrize("damaged", [b"", b"0", b"65536", b"-1", b"9" * 5_000, b"\xff", b"4001 "])
async def test_a_damaged_port_is_none(tmp_path: Path, journal: Journal, damaged: bytes) -> None:
    async with open_store(tmp_path / "store.sqlite") as store:
        await keep_ports(store, {}, {ANY: 40_001}, journal)
        await store._write(("UPDATE facts SET value = ?", [(damaged,)]))
        assert await load_ports(store, [ANY]) == {}


async def test_a_disk_that_does_not_take_the_port_stops_no_node(tmp_path: Path, journal: Journal) -> None:

    async with open_store(tmp_path / "store.sqlite") as store:
        await store._write(("DROP TABLE facts", [()]))
        with pytest.raises(StoreError):
            await store.put_fact("manifest", b"")
        await keep_ports(store, {}, {ANY: 40_001}, journal)
    (warning,) = journal.warnings
    assert "another port than 40001" in warning


async def test_a_port_that_is_taken_for_both_versions_of_ip_is_warned_about_once(
    tmp_path: Path, journal: Journal
) -> None:
    async with open_store(tmp_path / "store.sqlite") as store:
        kept = dict.fromkeys(DEFAULT_LISTEN, 4001)
        await keep_ports(store, kept, dict.fromkeys(DEFAULT_LISTEN, 5001), journal)
    (warning,) = journal.warnings
    assert "--port PORT" in warning


def test_a_port_replaces_any_port_and_leaves_the_ports_that_are_named() -> None:
    assert NodeSettings(port=4001).listening == ["/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001"]
    assert NodeSettings(port=4001, listen=[ANY, "/ip4/10.0.0.1/tcp/80"]).listening == [
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/10.0.0.1/tcp/80",
    ]
    assert NodeSettings().listening == DEFAULT_LISTEN

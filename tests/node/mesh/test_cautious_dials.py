"""Liars that announce a third party's port, or an address inside this node's network."""

from __future__ import annotations

import os

import pytest
import trio

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.mesh.host import Host
from farandole.protocol.mesh.dialling import FREE_OF_PORT

from ...patience import PATIENCE
from ..hosts import ECHO, echo, host_at_loopback, port_of


async def dial_in_vain(host: Host, peer: bytes, address: str) -> str:
    host.dialler.add_addresses(peer, [address], is_hearsay=True)
    with pytest.raises(PeerUnreachableError) as raised:
        await host.connect(peer, timeout=PATIENCE)
    return str(raised.value)


async def test_sixty_liars_bring_a_third_party_a_handful_of_connections() -> None:
    num_connections = 0

    async def hang_up(stream: trio.SocketStream) -> None:
        nonlocal num_connections
        num_connections += 1
        await stream.aclose()

    async with host_at_loopback() as alice, trio.open_nursery() as nursery:
        (trap,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, hang_up, [trap])
        address = f"/ip4/127.0.0.1/tcp/{trap.socket.getsockname()[1]}"
        reasons = [await dial_in_vain(alice, os.urandom(32), address) for _ in range(60)]
        nursery.cancel_scope.cancel()
    assert num_connections == FREE_OF_PORT
    assert "too early" in reasons[-1]


@pytest.mark.parametrize("address", ["/ip4/192.168.77.1/tcp/8080", "/ip4/127.0.0.1/tcp/22", "/dns4/localhost/tcp/22"])
async def test_networks_where_this_node_has_no_business_and_well_known_ports_are_not_dialled(address: str) -> None:
    async with host_at_loopback() as alice:
        assert "is not dialled on a peer's word" in await dial_in_vain(alice, os.urandom(32), address)


async def test_liars_who_point_at_an_honest_node_do_not_make_it_unreachable() -> None:
    async with host_at_loopback() as alice, host_at_loopback() as bob:
        bob.set_handler(ECHO, echo)
        address = f"/ip4/127.0.0.1/tcp/{port_of(bob)}"
        for _ in range(3 * FREE_OF_PORT):
            await dial_in_vain(alice, os.urandom(32), address)
        alice.dialler.add_addresses(bob.author, [address], is_hearsay=True)
        await alice.connect(bob.author)
        assert address in alice.dialler.known.to_keep(bob.author)


async def test_what_the_user_says_is_dialled_wherever_it_is() -> None:
    async with host_at_loopback() as alice, host_at_loopback() as bob:
        alice.acceptor.close()  # so that it no longer listens at 127.0.0.1
        address = f"/ip4/127.0.0.1/tcp/{port_of(bob)}"
        assert "is not dialled" in await dial_in_vain(alice, bob.author, address)
        await alice.connect(bob.author, [address])


async def test_an_announced_address_inside_a_network_is_not_kept_for_another_day() -> None:
    async with host_at_loopback() as alice:
        liar = os.urandom(32)
        public, private = "/ip4/8.8.8.8/tcp/4001", "/ip4/192.168.77.1/tcp/8080"
        alice.dialler.add_addresses(liar, [public, private], is_hearsay=True)
        assert set(alice.dialler.known.of(liar)) == {public, private}
        assert alice.dialler.known.to_keep(liar) == [public]

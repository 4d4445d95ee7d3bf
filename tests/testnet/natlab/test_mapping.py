"""A home whose router opens ports on request: its node is public, whatever happens to the router."""

from __future__ import annotations

import trio

from farandole.testnet.natlab.home import Home
from farandole.testnet.natlab.lab import Lab

from ...node.hosts import until
from ...patience import PATIENCE
from .mesh_node import PORT
from .test_mesh import Node, open_nodes

LEASE_SECONDS = 2


def is_public_at(node: Node, home: Home) -> bool:
    """Return whether the node has found out its public address, and reports it to others."""
    address = f"/ip4/{home.address}/tcp/{PORT}/"
    return node.told["kind"] == "public" and any(told.startswith(address) for told in node.told["addresses"])


async def test_who_has_asked_its_router_is_public_and_stays_so(full_lab: Lab) -> None:
    homes = [full_lab.add_home(kind) for kind in ("open", "open", "upnp", "symmetric")]
    with trio.fail_after(PATIENCE):
        async with open_nodes(homes, full_lab.leash, f"lease={LEASE_SECONDS}") as (one, two, mapped, far):
            home = homes[2]
            for node in (two, mapped, far):
                await node.dial(one)
            await mapped.dial(two)
            await until(lambda: is_public_at(mapped, home))
            await trio.sleep(1.5 * LEASE_SECONDS)  # the first lease has expired
            await until(lambda: is_public_at(mapped, home))
            await far.dial(mapped)
            await until(lambda: far.path(mapped) == mapped.path(far) == "direct")
            home.change_address()  # its router restarts
            await until(lambda: is_public_at(mapped, home))
            await two.dial(mapped)
            await until(lambda: two.path(mapped) == "direct")

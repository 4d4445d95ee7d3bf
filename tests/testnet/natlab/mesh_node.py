"""A node's host and connectivity, without a trainer; it dials the peers named by lines of JSON, and prints changes.

It listens on port 4001, over IPv4 and IPv6, and on the ports given as arguments; ``lease=SECONDS``: it requests them
from its router. It looks more often than a node how it is reached, and whether a peer is frozen.
"""

from __future__ import annotations

import json
import sys

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.errors import PeerUnreachableError
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.reach import reachability
from farandole.node.mesh.reach.connectivity import Connectivity, open_connectivity
from farandole.protocol.mesh.relay import Limits

PORT = 4001
reachability.DIAL_INTERVAL = reachability.RETRY_INTERVAL = 1.0
PING_INTERVAL, PING_TIMEOUT = 1.0, 8.0


class Dial(msgspec.Struct):
    """A line of the input."""

    peer: str
    """Public key in hex."""
    addresses: list[str]


async def tell(host: Host, connectivity: Connectivity) -> None:
    told = ""
    while True:
        news = {
            "peer": host.author.hex(),
            "kind": connectivity.reachability.verdict.kind,
            "addresses": host.addresses,
            "observed": host.own.observed_ips,
            "mapped": host.own.mapped,
            "relays": [held.relay.hex() for held in host.relays.reservations],
            "paths": {peer.hex(): host.connections.path(peer) for peer in host.connected},
        }
        line = json.dumps(news)
        if line != told:
            print(line, flush=True)
        told = line
        await trio.sleep(0.05)


async def obey(host: Host, nursery: trio.Nursery) -> None:
    async def keep_connected(order: Dial) -> None:
        while True:
            try:
                await host.connect(bytes.fromhex(order.peer), order.addresses)
            except PeerUnreachableError as error:
                print(error, file=sys.stderr, flush=True)
            await trio.sleep(1)

    async for line in trio.wrap_file(sys.stdin):
        nursery.start_soon(keep_connected, msgspec.json.decode(line, type=Dial))


async def run() -> None:
    key = Ed25519PrivateKey.generate()
    leases = [int(argument.removeprefix("lease=")) for argument in sys.argv[1:] if argument.startswith("lease=")]
    ports = [PORT, *(int(argument) for argument in sys.argv[1:] if argument.isdigit())]
    async with (
        open_host(key, [f"/ip6/::/tcp/{PORT}", *(f"/ip4/0.0.0.0/tcp/{port}" for port in ports)]) as host,
        open_connectivity(
            host, bytes(32), Shaping(), limits=Limits(), port_lease=leases[0] if leases else None
        ) as connectivity,
        trio.open_nursery() as nursery,
    ):
        host.connections.ping_interval, host.connections.ping_timeout = PING_INTERVAL, PING_TIMEOUT
        nursery.start_soon(tell, host, connectivity)
        nursery.start_soon(obey, host, nursery)


if __name__ == "__main__":
    trio.run(run)

"""Hosts that know each other only through a relay, on loopback: none knows where the others listen."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.nurseries import open_service_nursery
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.reach.relay_server import RelayServer
from farandole.protocol.mesh.relay import Limits

from ..patience import PATIENCE
from .hosts import ECHO, LOOPBACK, echo, host_at_loopback


@dataclass
class Relay:
    """A host that relays."""

    host: Host
    server: RelayServer


@contextlib.asynccontextmanager
async def open_relay(
    limits: Limits | None = None, shaping: Shaping | None = None, ping: float = 10.0
) -> AsyncIterator[Relay]:
    key = Ed25519PrivateKey.generate()
    async with (
        open_host(key, LOOPBACK, shaping=shaping, ping_interval=ping, ping_timeout=ping) as host,
        open_service_nursery() as nursery,
    ):
        server = RelayServer(host, key, shaping, limits)
        nursery.start_soon(server.run)
        await trio.testing.wait_all_tasks_blocked()
        yield Relay(host, server)


def open_public() -> contextlib.AbstractAsyncContextManager[Host]:
    """Open a node that listens."""
    return host_at_loopback()


@contextlib.asynccontextmanager
async def open_home(ping: float = 10.0) -> AsyncIterator[Host]:
    """Open a node without a listener."""
    async with open_host(Ed25519PrivateKey.generate(), [], ping_interval=ping, ping_timeout=ping) as host:
        yield host


async def reserve(home: Host, relay: Host) -> str:
    """Reserve at the relay; return the address through it, with the peer's id."""
    await home.connect(relay.author, relay.addresses)
    held = await home.relays.reserve(relay.author)
    return f"{held.address}/p2p/{home.peer_id}"


@contextlib.asynccontextmanager
async def relayed_pair(
    limits: Limits | None = None, shaping: Shaping | None = None
) -> AsyncIterator[tuple[Relay, Host, Host]]:
    """Open a relay and two homes, of which the first is connected through it to the second, which echoes."""
    with trio.fail_after(PATIENCE):
        async with open_relay(limits, shaping) as relay, open_home() as alice, open_home() as bob:
            bob.set_handler(ECHO, echo)
            await alice.connect(bob.author, [await reserve(bob, relay.host)])
            yield relay, alice, bob


async def until(condition: Callable[[], bool]) -> None:
    """Poll until a condition without an event is true."""
    while True:
        if condition():
            return
        await trio.sleep(0.01)

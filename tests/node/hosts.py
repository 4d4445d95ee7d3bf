"""Hosts on loopback, alone or behind relays, and a service to request from them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.nurseries import open_service_nursery
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.reach.connectivity import Connectivity, RelayServer, open_connectivity
from farandole.node.mesh.reach.reachability import Reachability
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.mesh.reachability import Verdict
from farandole.protocol.mesh.relay import Limits

from ..patience import PATIENCE

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
ECHO = "/echo/1"


def host_at_loopback(**settings: Any) -> AbstractAsyncContextManager[Host]:
    return open_host(Ed25519PrivateKey.generate(), LOOPBACK, **settings)


@asynccontextmanager
async def connected_pair() -> AsyncIterator[tuple[Host, Host]]:
    """Open two hosts, of which the first has dialled the second; both fail after some time, and the second echoes."""
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as alice, host_at_loopback() as bob:
            bob.set_handler(ECHO, echo)
            await alice.connect(bob.author, bob.addresses)
            yield alice, bob


def port_of(host: Host) -> int:
    """Return the port at which the host listens."""
    return host.own.listening[0][1]


def has_ipv6() -> bool:
    """Return whether this system can listen over IPv6."""
    try:
        with socket.create_server(("::", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def hang(*args: object) -> None:
    """Serve or do nothing, for ever."""
    await trio.sleep_forever()


async def echo(stream: Libp2pStream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)


async def echoed(stream: Libp2pStream, data: bytes) -> bytes:
    """Send data and an end to an echo, and receive meanwhile; return all that comes back."""
    received = bytearray()

    async def send() -> None:
        await stream.send_all(data)
        await stream.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while piece := await stream.receive_some():
            received += piece
    return bytes(received)


async def assert_echo(caller: Host, peer: Host) -> None:
    """Assert that a new stream to the peer's `echo` carries bytes both ways."""
    async with await caller.open_stream(peer.author, ECHO, PATIENCE) as stream:
        await stream.send_all(b"are you there?")
        assert await stream.receive_some() == b"are you there?"


async def assert_answers(host: Host) -> None:
    """Assert that an honest newcomer is served."""
    async with host_at_loopback() as newcomer:
        with trio.fail_after(PATIENCE):
            newcomer.dialler.add_addresses(host.author, host.addresses)
            await assert_echo(newcomer, host)


@asynccontextmanager
async def open_node(
    listen: list[str] = LOOPBACK, verdict: Verdict | None = None, run_id: bytes = bytes(32)
) -> AsyncIterator[tuple[Host, Connectivity]]:
    """Open a host that finds out how it is reached, unless the test says so."""
    reachability = Reachability(verdict) if verdict else None
    async with (
        open_host(Ed25519PrivateKey.generate(), listen) as host,
        open_connectivity(host, run_id, Shaping(), limits=Limits(), reachability=reachability) as connectivity,
    ):
        yield host, connectivity


@dataclass
class Relay:
    """A host that relays."""

    host: Host
    server: RelayServer


@asynccontextmanager
async def open_relay(limits: Limits | None = None, shaping: Shaping | None = None) -> AsyncIterator[Relay]:
    key = Ed25519PrivateKey.generate()
    async with open_host(key, LOOPBACK, shaping=shaping) as host, open_service_nursery() as nursery:
        server = RelayServer(host, shaping or Shaping(), limits)
        nursery.start_soon(server.run)
        await trio.testing.wait_all_tasks_blocked()
        yield Relay(host, server)


def open_home() -> AbstractAsyncContextManager[Host]:
    """Open a node without a listener."""
    return open_host(Ed25519PrivateKey.generate(), [])


async def reserve(home: Host, relay: Host) -> str:
    """Reserve at the relay; return the address through it, with the peer's id."""
    await home.connect(relay.author, relay.addresses)
    held = await home.relays.reserve(relay.author)
    return f"{held.address}/p2p/{home.peer_id}"


@asynccontextmanager
async def relayed_pair(
    limits: Limits | None = None, shaping: Shaping | None = None
) -> AsyncIterator[tuple[Relay, Host, Host]]:
    """Open a relay and two homes, of which the first is connected through it to the second, which echoes."""
    with trio.fail_after(PATIENCE):
        async with open_relay(limits, shaping) as relay, open_home() as alice, open_home() as bob:
            bob.set_handler(ECHO, echo)
            await alice.connect(bob.author, [await reserve(bob, relay.host)])
            yield relay, alice, bob


class Line:
    """A line to a port, which a test watches, freezes or cuts."""

    def __init__(self, nursery: trio.Nursery, port: int) -> None:
        self.is_frozen = False
        self.ends: list[trio.SocketStream] = []
        self.recorded: list[bytearray] = []
        """What has come from each end."""
        self._nursery, self._port = nursery, port

    async def open(self) -> int:
        """Return the port from which the line leads on."""
        (listener,) = await self._nursery.start(partial(trio.serve_tcp, self._pass_on, 0, host="127.0.0.1"))
        return int(listener.socket.getsockname()[1])

    async def _pass_on(self, near: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", self._port) as far, trio.open_nursery() as both:
            self.ends += [near, far]
            both.start_soon(self._copy, near, far)
            both.start_soon(self._copy, far, near)

    async def _copy(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        record = bytearray()
        self.recorded.append(record)
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                record += data
                if self.is_frozen:
                    await trio.sleep_forever()
                await target.send_all(data)
            await target.send_eof()


async def until(condition: Callable[[], bool]) -> None:
    """Poll until a condition without an event is true."""
    while not condition():  # noqa: ASYNC110 - there is none
        await trio.sleep(0.01)


def num_tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living

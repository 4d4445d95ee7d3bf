"""Hosts on loopback, and a service to request from them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.yamux import Libp2pStream

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

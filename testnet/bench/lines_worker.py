"""The processes of the benchmark of lines: an end of a bulk channel, and a proxy on a machine with another line."""

from __future__ import annotations

import time
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.bulk.bundle import Bundle
from farandole.node.bulk.channel import BulkChannel
from farandole.node.bulk.negotiation import BulkService, open_bulk
from farandole.node.mesh.host import Host, open_host
from farandole.protocol.wire.identity import public_key_of
from farandole.protocol.wire.incoming import Incoming

from ..socks_proxy import open_proxy
from .server import Server

RUN_ID = bytes(32)


class LineProxy:
    """A proxy."""

    def __init__(self, server: Server) -> None:
        self._stack = server.stack

    async def open(self, host: str) -> dict[str, Any]:
        """Listen at an address of this machine."""
        proxy = await self._stack.enter_async_context(open_proxy(host))
        return {"url": f"socks5://{host}:{proxy.port}"}


class LineEnd:
    """An end of a channel."""

    _host: Host
    _channels: BulkService
    _channel: BulkChannel | Bundle

    def __init__(self, server: Server) -> None:
        self._stack = server.stack

    async def open(self, address: str, lines: list[str]) -> dict[str, Any]:
        """Listen at an IP address, with further lines."""
        listen = [f"/ip4/{address}/tcp/0"]
        self._host = await self._stack.enter_async_context(open_host(Ed25519PrivateKey.generate(), listen))
        self._channels = await self._stack.enter_async_context(open_bulk(self._host, RUN_ID, lines=lines))
        return {"address": self._host.addresses[0], "peer": self._host.addresses[0].rpartition("/p2p/")[2]}

    async def ask(self, address: str) -> dict[str, Any]:
        """Open a channel with a peer that expects this node."""
        peer = public_key_of(address.rpartition("/p2p/")[2])
        await self._host.connect(peer, [address])
        channel = await self._channels.acquire(peer, all_lines=True)
        if channel is None:
            raise ConnectionError("no channel opened")
        self._channel = channel
        return {"session": channel.session.hex(), "strands": channel.num_strands if isinstance(channel, Bundle) else 1}

    def expect(self, peer: str) -> dict[str, Any]:
        """Let a peer open channels from now on."""
        self._stack.enter_context(self._channels.expecting(public_key_of(peer)))
        return {}

    def take(self, peer: str, session: str) -> dict[str, Any]:
        """Take the channel that the peer has opened."""
        channel = self._channels.take(public_key_of(peer), bytes.fromhex(session))
        if channel is None:
            raise ConnectionError("the channel is not here")
        self._channel = channel
        return {}

    async def move(self, size: int) -> dict[str, Any]:
        """Send and receive as many bytes at once; returns the seconds until all are here."""
        outgoing, incoming = memoryview(bytearray(size)), Incoming(memoryview(bytearray(size)))
        began_at = time.monotonic()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._channel.send, outgoing)
            await self._channel.receive(incoming)
            seconds = time.monotonic() - began_at
        return {"seconds": seconds}

"""A SOCKS5 proxy (RFC 1928) without passwords in this process, which counts what goes through it."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import trio


@dataclass
class Proxy:
    """A proxy that listens."""

    port: int
    seconds_per_read: float = 0.0
    """A pause before each read of what it forwards: a slow line."""
    is_dead: bool = False
    """Whether it refuses every connection."""
    is_silent: bool = False
    """Whether it accepts connections and says nothing."""
    num_bytes: int = 0
    connections: list[trio.SocketStream] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Return its URL, on this machine."""
        return f"socks5://127.0.0.1:{self.port}"

    async def break_off(self) -> None:
        """Close all connections, and refuse further ones."""
        self.is_dead = True
        for connection in self.connections:
            await connection.aclose()


@contextlib.asynccontextmanager
async def open_proxy(host: str = "127.0.0.1") -> AsyncIterator[Proxy]:
    """Run a proxy for as long as the block runs, on a free port of an address of this machine."""
    [listener] = await trio.open_tcp_listeners(0, host=host)
    proxy = Proxy(listener.socket.getsockname()[1])

    async def serve(client: trio.SocketStream) -> None:
        with contextlib.suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            async with client:
                await _serve(proxy, client)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield proxy
        nursery.cancel_scope.cancel()


async def _serve(proxy: Proxy, client: trio.SocketStream) -> None:
    if proxy.is_silent:
        await trio.sleep_forever()
    if proxy.is_dead:
        return
    _, num_methods = await _receive(client, 2)
    await _receive(client, num_methods)
    await client.send_all(b"\x05\x00")
    *_, kind = await _receive(client, 4)
    host = ipaddress.ip_address(await _receive(client, {1: 4, 4: 16}[kind]))
    port = int.from_bytes(await _receive(client, 2), "big")
    remote = await trio.open_tcp_stream(str(host), port)
    await client.send_all(b"\x05\x00\x00\x01" + bytes(6))
    proxy.connections += [client, remote]

    async def forward(source: trio.SocketStream, sink: trio.SocketStream) -> None:
        with contextlib.suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await source.receive_some(65_536):
                await trio.sleep(proxy.seconds_per_read)
                proxy.num_bytes += len(data)
                await sink.send_all(data)
        nursery.cancel_scope.cancel()

    async with remote, trio.open_nursery() as nursery:
        nursery.start_soon(forward, client, remote)
        nursery.start_soon(forward, remote, client)


async def _receive(stream: trio.SocketStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        if not more:
            raise trio.BrokenResourceError
        data += more
    return data

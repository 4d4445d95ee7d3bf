"""Plain sockets on one host, controlled by lines of JSON: what can be reached from here, without libp2p.

A request is ``{"id": 1, "do": ...}`` with the fields of `ProbeRequest`, the answer ``{"id": 1, "result": ...}``;
several may run at once. ``observe`` takes a local port, and asks a third host which address it has outside. ``punch``
then tries to open a path between that port and another host's observed address, while the other host does the same.
``connect`` opens a plain connection to an address, and the host that observes there answers it. ``serve`` is the third
host's part.

A path counts once both ends have read from it the token that both were given, however it was opened: an accepted
connection, an outgoing one, and a simultaneous open (RFC 9293, section 3.5) look alike.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import trio

TOKEN_BYTES: Final = 16
# Between two attempts: a home's router may have dropped the earlier one, if it came before the other side's.
_REPEAT_INTERVAL: Final = 0.1
_MAX_LINE: Final = 4_096
_BACKLOG: Final = 16

Address = tuple[str, int]


class ProbeRequest(msgspec.Struct):
    """A line of the input."""

    id: int
    do: str
    port: int = 0
    """Local port."""
    target: Address = ("", 0)
    """Address of the third host, or the observed one of the other host."""
    token: str = ""
    seconds: float = 1.0


@dataclass
class Probe:
    """``nursery`` outlives the requests: sockets that they opened stay open, as an application's do."""

    nursery: trio.Nursery
    sockets: list[trio.socket.SocketType] = field(default_factory=list)
    """Kept, so that the ports stay in use."""
    arrivals: dict[int, trio.MemoryReceiveChannel[trio.socket.SocketType]] = field(default_factory=dict)
    """Local port -> the connections that arrived at it."""

    async def serve(self, request: ProbeRequest) -> bool:
        """Tell each caller which address it has outside."""
        listener = await _bound(request.port)
        listener.listen(_BACKLOG)
        self.nursery.start_soon(_tell_callers, listener, self.nursery)
        return True

    async def observe(self, request: ProbeRequest) -> Address | None:
        """Return the local port's address as the third host sees it, or None if that host cannot be reached."""
        sock, listener = await _bound(request.port), await _bound(request.port)
        listener.listen(_BACKLOG)
        arrive, self.arrivals[request.port] = trio.open_memory_channel[trio.socket.SocketType](_BACKLOG)
        self.nursery.start_soon(_accept, listener, arrive)
        answer = None
        with trio.move_on_after(request.seconds), suppress(OSError):
            await sock.connect(request.target)
            await sock.send(b"?")
            answer = await sock.recv(_MAX_LINE)
        if not answer:
            return None
        self.sockets.append(sock)
        seen: Address = msgspec.json.decode(answer.partition(b"\n")[0], type=Address)
        return seen

    async def connect(self, request: ProbeRequest) -> bool:
        """Return whether a call from any port is answered."""
        with trio.move_on_after(request.seconds), suppress(OSError):
            sock = trio.socket.socket()
            await sock.connect(request.target)
            return await _is_peer(sock, request.token.encode())
        return False

    async def answer(self, request: ProbeRequest) -> bool:
        """Wait for a call to the observed port."""
        with trio.move_on_after(request.seconds):
            async for sock in self.arrivals[request.port]:
                if await _is_peer(sock, request.token.encode()):
                    return True
        return False

    async def punch(self, request: ProbeRequest) -> bool:
        """Return whether a path between the observed ports opens."""
        with trio.move_on_after(request.seconds):
            await _punch(self.arrivals[request.port], request)
            return True
        return False


async def _bound(port: int) -> trio.socket.SocketType:
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    await sock.bind(("0.0.0.0", port))
    return sock


async def _tell_callers(listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
    while True:
        sock, address = await listener.accept()
        nursery.start_soon(_tell_caller, sock, address)


async def _tell_caller(sock: trio.socket.SocketType, address: Address) -> None:
    with suppress(OSError), sock:
        while await sock.recv(1):
            await sock.send(msgspec.json.encode(address) + b"\n")


async def _accept(listener: trio.socket.SocketType, arrive: trio.MemorySendChannel[trio.socket.SocketType]) -> None:
    while True:
        sock, _ = await listener.accept()
        await arrive.send(sock)


async def _is_peer(sock: trio.socket.SocketType, token: bytes) -> bool:
    """Return whether the token comes back over the connection."""
    received = b""
    with suppress(OSError):
        await sock.send(token)
        while len(received) < TOKEN_BYTES:
            data = await sock.recv(TOKEN_BYTES - len(received))
            if not data:
                return False
            received += data
    return received == token


async def _punch(arrivals: trio.MemoryReceiveChannel[trio.socket.SocketType], request: ProbeRequest) -> None:
    """Return once there is a connection."""
    done = trio.Event()
    token = request.token.encode()

    async def check(sock: trio.socket.SocketType) -> None:
        if await _is_peer(sock, token):
            done.set()

    async def call() -> None:
        while True:
            sock = await _bound(request.port)
            with suppress(OSError):
                await sock.connect(request.target)
                await check(sock)
            sock.close()
            await trio.sleep(_REPEAT_INTERVAL)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)

        async def answer() -> None:
            async for sock in arrivals:
                nursery.start_soon(check, sock)

        nursery.start_soon(answer)
        await done.wait()
        nursery.cancel_scope.cancel()


async def _reply(request: ProbeRequest, do: Callable[[ProbeRequest], Awaitable[object]]) -> None:
    result = await do(request)
    sys.stdout.buffer.write(msgspec.json.encode({"id": request.id, "result": result}) + b"\n")
    sys.stdout.buffer.flush()


async def main() -> None:
    """Serve requests until the input ends."""
    async with trio.open_nursery() as nursery:
        probe = Probe(nursery)
        stream, buffer = trio.lowlevel.FdStream(sys.stdin.fileno()), b""
        while data := await stream.receive_some():
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                request = msgspec.json.decode(line, type=ProbeRequest)
                nursery.start_soon(partial(_reply, request, getattr(probe, request.do)))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)

"""A process of the benchmark of exchanges: ``python -m farandole.testnet.bench.worker KIND SOCKET OUTGOING INCOMING``.

The last three are descriptors: requests come over the socket (`farandole.testnet.bench.process`), the payloads lie in
shared memory. A mesh process and its trainer have a fourth, a socket between the two. A kind is one of `PATHS`, or
``node`` (the mesh process), or ``trainer`` (which imports torch).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import trio

from farandole.node.base.system.memory import map_shared_memory

from .meter import UsageMeter
from .paths import PATHS, Announce, PathEnd
from .requests import handle_request, read_requests, send_answer


class Mover:
    """Moves payloads of any size over one way."""

    def __init__(self, end: PathEnd, outgoing: memoryview, incoming: memoryview) -> None:
        self._end = end
        self._outgoing = outgoing
        self._incoming = incoming
        self._meter = UsageMeter([outgoing, incoming])

    async def send(self, size: int) -> dict[str, Any]:
        """The first so many bytes."""
        with self._meter.running() as figures:
            await self._end.send(self._outgoing[:size])
        return figures

    async def receive(self, size: int) -> dict[str, Any]:
        """So many bytes."""
        with self._meter.running() as figures:
            await self._end.receive_into(self._incoming[:size])
        return figures


@contextlib.asynccontextmanager
async def open_kind(
    kind: str,
    outgoing: memoryview,
    incoming: memoryview,
    address: str | None,
    announce: Announce,
    link: socket.socket | None,
) -> AsyncIterator[object]:
    """What answers the requests."""
    if kind == "trainer":
        from .trainer import BenchTrainer

        await announce("")
        assert link is not None, "a trainer has a mesh process"
        yield BenchTrainer(outgoing, incoming, link)
    elif kind == "node":
        from .node import open_node_end

        async with open_node_end(outgoing, incoming, address, announce, link) as node:
            yield node
    else:
        async with PATHS[kind](address, announce) as end:
            yield Mover(end, outgoing, incoming)


async def serve(
    kind: str,
    control: trio.SocketStream,
    outgoing: memoryview,
    incoming: memoryview,
    link: socket.socket | None,
) -> None:
    """Answer requests until the other end closes; the first gives the address to connect to, or gets one."""
    requests = read_requests(control)

    async def announce(address: str) -> None:
        await send_answer(control, {"address": address})

    first = await anext(requests)
    address = first["address"]
    async with open_kind(kind, outgoing, incoming, address, announce, link) as served:
        if address is not None:
            await announce(address)
        async for request in requests:
            await send_answer(control, await handle_request(served, request))


def main() -> None:
    """Run one worker."""
    kind, *descriptors = sys.argv[1:]
    control, outgoing, incoming, *links = map(int, descriptors)
    out, into = (memoryview(map_shared_memory(fd, os.fstat(fd).st_size)) for fd in (outgoing, incoming))

    async def run() -> None:
        plain = socket.socket(fileno=control)
        link = socket.socket(fileno=links[0]) if links else None
        await serve(kind, trio.SocketStream(trio.socket.from_stdlib_socket(plain)), out, into, link)

    # The workers serve until they are told no more; how their connections then break is nobody's business.
    with contextlib.suppress(BrokenPipeError):
        trio.run(run)


if __name__ == "__main__":
    main()

"""A process of a benchmark that answers requests (`farandole.testnet.bench.process`), one JSON object per line.

    python -m farandole.testnet.bench.server MODULE:CLASS SOCKET [DESCRIPTOR...]

Requests arrive on the socket. Each is a method call on one object of the class, which is created with a `Server` and
the other descriptors.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any, Final

import trio

from farandole.node.base.system.memory import map_shared_memory
from farandole.node.base.system.tuning import importing_for_good

# Requests are lines of a few hundred bytes.
MAX_REQUEST_BYTES: Final = 65_536


class Server:
    """The parts of its process that the answering object may use."""

    def __init__(self, control: trio.SocketStream, stack: contextlib.AsyncExitStack) -> None:
        self.stack = stack
        """Closed when the requests end."""
        self._control = control

    async def announce(self, address: str) -> None:
        """Answer the present request with an address before its method returns, which must then return None."""
        await self.answer({"address": address})

    async def answer(self, figures: dict[str, Any]) -> None:
        """Send one answer."""
        await self._control.send_all(json.dumps(figures).encode() + b"\n")


def map_payload(descriptor: int) -> memoryview:
    """Map the memory of a `SharedPayload`."""
    return memoryview(map_shared_memory(descriptor, os.fstat(descriptor).st_size))


async def serve(kind: str, descriptor: int, *others: int) -> None:
    """Answer requests until the other end closes; a method's error is sent as its answer."""
    module, _, name = kind.partition(":")
    control = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=descriptor)))
    async with contextlib.AsyncExitStack() as stack:
        server = Server(control, stack)
        with importing_for_good():  # as daemons and trainers do
            served_class = getattr(import_module(f".{module}", __package__), name)
        served = served_class(server, *others)
        async for line in _lines(control):
            request = json.loads(line)
            try:
                answer = getattr(served, request.pop("do"))(**request)
                if inspect.isawaitable(answer):
                    answer = await answer
            except Exception as error:  # the benchmark shows any error, and continues
                answer = {"error": f"{type(error).__name__}: {error}"}
            if answer is not None:
                await server.answer(answer)


async def _lines(control: trio.SocketStream) -> AsyncIterator[bytes]:
    buffer = b""
    while data := await control.receive_some(MAX_REQUEST_BYTES):
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            yield line


if __name__ == "__main__":
    kind, *descriptors = sys.argv[1:]
    # The benchmark may be interrupted while an answer is due; a connection that breaks then is no error.
    with contextlib.suppress(BrokenPipeError):
        trio.run(serve, kind, *map(int, descriptors))

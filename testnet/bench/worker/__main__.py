"""A process of a benchmark that answers requests (`farandole.testnet.bench.process`), one JSON object per line.

    python -m farandole.testnet.bench.worker PART SOCKET

Requests arrive on the socket. Each is a call of an action: a function, or a method of the part's class, which is
created with a stack that ends with the requests.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import socket
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Final

import trio

from farandole.node.base.system.tuning import importing_for_good

# Requests are lines of a few hundred bytes.
MAX_REQUEST_BYTES: Final = 65_536
PARTS: Final = {
    "exchanging node": "exchange:ExchangingNode",
    "program": "exchange:MeshProgram",
    "joining node": "join:JoiningNode",
    "stage node": "stages:StageNode",
    "stages": "stages",
    "training": "training",
    "DiLoCo member": "race:DiLoCoMember",
    "attacked node": "hostile:AttackedNode",
    "hostile": "hostile",
}
"""Part of a benchmark -> module here, whose functions are the actions, or a class in it, whose methods are."""


async def serve(part: str, descriptor: int) -> None:
    """Answer requests until the other end closes; an action's error is sent as its answer."""
    module, _, name = PARTS[part].partition(":")
    control = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=descriptor)))
    async with contextlib.AsyncExitStack() as stack:
        with importing_for_good():  # as daemons and trainers do
            served = import_module(f".{module}", __package__)
        if name:
            served = getattr(served, name)(stack)
        async for line in _lines(control):
            request = json.loads(line)
            try:
                answer = getattr(served, request.pop("do"))(**request)
                if inspect.isawaitable(answer):
                    answer = await answer
            except Exception as error:  # the benchmark shows any error, and continues
                answer = {"error": f"{type(error).__name__}: {error}"}
            await control.send_all(json.dumps(answer).encode() + b"\n")


async def _lines(control: trio.SocketStream) -> AsyncIterator[bytes]:
    buffer = b""
    while data := await control.receive_some(MAX_REQUEST_BYTES):
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            yield line


if __name__ == "__main__":
    part, descriptor = sys.argv[1:]
    # The benchmark may be interrupted while an answer is due; a connection that breaks then is no error.
    with contextlib.suppress(BrokenPipeError):
        trio.run(serve, part, int(descriptor))

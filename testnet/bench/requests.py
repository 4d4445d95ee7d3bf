"""The answering side of `farandole.testnet.bench.process` in trio: requests and answers, JSON and a line each."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

import trio

# Requests are lines of a few hundred bytes.
MAX_REQUEST_BYTES: Final = 65_536

Handler = Callable[..., Awaitable[dict[str, Any]]]


async def read_requests(control: trio.SocketStream) -> AsyncGenerator[dict[str, Any], None]:
    """Until the other end closes."""
    buffer = bytearray()
    while data := await control.receive_some(MAX_REQUEST_BYTES):
        buffer += data
        while (end := buffer.find(b"\n")) >= 0:
            yield json.loads(buffer[:end])
            del buffer[: end + 1]


async def send_answer(control: trio.SocketStream, figures: dict[str, Any]) -> None:
    """One line."""
    await control.send_all(json.dumps(figures).encode() + b"\n")


async def handle_request(served: object, request: dict[str, Any]) -> dict[str, Any]:
    """What the method that the request names returns, or the error that it raises: the benchmark shows it."""
    handler: Handler = getattr(served, request.pop("do"))
    try:
        return await handler(**request)
    except Exception as error:  # whatever it is, the benchmark shows it and goes on
        return {"error": f"{type(error).__name__}: {error}"}

"""The control API: how the CLI and scripts talk to the daemon on this machine.

A socket for its owner alone (`farandole.node.base.system.sockets`); one JSON object a line:

    {"method": "status", "params": {}}  ->  {"ok": ...}  or  {"error": {"code": "...", "message": "..."}}
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from farandole.protocol.wire.errors import FarandoleError

from .system.sockets import TaskStatus, bound_socket, connect, serve_door

# Requests name a method and a few settings.
MAX_REQUEST_BYTES: Final = 64 * 1024
# The members of the largest run (4,096 authors) at about 600 bytes each, with a reserve.
MAX_RESPONSE_BYTES: Final = 16 * 1024 * 1024
# A person, a `status --watch` or two, a monitoring script; more come from a broken script.
MAX_CONNECTIONS: Final = 32
REQUEST_TIMEOUT: Final = 30.0
IDLE_TIMEOUT: Final = 300.0

Handler = Callable[[dict[str, Any]], Awaitable[object]]

_log = logging.getLogger(__name__)


class ControlError(FarandoleError):
    """A request was refused; ``code`` is for scripts, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NoNodeError(FarandoleError):
    """No daemon answers in this home folder."""


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    params: dict[str, Any] = {}


# --- the daemon's end -------------------------------------------------------------------------------------------


async def serve_control(
    path: Path, handlers: Mapping[str, Handler], *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve requests at ``path`` until cancelled; started once the socket listens.

    The caller holds the home's lock. A handler refuses with a `FarandoleError`, which may be a `ControlError`; whatever
    else it raises is logged, and costs the request only.
    """

    async def serve(connection: trio.SocketStream) -> None:
        buffer = bytearray()
        while True:
            with trio.fail_after(IDLE_TIMEOUT):
                line = await _receive_line(connection, buffer)
            if line is None:
                return
            with trio.fail_after(REQUEST_TIMEOUT + 5.0):
                await connection.send_all(await answer(line, handlers))

    with bound_socket(path) as listener:
        await serve_door(listener, serve, MAX_CONNECTIONS, task_status)


async def _receive_line(stream: trio.SocketStream, buffer: bytearray) -> bytes | None:
    """Return the next line without its end; None when the client is done (or sends too much)."""
    searched = 0
    while (end := buffer.find(b"\n", searched)) < 0:
        searched = len(buffer)
        data = await stream.receive_some()
        if not data or len(buffer) + len(data) > MAX_REQUEST_BYTES:
            return None
        buffer += data
    line = bytes(buffer[:end])
    del buffer[: end + 1]
    return line


async def answer(line: bytes, handlers: Mapping[str, Handler]) -> bytes:
    """Return the response line to one request line; errors are responses, too."""

    def refusal(code: str, message: str) -> bytes:
        return msgspec.json.encode({"error": {"code": code, "message": message}}) + b"\n"

    try:
        request = msgspec.json.decode(line, type=_Request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return refusal("bad_request", f"not a request: {error}")
    if (handler := handlers.get(request.method)) is None:
        known = ", ".join(sorted(handlers))
        return refusal("unknown_method", f"no method {request.method!r}; there are: {known}")
    try:
        with trio.fail_after(REQUEST_TIMEOUT):
            return msgspec.json.encode({"ok": await handler(request.params)}) + b"\n"
    except FarandoleError as error:
        return refusal(getattr(error, "code", "refused"), str(error))
    except trio.TooSlowError:
        return refusal("timeout", f"{request.method} took more than {REQUEST_TIMEOUT:g} s")
    except Exception as error:  # whatever a handler raises fails this request, and not the node
        _log.exception("the control method %s failed", request.method)
        return refusal("internal", f"{request.method} failed: {error!r}; see the node's log")


# --- the CLI's end ----------------------------------------------------------------------------------------------


def call(home: Path, method: str, *, timeout: float = 10.0, **params: object) -> Any:
    """Ask the daemon that runs in ``home``; return the decoded JSON of its answer.

    Raises `NoNodeError` if there is none (or it is silent for ``timeout`` seconds), `ControlError` if it
    refuses.
    """
    advice = (
        "start one with `farandole join INVITE` (without an invite if this folder has been in a run), or name another "
        "folder with --home"
    )
    try:
        with contextlib.closing(connect(home / "control.sock", timeout)) as connection:
            connection.sendall(msgspec.json.encode(_Request(method, params)) + b"\n")
            with connection.makefile("rb") as lines:
                raw = lines.readline(MAX_RESPONSE_BYTES + 1)
        if len(raw) > MAX_RESPONSE_BYTES:
            raise ControlError("too_long", f"the answer has more than {MAX_RESPONSE_BYTES} bytes")
        if not raw.endswith(b"\n"):
            raise ConnectionResetError("the node closed the connection")
        response = msgspec.json.decode(raw, type=dict[str, Any])
    except (FileNotFoundError, ConnectionError) as error:
        raise NoNodeError(f"no node runs in {home}: {advice}") from error
    except TimeoutError as error:
        raise NoNodeError(
            f"the node in {home} does not answer: is it stopped or overloaded? its log is {home / 'log'}"
        ) from error
    except PermissionError as error:
        raise NoNodeError(f"the node in {home} belongs to another user ({error})") from error
    except msgspec.MsgspecError as error:
        raise NoNodeError(f"what answers for {home} is no node") from error
    if (refusal := response.get("error")) is not None:
        raise ControlError(refusal["code"], refusal["message"])
    return response.get("ok")

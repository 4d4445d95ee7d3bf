"""The control API: how the CLI and scripts talk to the daemon on this machine.

A Unix socket in the node's home folder, for the owner alone; one JSON object a line:

    {"method": "status", "params": {}}  ->  {"ok": ...}  or  {"error": {"code": "...", "message": "..."}}

A socket and not a port: the file system's permissions are the authentication, and two nodes never clash.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from farandole.protocol.errors import FarandoleError

# Requests name a method and a few settings.
MAX_REQUEST_BYTES: Final = 64 * 1024
# The members of the largest run (4,096 authors) at about 600 bytes each, and room.
MAX_RESPONSE_BYTES: Final = 16 * 1024 * 1024
# A person, a `status --watch` or two, a monitoring script; more is a script gone wild.
MAX_CONNECTIONS: Final = 32
REQUEST_TIMEOUT: Final = 30.0
IDLE_TIMEOUT: Final = 300.0
# sockaddr_un holds 108 bytes with the final zero on Linux, 104 on macOS.
MAX_SOCKET_PATH_BYTES: Final = 103

if TYPE_CHECKING:
    # libp2p installs trio-typing's stubs, which hide trio's own types from checkers and keep this one elsewhere.
    from trio_typing import TaskStatus

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


class _ErrorBody(msgspec.Struct):
    code: str
    message: str


class _Response(msgspec.Struct, omit_defaults=True):
    ok: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: _ErrorBody | msgspec.UnsetType = msgspec.UNSET


def socket_path(path: Path) -> Path:
    """Where the socket for ``path`` really lies: there, or, if that is too long, in a private temporary folder.

    The place follows from the path alone, so both ends compute the same.
    """
    absolute = path.absolute()
    if len(os.fsencode(absolute)) <= MAX_SOCKET_PATH_BYTES:
        return absolute
    digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"farandole-{os.getuid()}" / f"{digest}.sock"


def _record_of(path: Path) -> Path:
    """The file beside ``path`` that says where the socket is, when it is elsewhere (TMPDIR differs between shells)."""
    return path.with_suffix(".path")


# --- the daemon's end -------------------------------------------------------------------------------------------


async def serve_control(
    path: Path, handlers: Mapping[str, Handler], *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve requests at ``path`` until cancelled; started once the socket listens.

    The caller holds the home's lock: a socket that lies there already is of a dead process and is replaced. A handler
    refuses with `ControlError`; whatever else it raises is logged, and costs the request only.
    """
    with _listening(path) as listener:
        listener.listen(MAX_CONNECTIONS)
        slots = trio.CapacityLimiter(MAX_CONNECTIONS)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                accepted, _ = await listener.accept()
                nursery.start_soon(_serve_connection, trio.SocketStream(accepted), handlers, slots)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[trio.socket.SocketType]:
    """A bound socket with mode 0600, and no trace of it afterwards."""
    real = socket_path(path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _make_private(real.parent)
    real.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        _bind_privately(listener, real)
        if real != path.absolute():
            _record_of(path).write_text(str(real))
        try:
            yield trio.socket.from_stdlib_socket(listener)
        finally:
            real.unlink(missing_ok=True)
            _record_of(path).unlink(missing_ok=True)


def _make_private(folder: Path) -> None:
    """Make the folder of a socket if need be, and refuse one in the temporary folder that somebody else prepared."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise FarandoleError(f"{folder} belongs to another user: give the node a shorter --home")


def _bind_privately(listener: socket.socket, path: Path) -> None:
    """Bind with mode 0600 from the first moment."""
    previous = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    finally:
        os.umask(previous)


async def _serve_connection(
    stream: trio.SocketStream, handlers: Mapping[str, Handler], slots: trio.CapacityLimiter
) -> None:
    # A client that goes away in the middle is no event.
    with contextlib.suppress(trio.BrokenResourceError, trio.TooSlowError):
        async with stream, slots:
            buffer = bytearray()
            while True:
                with trio.fail_after(IDLE_TIMEOUT):
                    line = await _receive_line(stream, buffer)
                if line is None:
                    return
                with trio.fail_after(REQUEST_TIMEOUT + 5.0):
                    await stream.send_all(await _answer(line, handlers))


async def _receive_line(stream: trio.SocketStream, buffer: bytearray) -> bytes | None:
    """The next line, without its end; None when the client is through (or says too much)."""
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


async def _answer(line: bytes, handlers: Mapping[str, Handler]) -> bytes:
    try:
        result = msgspec.json.encode(await _handle(line, handlers))
        return msgspec.json.encode(_Response(ok=msgspec.Raw(result))) + b"\n"
    except ControlError as error:
        return msgspec.json.encode(_Response(error=_ErrorBody(error.code, str(error)))) + b"\n"


async def _handle(line: bytes, handlers: Mapping[str, Handler]) -> object:
    try:
        request = msgspec.json.decode(line, type=_Request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError("bad_request", f"not a request: {error}") from error
    handler = handlers.get(request.method)
    if handler is None:
        known = ", ".join(sorted(handlers))
        raise ControlError("unknown_method", f"no method {request.method!r}; there are: {known}")
    try:
        with trio.fail_after(REQUEST_TIMEOUT):
            return await handler(request.params)
    except ControlError:
        raise
    except trio.TooSlowError as error:
        raise ControlError("timeout", f"{request.method} took more than {REQUEST_TIMEOUT:g} s") from error
    except Exception as error:
        _log.exception("the control method %s failed", request.method)
        raise ControlError("internal", f"{request.method} failed: {error!r}; see the node's log") from error


# --- the CLI's end ----------------------------------------------------------------------------------------------


def call(home: Path, method: str, *, timeout: float = 10.0, **params: object) -> Any:
    """Ask the daemon that runs in ``home``; the decoded JSON of its answer.

    Raises `NoNodeError` if there is none (or it does not answer within ``timeout`` seconds), `ControlError` if it
    refuses.
    """
    request = msgspec.json.encode(_Request(method, params)) + b"\n"
    response = msgspec.json.decode(_exchange(home, request, time.monotonic() + timeout), type=_Response)
    if response.error is not msgspec.UNSET:
        raise ControlError(response.error.code, response.error.message)
    return None if response.ok is msgspec.UNSET else msgspec.json.decode(response.ok)


def _exchange(home: Path, request: bytes, deadline: float) -> bytes:
    """Send one line, receive one line."""
    path = home / "control.sock"
    advice = "start one with `farandole join INVITE`, or name another folder with --home"
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        try:
            connection.settimeout(_remaining(deadline))
            connection.connect(os.fspath(_find_socket(path)))
            connection.sendall(request)
            return _receive_response(connection, deadline)
        except (FileNotFoundError, ConnectionError) as error:
            raise NoNodeError(f"no node runs in {home}: {advice}") from error
        except TimeoutError as error:
            raise NoNodeError(
                f"the node in {home} does not answer: is it stopped or overloaded? its log is {home / 'log'}"
            ) from error
        except PermissionError as error:
            raise NoNodeError(f"the node in {home} belongs to another user ({error})") from error


def _find_socket(path: Path) -> Path:
    record = _record_of(path)
    real = Path(record.read_text()) if record.exists() else socket_path(path)
    if not stat.S_ISSOCK(real.stat().st_mode):
        raise FileNotFoundError(real)
    return real


def _receive_response(connection: socket.socket, deadline: float) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        connection.settimeout(_remaining(deadline))
        data = connection.recv(256 * 1024)
        if not data:
            raise ConnectionResetError("the node closed the connection")
        received += data
        if len(received) > MAX_RESPONSE_BYTES:
            raise ControlError("too_long", f"the answer has more than {MAX_RESPONSE_BYTES} bytes")
    return bytes(received)


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining

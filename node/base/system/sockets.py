"""Options of sockets, and the sockets at which programs of this node's owner connect.

Those are files in its home folder, or elsewhere if its path is too long. The file system's permissions are the
authentication, and two nodes never clash.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import trio

from farandole.protocol.wire.errors import FarandoleError

if TYPE_CHECKING:
    # libp2p installs trio-typing's stubs, which hide trio's own types from checkers and keep this one elsewhere.
    from trio_typing import TaskStatus as TaskStatus
else:
    from trio import TaskStatus

LOOPBACK: Final = "127.0.0.1"
# The errors of listening on :: where a system has no IPv6, or has it turned off.
NO_IPV6: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
# What setsockopt(2) takes for SO_LINGER: "on", and for 0 seconds.
_LINGER_NOT: Final = struct.pack("ii", 1, 0)
# sockaddr_un holds 108 bytes with the final zero on Linux, 104 on macOS.
MAX_SOCKET_PATH_BYTES: Final = 103

_Socket = socket.socket | trio.socket.SocketType | trio.SocketStream


def listen_alone(listener: _Socket) -> None:
    """Let ``listener`` bind its port soon after an earlier listener: connections of that one may not be quite over."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def share_port(bound: _Socket) -> None:
    """Let connections be dialled from the port that a socket listens at, if both share it.

    Only sockets of this user can share it.
    """
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def prefer_congestion_control(connection: _Socket, name: str) -> None:
    """Use this congestion control algorithm, where it is available and allowed. Linux alone lets a program choose."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode("ascii"))


def leave_nothing(connection: _Socket) -> None:
    """Make the connection end with RST, so that the kernel keeps no TIME_WAIT entry for it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)


@contextlib.contextmanager
def bound_socket(path: Path) -> Iterator[trio.socket.SocketType]:
    """Bind a socket for ``path`` with mode 0600 within the block, and remove it afterwards.

    The caller holds the home's lock: a socket that is already there belongs to a dead process and is replaced. Raises
    `FarandoleError` and `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    real = socket_path(path)
    real.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if real.parent.stat().st_uid != os.getuid():  # in the temporary folder another user may have prepared it
        raise FarandoleError(f"{real.parent} belongs to another user: give the node a shorter --home")
    real.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        previous = os.umask(0o177)  # with mode 0600 from the start
        try:
            listener.bind(os.fspath(real))
        finally:
            os.umask(previous)
        try:
            yield trio.socket.from_stdlib_socket(listener)
        finally:
            real.unlink(missing_ok=True)


def connect(path: Path, timeout: float) -> socket.socket:
    """Connect to the `bound_socket` for ``path``; ``timeout`` in seconds is the connection's too.

    Raises `OSError`: `FileNotFoundError` and `ConnectionError` if no process listens.
    """
    real = socket_path(path)
    if not stat.S_ISSOCK(real.stat().st_mode):
        raise FileNotFoundError(real)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(os.fspath(real))
    except BaseException:  # whatever it is, no caller has the socket yet
        connection.close()
        raise
    return connection


def socket_path(path: Path) -> Path:
    """Return the socket's real path: ``path``, or, if that is too long, one in a private folder of /tmp.

    It follows from ``path`` alone, so both ends compute the same, whatever their TMPDIR.
    """
    absolute = path.absolute()
    if len(os.fsencode(absolute)) <= MAX_SOCKET_PATH_BYTES:
        return absolute
    digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
    return Path(f"/tmp/farandole-{os.getuid()}/{digest}.sock")  # its owner is checked before it is used


async def serve_door(
    listener: trio.socket.SocketType,
    serve: Callable[[trio.SocketStream], Awaitable[None]],
    max_connections: int,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Listen, and run ``serve`` for each of the owner's connections until cancelled; further ones wait.

    A connection is closed when ``serve`` ends. `trio.BrokenResourceError` and `trio.TooSlowError` mean that the program
    is gone, and end nothing else.
    """
    slots = trio.CapacityLimiter(max_connections)

    async def run(connection: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.TooSlowError):
            async with slots:
                await serve(connection)

    listener.listen(max_connections)
    task_status.started()
    await trio.serve_listeners(run, [trio.SocketListener(listener)])

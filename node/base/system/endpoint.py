"""The control API's listening socket, which only programs of this node's owner can reach."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import trio

from .features import HAS_UNIX_SOCKETS


@dataclass(frozen=True)
class Endpoint:
    """A bound socket; a client sends ``token`` first, on a line of its own, if there is one."""

    listener: trio.socket.SocketType
    token: bytes = b""


@contextmanager
def bound_endpoint(path: Path) -> Iterator[Endpoint]:
    """Bind a socket for ``path`` within the block, and remove it afterwards.

    The caller holds the home's lock: a socket that is already there belongs to a dead process and is replaced. Raises
    `FarandoleError` and `OSError`.
    """
    if sys.platform != "win32" and HAS_UNIX_SOCKETS:
        from .unix_socket import bound
    else:
        from .loopback_port import bound

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with bound(path) as endpoint:
        yield endpoint


def connect(path: Path, timeout: float) -> socket:
    """Connect to the `bound_endpoint` for ``path`` and send the token.

    ``timeout`` in seconds is the connection's too. Raises `OSError`: `FileNotFoundError` and `ConnectionError` if no
    process listens.
    """
    if sys.platform != "win32" and HAS_UNIX_SOCKETS:
        from .unix_socket import connected
    else:
        from .loopback_port import connected

    return connected(path, timeout)


def socket_place(path: Path) -> Path:
    """Return where the socket for ``path`` is: elsewhere if the path is too long for one."""
    if sys.platform != "win32" and HAS_UNIX_SOCKETS:
        from .unix_socket import socket_path

        return socket_path(path)
    return path.absolute()

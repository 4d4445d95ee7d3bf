"""Where the programs of this node's owner reach it, and nobody else does: the control API's listening socket."""

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
    """A bound socket; whoever connects says ``token`` first, a line of its own, if there is one."""

    listener: trio.socket.SocketType
    token: bytes = b""


@contextmanager
def bound_endpoint(path: Path) -> Iterator[Endpoint]:
    """Bound for ``path``, and no trace of it afterwards.

    The caller holds the home's lock: what lies there already is of a dead process and is replaced. Raises
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
    """A connection with what was `bound_endpoint` for ``path``, with the token said.

    ``timeout`` in seconds is the connection's too. Raises `OSError`: `FileNotFoundError` and `ConnectionError` where
    nobody listens.
    """
    if sys.platform != "win32" and HAS_UNIX_SOCKETS:
        from .unix_socket import connected
    else:
        from .loopback_port import connected

    return connected(path, timeout)

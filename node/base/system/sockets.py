"""Sockets and ports, the same way on every system, as far as each goes."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from typing import Final, Protocol

from .features import SHARES_PORTS

LOOPBACK: Final = "127.0.0.1"
# What setsockopt(2) takes for SO_LINGER: "on", and for 0 seconds; two of Windows' shorts, or two ints.
_LINGER_NOT: Final = struct.pack("HH" if sys.platform == "win32" else "ii", 1, 0)


class _Socket(Protocol):
    """Of the standard library, or trio's."""

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        """As `socket.socket.setsockopt`."""


def listen_alone(listener: _Socket) -> None:
    """Before it is bound: let nobody else bind to the same port, and do so even if one that has just ended did.

    On Windows anybody may bind to a port that is in use, and SO_REUSEADDR means just that. On other systems nobody may,
    and it is about connections of before that are not quite over.
    """
    if sys.platform == "win32":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def share_port(bound: _Socket) -> None:
    """Let connections that say the same be dialled from the port that a socket listens at; nothing if that cannot be.

    Only this user's (`SHARES_PORTS`).
    """
    if sys.platform != "win32" and SHARES_PORTS:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def prefer_congestion_control(connection: _Socket, name: str) -> None:
    """Have TCP go by this algorithm, where it is there and allowed. Linux alone lets a program choose."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode("ascii"))


def leave_nothing(connection: _Socket) -> None:
    """When it ends, end it without a word (RST): the kernel remembers no such connection then (TIME_WAIT)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)

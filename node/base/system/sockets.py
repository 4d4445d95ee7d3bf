"""Sockets and ports, the same way on every system, as far as each goes."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from typing import Final, Protocol

from .features import SHARES_PORTS

LOOPBACK: Final = "127.0.0.1"
# The errors of listening on :: where a system has no IPv6, or has it turned off.
NO_IPV6: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
# What setsockopt(2) takes for SO_LINGER: "on", and for 0 seconds; two of Windows' shorts, or two ints.
_LINGER_NOT: Final = struct.pack("HH" if sys.platform == "win32" else "ii", 1, 0)


class _Socket(Protocol):
    """A socket of the standard library or of trio."""

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        """See `socket.socket.setsockopt`."""


def listen_alone(listener: _Socket) -> None:
    """Keep other sockets off the port that ``listener`` binds next, and let it bind soon after an earlier listener.

    On Windows any socket may bind to a port that is in use, and SO_REUSEADDR means just that. On other systems none
    may, and SO_REUSEADDR is about earlier connections that are not quite over.
    """
    if sys.platform == "win32":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def share_port(bound: _Socket) -> None:
    """Let connections be dialled from the port that a socket listens at, if both share it; no effect where unsupported.

    Only sockets of this user can share it (`SHARES_PORTS`).
    """
    if sys.platform != "win32" and SHARES_PORTS:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def prefer_congestion_control(connection: _Socket, name: str) -> None:
    """Use this congestion control algorithm, where it is available and allowed. Linux alone lets a program choose."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode("ascii"))


def leave_nothing(connection: _Socket) -> None:
    """Make the connection end with RST, so that the kernel keeps no TIME_WAIT entry for it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)


def send_now(descriptor: int, data: bytes) -> int:
    """Send as much as a non-blocking socket takes; return the number of bytes.

    It is 0 for a broken socket: the next wait for the socket raises the error. On Windows sockets are not files, so
    nothing is sent without a wait.
    """
    if sys.platform == "win32":
        return 0
    try:
        return os.write(descriptor, data)
    except OSError:
        return 0

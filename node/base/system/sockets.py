"""Options of sockets and ports."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from typing import Final

import trio

LOOPBACK: Final = "127.0.0.1"
# The errors of listening on :: where a system has no IPv6, or has it turned off.
NO_IPV6: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
# What setsockopt(2) takes for SO_LINGER: "on", and for 0 seconds.
_LINGER_NOT: Final = struct.pack("ii", 1, 0)

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


def send_now(descriptor: int, data: bytes) -> int:
    """Send as much as a non-blocking socket takes; return the number of bytes.

    It is 0 for a broken socket: the next wait for the socket raises the error.
    """
    try:
        return os.write(descriptor, data)
    except OSError:
        return 0

"""Dialling from the port that listens: what a NAT makes of that port is then known, and two such dials can meet."""

from __future__ import annotations

import contextlib
import socket

import trio

CAN_REUSE = hasattr(socket, "SO_REUSEPORT")


def let_dials_share(listener: socket.socket) -> None:
    """Let dials of this user's leave from a listening socket's port.

    Said after it is bound, so that no second listener can take the same port.
    """
    if CAN_REUSE:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


async def connect_from(local: tuple[str, int], target: tuple[str, int]) -> trio.SocketStream:
    """A TCP connection from a listening socket's address; `OSError` if it comes to none."""
    if not CAN_REUSE:
        raise OSError("this system cannot dial from a port that listens")
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    connection = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        await connection.bind(local)
        await connection.connect(target)
        calm(connection)
    except BaseException:  # cancelled, too: nobody else has the socket yet
        connection.close()
        raise
    return trio.SocketStream(connection)


def calm(connection: trio.socket.SocketType) -> None:
    """Use CUBIC where there is it: BBR slows what simultaneous open has opened for about ten seconds."""
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")

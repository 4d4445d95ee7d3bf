"""Dials from the listening port: then a NAT's mapping of that port is known, and two such dials can meet."""

from __future__ import annotations

import socket

import trio

from ..base.system.sockets import prefer_congestion_control, share_port


async def connect_from(local: tuple[str, int], target: tuple[str, int]) -> trio.SocketStream:
    """Return a TCP connection from a listening socket's address; raise `OSError` if it fails."""
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    connection = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        share_port(connection)
        await connection.bind(local)
        await connection.connect(target)
        calm(connection)
    except BaseException:  # also when cancelled: nothing else owns the socket yet
        connection.close()
        raise
    return trio.SocketStream(connection)


def calm(connection: trio.socket.SocketType) -> None:
    """Use CUBIC if available: BBR slows a connection from a simultaneous open for about ten seconds."""
    prefer_congestion_control(connection, "cubic")

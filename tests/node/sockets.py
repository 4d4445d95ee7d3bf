"""Plain sockets, and channels over them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from farandole.node.base.bandwidth import Shaping
from farandole.node.bulk.channel import BulkChannel
from farandole.protocol.exchange.bulk import Secrets

SECRETS = Secrets(b"n" * 32, b"f" * 32)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over loopback TCP: the dialling one, and the accepted one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        return dialled, listener.accept()[0]


@contextmanager
def channel_pair(
    near: Shaping | None = None, far: Shaping | None = None
) -> Iterator[tuple[BulkChannel, BulkChannel, socket.socket]]:
    """Open both ends of a bulk channel over loopback TCP; yield the first one's socket too."""
    dialled, accepted = tcp_pair()
    theirs = Secrets(SECRETS.opening, SECRETS.sealing)
    channels = (
        BulkChannel(b"b" * 32, b"s" * 16, dialled, SECRETS, near or Shaping()),
        BulkChannel(b"a" * 32, b"s" * 16, accepted, theirs, far or Shaping()),
    )
    try:
        yield *channels, dialled
    finally:
        for channel in reversed(channels):
            channel.close()

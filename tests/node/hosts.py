"""Hosts on loopback, and a service to request from them."""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.yamux import Libp2pStream

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
ECHO = "/echo/1"


def host_at_loopback(**settings: Any) -> AbstractAsyncContextManager[Host]:
    return open_host(Ed25519PrivateKey.generate(), LOOPBACK, **settings)


def has_ipv6() -> bool:
    """Return whether this system can listen over IPv6."""
    try:
        with socket.create_server(("::", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def echo(stream: Libp2pStream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)

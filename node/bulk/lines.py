"""Other lines of this node's owner: SOCKS5 proxies (RFC 1928) on machines that have internet connections of their own.

A bulk channel has a strand over each (`farandole.node.bulk.strands`). What goes through a proxy is sealed as on any
channel, so the proxy need not be trusted with more than the addresses. `ssh -N -D 1080 HOST` makes one of any machine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Final

import trio
from python_socks import ProxyConnectionError, ProxyError
from python_socks.async_.trio import Proxy

from farandole.protocol.wire.identity import short_name
from farandole.protocol.wire.ip_addresses import Address, unicast_ip

from ..base.backoff import Backoff
from ..base.bandwidth import Shaping

logger = logging.getLogger(__name__)

# A line that did not reach a peer is left alone for as long with it; exchanges do not wait for it meanwhile.
FIRST_RETRY_AFTER: Final = 10.0
MAX_RETRY_AFTER: Final = 600.0


class Line:
    """One line, by the URL of its proxy: ``socks5://HOST:PORT``."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._proxy = Proxy.from_url(url)
        self._backoff = Backoff(FIRST_RETRY_AFTER, MAX_RETRY_AFTER)
        self._is_missing = False
        self.shaping = Shaping()
        """Without caps: the node's caps are for its own line."""

    async def dial(self, address: Address) -> trio.socket.SocketType:
        """Connect to a peer's address through the proxy, until cancelled. Raises `OSError`."""
        try:
            connection = await self._proxy.connect(*address, timeout=math.inf)
        except ProxyConnectionError as error:
            if not self._is_missing:
                logger.warning("no proxy answers at %s: exchanges do without this line", self._url)
            self._is_missing = True
            raise OSError(str(error)) from error
        except (ProxyError, ValueError) as error:  # it does not reach the peer, or its answer is none
            raise OSError(str(error)) from error
        self._is_missing = False
        return connection

    def is_due(self, peer: bytes) -> bool:
        """Return whether to try this line to a peer: it has not just failed."""
        return self._backoff.is_due(peer, (), trio.current_time())

    def note(self, peer: bytes, *, has_opened: bool) -> None:
        """Note whether a connection with the peer has opened."""
        if has_opened:
            self._backoff.note_success(peer)
            return
        _, pause = self._backoff.note_failure(peer, (), trio.current_time())
        logger.info("the line over %s did not reach %s: not tried for %.0f s", self._url, short_name(peer), pause)


def reachable(addresses: Iterable[Address]) -> list[Address]:
    """Return the addresses to dial through a proxy: those on the internet. Its own network is no peer's business."""
    return [(str(ip), port) for text, port in addresses if (ip := unicast_ip(text)) is not None and ip.is_global]

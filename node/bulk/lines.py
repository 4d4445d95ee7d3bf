"""Other lines of this node's owner: SOCKS5 proxies (RFC 1928) on machines that have internet connections of their own.

A bulk channel has a strand over each (`farandole.node.bulk.strands`). What goes through a proxy is sealed as on any
channel, so the proxy need not be trusted with more than the addresses. `ssh -N -D 1080 HOST` makes one of any machine.
"""

from __future__ import annotations

import logging
from typing import Final

import trio
from python_socks import ProxyConnectionError, ProxyError, ProxyTimeoutError
from python_socks.async_.trio import Proxy

from farandole.protocol.bulk import Address

from ..base.backoff import Backoff
from ..base.bandwidth import Shaping

logger = logging.getLogger(__name__)

# A proxy or a peer that has failed is left alone for as long; exchanges do not wait for it meanwhile.
FIRST_RETRY_AFTER: Final = 10.0
MAX_RETRY_AFTER: Final = 600.0
DIAL_TIMEOUT: Final = 5.0


class Line:
    """One line, by the URL of its proxy: ``socks5://[USER:PASSWORD@]HOST:PORT``."""

    def __init__(self, url: str) -> None:
        self._proxy = Proxy.from_url(url)
        self._place = url.removeprefix("socks5://").rpartition("@")[2]
        """Without the password."""
        self._is_missing = False
        self._backoff = Backoff(FIRST_RETRY_AFTER, MAX_RETRY_AFTER)
        self.shaping = Shaping()
        """Without caps: the node's caps are for its own line."""

    async def dial(self, address: Address) -> trio.socket.SocketType:
        """Connect to a peer's address through the proxy. Raises `OSError`."""
        try:
            connection = await self._proxy.connect(*address, timeout=DIAL_TIMEOUT)
        except ProxyConnectionError as error:
            if not self._is_missing:
                logger.warning("no proxy answers at %s: exchanges do without this line", self._place)
            self._is_missing = True
            raise OSError(str(error)) from error
        except (ProxyError, ProxyTimeoutError) as error:  # it does not reach the peer, perhaps
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
        else:
            self._backoff.note_failure(peer, (), trio.current_time())

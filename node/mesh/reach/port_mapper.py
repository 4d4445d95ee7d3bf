"""Keeps this node's ports open at the home's router. It asks again before each lease ends, after a restart of the
router, and when its outer address has changed. It closes the ports when the node leaves.

A router's answer proves nothing: whether others can dial the node is decided by peers that try (dialback.py).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from typing import Final

import trio

from ...base.backoff import pauses
from ..host import Host
from .upnp import MappingError, Opened, UpnpRouter, find_router

logger = logging.getLogger(__name__)

# Between two checks whether the router still has the ports: a restart is noticed within a quarter of the minute in
# which a node must be reachable again.
CHECK_INTERVAL: Final = 15.0
# Between two checks of this node's ports: the bulk channels' port opens a moment later than libp2p's.
PORTS_INTERVAL: Final = 0.5
# After a failure, or when the router is gone; the laptop may be in another network by then.
FIRST_RETRY_AFTER, MAX_RETRY_AFTER = 4.0, 300.0
# Minimum, even if the lease is shorter.
MIN_RENEWAL_INTERVAL: Final = 2.0
# Ports that a node opens at most: for libp2p, and for bulk channels.
MAX_PORTS: Final = 4
# To close the ports; the router drops them by itself when their leases end.
CLOSE_TIMEOUT: Final = 2.0


class PortKeeper:
    """The open ports of one host, recorded in ``host.mapped``."""

    def __init__(self, host: Host, on_change: Callable[[], None], lease_seconds: int) -> None:
        """``on_change``: called when others may reach the host in another way."""
        self.has_tried = trio.Event()
        """Set once a router has been asked, or there was none to ask."""
        self._host = host
        self._on_change = on_change
        self._lease_seconds = lease_seconds
        self._opened: dict[int, Opened] = {}
        self._asked: set[int] = set()
        self._renew_at = 0.0

    async def run(self) -> None:
        """Keep the ports open until cancelled."""
        waits = pauses(FIRST_RETRY_AFTER, MAX_RETRY_AFTER, random.Random())
        while True:
            try:
                if self._ports():
                    await self._keep(await find_router())
            except MappingError as error:
                logger.debug("no port at the router: %s", error)
            if self._opened:
                waits = pauses(FIRST_RETRY_AFTER, MAX_RETRY_AFTER, random.Random())
            self._tell({})
            self.has_tried.set()
            await trio.sleep(next(waits))

    async def _keep(self, router: UpnpRouter) -> None:
        """Keep ports open at this router until it fails; raises `MappingError` then."""
        try:
            while True:
                await self._open(router)
                self.has_tried.set()
                look_at = trio.current_time() + CHECK_INTERVAL
                while self._asked == set(self._ports()) and trio.current_time() < self._renew_at:
                    await trio.sleep(PORTS_INTERVAL)
                    if trio.current_time() >= look_at:
                        look_at = trio.current_time() + CHECK_INTERVAL
                        if any([await router.has_forgotten(opened) for opened in self._opened.values()]):
                            logger.info("the router %s has begun anew, or has another address", router.ip)
                            break
        except trio.Cancelled:  # this node leaves
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_TIMEOUT):
                await self._close(router, self._opened.values())
            raise

    async def _open(self, router: UpnpRouter) -> None:
        """Open libp2p's port, and the others if the router allows it."""
        ports, opened = self._ports(), dict[int, Opened]()
        self._asked = set(ports)
        for port in ports:
            try:
                opened[port] = await router.open_port(port, self._lease_seconds)
            except MappingError as error:
                if not opened:
                    raise
                logger.debug("port %d is not sent on: %s", port, error)
        await self._close(router, [each for port, each in self._opened.items() if port not in ports])
        soonest = min((each.seconds for each in opened.values()), default=0.0)
        self._renew_at = trio.current_time() + max(soonest / 2, MIN_RENEWAL_INTERVAL)
        self._tell(opened)

    async def _close(self, router: UpnpRouter, ports: Iterable[Opened]) -> None:
        for opened in ports:
            try:
                await router.close_port(opened)
            except MappingError as error:
                logger.debug("a port stays open until its lease ends: %s", error)
                return

    def _tell(self, opened: dict[int, Opened]) -> None:
        before, self._opened = self._host.own.mapped, opened
        self._host.own.mapped = {port: each.outer for port, each in opened.items()}
        for port, (ip, outer) in self._host.own.mapped.items() - before.items():
            logger.info("the router sends on port %d of %s to port %d here", outer, ip, port)
        listening = [port for _, port in self._host.own.listening]
        if any(port in listening for port, _ in self._host.own.mapped.items() ^ before.items()):
            self._on_change()

    def _ports(self) -> list[int]:
        """Return the ports that other machines can reach over IPv4."""
        listening = [port for ip, port in self._host.own.listening if ":" not in ip and not ip.startswith("127.")]
        return list(dict.fromkeys((*listening, *(self._host.own.bulk_ports if listening else ()))))[:MAX_PORTS]

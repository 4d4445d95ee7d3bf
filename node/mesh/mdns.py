"""Finds peers of the same run in the local network, without any server: multicast DNS (RFC 6762, 6763).

Each node announces one service. Its name begins with a hash of the run's id, which does not reveal the id; its
TXT record has the peer id; its addresses are the interfaces' addresses. The library works in threads of its own and
passes a bounded number of names to trio. Any machine in the network can answer anything. So an answer only ever leads
to a dial of an address in one of this machine's own networks, where the peer has to prove its peer id.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import ifaddr
import trio
from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from farandole.protocol.mesh.dialling import unicast_ip
from farandole.protocol.mesh.kademlia import local_name
from farandole.protocol.wire.bounds import Backoff, Latest
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import public_key_of

from ..base.errors import PeerUnreachableError
from ..base.nurseries import open_service_nursery
from ..base.streams import NEIGHBOUR_DIAL_TIMEOUT
from .addresses import multiaddr_of
from .host import Host

logger = logging.getLogger(__name__)

SERVICE_TYPE: Final = "_farandole._tcp.local."
PEER_PROPERTY: Final = b"peer"
# Names waiting to be resolved, and peers remembered: a classroom; in a flood the rest is dropped.
MAX_NAMES: Final = 64
MAX_PEERS: Final = 64
# Addresses of one peer: a few interfaces.
MAX_ADDRESSES: Final = 8
# A run of many nodes in one network needs no full mesh; the others' addresses are known for exchanges.
MAX_CONNECTED: Final = 8
RESOLVE_TIMEOUT: Final = 3.0
# Between two checks of the interfaces, and of disconnected peers. A laptop that is opened is back within that.
CHECK_INTERVAL: Final = 10.0
FIRST_RETRY_AFTER, MAX_RETRY_AFTER = 10.0, 300.0

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def local_networks() -> list[Network]:
    """Return the networks of this machine's interfaces, without loopback and link-local ones."""
    found: list[Network] = []
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            text = ip.ip if isinstance(ip.ip, str) else ip.ip[0]
            network = ipaddress.ip_network(f"{text}/{ip.network_prefix}", strict=False)
            if not network.is_loopback and not network.is_link_local:
                found.append(network)
    return found


def neighbour_of(
    peer: object, ips: Iterable[str], port: object, networks: Sequence[Network], own: bytes
) -> tuple[bytes, list[str]] | None:
    """Return the peer in an answer and its multiaddrs in these networks, if it is another peer and has some.

    It is not authenticated.
    """
    if not isinstance(peer, bytes) or not isinstance(port, int) or port not in range(1, 65536):
        return None
    try:
        author = public_key_of(peer.decode("ascii"))
    except (RemoteProtocolError, UnicodeDecodeError):
        return None
    parsed = {ip: unicast_ip(ip) for ip in ips}
    inside = (ip for ip, parsed_ip in parsed.items() if parsed_ip and any(parsed_ip in each for each in networks))
    near = [multiaddr_of(ip, port) for ip in inside][:MAX_ADDRESSES]
    return (author, near) if near and author != own else None


class Mdns:
    """Announces one host, and dials the peers that it finds; `open_mdns` runs it."""

    def __init__(self, host: Host, run_id: bytes) -> None:
        self._host = host
        self._name = local_name(run_id)
        self._found, self.unresolved = trio.open_memory_channel[str](MAX_NAMES)
        """Service names that wait to be resolved, the oldest first."""
        self._arrival = trio.Event()  # a neighbour
        self.neighbours = Latest[bytes, list[str]](MAX_PEERS)
        """Peer -> its addresses, the one heard from last at the end."""
        self._backoff = Backoff(FIRST_RETRY_AFTER, MAX_RETRY_AFTER)

    async def run(self) -> None:
        """Announce and look for peers until cancelled; restart when the interfaces change."""
        while True:
            ips = self._ips()
            if any(":" not in ip for ip in ips):
                try:
                    await self._run_at(ips)
                except (OSError, ZeroconfError) as error:
                    logger.warning("no multicast DNS at %s: %s", ", ".join(ips), error)
            await trio.sleep(CHECK_INTERVAL)

    def _ips(self) -> list[str]:
        """Return the IP addresses at which other machines can reach this node."""
        return [ip for ip in self._host.own.ips if not ipaddress.ip_address(ip).is_loopback]

    async def _run_at(self, ips: list[str]) -> None:
        interfaces = [ip for ip in ips if ":" not in ip]
        responder = await trio.to_thread.run_sync(lambda: Zeroconf(interfaces, ip_version=IPVersion.V4Only))
        token = trio.lowlevel.current_trio_token()

        def on_change(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            if state_change is not ServiceStateChange.Removed:
                token.run_sync_soon(self.note, name)

        browser = ServiceBrowser(responder, SERVICE_TYPE, handlers=[on_change])

        def end() -> None:
            browser.cancel()
            responder.close()  # says farewell, and ends the library's threads

        try:
            if (info := self.announcement(ips)) is not None:
                # Two nodes never have one name: it holds the peer id. So there is nothing to probe for.
                await trio.to_thread.run_sync(partial(responder.register_service, info, cooperating_responders=True))
            async with open_service_nursery() as nursery:
                nursery.start_soon(self._resolve, responder)
                while self._ips() == ips:
                    self._arrival = trio.Event()
                    await self._connect()
                    with trio.move_on_after(CHECK_INTERVAL):
                        await self._arrival.wait()
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(end)

    def announcement(self, ips: Sequence[str]) -> ServiceInfo | None:
        """Return the announcement of the run, with those of the IP addresses that have its port."""
        # An announcement has one port: the one of IPv4, if both versions of IP do not share it.
        here = sorted(
            (address for address in self._host.own.interfaces if address[0] in ips), key=lambda a: ":" in a[0]
        )
        if not here:
            return None
        return ServiceInfo(
            SERVICE_TYPE,
            f"{self._name}-{self._host.peer_id[-16:]}.{SERVICE_TYPE}",
            port=here[0][1],
            properties={PEER_PROPERTY: self._host.peer_id.encode()},
            parsed_addresses=[ip for ip, own in here if own == here[0][1]],
            server=f"{self._host.peer_id[-32:].lower()}.local.",
        )

    def note(self, name: str) -> None:
        """Queue a service name of our run for resolution; at most `MAX_NAMES` wait."""
        if name.startswith(f"{self._name}-"):
            with suppress(trio.WouldBlock):
                self._found.send_nowait(name)

    async def _resolve(self, responder: Zeroconf) -> None:
        async for name in self.unresolved:
            info = await trio.to_thread.run_sync(
                lambda name=name: responder.get_service_info(SERVICE_TYPE, name, int(1000 * RESOLVE_TIMEOUT))
            )
            if info is not None:
                networks = await trio.to_thread.run_sync(local_networks)
                peer = info.properties.get(PEER_PROPERTY)
                neighbour = neighbour_of(peer, info.parsed_addresses(), info.port, networks, self._host.author)
                if neighbour is not None:
                    self.take(*neighbour)

    def take(self, peer: bytes, addresses: list[str]) -> None:
        """Remember a neighbour; it replaces the oldest."""
        self.neighbours[peer] = addresses
        self._arrival.set()

    async def _connect(self) -> None:
        """Dial the neighbours that are due, until enough are connected."""
        for peer, addresses in list(self.neighbours.items()):
            connected = self._host.connected
            if len(connected & self.neighbours.keys()) >= MAX_CONNECTED:
                return
            if peer in connected or not self._backoff.is_due(peer, trio.current_time(), addresses):
                continue
            try:
                await self._host.connect(peer, addresses, timeout=NEIGHBOUR_DIAL_TIMEOUT)
            except PeerUnreachableError as error:
                logger.debug("a neighbour did not answer: %s", error)
                self._backoff.note_failure(peer, trio.current_time(), addresses)
            else:
                self._backoff.note_success(peer)


@asynccontextmanager
async def open_mdns(host: Host, run_id: bytes, *, is_on: bool = True) -> AsyncIterator[None]:
    """Announce the run, and find its peers, in this machine's networks for as long as the block runs."""
    async with open_service_nursery() as nursery:
        if is_on:
            nursery.start_soon(Mdns(host, run_id).run)
        yield

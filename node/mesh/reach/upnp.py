"""Keeps this node's ports open at the home's router, by UPnP's Internet Gateway Device, versions 1 and 2, over IPv4.

The router is the default gateway: no other machine is asked. It is found by SSDP (a datagram to a group of the local
network), described in XML over HTTP, and asked by SOAP. Only the gateway's answers count, and even the gateway is not
trusted. It is asked at no other address, its answers are bounded in bytes and time, and of their XML only the text of a
few elements is read, without a parser. Whether others can dial the node is decided by peers that try (reachability.py).
"""

from __future__ import annotations

import ipaddress
import logging
import random
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urljoin, urlsplit
from xml.sax.saxutils import escape, unescape

import trio

from farandole.protocol.mesh.dialling import Address
from farandole.protocol.wire.bounds import pauses
from farandole.protocol.wire.errors import FarandoleError

from ...base.system.processes import read_proc
from ..addresses import OwnAddresses
from ..host import Host

logger = logging.getLogger(__name__)

# Flags in Linux's table for a route that is up and leads through a gateway (linux/route.h).
_UP_BY_GATEWAY: Final = 0x0003
_GROUP: Final = ("239.255.255.250", 1900)
_TARGETS: Final = (
    "urn:schemas-upnp-org:device:InternetGatewayDevice:1",
    "urn:schemas-upnp-org:device:InternetGatewayDevice:2",
)
_SERVICES: Final = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)
# A datagram may be lost, so each search is repeated. Routers answer within the second that MX allows them.
NUM_SEARCHES: Final = 3
SEARCH_INTERVAL: Final = 1.0
MAX_DATAGRAM: Final = 2_048
HTTP_TIMEOUT: Final = 4.0
# Descriptions of real routers have up to 20 KB.
MAX_REPLY_BYTES: Final = 65_536
# Longest part of a router's error text that people see.
MAX_REASON_CHARS: Final = 80
# Errors of the services (WANIPConnection:1, 2.4.16): another machine has the port; only permanent leases are supported.
_CONFLICT, _ONLY_ENDLESS = 718, 725
# Other outer ports to try if this machine's is taken, in the range from which systems take their own.
NUM_TRIES: Final = 4
_FIRST_PORT, _LAST_PORT = 49_152, 65_535
# The router is asked again this often, as by go-libp2p: a restart, or another outer address, is made up for within a
# third of the minute in which a node must be reachable again.
ASK_INTERVAL: Final = 20.0
# Between two checks of this node's ports: the bulk channels' port opens a moment later than libp2p's.
PORTS_INTERVAL: Final = 0.5
# After a failure, or when the router is gone; the laptop may be in another network by then.
FIRST_RETRY_AFTER, MAX_RETRY_AFTER = 4.0, 300.0
# Ports that a node opens at most: for libp2p, and for bulk channels.
MAX_PORTS: Final = 4
# To close the ports; the router drops them by itself when their leases end.
CLOSE_TIMEOUT: Final = 2.0


class MappingError(FarandoleError):
    """The router does not do what it was asked for, or there is none; the message says why."""

    def __init__(self, message: str, code: int = 0) -> None:
        """``code``: what UPnP calls the error, 0 if nothing."""
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class UpnpRouter:
    """A router that opens ports. Every call ends within a few seconds, and raises `MappingError` on failure."""

    control: str
    """The URL for requests."""
    service: str
    """The type of the service at that URL."""
    local_ip: str
    """This machine's address, as the router sees it."""

    async def external_ip(self) -> str:
        """Return its outer address; raise `MappingError` on failure."""
        ip = text_of("NewExternalIPAddress", await self._ask("GetExternalIPAddress", {}))
        try:
            return str(ipaddress.IPv4Address(ip))
        except ValueError as error:
            raise MappingError("the router does not know its outer address") from error

    async def open_port(self, port: int, outer: int, seconds: int) -> Address:
        """Open a port of this machine or keep it open, at this outer port or another free one; raises `MappingError`.

        Return the outer address that the router reports, which behind a second router is not a public one.
        """
        for _ in range(NUM_TRIES):
            for lease in (seconds, 0):
                mapping = {
                    **_name(outer),
                    "NewInternalPort": str(port),
                    "NewInternalClient": self.local_ip,
                    "NewEnabled": "1",
                    "NewPortMappingDescription": "farandole",
                    "NewLeaseDuration": str(lease),
                }
                try:
                    await self._ask("AddPortMapping", mapping)
                except MappingError as error:
                    if error.code == _CONFLICT:
                        outer = random.randint(_FIRST_PORT, _LAST_PORT)
                        break
                    if error.code != _ONLY_ENDLESS or not lease:
                        raise
                else:
                    return await self.external_ip(), outer
        raise MappingError("the router has given the port to another machine", _CONFLICT)

    async def close_port(self, outer: int) -> None:
        """Close an outer port; raise `MappingError` on failure."""
        await self._ask("DeletePortMapping", _name(outer))

    async def _ask(self, action: str, arguments: Mapping[str, str]) -> bytes:
        values = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in arguments.items())
        body = (
            '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
            's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
            f'<u:{action} xmlns:u="{self.service}">{values}</u:{action}></s:Body></s:Envelope>'
        )
        headers = {"SOAPAction": f'"{self.service}#{action}"', "Content-Type": 'text/xml; charset="utf-8"'}
        status, reply = await _request("POST", self.control, headers, body.encode())
        if status != 200:
            reason = "".join(filter(str.isprintable, text_of("errorDescription", reply)))[:MAX_REASON_CHARS]
            code = text_of("errorCode", reply)
            raise MappingError(
                reason or f"the router answers {action} with status {status}",
                int(code) if re.fullmatch(r"[0-9]{3}", code) else 0,
            )
        return reply


def _name(outer: int) -> dict[str, str]:
    """Return the arguments that identify a mapping."""
    return {"NewRemoteHost": "", "NewExternalPort": str(outer), "NewProtocol": "TCP"}


async def find_router() -> UpnpRouter:
    """Return the gateway, if it opens ports by UPnP; raise `MappingError` if not."""
    gateway = gateway_of(read_proc("net/route") or "")
    if gateway is None or not _is_private(gateway):
        raise MappingError("no home's router leads out of here")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((gateway, 9))  # sends nothing: asks the kernel for its choice
        except OSError as error:
            raise MappingError(f"no way to the router: {error}") from error
        local_ip = str(probe.getsockname()[0])
    if not _is_private(local_ip):
        raise MappingError("this machine has an address of its own on the internet")
    location = await _search(gateway, local_ip)
    status, reply = await _request("GET", location, {}, b"")
    if status != 200:
        raise MappingError(f"the router does not describe itself (status {status})")
    described = re.split(rb"</(?:[\w.-]+:)?service>", reply)
    services = {text_of("serviceType", each): text_of("controlURL", each) for each in described}
    for service in _SERVICES:
        if services.get(service):
            try:
                control = urljoin(location, services[service])
            except ValueError as error:
                raise MappingError("the router's URL is none") from error
            is_there = urlsplit(control).hostname == urlsplit(location).hostname
            if not is_there or not re.fullmatch(r"http://[!-~]{1,512}", control):
                raise MappingError("the router sends us to another machine")
            return UpnpRouter(control, service, local_ip)
    raise MappingError("the router opens no ports for others")


def _is_private(ip: str) -> bool:
    parsed = ipaddress.IPv4Address(ip)
    return parsed.is_private and not parsed.is_loopback


def gateway_of(routes: str) -> str | None:
    """Parse /proc/net/route: return the gateway of the default route with the smallest metric."""
    found: list[tuple[int, str]] = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or fields[1] != "00000000" or fields[7] != "00000000":
            continue
        if int(fields[3], 16) & _UP_BY_GATEWAY == _UP_BY_GATEWAY:
            found.append((int(fields[6]), socket.inet_ntoa(struct.pack("=I", int(fields[2], 16)))))
    return min(found)[1] if found else None


async def _search(gateway: str, local_ip: str) -> str:
    """Return the URL of the gateway's description."""
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock:
        try:
            await sock.bind((local_ip, 0))
            for _ in range(NUM_SEARCHES):
                for target in _TARGETS:
                    lines = ("M-SEARCH * HTTP/1.1", "HOST: 239.255.255.250:1900", 'MAN: "ssdp:discover"', "MX: 1")
                    await sock.sendto("\r\n".join((*lines, f"ST: {target}", "", "")).encode(), _GROUP)
                with trio.move_on_after(SEARCH_INTERVAL):
                    while True:
                        data, sender = await sock.recvfrom(MAX_DATAGRAM)
                        if sender[0] == gateway and (location := _location(data, sender[0])) is not None:
                            return location
        except OSError as error:
            raise MappingError(f"no local network to ask: {error}") from error
    raise MappingError("no router answers")


def _location(data: bytes, sender: str) -> str | None:
    """Return the location in an answer, if it leads to the machine that sent the answer."""
    match = re.search(rb"(?im)^location:[ \t]*(http://[!-~]{1,256})[ \t]*\r?$", data)
    if match is None:
        return None
    location = match[1].decode("ascii")
    try:
        return location if urlsplit(location).hostname == sender else None
    except ValueError:
        return None


async def _request(method: str, url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
    """Send one HTTP request; return status and body; raise `MappingError` on failure."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        fields = {"Host": f"{host}:{port}", "Connection": "close", "Content-Length": str(len(body)), **headers}
        lines = [f"{method} {path} HTTP/1.0", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        with trio.fail_after(HTTP_TIMEOUT):
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all("\r\n".join(lines).encode("ascii") + body)
                reply = bytearray()
                while len(reply) <= MAX_REPLY_BYTES and (data := await stream.receive_some(MAX_REPLY_BYTES)):
                    reply += data
    except (OSError, ValueError, trio.TooSlowError, trio.BrokenResourceError) as error:
        raise MappingError(f"the router does not answer, or too slowly: {error!r}") from error
    head, _, content = bytes(reply).partition(b"\r\n\r\n")
    match = re.match(rb"HTTP/1\.[01] (\d{3})\b", head)
    if match is None or len(reply) > MAX_REPLY_BYTES:
        raise MappingError("the router does not speak HTTP, or says too much")
    return int(match[1]), content


def text_of(name: str, xml: bytes) -> str:
    """Return the text of the first element of this name, in any namespace; empty if there is none.

    The time is linear in the bytes, whatever they are.
    """
    match = re.search(rf"<(?:[\w.-]+:)?{name}(?:\s[^<>]*)?>([^<]*)</".encode(), xml)
    return "" if match is None else unescape(match[1].decode(errors="replace")).strip()


async def keep_ports(host: Host, on_change: Callable[[], None], lease_seconds: int, has_tried: trio.Event) -> None:
    """Keep the ports of a host open until cancelled, as ``host.own.mapped`` records, and close them then.

    ``on_change``: called when others may reach the host in another way; ``has_tried``: set once a router has been
    asked, or there was none to ask.
    """
    own, waits, router = host.own, pauses(FIRST_RETRY_AFTER, MAX_RETRY_AFTER, random.Random()), None
    try:
        while True:
            listening, ports, mapped = [port for _, port in own.listening], ports_of(own), dict[int, Address]()
            try:
                if ports or router is not None:
                    router = router or await find_router()
                    mapped = await _open(router, ports, own.mapped, lease_seconds)
                    waits = pauses(FIRST_RETRY_AFTER, MAX_RETRY_AFTER, random.Random())
            except MappingError as error:
                logger.debug("no port at the router: %s", error)
                router = None
            before, own.mapped = own.mapped, mapped
            for port, (ip, outer) in mapped.items() - before.items():
                logger.info("the router sends on port %d of %s to port %d here", outer, ip, port)
            if any(port in listening for port, _ in mapped.items() ^ before.items()):
                on_change()
            has_tried.set()
            if router is None:
                await trio.sleep(next(waits))
                continue
            for _ in range(round(min(ASK_INTERVAL, lease_seconds / 2) / PORTS_INTERVAL)):
                await trio.sleep(PORTS_INTERVAL)
                if ports != ports_of(own):
                    break
    finally:  # this node leaves
        if router is not None:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_TIMEOUT):
                await _close(router, own.mapped.values())


def ports_of(own: OwnAddresses) -> list[int]:
    """Return the ports that other machines can reach over IPv4."""
    listening = [port for ip, port in own.listening if ":" not in ip and not ip.startswith("127.")]
    return list(dict.fromkeys((*listening, *(sorted(own.bulk_ports) if listening else ()))))[:MAX_PORTS]


async def _open(
    router: UpnpRouter, ports: Sequence[int], before: Mapping[int, Address], lease_seconds: int
) -> dict[int, Address]:
    """Open libp2p's port, and the others if the router allows it; close those that were open before."""
    mapped: dict[int, Address] = {}
    for port in ports:
        try:
            _, outer = before.get(port, ("", port))
            mapped[port] = await router.open_port(port, outer, lease_seconds)
        except MappingError as error:
            if not mapped:
                raise
            logger.debug("port %d is not sent on: %s", port, error)
    await _close(router, [address for port, address in before.items() if port not in ports])
    return mapped


async def _close(router: UpnpRouter, addresses: Iterable[Address]) -> None:
    for _, outer in addresses:
        try:
            await router.close_port(outer)
        except MappingError as error:
            logger.debug("a port stays open until its lease ends: %s", error)
            return

"""Asking the home's router for a port: UPnP's Internet Gateway Device, versions 1 and 2, over IPv4.

Found by SSDP (a datagram to a group of the local network), described in XML over HTTP, asked by SOAP. Whoever answers
is a stranger on the local network: it is asked only at the address from which it answers, what it says is bounded in
bytes and time, and XML that declares anything is refused unread.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urljoin, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import trio

from farandole.protocol.errors import FarandoleError

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
# A datagram may be lost: asked again so often, so far apart. Routers answer within the second that MX allows them.
NUM_SEARCHES: Final = 3
SEARCH_INTERVAL: Final = 1.0
MAX_DATAGRAM: Final = 2_048
HTTP_TIMEOUT: Final = 4.0
# Descriptions of real routers have up to 20 KB.
MAX_REPLY_BYTES: Final = 65_536
# What people see of a router's own words.
MAX_REASON_CHARS: Final = 80
# The port's owner is told again before this many seconds are over, or the router forgets it.
LEASE_SECONDS: Final = 3_600


class UpnpError(FarandoleError):
    """The router does not do what it was asked for; the message says why."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A router that opens ports."""

    control: str
    """The URL to ask."""
    service: str
    """What it calls itself there."""
    local_ip: str
    """This machine's address, as the router sees it."""

    @property
    def ip(self) -> str:
        """Its own, inside."""
        return urlsplit(self.control).hostname or ""

    async def external_ip(self) -> str:
        """Its outer address; raises `UpnpError`."""
        ip = (await self._ask("GetExternalIPAddress", {})).get("NewExternalIPAddress", "")
        try:
            return str(ipaddress.IPv4Address(ip))
        except ValueError as error:
            raise UpnpError("the router does not know its outer address") from error

    async def open_port(self, port: int, seconds: int = LEASE_SECONDS) -> None:
        """Send on to this machine what comes to this TCP port of the router's; raises `UpnpError`."""
        mapping = {
            "NewRemoteHost": "",
            "NewExternalPort": str(port),
            "NewProtocol": "TCP",
            "NewInternalPort": str(port),
            "NewInternalClient": self.local_ip,
            "NewEnabled": "1",
            "NewPortMappingDescription": "farandole",
            "NewLeaseDuration": str(seconds),
        }
        await self._ask("AddPortMapping", mapping)

    async def close_port(self, port: int) -> None:
        """Undo `open_port`; raises `UpnpError`."""
        mapping = {"NewRemoteHost": "", "NewExternalPort": str(port), "NewProtocol": "TCP"}
        await self._ask("DeletePortMapping", mapping)

    async def _ask(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        values = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in arguments.items())
        body = (
            '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
            's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
            f'<u:{action} xmlns:u="{self.service}">{values}</u:{action}></s:Body></s:Envelope>'
        )
        headers = {"SOAPAction": f'"{self.service}#{action}"', "Content-Type": 'text/xml; charset="utf-8"'}
        status, reply, _ = await _request("POST", self.control, headers, body.encode())
        answers = {_local_name(element): element.text or "" for element in _parse(reply).iter()}
        if status != 200:
            reason = "".join(filter(str.isprintable, answers.get("errorDescription", "")))[:MAX_REASON_CHARS]
            raise UpnpError(reason or f"the router answers {action} with status {status}")
        return answers


async def find_gateway() -> Gateway:
    """The first router that answers and opens ports; raises `UpnpError` if there is none."""
    location = await _search()
    status, reply, local_ip = await _request("GET", location, {}, b"")
    if status != 200:
        raise UpnpError(f"the router does not describe itself (status {status})")
    services = {}
    for element in _parse(reply).iter():
        if _local_name(element) == "service":
            fields = {_local_name(child): (child.text or "").strip() for child in element}
            services[fields.get("serviceType", "")] = fields.get("controlURL", "")
    for service in _SERVICES:
        if services.get(service):
            try:
                control = urljoin(location, services[service])
            except ValueError as error:
                raise UpnpError("the router's URL is none") from error
            is_there = urlsplit(control).hostname == urlsplit(location).hostname
            if not is_there or not re.fullmatch(r"http://[!-~]{1,512}", control):
                raise UpnpError("the router sends us to another machine")
            return Gateway(control, service, local_ip)
    raise UpnpError("the router opens no ports for others")


async def _search() -> str:
    """The URL of the first router's description."""
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock:
        try:
            for _ in range(NUM_SEARCHES):
                for target in _TARGETS:
                    await sock.sendto(_question(target), _GROUP)
                with trio.move_on_after(SEARCH_INTERVAL):
                    while True:
                        data, sender = await sock.recvfrom(MAX_DATAGRAM)
                        if (location := _location(data, sender[0])) is not None:
                            return location
        except OSError as error:
            raise UpnpError(f"no local network to ask: {error}") from error
    raise UpnpError("no router answers")


def _question(target: str) -> bytes:
    lines = ("M-SEARCH * HTTP/1.1", "HOST: 239.255.255.250:1900", 'MAN: "ssdp:discover"', "MX: 1", f"ST: {target}")
    return "\r\n".join((*lines, "", "")).encode()


def _location(data: bytes, sender: str) -> str | None:
    """Of an answer that leads to the machine that gave it."""
    match = re.search(rb"(?im)^location:[ \t]*(http://[!-~]{1,256})[ \t]*\r?$", data)
    if match is None:
        return None
    location = match[1].decode("ascii")
    try:
        return location if urlsplit(location).hostname == sender else None
    except ValueError:
        return None


async def _request(method: str, url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes, str]:
    """One HTTP request: status, body, and this machine's address towards the other; raises `UpnpError`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        fields = {"Host": f"{host}:{port}", "Connection": "close", "Content-Length": str(len(body)), **headers}
        lines = [f"{method} {path} HTTP/1.0", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        with trio.fail_after(HTTP_TIMEOUT):
            async with await trio.open_tcp_stream(host, port) as stream:
                local_ip = str(stream.socket.getsockname()[0])
                await stream.send_all("\r\n".join(lines).encode("ascii") + body)
                reply = bytearray()
                while len(reply) <= MAX_REPLY_BYTES and (data := await stream.receive_some(MAX_REPLY_BYTES)):
                    reply += data
    except (OSError, ValueError, trio.TooSlowError, trio.BrokenResourceError) as error:
        raise UpnpError(f"the router answers not, or too slowly: {error!r}") from error
    head, _, content = bytes(reply).partition(b"\r\n\r\n")
    match = re.match(rb"HTTP/1\.[01] (\d{3})\b", head)
    if match is None or len(reply) > MAX_REPLY_BYTES:
        raise UpnpError("the router does not speak HTTP, or says too much")
    return int(match[1]), content, local_ip


def _parse(content: bytes) -> ElementTree.Element:
    """Entities may grow without bound, and nobody needs them here; nor UTF-16, in which they would not be seen."""
    if b"\0" in content or b"<!" in re.sub(rb"(?s)<!--.*?-->", b"", content):
        raise UpnpError("the router's XML declares something")
    try:
        return ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise UpnpError(f"the router's XML is none: {error}") from error


def _local_name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]

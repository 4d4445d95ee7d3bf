"""A router's answers come from a stranger: an HTTP server on loopback plays it. tests/testnet/natlab has a real one."""

from __future__ import annotations

import pytest
import trio

from farandole.node.base.nurseries import open_service_nursery
from farandole.node.mesh.reach.upnp import (
    MAX_REPLY_BYTES,
    MappingError,
    UpnpRouter,
    _location,
    _parse,
    gateway_of_bsd,
    gateway_of_linux,
)

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
FAULT = "<e><errorCode>725</errorCode><errorDescription>OnlyPermanentLeasesSupported</errorDescription></e>"


def answer(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} Whatever\r\nServer: x\r\n\r\n{body}".encode()


async def ask(reply: bytes) -> str:
    """Return the result of asking a router that gives this reply."""

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(reply)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    router = UpnpRouter(f"http://127.0.0.1:{port}/control", SERVICE, "127.0.0.1")
    async with open_service_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        return await router.external_ip()


async def test_a_router_tells_its_address() -> None:
    body = '<u:R xmlns:u="urn:x"><NewExternalIPAddress>5.1.1.1</NewExternalIPAddress></u:R>'
    assert await ask(answer(200, body)) == "5.1.1.1"


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0\r\n",
        answer(200, "no XML"),
        answer(200, "<a/>"),
        answer(200, "<a><NewExternalIPAddress>nowhere</NewExternalIPAddress></a>"),
        answer(200, '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'),
        answer(500, FAULT),
        answer(200, "<a>" + " " * MAX_REPLY_BYTES + "</a>"),
    ],
)
async def test_whatever_a_router_says_is_an_answer_or_an_error(reply: bytes) -> None:
    with pytest.raises(MappingError):
        await ask(reply)


def test_declarations_are_not_read_in_any_encoding() -> None:
    with pytest.raises(MappingError):
        _parse('<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'.encode("utf-16"))
    assert _parse(b"<?xml version='1.0'?><!-- fine --><a/>").tag == "a"


@pytest.mark.parametrize(
    ("data", "location"),
    [
        (b"HTTP/1.1 200 OK\r\nLOCATION: http://192.168.1.1:5000/root.xml\r\nST: x\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nLocation: http://192.168.1.2/root.xml\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nLocation: file:///etc/passwd\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nLocation: http://[/\r\n\r\n", False),
        (b"\xff\x00", False),
    ],
)
def test_a_router_leads_to_itself_alone(data: bytes, location: bool) -> None:
    assert (_location(data, "192.168.1.1") is not None) == location


HEADER = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"


def route(destination: str, gateway: str, flags: str, metric: int, mask: str = "00000000") -> str:
    return f"eth0\t{destination}\t{gateway}\t{flags}\t0\t0\t{metric}\t{mask}\t0\t0\t0\n"


def test_of_linux_the_default_route_with_the_smallest_metric() -> None:
    routes = [
        route("0001A8C0", "00000000", "0001", 0, "00FFFFFF"),
        route("00000000", "0101A8C0", "0003", 600),
        route("00000000", "FE01A8C0", "0003", 100),
        route("00000000", "0201A8C0", "0002", 0),  # down
    ]
    assert gateway_of_linux(HEADER + "".join(routes)) == "192.168.1.254"
    assert gateway_of_linux(HEADER + routes[0]) is None
    assert gateway_of_linux("") is None


def test_of_macos_what_route_says() -> None:
    told = "   route to: default\ndestination: default\n    gateway: 192.168.1.1\n  interface: en0\n"
    assert gateway_of_bsd(told) == "192.168.1.1"
    assert gateway_of_bsd("    gateway: fe80::1%en0\n") is None
    assert gateway_of_bsd("route: writing to routing socket: not in table\n") is None

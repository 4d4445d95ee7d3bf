"""A router's answers come from a stranger, and it may forget ports: tests/testnet/natlab has a real one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Mapping

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.nurseries import open_service_nursery
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.reach import upnp as keeper
from farandole.node.mesh.reach.upnp import (
    MAX_REPLY_BYTES,
    MappingError,
    UpnpRouter,
    _location,
    gateway_of,
    keep_ports,
    text_of,
)
from farandole.protocol.mesh.dialling import Address

from ...hosts import LOOPBACK, until

LEASE_SECONDS = 2
OUTER_IP = "5.1.1.1"
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


async def test_where_a_port_is_taken_another_is_opened_and_without_a_lease_if_the_router_knows_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[tuple[str, str]] = []

    async def ask(self: UpnpRouter, action: str, arguments: Mapping[str, str]) -> bytes:
        if action == "AddPortMapping":
            outer, lease = arguments["NewExternalPort"], arguments["NewLeaseDuration"]
            if outer == "4001" or lease != "0":
                raise MappingError("no", 718 if outer == "4001" else 725)
            opened.append((outer, arguments["NewInternalPort"]))
        return f"<NewExternalIPAddress>{OUTER_IP}</NewExternalIPAddress>".encode()

    monkeypatch.setattr(UpnpRouter, "_ask", ask)
    ip, outer = await UpnpRouter("http://127.0.0.1/control", SERVICE, "127.0.0.1").open_port(4001, 4001, LEASE_SECONDS)
    assert opened == [(str(outer), "4001")]
    assert (ip, outer != 4001) == (OUTER_IP, True)


@pytest.mark.parametrize(
    ("xml", "text"),
    [
        (b"<?xml version='1.0'?><x><url> /a?b&amp;c\n</url><url>/d</url></x>", "/a?b&c"),
        (b'<s:url xmlns:s="urn:x">/a</s:url>', "/a"),
        (b'<!DOCTYPE a [<!ENTITY b "c">]><a><url>&b;</url></a>', "&b;"),
        (b"<urls>/a</urls><url/>", ""),
        ("<url>/a</url>".encode("utf-16"), ""),
        (b"<url>" * 13_000, ""),
        (b"<" + b"a" * 65_000, ""),
        (b"<url" + b" " * 65_000, ""),
    ],
)
def test_of_xml_the_text_of_an_element_is_read_and_no_declaration(xml: bytes, text: str) -> None:
    assert text_of("url", xml) == text


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
    assert gateway_of(HEADER + "".join(routes)) == "192.168.1.254"
    assert gateway_of(HEADER + routes[0]) is None
    assert gateway_of("") is None


# A host at home with a router that opens ports


class Home:
    """A router, with the mappings that it was asked for."""

    ip = "192.168.1.1"

    def __init__(self) -> None:
        self.is_on = True
        self.mapped: dict[int, int] = {}
        self.refused = 0
        self.is_shared = False
        """Whether another machine has this one's ports."""
        self.num_asked = 0

    async def open_port(self, port: int, outer: int, seconds: int) -> Address:
        self.num_asked += 1
        self.answer(port)
        if self.is_shared and outer == port:
            outer = random.randint(49_152, 65_535)
        self.mapped[outer] = seconds
        return OUTER_IP, outer

    async def close_port(self, outer: int) -> None:
        self.answer()
        self.mapped[outer] = 0

    def answer(self, port: int | None = None) -> None:
        if not self.is_on or port == self.refused:
            raise MappingError("no answer, or a refusal")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Home:
    home = Home()

    async def find_router() -> Home:
        home.answer()
        return home

    monkeypatch.setattr(keeper, "find_router", find_router)
    for name, seconds in (("ASK_INTERVAL", 0.1), ("PORTS_INTERVAL", 0.02)):
        monkeypatch.setattr(keeper, name, seconds)
    monkeypatch.setattr(keeper, "FIRST_RETRY_AFTER", 0.1)
    return home


@contextlib.asynccontextmanager
async def open_kept(listen: str = "/ip4/0.0.0.0/tcp/0") -> AsyncIterator[tuple[Host, trio.Event, list[int]]]:
    changes: list[int] = []
    async with open_host(Ed25519PrivateKey.generate(), [listen]) as host, open_service_nursery() as nursery:
        has_tried = trio.Event()
        nursery.start_soon(keep_ports, host, lambda: changes.append(len(host.own.mapped)), LEASE_SECONDS, has_tried)
        yield host, has_tried, changes


async def test_ports_are_kept_open_and_closed_at_the_end(home: Home) -> None:
    async with open_kept() as (host, has_tried, changes):
        await has_tried.wait()
        port = host.own.listening[0][1]
        assert host.own.mapped == {port: (OUTER_IP, port)}
        assert host.own.all_mapped == [f"/ip4/{OUTER_IP}/tcp/{port}/p2p/{host.peer_id}"]
        assert home.mapped == {port: LEASE_SECONDS}
        asked = home.num_asked
        await until(lambda: home.num_asked >= asked + 2)  # the lease is renewed
        host.own.bulk_ports.add(6_000)
        await until(lambda: home.mapped.get(6_000) == LEASE_SECONDS and len(host.own.mapped) == 2)
        host.own.bulk_ports.clear()
        await until(lambda: home.mapped[6_000] == 0 and len(host.own.mapped) == 1)
        assert changes == [1]  # others still dial the host at the same address
    assert home.mapped == {port: 0, 6_000: 0}


async def test_the_port_that_a_router_gave_instead_is_renewed_and_no_other_is_opened(home: Home) -> None:
    home.is_shared = True
    async with open_kept() as (host, has_tried, changes):
        await has_tried.wait()
        asked = home.num_asked
        await until(lambda: home.num_asked >= asked + 3)
        assert [(OUTER_IP, outer) for outer in home.mapped] == list(host.own.mapped.values())
        assert changes == [1]


async def test_a_port_that_is_refused_costs_no_other(home: Home) -> None:
    home.refused = 6_000
    async with open_kept() as (host, has_tried, _):
        await has_tried.wait()
        host.own.bulk_ports.add(home.refused)
        asked = home.num_asked
        await until(lambda: home.num_asked >= asked + 2)
        assert host.own.mapped.keys() == {host.own.listening[0][1]}


async def test_a_router_that_begins_anew_or_was_off_is_asked_anew(home: Home) -> None:
    async with open_kept() as (host, has_tried, changes):
        await has_tried.wait()
        home.mapped.clear()
        await until(lambda: bool(home.mapped))
        assert host.own.mapped
        home.is_on = False
        await until(lambda: not host.own.mapped)
        home.mapped.clear()
        home.is_on = True
        await until(lambda: bool(host.own.mapped))
        assert changes == [1, 0, 1]


@pytest.mark.parametrize(("listen", "is_on"), [(LOOPBACK[0], True), ("/ip4/0.0.0.0/tcp/0", False)])
async def test_who_listens_for_this_machine_alone_or_has_no_router_does_without(
    home: Home, listen: str, is_on: bool
) -> None:
    home.is_on = is_on
    async with open_kept(listen) as (host, has_tried, changes):
        await has_tried.wait()
        assert (host.own.mapped, changes, home.num_asked) == ({}, [], 0)

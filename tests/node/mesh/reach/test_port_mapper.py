"""A host at home with a router on loopback that speaks NAT-PMP."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.nurseries import open_service_nursery
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.reach import port_mapper as keeper
from farandole.node.mesh.reach.gateway import Gateway, MappingError, NatPmpRouter
from farandole.node.mesh.reach.port_mapper import PortKeeper, Router

from ...hosts import LOOPBACK
from ...relayed import until

LEASE_SECONDS = 2
OUTER_IP = "5.1.1.1"


@dataclass
class Home:
    """A router, with the mappings that it was asked for."""

    sock: trio.socket.SocketType
    is_on: bool = True
    began_at: float = 0.0
    mapped: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    num_asked: int = 0

    def restart(self) -> None:
        self.mapped, self.began_at = {}, trio.current_time()

    async def run(self) -> None:
        while True:
            question, asker = await self.sock.recvfrom(64)
            inner = int.from_bytes(question[4:6], "big")
            result = 2 if inner and inner == self.refused else 0
            answer = struct.pack(">BBHI", 0, 128 + question[1], result, int(trio.current_time() - self.began_at))
            if question[1] == 0:
                answer += bytes(map(int, OUTER_IP.split(".")))
            else:
                _, _, seconds = struct.unpack(">HHI", question[4:])
                self.num_asked += 1
                self.mapped |= {} if result else {inner: seconds}
                answer += struct.pack(">HHI", inner, inner if seconds else 0, seconds)
            if self.is_on:
                await self.sock.sendto(answer, asker)


@pytest.fixture
async def home(monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery) -> AsyncIterator[Home]:
    with trio.socket.socket(type=trio.socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        home = Home(sock)
        nursery.start_soon(home.run)

        async def find_router() -> Router:
            router = NatPmpRouter(Gateway("127.0.0.1", "127.0.0.1"), sock.getsockname()[1])
            await router.external_ip()
            return router

        monkeypatch.setattr(keeper, "find_router", find_router)
        for name, seconds in (("CHECK_INTERVAL", 0.1), ("PORTS_INTERVAL", 0.02), ("MIN_RENEWAL_INTERVAL", 0.3)):
            monkeypatch.setattr(keeper, name, seconds)
        monkeypatch.setattr(keeper, "FIRST_RETRY_AFTER", 0.1)
        yield home


@contextlib.asynccontextmanager
async def open_kept(listen: str = "/ip4/0.0.0.0/tcp/0") -> AsyncIterator[tuple[Host, PortKeeper, list[int]]]:
    changes: list[int] = []
    async with open_host(Ed25519PrivateKey.generate(), [listen]) as host, open_service_nursery() as nursery:
        kept = PortKeeper(host, lambda: changes.append(len(host.own.mapped)), LEASE_SECONDS)
        nursery.start_soon(kept.run)
        yield host, kept, changes


async def test_ports_are_kept_open_and_closed_at_the_end(home: Home) -> None:
    async with open_kept() as (host, kept, changes):
        await kept.has_tried.wait()
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


async def test_a_port_that_is_refused_costs_no_other(home: Home) -> None:
    home.refused = 6_000
    async with open_kept() as (host, kept, _):
        await kept.has_tried.wait()
        host.own.bulk_ports.add(home.refused)
        asked = home.num_asked
        await until(lambda: home.num_asked >= asked + 2)
        assert host.own.mapped.keys() == {host.own.listening[0][1]}


async def test_a_router_that_begins_anew_is_asked_anew(home: Home) -> None:
    async with open_kept() as (host, kept, _):
        await kept.has_tried.wait()
        home.restart()
        await until(lambda: bool(home.mapped))
        assert host.own.mapped


async def test_a_router_that_is_off_is_looked_for_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.node.mesh.reach.gateway.PAUSES", (0.5,))
    async with open_kept() as (host, kept, changes):
        await kept.has_tried.wait()
        home.is_on = False
        await until(lambda: not host.own.mapped)
        home.restart()
        home.is_on = True
        await until(lambda: bool(host.own.mapped))
        assert changes == [1, 0, 1]


async def test_who_listens_for_this_machine_alone_asks_nobody(home: Home) -> None:
    async with open_kept(LOOPBACK[0]) as (host, kept, changes):
        await kept.has_tried.wait()
        assert (host.own.mapped, changes, home.num_asked) == ({}, [], 0)


async def test_without_a_router_a_node_does_without(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    async def find_none() -> Router:
        raise MappingError("no router answers")

    monkeypatch.setattr(keeper, "find_router", find_none)
    async with open_kept() as (host, kept, changes):
        await kept.has_tried.wait()
        assert (host.own.mapped, changes) == ({}, [])

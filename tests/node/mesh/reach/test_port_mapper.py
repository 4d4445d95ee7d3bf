"""A host at home with a router that opens ports."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.nurseries import open_service_nursery
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.reach import port_mapper as keeper
from farandole.node.mesh.reach.port_mapper import PortKeeper
from farandole.node.mesh.reach.upnp import MappingError, Opened

from ...hosts import LOOPBACK
from ...relayed import until

LEASE_SECONDS = 2
OUTER_IP = "5.1.1.1"


class Home:
    """A router, with the mappings that it was asked for."""

    ip = "192.168.1.1"

    def __init__(self) -> None:
        self.is_on = True
        self.mapped: dict[int, int] = {}
        self.refused = 0
        self.num_asked = 0

    async def open_port(self, port: int, seconds: int) -> Opened:
        self.num_asked += 1
        self.answer(port)
        self.mapped[port] = seconds
        return Opened(port, (OUTER_IP, port), seconds)

    async def close_port(self, opened: Opened) -> None:
        self.answer()
        self.mapped[opened.port] = 0

    async def has_forgotten(self, opened: Opened) -> bool:
        self.answer()
        return opened.port not in self.mapped

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
    for name, seconds in (("CHECK_INTERVAL", 0.1), ("PORTS_INTERVAL", 0.02), ("MIN_RENEWAL_INTERVAL", 0.3)):
        monkeypatch.setattr(keeper, name, seconds)
    monkeypatch.setattr(keeper, "FIRST_RETRY_AFTER", 0.1)
    return home


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
        home.mapped.clear()
        await until(lambda: bool(home.mapped))
        assert host.own.mapped


async def test_a_router_that_is_off_is_looked_for_again(home: Home) -> None:
    async with open_kept() as (host, kept, changes):
        await kept.has_tried.wait()
        home.is_on = False
        await until(lambda: not host.own.mapped)
        home.mapped.clear()
        home.is_on = True
        await until(lambda: bool(host.own.mapped))
        assert changes == [1, 0, 1]


async def test_who_listens_for_this_machine_alone_asks_nobody(home: Home) -> None:
    async with open_kept(LOOPBACK[0]) as (host, kept, changes):
        await kept.has_tried.wait()
        assert (host.own.mapped, changes, home.num_asked) == ({}, [], 0)


async def test_without_a_router_a_node_does_without(home: Home) -> None:
    home.is_on = False
    async with open_kept() as (host, kept, changes):
        await kept.has_tried.wait()
        assert (host.own.mapped, changes) == ({}, [])

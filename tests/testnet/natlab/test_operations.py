"""Events in a home: its line, its cable, its router, its address. With plain sockets; nothing leaves the lab."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from farandole.testnet.natlab.home import Home
from farandole.testnet.natlab.lab import Lab
from farandole.testnet.natlab.namespace import Location

from ...patience import PATIENCE as LONG
from .probe import PATHLESS_SECONDS, PATIENCE, Address, Probe, meet, open_probes

SIZE = 1_000_000
_SERVER = f"""
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print(flush=True)
    connection, _ = server.accept()
    connection.sendall(connection.recv(1))
    left = {SIZE}
    while left:
        left -= len(connection.recv(left))
    connection.sendall(b"!")
"""
_CLIENT = f"""
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
started_at = time.monotonic()
connection.sendall(b"?"), connection.recv(1)
answered_at = time.monotonic()
connection.sendall(bytes({SIZE})), connection.recv(1)
print(answered_at - started_at, time.monotonic() - answered_at)
"""
LAB_FOREVER = """
import json, time
from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.lab import open_lab
with open_leash() as leash, open_lab(leash) as lab:
    home = lab.add_home("upnp")
    home.set_delay(5)
    namespaces = [lab.internet, *(router.namespace for router in home.routers)]
    print(json.dumps([namespace.holder for namespace in namespaces]), flush=True)
    time.sleep(600)
"""


@dataclass
class World:
    """A home, a public host that reports the home's outside address, and a host that calls it."""

    home: Home
    third: Home
    probes: dict[str, Probe]

    async def observe(self, seconds: float = PATIENCE) -> Address | None:
        """Return the outside address of a fresh port of the home."""
        return await self.probes["home"].observe(self.third.address, self.probes["home"].take_port(), seconds)

    async def calls(self, target: Address, port: int, seconds: float = PATIENCE) -> bool:
        """Return whether the other host's call to ``target`` is answered from the home's port."""
        caller = self.probes["caller"]
        return await meet(caller, caller.take_port(), self.probes["home"], port, seconds, target)


@asynccontextmanager
async def open_world(lab: Lab, kind: str) -> AsyncIterator[World]:
    home, third, caller = lab.add_home(kind), lab.add_home("open"), lab.add_home("port-restricted")
    places = {"home": home.host, "third": third.host, "caller": caller.host}
    async with open_probes(places) as probes:
        probes["third"].serve()
        yield World(home, third, probes)


async def test_who_is_cut_off_or_unplugged_reaches_nobody_until_that_ends(lab: Lab) -> None:
    async with open_world(lab, "carrier") as world:
        for stop in (world.home.cut, world.home.unplug, world.home.switch_off):
            assert await world.observe() is not None
            stop()
            assert await world.observe(PATHLESS_SECONDS) is None
            stop(undo=True)
            assert await world.observe() is not None


async def test_a_router_that_was_off_has_forgotten_its_mappings(lab: Lab) -> None:
    async with open_world(lab, "full-cone") as world:
        probe, port = world.probes["home"], world.probes["home"].take_port()
        seen = await probe.observe(world.third.address, port)
        assert seen is not None
        assert await world.calls(seen, port)
        world.home.switch_off()
        world.home.switch_off(undo=True)
        assert not await world.calls(seen, port, PATHLESS_SECONDS)


async def test_a_home_gets_another_public_address(lab: Lab) -> None:
    for kind in ("port-restricted", "open", "carrier"):
        async with open_world(lab, kind) as world:
            before = await world.observe()
            world.home.set_delay(1)
            world.home.change_address()
            after = await world.observe()
            assert before is not None
            assert after is not None
            assert before[0] != after[0] == world.home.address
            assert (world.home.host.ip == world.home.address) == (kind == "open")


async def test_a_lossy_line_loses_some(lab: Lab) -> None:
    async with open_world(lab, "port-restricted") as world:
        probe = world.probes["home"]
        world.home.set_loss(0.5)
        arrived = []

        async def observe() -> None:
            arrived.append(await probe.observe(world.third.address, probe.take_port(), 0.5) is not None)

        while not any(arrived):  # on a busy machine the third may miss some
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(observe)
        assert sum(arrived) < len(arrived)


def measure(near: Location, far: Location) -> tuple[float, float]:
    """Return the seconds of a round trip, and of sending `SIZE` bytes from ``near`` to ``far``."""
    with subprocess.Popen([*far.enter, sys.executable, "-c", _SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            client = subprocess.run(
                [*near.enter, sys.executable, "-c", _CLIENT, far.ip],
                capture_output=True,
                text=True,
                check=True,
                timeout=LONG,
            )
        finally:
            server.kill()
    round_trip, transfer = map(float, client.stdout.split())
    return round_trip, transfer


def test_lines_take_their_time_until_they_are_changed(lab: Lab) -> None:
    near, far = lab.add_home("port-restricted"), lab.add_home("open")
    near.set_rate(16, 40)
    near.set_delay(20)
    far.set_delay(10)
    round_trip, transfer = measure(near.host, far.host)
    assert round_trip >= 2 * (0.020 + 0.010)
    assert transfer >= 0.9 * SIZE * 8 / 16e6
    near.set_rate(None, None)
    near.set_delay(0)
    far.set_delay(0)
    for _ in range(10):  # a busy machine may be as slow as the line was
        quicker, faster = measure(near.host, far.host)
        if quicker < round_trip and faster < transfer:
            break
    else:
        raise AssertionError(f"a round trip took {quicker:.3f} s, and {SIZE} bytes {faster:.3f} s")


def test_hosts_of_one_home_reach_each_other(lab: Lab) -> None:
    near, far = lab.add_home("symmetric", hosts=2).hosts
    assert near.ip != far.ip
    measure(near, far)


def test_addresses_are_global_and_nothing_leaves_the_lab(lab: Lab) -> None:
    homes = [lab.add_home("open"), lab.add_home("carrier"), lab.add_home("port-restricted")]
    assert all(ipaddress.ip_address(home.address).is_global for home in homes)
    links = {line["ifname"] for line in json.loads(lab.internet.run("ip -json link"))}
    assert links == {"lo", "to1", "to2", "to3"}
    assert lab.internet.run("ip route show default").strip() == "blackhole default"
    outside = {line["ifname"] for line in json.loads(subprocess.check_output(["ip", "-json", "link"]))}
    for home in homes:
        for router in home.routers:
            inside = {line["ifname"] for line in json.loads(router.namespace.run("ip -json link"))}
            assert inside <= {"lo", "wan", "lan", "port0"}
    assert not outside & {"to1", "to2", "to3", "wan", "lan", "port0"}


async def test_a_lab_that_is_killed_leaves_nothing_behind(full_lab: Lab) -> None:
    process = await trio.lowlevel.open_process([sys.executable, "-c", LAB_FOREVER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with trio.fail_after(PATIENCE):
        namespaces = {_namespace_of(pid) for pid in json.loads(await process.stdout.receive_some())}
        assert namespaces <= _namespaces()
        process.kill()
        await process.wait()
        await process.stdout.aclose()
        while namespaces & _namespaces():  # noqa: ASYNC110 - other processes tell no event
            await trio.sleep(0.05)


def _namespace_of(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None  # it has ended


def _namespaces() -> set[str | None]:
    """Return the network namespaces of all processes."""
    return {_namespace_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")} - {None}

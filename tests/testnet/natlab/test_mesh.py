"""Nodes' hosts in homes behind NAT, with libp2p: direct or relayed paths, routers that open ports, and the doctor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from farandole.node.base.causes import Diagnosis, Level
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.testnet.natlab.groups import Leash
from farandole.testnet.natlab.home import Home
from farandole.testnet.natlab.lab import Lab

from ...node.hosts import until
from ...patience import PATIENCE
from .mesh_node import PORT

NODE = Path(__file__).with_name("mesh_node.py")


@dataclass
class Node:
    """A `mesh_node.py` in a home, and its last report."""

    process: trio.Process
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.told.get("peer", ""))

    def path(self, peer: Node) -> str:
        """Return how it reaches a peer."""
        return str(self.told["paths"].get(peer.name, ""))

    async def dial(self, peer: Node) -> None:
        assert self.process.stdin is not None
        order = {"peer": peer.name, "addresses": peer.told["addresses"]}
        await self.process.stdin.send_all(json.dumps(order).encode() + b"\n")

    async def listen(self) -> None:
        assert self.process.stdout is not None
        buffer = b""
        with contextlib.suppress(trio.ClosedResourceError):
            async for data in self.process.stdout:
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self.told = json.loads(line)


@contextlib.asynccontextmanager
async def open_nodes(homes: list[Home], leash: Leash, *arguments: int | str) -> AsyncIterator[list[Node]]:
    """Open a node in each home, with these arguments, such as other ports to listen on."""
    async with trio.open_nursery() as nursery:
        nodes: list[Node] = []
        try:
            for home in homes:
                process = await trio.lowlevel.open_process(
                    [*home.host.enter, sys.executable, str(NODE), *map(str, arguments)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
                leash.hold(process.pid)
                nodes.append(Node(process))
                nursery.start_soon(nodes[-1].listen)
            await until(lambda: all(node.told for node in nodes))
            yield nodes
        finally:
            with trio.CancelScope(shield=True):  # killed processes end at once
                for node in nodes:
                    node.process.kill()
                    await node.process.wait()
                    leash.release(node.process.pid)
                    for pipe in (node.process.stdin, node.process.stdout):
                        assert pipe is not None
                        await pipe.aclose()
            nursery.cancel_scope.cancel()


def has_relays(node: Node) -> Callable[[], bool]:
    """Return a check whether the node has reservations with two relays, and announces both."""
    return lambda: len(node.told["relays"]) == 2 == sum("/p2p-circuit" in a for a in node.told["addresses"])


def has_let_go(node: Node, relay: Node) -> Callable[[], bool]:
    return lambda: relay.name not in node.told["relays"] and relay.name not in node.told["paths"]


async def acquaint(relays: list[Node], others: list[Node]) -> None:
    """Let all dial the relays, until the others have reservations."""
    for relay in relays[1:]:
        await relay.dial(relays[0])
    for relay in relays:
        for node in others:
            await node.dial(relay)
    for node in others:
        await until(has_relays(node))


async def test_who_can_punch_becomes_direct_the_others_stay_relayed_and_a_new_address_is_found(lab: Lab) -> None:
    kinds = ("open", "open", "port-restricted", "carrier", "symmetric", "symmetric")
    with trio.fail_after(PATIENCE):
        async with open_nodes([lab.add_home(kind) for kind in kinds], lab.leash) as nodes:
            one, two, near, far, hard, harder = nodes
            await acquaint([one, two], [near, far, hard, harder])
            verdicts = ["public"] * 2 + ["punchable"] * 2 + ["relay only"] * 2
            # With one witness the verdicts may differ.
            await until(lambda: [node.told["kind"] for node in nodes] == verdicts)
            await near.dial(far)
            await until(lambda: near.path(far) == far.path(near) == "punched")
            await hard.dial(harder)
            await until(lambda: hard.path(harder) == harder.path(hard) == "relayed")
            home = lab.homes[2]
            home.change_address()
            await until(lambda: near.told["observed"] == [home.address])
            await until(has_relays(near))
            await hard.dial(near)
            await until(lambda: hard.path(near) != "")


async def test_homes_with_other_versions_of_ip_meet_through_relays_with_both(lab: Lab) -> None:
    """And each becomes direct with a home that has both, over the version that they share."""
    homes = [lab.add_home("open", families="46") for _ in range(2)]
    homes += [lab.add_home("port-restricted", families=families) for families in ("4", "6", "46")]
    with trio.fail_after(PATIENCE):
        async with open_nodes(homes, lab.leash) as nodes:
            one, two, old, new, both = nodes
            await acquaint([one, two], [old, new, both])
            circuits = [address for address in both.told["addresses"] if "/p2p-circuit" in address]
            assert all(address.startswith("/ip4/") for address in circuits), "few peers have nothing but IPv6"
            await old.dial(new)
            await until(lambda: old.path(new) == new.path(old) == "relayed")
            await old.dial(both)
            await until(lambda: old.path(both) == both.path(old) == "punched")
            await new.dial(both)
            await until(lambda: new.path(both) == both.path(new) == "punched")


async def test_relays_that_die_or_freeze_are_replaced_and_peers_found_again(lab: Lab) -> None:
    kinds = ("open", "open", "open", "open", "symmetric", "symmetric")
    with trio.fail_after(PATIENCE):
        async with open_nodes([lab.add_home(kind) for kind in kinds], lab.leash) as nodes:
            *relays, hard, harder = nodes
            await acquaint(relays, [hard, harder])
            by_name = {relay.name: relay for relay in relays}
            for how in (signal.SIGKILL, signal.SIGSTOP):
                await until(has_relays(harder))
                await hard.dial(harder)
                await until(lambda: hard.path(harder) == "relayed")
                victim = by_name[harder.told["relays"][0]]
                os.kill(victim.process.pid, how)
                for node in (hard, harder):
                    await until(has_let_go(node, victim))
            await until(has_relays(harder))
            await hard.dial(harder)
            await until(lambda: hard.path(harder) == "relayed")


LEASE_SECONDS = 2


def is_public_at(node: Node, home: Home) -> bool:
    """Return whether the node has found out its public address, and reports it to others."""
    address = f"/ip4/{home.address}/tcp/{PORT}/"
    return node.told["kind"] == "public" and any(told.startswith(address) for told in node.told["addresses"])


async def test_who_has_asked_its_router_is_public_and_stays_so(full_lab: Lab) -> None:
    homes = [full_lab.add_home(kind) for kind in ("open", "open", "upnp", "symmetric")]
    with trio.fail_after(PATIENCE):
        async with open_nodes(homes, full_lab.leash, f"lease={LEASE_SECONDS}") as (one, two, mapped, far):
            home = homes[2]
            for node in (two, mapped, far):
                await node.dial(one)
            await mapped.dial(two)
            await until(lambda: is_public_at(mapped, home))
            await trio.sleep(1.5 * LEASE_SECONDS)  # the first lease has expired
            await until(lambda: is_public_at(mapped, home))
            await far.dial(mapped)
            await until(lambda: far.path(mapped) == mapped.path(far) == "direct")
            home.change_address()  # its router restarts
            await until(lambda: is_public_at(mapped, home))
            await two.dial(mapped)
            await until(lambda: two.path(mapped) == "direct")


def address_of(home: Home, node: Node, port: int = PORT) -> str:
    """Return the public address of a node in an open home."""
    address = next(a for a in node.told["addresses"] if a.startswith(f"/ip4/{home.address}/"))
    return f"/ip4/{home.address}/tcp/{port}/p2p/{address.rpartition('/')[2]}"


@contextlib.asynccontextmanager
async def open_publics(lab: Lab, *ports: int) -> AsyncIterator[list[tuple[Home, Node]]]:
    """Open two public nodes, each of which knows that the other is public."""
    homes = [lab.add_home("open") for _ in range(2)]
    async with open_nodes(homes, lab.leash, *ports) as nodes:
        await nodes[0].dial(nodes[1])
        await until(lambda: all(node.told["kind"] == "public" for node in nodes))
        yield list(zip(homes, nodes, strict=True))


async def visit(home: Home, folder: Path, *addresses: str) -> dict[str, Level]:
    """Run the doctor in a home; return its findings -> their level."""
    invite = encode_invite(Invite(bytes(32), addresses))
    command = [*home.host.enter, sys.executable, "-m", "farandole.node", "doctor", invite, "--json"]
    done = await trio.run_process(
        [*command, "--home", str(folder / "home"), "--device", "cpu"], capture_stdout=True, check=False
    )
    diagnosis = msgspec.json.decode(done.stdout, type=Diagnosis)
    assert done.returncode == (0 if diagnosis.is_well else 1)
    return {finding.cause: finding.level for finding in diagnosis.findings}


async def witnessed(home: Home, folder: Path, cause: str, *addresses: str) -> dict[str, Level]:
    """Return the doctor's findings once this cause is among them: a busy peer may become a witness late."""
    while cause not in (causes := await visit(home, folder, *addresses)):
        pass
    assert ("nat-symmetric" in causes) == (cause == "nat-symmetric")
    assert ("relay-fine" if cause != "nat-public" else "relay-needless") in causes
    assert {"bootstrap-fine", "clock-fine"} <= causes.keys()
    return causes


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "cause"), [("open", "nat-public"), ("port-restricted", "nat-punchable")])
async def test_what_a_router_does_is_named(lab: Lab, tmp_path: Path, kind: str, cause: str) -> None:
    with trio.fail_after(PATIENCE):
        async with open_publics(lab) as publics:
            causes = await witnessed(lab.add_home(kind), tmp_path, cause, *(address_of(*public) for public in publics))
    assert causes[cause] is Level.OK


async def test_a_symmetric_router_and_a_firewall_that_lets_out_port_443_alone_are_named(
    lab: Lab, tmp_path: Path
) -> None:
    with trio.fail_after(PATIENCE):
        async with open_publics(lab, 443) as publics:
            usual = [address_of(*public) for public in publics]
            causes = await witnessed(lab.add_home("symmetric"), tmp_path / "symmetric", "nat-symmetric", *usual)
            assert causes["nat-symmetric"] is Level.WARNING
            home, folder = lab.add_home("https-only"), tmp_path / "https-only"
            causes = await visit(home, folder, *usual)
            assert causes["bootstrap-silent"] is Level.FAILED
            causes = await visit(home, folder, *(address_of(*public, port=443) for public in publics))
            assert causes["bootstrap-fine"] is Level.OK

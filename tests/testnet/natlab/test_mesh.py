"""Nodes' hosts in homes behind NAT, with libp2p: which become direct or stay relayed, and relays that disappear."""

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

import trio

from farandole.testnet.natlab.groups import Leash
from farandole.testnet.natlab.home import Home
from farandole.testnet.natlab.lab import Lab

from ...node.hosts import until
from ...patience import PATIENCE

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

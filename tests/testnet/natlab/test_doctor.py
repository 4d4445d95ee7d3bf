"""The doctor at home behind routers: it reports what the router does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import trio

from farandole.node.base.causes import Diagnosis, Level
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.testnet.natlab.home import Home
from farandole.testnet.natlab.lab import Lab

from ...node.hosts import until
from ...patience import PATIENCE
from .mesh_node import PORT
from .test_mesh import Node, open_nodes


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

"""Interoperability with js-libp2p: all protocols of farandole's own mesh, with another implementation.

The node of js-libp2p (`js/peer.mjs`) is controlled by lines of JSON. It is installed once, from npm into pytest's
cache. DCUtR is not tested: js-libp2p punches only to public addresses, and these tests run on loopback. They only check
that a node's roles in it are js-libp2p's (see `reach/test_punching.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import trio

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.base.streams import read_exactly
from farandole.node.mesh.host import Host
from farandole.node.mesh.upgrading import PING_PROTOCOL
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.mesh.kademlia import KAD_PROTOCOL
from farandole.protocol.wire.identity import public_key_of

from ..hosts import echo, host_at_loopback, open_relay, reserve

pytestmark = pytest.mark.soak

FOLDER = Path(__file__).parent / "js"
LARGE = 64 * 1024 * 1024
PIECE = bytes(65_507)
# For starting node, or 64 MiB through JavaScript, on a busy machine.
JS_TIMEOUT = 120.0
NPM_TIMEOUT = 300


@pytest.fixture(scope="session")
def js_folder(pytestconfig: pytest.Config) -> Path:
    """Return the folder with js-libp2p; skip the test if it cannot be installed."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("js-libp2p needs node and npm, which are not installed here")
    folder = pytestconfig.cache.mkdir("js-libp2p")
    for name in ("package.json", "peer.mjs"):
        shutil.copy(FOLDER / name, folder / name)
    if not (folder / "node_modules" / "libp2p").exists():
        command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=NPM_TIMEOUT)
        except subprocess.TimeoutExpired:
            pytest.skip("npm does not install js-libp2p in time")
        if done.returncode:
            pytest.skip(f"npm cannot install js-libp2p here: {done.stderr.strip()[-300:]}")
    return folder


class JsPeer:
    """A node of js-libp2p."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._received = b""
        self.peer_id = ""
        self.addresses: list[str] = []

    @property
    def peer(self) -> bytes:
        """Return its public key."""
        return public_key_of(self.peer_id)

    async def ask(self, command: str, **settings: Any) -> dict[str, Any]:
        """Send a command and return the answer; raise `AssertionError` with the node's error if it fails."""
        answer = await self.try_to(command, **settings)
        assert "ok" in answer, f"{command}: {answer['error']}"
        return dict(answer["ok"])

    async def try_to(self, command: str, **settings: Any) -> dict[str, Any]:
        """Send a command that may fail; return {"ok": result} or {"error": text}."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with trio.fail_after(JS_TIMEOUT):
            await self._process.stdin.send_all(json.dumps({"command": command, **settings}).encode() + b"\n")
            while b"\n" not in self._received:
                data = await self._process.stdout.receive_some()
                assert data, "node has ended"
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return dict(json.loads(line))


@asynccontextmanager
async def open_js(folder: Path, **settings: Any) -> AsyncIterator[JsPeer]:
    process = await trio.lowlevel.open_process(
        ["node", "peer.mjs"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        peer = JsPeer(process)
        started = await peer.ask("start", **settings)
        peer.peer_id, peer.addresses = started["peer"], started["addresses"]
        yield peer
    finally:
        process.kill()
        await process.wait()


async def sink(stream: Libp2pStream) -> None:
    size = 0
    while data := await stream.receive_some():
        size += len(data)
    await stream.send_all(f"{size} bytes".encode())


async def source(stream: Libp2pStream) -> None:
    for _ in range(0, LARGE, len(PIECE)):
        await stream.send_all(PIECE)


def serve(host: Host) -> None:
    for name, handler in (("echo", echo), ("sink", sink), ("source", source)):
        host.set_handler(f"/interop/{name}", handler)


async def receive_all(stream: Libp2pStream) -> int:
    size = 0
    while data := await stream.receive_some():
        size += len(data)
    return size


async def test_js_dials_identifies_and_pings(js_folder: Path) -> None:
    async with open_js(js_folder) as js, host_at_loopback() as host:
        serve(host)
        assert (await js.ask("dial", address=host.addresses[0]))["remote"] == host.peer_id
        with trio.fail_after(JS_TIMEOUT):
            while "agent" not in (await js.try_to("identify", peer=host.peer_id)).get("ok", {}):
                await trio.lowlevel.checkpoint()
        known = await js.ask("identify", peer=host.peer_id)
        assert known["agent"] == f"farandole/{version('farandole')}"
        assert known["version"] == "farandole/1.0.0"
        assert {"/interop/echo", PING_PROTOCOL, KAD_PROTOCOL} <= set(known["protocols"])
        assert (await js.ask("ping", address=host.addresses[0]))["milliseconds"] >= 0
        assert js.peer in host.connected


async def test_we_dial_js_and_ping_it(js_folder: Path) -> None:
    async with open_js(js_folder) as js, host_at_loopback() as host:
        await host.connect(js.peer, js.addresses)
        assert host.connections.path(js.peer) == "direct"
        async with await host.open_stream(js.peer, PING_PROTOCOL) as stream:
            data = os.urandom(32)
            await stream.send_all(data)
            assert await read_exactly(stream.receive_some, 32) == data
        with pytest.raises(PeerUnreachableError, match="/none"):
            await host.open_stream(js.peer, "/none")


async def test_64_mib_arrive_each_way_over_connections_that_either_dialled(js_folder: Path) -> None:
    async with open_js(js_folder) as js, host_at_loopback() as host:
        serve(host)
        address = host.addresses[0]
        answer = await js.ask("send", address=address, size=LARGE)  # it closes its side, then reads ours
        assert answer["text"] == f"{LARGE} bytes"
        assert (await js.ask("receive", address=address))["size"] >= LARGE
        async with await host.open_stream(js.peer, "/interop/source") as stream:
            with trio.fail_after(JS_TIMEOUT):
                assert await receive_all(stream) == LARGE
    async with open_js(js_folder) as js, host_at_loopback() as host:
        await host.connect(js.peer, js.addresses)
        async with await host.open_stream(js.peer, "/interop/echo") as stream, trio.open_nursery() as nursery:

            async def send() -> None:
                for _ in range(0, LARGE, len(PIECE)):
                    await stream.send_all(PIECE)
                await stream.send_eof()  # js goes on sending

            nursery.start_soon(send)
            with trio.fail_after(JS_TIMEOUT):
                assert await receive_all(stream) >= LARGE


async def test_providers_are_found_and_kept_either_way(js_folder: Path) -> None:
    async with open_js(js_folder, kad=KAD_PROTOCOL) as js, host_at_loopback() as host, host_at_loopback() as other:
        await js.ask("dial", address=host.addresses[0])
        await other.connect(host.author, host.addresses)
        key, theirs = os.urandom(32), os.urandom(32)
        await other.dht.provide(key)
        with trio.fail_after(JS_TIMEOUT):
            while other.peer_id not in (await js.ask("providers", key=key.hex()))["found"]:
                await trio.lowlevel.checkpoint()
            await js.ask("provide", key=theirs.hex())
            while js.peer not in [peer for peer, _ in await other.dht.find_providers(theirs, timeout=5)]:
                await trio.lowlevel.checkpoint()
        assert (await js.ask("find", peer=other.peer_id))["addresses"]


async def test_we_reach_a_node_through_a_relay_of_js(js_folder: Path) -> None:
    async with open_js(js_folder, isRelay=True) as js, host_at_loopback() as alice, host_at_loopback() as bob:
        serve(bob)
        await bob.connect(js.peer, js.addresses)
        held = await bob.relays.reserve(js.peer)
        await alice.connect(bob.author, [held.address])
        assert alice.connections.path(bob.author) == "relayed"
        async with await alice.open_stream(bob.author, "/interop/echo") as stream:
            await stream.send_all(b"round about")
            await stream.send_eof()
            assert await receive_all(stream) == 11


async def test_js_is_reached_and_reaches_us_through_our_relay(js_folder: Path) -> None:
    async with open_relay() as relay, host_at_loopback() as alice:
        serve(alice)
        relay_address = relay.host.addresses[0]
        async with open_js(js_folder, listen=[f"{relay_address}/p2p-circuit"]) as js:
            with trio.fail_after(JS_TIMEOUT):
                while not (through := [each for each in js.addresses if "/p2p-circuit" in each]):
                    js.addresses = (await js.ask("addresses"))["addresses"]
                await alice.connect(js.peer, [through[0].rpartition("/p2p/")[0]])
            assert alice.connections.path(js.peer) == "relayed"
            async with await alice.open_stream(js.peer, "/interop/echo") as stream:
                await stream.send_all(b"round about")
                await stream.send_eof()
                assert await receive_all(stream) == 11
            await alice.connections.disconnect(js.peer)
            behind = await reserve(alice, relay.host)
            assert (await js.ask("streams", address=behind, number=3, atOnce=1))["answered"] == 3

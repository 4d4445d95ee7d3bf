"""Links between namespaces, with plain sockets in processes of their own. A link is never faster than it says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.testnet.leash import open_leash
from farandole.testnet.links import LinksError, Place, open_places
from farandole.testnet.scenario import Link, parse_scenario

from .play import testnet

LINK = Link(up_mbit=16, down_mbit=40, delay_ms=30)
SIZE = 1_000_000
SERVER = f"""
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
CLIENT = f"""
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
started_at = time.monotonic()
connection.sendall(b"?"), connection.recv(1)
answered_at = time.monotonic()
connection.sendall(bytes({SIZE})), connection.recv(1)
print(answered_at - started_at, time.monotonic() - answered_at)
"""


def made(link: Link | None) -> Iterator[list[Place]]:
    with open_leash() as leash:
        try:
            with open_places(link, 2, leash) as places:
                yield places
        except LinksError as error:
            pytest.skip(str(error))


@pytest.fixture
def places() -> Iterator[list[Place]]:
    yield from made(LINK)


def test_packets_take_their_time(places: list[Place]) -> None:
    near, far = places
    command = [*far.enter, sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        client = subprocess.run(
            [*near.enter, sys.executable, "-c", CLIENT, far.ip], capture_output=True, text=True, check=True, timeout=60
        )
        server.wait()
    round_trip, transfer = map(float, client.stdout.split())
    assert round_trip >= 2 * LINK.delay_ms / 1e3
    assert transfer >= 0.9 * SIZE * 8 / (LINK.up_mbit * 1e6)


async def test_who_lacks_a_tool_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = {"name": "links", "model": "tiny"}
    link = {"up_mbit": 20, "down_mbit": 20}
    scenario = parse_scenario({"nodes": 2, "min_partners": 1, "link": link, "run": run})
    with pytest.raises(LinksError, match=r"root|tc, nsenter, unshare not found|Linux"):
        await testnet(scenario, tmp_path / "out").play()


def test_without_a_link_all_are_at_home() -> None:
    assert [place for places in made(None) for place in places] == [Place(), Place()]

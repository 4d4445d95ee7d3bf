"""Links between namespaces, with plain sockets in separate processes. A link is never faster than configured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.namespace import Location, NamespaceError
from farandole.testnet.play.places import open_links
from farandole.testnet.play.scenario import LinkSettings, parse_scenario

from .playing import testnet
from .transfer import SIZE, measure

LINK = LinkSettings(up_mbit=16, down_mbit=40, delay_ms=30)


@pytest.fixture
def places() -> Iterator[list[Location]]:
    with open_leash() as leash:
        try:
            with open_links(LINK, 2, leash) as places:
                yield places
        except NamespaceError as error:
            pytest.skip(str(error))


def test_packets_take_their_time(places: list[Location]) -> None:
    near, far = places
    round_trip, transfer = measure(near, far)
    assert round_trip >= 2 * LINK.delay_ms / 1e3
    assert transfer >= 0.9 * SIZE * 8 / (LINK.up_mbit * 1e6)


async def test_who_lacks_a_tool_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = {"name": "links", "model": "tiny"}
    link = {"up_mbit": 20, "down_mbit": 20}
    scenario = parse_scenario({"nodes": 2, "min_partners": 1, "link": link, "run": run})
    with pytest.raises(NamespaceError, match=r"root|ip, tc, nsenter, unshare not found|Linux"):
        await testnet(scenario, tmp_path / "out").play()

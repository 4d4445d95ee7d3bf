"""Caps hold where a provider would measure: at the network devices of two nodes, each in its own namespace."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.namespace import Location, NamespaceError
from farandole.testnet.play.places import open_links
from farandole.testnet.play.scenario import LinkSettings

LINK = LinkSettings(up_mbit=100, down_mbit=100, delay_ms=5)
MBIT = 12.0
SETTLE_SECONDS = 1.0
ROOT = Path(__file__).parents[3]
_RECEIVED, _SENT = 0, 8  # columns of /proc/net/dev


@pytest.fixture
def places() -> Iterator[list[Location]]:
    with open_leash() as leash:
        try:
            with open_links(LINK, 2, leash) as places:
                yield places
        except NamespaceError as error:
            pytest.skip(str(error))


@contextmanager
def node(place: Location, *arguments: str) -> Iterator[str]:
    """Run a node in a place until the block ends; yield its first line of output."""
    command = [*place.enter, sys.executable, "-m", "tests.testnet.play.capped_node", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def count(place: Location, column: int) -> int:
    """Return the bytes of all packets at the place's device until now, with all headers."""
    table = subprocess.run([*place.enter, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True).stdout
    line = next(line for line in table.splitlines() if line.strip().startswith("link:"))
    return int(line.partition(":")[2].split()[column])


@pytest.mark.parametrize("caps_upload", [True, False], ids=["upload", "download"])
def test_a_cap_is_not_exceeded_at_the_device(places: list[Location], tmp_path: Path, caps_upload: bool) -> None:
    """A busy machine may make the transfer slower; nothing may make it faster."""
    near, far = places
    up, down = (MBIT, 0.0) if caps_upload else (0.0, MBIT)
    capped, column = (near, _SENT) if caps_upload else (far, _RECEIVED)
    with (
        node(near, "give", near.ip, str(up), str(tmp_path)) as address,
        node(far, "take", address, far.ip, str(down), str(tmp_path)) as said,
    ):
        assert said == "taking"
        time.sleep(SETTLE_SECONDS)
        began_at, before = time.monotonic(), count(capped, column)
        time.sleep(3.0)
        mbit = (count(capped, column) - before) * 8 / 1e6
        assert 0 < mbit / (time.monotonic() - began_at) <= 1.1 * MBIT

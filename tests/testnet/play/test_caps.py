"""Caps hold where a provider would measure: at the network devices of two nodes, each in its own namespace."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from farandole.testnet.bench.join import make_checkpoint
from farandole.testnet.bench.process import open_worker, worker_command
from farandole.testnet.natlab.lab import Lab
from farandole.testnet.natlab.namespace import Location

MBIT = 12.0
SIZE_MB = 48  # half a minute at 12 Mbit/s
_RECEIVED, _SENT = 0, 8  # columns of /proc/net/dev
PATIENCE = 60.0  # seconds until the transfer is under way, on a busy machine


def count(place: Location, column: int) -> int:
    """Return the bytes of all packets at the place's device until now, with all headers."""
    table = subprocess.run([*place.enter, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True).stdout
    line = next(line for line in table.splitlines() if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[column])


@pytest.mark.parametrize("caps_upload", [True, False], ids=["upload", "download"])
def test_a_cap_is_not_exceeded_at_the_device(lab: Lab, tmp_path: Path, caps_upload: bool) -> None:
    """A busy machine may make the transfer slower; nothing may make it faster."""
    near, far = (lab.add_home("open").host for _ in range(2))
    capped, column = (near, _SENT) if caps_upload else (far, _RECEIVED)
    command, log, source = worker_command("join:JoiningNode"), tmp_path / "log", tmp_path / "theirs"
    make_checkpoint(source, SIZE_MB)
    with (
        open_worker("donor", [*near.enter, *command], log) as donor,
        open_worker("newcomer", [*far.enter, *command], log) as newcomer,
    ):
        address = donor.ask("open", ip=near.ip, up_mbit=MBIT if caps_upload else 0.0)["address"]
        newcomer.ask("open", ip=far.ip, down_mbit=0.0 if caps_upload else MBIT)
        donor.ask("hold", path=str(source))
        newcomer.ask("meet", addresses=[address])
        newcomer.put("fetch", path=str(source), target=str(tmp_path / "ours"), donors=[address])
        deadline = time.monotonic() + PATIENCE
        while count(capped, column) < 8_000_000:  # what fits into buffers may exceed the cap, and a start takes a while
            assert time.monotonic() < deadline, "the transfer has not begun"
            time.sleep(0.1)
        began_at, before = time.monotonic(), count(capped, column)
        time.sleep(3.0)
        mbit = (count(capped, column) - before) * 8 / 1e6
        assert 0 < mbit / (time.monotonic() - began_at) <= 1.1 * MBIT
        for node in (newcomer, donor):
            node.kill()

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import trio

from farandole.node.ui.reporting import measure_resources
from farandole.protocol.state.node_state import NodeState

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")


async def test_what_is_taken_is_seen() -> None:
    before = measure_resources(NodeState())
    assert before is not None
    assert before.trainer_memory is None
    descriptor = os.open(os.devnull, os.O_RDONLY)
    block = bytearray(b"x") * 50_000_000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        taken = measure_resources(NodeState(trainer_pid=os.getpid()))
        nursery.cancel_scope.cancel()
    os.close(descriptor)
    assert taken is not None
    assert taken.memory == pytest.approx(before.memory + len(block), rel=0.1)
    assert taken.trainer_memory == pytest.approx(taken.memory, rel=0.1)
    assert taken.descriptors == before.descriptors + 1
    assert taken.tasks == before.tasks + 1


async def test_a_trainer_that_is_gone_takes_nothing() -> None:
    process = await trio.lowlevel.open_process([sys.executable, "-c", ""])
    await process.wait()
    resources = measure_resources(NodeState(trainer_pid=process.pid))
    assert resources is not None
    assert resources.trainer_memory is None

"""A trainer without enough memory, in separate processes and under real limits."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trio

from farandole.node.base.errors import Exit
from farandole.node.base.system.processes import count_oom_kills
from farandole.node.trainer.trainer import Trainer, TrainerError, open_trainer
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer import trainer_messages as messages

from ...patience import PATIENCE
from ..daemons import joined
from ..small_runs import TINY, small_manifest, write_run
from ..trainer_commands import prepare_for

BATCH = 64
# An inner step of the whole batch takes 600 MB on top of a ready trainer's memory, one of half of it 350 MB.
ROOM = 450_000_000

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits that bind are Linux's")


@pytest.fixture
def manifest() -> Manifest:
    return small_manifest(
        model=TINY | {"num_layers": 4, "width": 64, "hidden": 256, "context": 256},
        inner={"batch_size": BATCH},
        rounds={"inner_steps": 1, "round_seconds": 0.0, "exchange_seconds": 5.0},
        data={},
    )


@pytest.fixture
def prepare(manifest: Manifest, tmp_path: Path) -> messages.Prepare:
    return prepare_for(manifest, tmp_path / "checkpoints")


async def train(trainer: Trainer) -> messages.Report:
    """Take one inner step."""
    await trainer.send(messages.Train(0, 1))
    with trio.fail_after(PATIENCE):
        while isinstance(report := await trainer.receive(), messages.Progress):
            pass
    return report


@pytest.mark.started  # a node's template may fork before the limit is set, and the node's trainers are its forks
async def test_a_node_without_memory_for_a_batch_takes_it_in_parts(
    prepare: messages.Prepare, manifest: Manifest, tmp_path: Path
) -> None:
    with pytest.raises(TrainerError, match="out of memory") as caught:
        async with open_trainer(prepare) as trainer:
            limit = psutil.Process(trainer.pid).memory_info().data + ROOM
            resource.prlimit(trainer.pid, resource.RLIMIT_DATA, (limit, limit))
            await train(trainer)
    assert caught.value.cause == "memory"

    write_run(tmp_path, manifest)
    for life in range(2):
        async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), "--device", "cpu") as alice:
            resource.prlimit(alice.process.pid, resource.RLIMIT_DATA, (limit, limit))  # and of all its trainers
            await alice.says("trainer ready")
            if life == 0:
                await alice.says("out of memory", "starting it again", f"of a batch's {BATCH} sequences at a time")
                await alice.says("trainer ready")
            await alice.says("1 inner step")
            status = await alice.ask("status")
            assert status["microbatch"] in (BATCH // 2, BATCH // 4)
            assert (status["trainer_restarts"] > 0) == (life == 0)
            assert await alice.end(signal.SIGTERM) == Exit.OK


@pytest.fixture
def memory_group() -> Iterator[tuple[Path, Path]]:
    """Create a control group for memory, and yield it with the file that sets its limit; remove it at the end."""
    root = Path("/sys/fs/cgroup")
    is_first_version = (root / "memory").is_dir()
    group = (root / "memory" if is_first_version else root) / f"farandole-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if is_first_version else "memory.max")
        limit.read_text()
    except OSError as error:
        pytest.skip(f"control groups for memory need root, and a kernel that has them: {error}")
    yield group, limit
    group.rmdir()


@pytest.mark.skipif(count_oom_kills() is None, reason="this kernel does not count what it kills")
async def test_a_trainer_that_the_kernel_kills_for_want_of_memory(
    prepare: messages.Prepare, memory_group: tuple[Path, Path]
) -> None:
    group, limit = memory_group
    with pytest.raises(TrainerError, match="probably by the kernel for want of memory") as caught:
        async with open_trainer(prepare) as trainer:
            (group / "cgroup.procs").write_text(str(trainer.pid))
            limit.write_text(str(ROOM // 3))  # for its allocations from now on
            await train(trainer)
    assert caught.value.cause == "memory"

"""The trainer in its own process, whose every death the daemon detects; and a loop of the owner's that attaches."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.system.sockets import connect
from farandole.node.base.system.tuning import KEEP_PRIORITY_VARIABLE, TRAINING_NICENESS
from farandole.node.store.folder import CheckpointFolder, index_of
from farandole.node.trainer import trainer as trainer_module
from farandole.node.trainer.channel import MAX_EPOCHS, SharedCounter, TrainerSocket, counted_size
from farandole.node.trainer.script import ANOTHER, ScriptDoor, open_script_door
from farandole.node.trainer.trainer import Trainer, TrainerError, open_trainer
from farandole.protocol.checkpoints.blocks import Index, encode_signed_index, sign_index
from farandole.protocol.run.manifest import Manifest, ModelConfig, StartConfig
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.wire.identity import public_bytes

from ...patience import PATIENCE
from ..small_runs import small_manifest
from ..trainer_commands import prepare_for, report_of, save_after_round, train_alone, with_settings


@pytest.fixture
def manifest() -> Manifest:
    return small_manifest(inner={"learning_rate": 3e-3, "warmup_steps": 2, "batch_size": 2}, rounds={})


@pytest.fixture
def prepare(tmp_path: Path, texts: Path, manifest: Manifest) -> Callable[..., messages.Prepare]:
    def make(author: bytes = b"a" * 32, run: Manifest | None = None, **changes: object) -> messages.Prepare:
        folder = tmp_path / author[:1].decode()
        command = prepare_for(run or manifest, folder, author=author, data=[str(texts)])
        return with_settings(command, **changes)

    return make


async def refusal(command: messages.Prepare, words: str) -> TrainerError:
    """Return the error with which a trainer refuses to begin."""
    with trio.fail_after(PATIENCE), pytest.raises(TrainerError, match=words) as caught:
        async with open_trainer(command):
            pass
    return caught.value


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's time in /proc")
async def test_training_takes_no_more_cores_than_it_has_threads(
    prepare: Callable[..., messages.Prepare], manifest: Manifest
) -> None:
    """Its operations are large enough for many threads; it has one."""
    model = msgspec.structs.replace(manifest.model, width=256, hidden=1_024, context=64, num_layers=2)
    inner = msgspec.structs.replace(manifest.inner, batch_size=16)
    large = msgspec.structs.replace(manifest, model=model, inner=inner)
    async with open_trainer(prepare(run=large)) as trainer:
        await trainer.send(messages.Train(0, 2))
        await report_of(trainer, messages.Contributed)
        began, taken = time.monotonic(), cpu_seconds(trainer.pid)
        await trainer.send(messages.TakeOuterStep(0))
        await trainer.send(messages.Train(1, 8))
        await report_of(trainer, messages.OuterStepTaken)
        await report_of(trainer, messages.Contributed)
        share = (cpu_seconds(trainer.pid) - taken) / (time.monotonic() - began)
    assert 0 < share <= 1.1


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used on all cores, in seconds."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


# Enough memory to write a checkpoint, but not to copy it.
LITTLE = 20_000_000
WIDE = {"num_layers": 1, "width": 256, "num_heads": 2, "hidden": 4096, "context": 16, "vocabulary": 256}


async def test_where_a_trainer_hung_is_logged(
    prepare: Callable[..., messages.Prepare], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "TRACEBACK_SECONDS", 5.0)
    with trio.fail_after(PATIENCE), pytest.raises(TrainerError, match="it hung"):
        async with open_trainer(prepare()) as trainer:
            await trainer.send(messages.Train(0, 0))
            await report_of(trainer, messages.Progress)
            await trainer.condemn("it hung")
            while True:
                await trainer.receive()
    assert "in inner_steps" in caplog.text


async def test_a_peers_checkpoint_replaces_the_own_one_only_if_it_is_fit(
    prepare: Callable[..., messages.Prepare], tmp_path: Path
) -> None:
    own, fetched = CheckpointFolder(tmp_path / "a", 0).file(5), tmp_path / "fetched.safetensors"
    async with open_trainer(prepare()) as trainer:
        await save_after_round(trainer, 4)
    kept = own.read_bytes()
    unfit = bytearray(kept)
    unfit[-4:] = b"\xff\xff\xff\x7f"  # NaN
    for content in (bytes(unfit), b"rubbish"):
        fetched.write_bytes(content)
        error = await refusal(prepare(fetched=str(fetched)), "a peer's weights are unfit")
        assert error.cause == "weights"  # another peer's weights may be fit
        assert own.read_bytes() == kept
        assert not fetched.exists()
    own.replace(fetched)
    async with open_trainer(prepare(fetched=str(fetched))) as trainer:
        assert trainer.prepared.resumed is not None
        assert (trainer.prepared.resumed.path, trainer.prepared.round) == (str(own), 5)
    assert own.read_bytes() == kept
    assert not fetched.exists()


async def test_a_damaged_checkpoint_is_passed_over_and_replaced(prepare: Callable[..., messages.Prepare]) -> None:
    folder = CheckpointFolder(Path(prepare().settings.checkpoints), 0)
    async with open_trainer(prepare()) as trainer:
        old, new = [await save_after_round(trainer, round_index) for round_index in (0, 1)]
        await trainer.send(messages.Save())
        assert await report_of(trainer, messages.Saved) == new, "there is nothing newer to be saved"
    good = folder.file(2).read_bytes()
    key = Ed25519PrivateKey.generate()
    index = Index(
        run_id=b"r" * 32,
        author=public_bytes(key),
        round=2,
        inner_steps=2,
        tokens=1,
        size=new.size,
        layout=bytes(32),
        hashes=new.hashes,
    )
    index_of(folder.file(2)).write_bytes(encode_signed_index(sign_index(key, index)))
    folder.file(2).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    async with open_trainer(prepare()) as trainer:
        assert trainer.prepared.resumed == msgspec.structs.replace(old, seconds=0.0)
        assert "it is not what was written" in trainer.prepared.problem
        assert (await save_after_round(trainer, 1)).problem == ""
    assert folder.files() == [folder.file(2), folder.file(1)]
    assert folder.file(2).read_bytes() == good, "the same steps from the same checkpoint"
    assert not index_of(folder.file(2)).exists(), "it was the damaged one's"
    for path in folder.files():
        path.write_bytes(b"rubbish")
    assert (await refusal(prepare(), "can be loaded")).cause == "setup"


async def test_without_memory_for_a_snapshot_training_waits_for_the_save(
    prepare: Callable[..., messages.Prepare], manifest: Manifest
) -> None:
    wide = msgspec.structs.replace(manifest, model=msgspec.convert(WIDE, ModelConfig))
    async with open_trainer(prepare(run=wide)) as trainer:
        size = (await save_after_round(trainer, 0)).size
        assert size > LITTLE
    async with open_trainer(prepare(run=wide)) as trainer:
        await train_alone(trainer, 7)  # it waits, and needs no more memory than it has
        used = psutil.Process(trainer.pid).memory_info().data
        resource.prlimit(trainer.pid, resource.RLIMIT_DATA, (used + LITTLE, resource.RLIM_INFINITY))
        await trainer.send(messages.Save())
        saved = await report_of(trainer, messages.Saved)
        assert (saved.problem, saved.round, saved.size) == ("", 8, size)
        assert "no memory for a snapshot" in saved.note
        resource.prlimit(trainer.pid, resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert (await save_after_round(trainer, 8)).note == ""


async def test_a_trainer_gives_way_to_other_programs_and_does_not_outlive_its_node_though_it_is_frozen(
    prepare: Callable[..., messages.Prepare], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEEP_PRIORITY_VARIABLE)
    monkeypatch.setattr("farandole.node.trainer.trainer.STOP_TIMEOUT", 0.2)
    with trio.fail_after(PATIENCE):
        async with open_trainer(prepare()) as trainer:
            own = os.getpriority(os.PRIO_PROCESS, 0)
            assert os.getpriority(os.PRIO_PROCESS, trainer.pid) == min(own + TRAINING_NICENESS, 19)
            os.kill(trainer.pid, signal.SIGSTOP)
    with pytest.raises(ProcessLookupError):
        os.kill(trainer.pid, 0)


async def test_what_cannot_be_set_up_is_said_in_words(
    prepare: Callable[..., messages.Prepare], manifest: Manifest, tmp_path: Path
) -> None:
    cut = msgspec.structs.replace(manifest.model, num_layers=2, num_stages=2)
    begun = msgspec.structs.replace(manifest, start=StartConfig("ab" * 32, "cd" * 32))
    rubbish = tmp_path / "start.safetensors"
    rubbish.write_bytes(b"rubbish")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"device": "cuda:7"}, "cuda"),
        ({"gpu_memory": 4.0}, "limits the memory of a GPU"),
        (
            {"run": msgspec.structs.replace(manifest, model=cut), "lean": True},
            "--lean and model.num_stages exclude each other",
        ),
        ({"run": begun, "start": str(rubbish)}, "that this run starts from are unfit"),
    )
    for changes, words in cases:
        assert (await refusal(prepare(**changes), words)).cause == "setup"  # the node leaves with this error
    assert not rubbish.exists(), "it is not tried again and again"


has_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")


@pytest.mark.started  # libraries read the number of threads when they are loaded
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=has_cuda)])
async def test_deterministic_trainers_with_other_threads_and_another_environment_compute_the_same_bits(
    prepare: Callable[..., messages.Prepare], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    # Products large enough to be divided among threads.
    model = {"num_layers": 2, "width": 64, "num_heads": 2, "hidden": 128, "context": 512, "vocabulary": 256}
    run = small_manifest(
        model=model, inner={"batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 1, "deterministic": True}
    )

    async def digest(threads: int) -> bytes:
        async with open_trainer(prepare(run=run, device=device, threads=threads)) as trainer:
            await trainer.send(messages.Train(0, 3))
            await report_of(trainer, messages.Contributed)
            return (await report_of(trainer, messages.Encoded)).digest

    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    first = await digest(1)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert await digest(3) == first


SIZE = 64
PREPARED = messages.Prepared("cpu", 16, SIZE, b"l" * 32, 0, 0, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the door's path."""
    return tmp_path / "trainer.sock"


@pytest.fixture
async def door(path: Path) -> AsyncIterator[ScriptDoor]:
    with trio.fail_after(PATIENCE):
        async with open_script_door(path) as door:
            yield door


@contextmanager
def a_loop(path: Path) -> Iterator[TrainerSocket]:
    with connect(path, PATIENCE) as connection:
        yield TrainerSocket(connection)


async def hear(loop: TrainerSocket) -> messages.Command:
    return await trio.to_thread.run_sync(loop.receive)


def attached(door: ScriptDoor, path: Path) -> AbstractAsyncContextManager[Trainer]:
    return door.open_trainer(prepare_for(small_manifest(), path.parent))


async def test_a_loop_is_told_to_stop_and_nothing_is_left_behind(path: Path) -> None:
    with trio.fail_after(PATIENCE):
        async with open_script_door(path) as door:
            with a_loop(path) as loop:
                await door.wait()
                loop.send(PREPARED)
                async with attached(door, path):
                    assert isinstance(await hear(loop), messages.Prepare)
                assert await hear(loop) == messages.Stop()
    assert not list(path.parent.rglob("*.shared"))
    with pytest.raises((FileNotFoundError, ConnectionError)):
        connect(path, 1.0)


def test_a_count_of_another_epoch_is_none() -> None:
    counter = SharedCounter(bytearray(counted_size(10)))
    counter.store(MAX_EPOCHS + 5, 7)
    assert counter.count_of(5) == counter.count_of(MAX_EPOCHS + 5) == 7
    assert counter.count_of(4) == counter.count_of(6) == 0


async def test_one_loop_at_a_time(door: ScriptDoor, path: Path) -> None:
    with a_loop(path) as first:
        await door.wait()
        with a_loop(path) as second:
            assert await hear(second) == messages.Dismiss(ANOTHER)
        first.send(PREPARED)
        async with attached(door, path):
            with a_loop(path) as third:
                assert await hear(third) == messages.Dismiss(ANOTHER)
        with a_loop(path) as fourth:
            await door.wait()
            fourth.send(PREPARED)
            async with attached(door, path):
                pass


async def test_a_loop_that_ends_while_it_waits_makes_room_for_the_next(door: ScriptDoor, path: Path) -> None:
    with a_loop(path):
        await door.wait()
        assert door.has_loop
    assert not door.has_loop
    with a_loop(path) as second:
        while not door.has_loop:  # noqa: ASYNC110 - the kernel has its connection first
            await trio.sleep(0.01)
        second.send(PREPARED)
        async with attached(door, path):
            assert isinstance(await hear(second), messages.Prepare)


async def test_a_loop_that_hangs_is_let_go(door: ScriptDoor, path: Path) -> None:
    """The node does not end a process that it has not started."""
    with a_loop(path) as loop:
        await door.wait()
        loop.send(PREPARED)
        with pytest.raises(TrainerError):
            async with attached(door, path) as trainer:
                await trainer.condemn("it hangs")
                await trainer.receive()


async def test_no_loop_is_wanted_any_more(door: ScriptDoor, path: Path) -> None:
    over = messages.Dismiss("all rounds are done", is_over=True)
    with a_loop(path) as waiting:
        await door.wait()
        await door.dismiss(over.reason)
        assert await hear(waiting) == over
    with a_loop(path) as late:
        assert await hear(late) == over


async def test_a_loop_that_trains_is_told_why_it_is_stopped(door: ScriptDoor, path: Path) -> None:
    with a_loop(path) as loop:
        await door.wait()
        loop.send(PREPARED)
        async with attached(door, path):
            assert isinstance(await hear(loop), messages.Prepare)
            door.dismissal = "the node leaves the run"
        assert await hear(loop) == messages.Dismiss("the node leaves the run", is_over=True)

"""The socket at which a loop of the node's owner attaches: one loop at a time, and no other user's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest
import trio

from farandole.node.base.system.sockets import connect
from farandole.node.trainer.channel import MAX_EPOCHS, SharedCounter, TrainerSocket, counted_size
from farandole.node.trainer.script import ANOTHER, ScriptDoor, open_script_door
from farandole.node.trainer.trainer import Trainer, TrainerError
from farandole.protocol.trainer import trainer_messages as messages

from ...patience import PATIENCE
from ..small_runs import small_manifest
from ..trainer_commands import prepare_for

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


def open_trainer(door: ScriptDoor, path: Path) -> AbstractAsyncContextManager[Trainer]:
    return door.open_trainer(prepare_for(small_manifest(), path.parent))


async def test_a_loop_is_told_to_stop_and_nothing_is_left_behind(path: Path) -> None:
    with trio.fail_after(PATIENCE):
        async with open_script_door(path) as door:
            with a_loop(path) as loop:
                await door.wait()
                loop.send(PREPARED)
                async with open_trainer(door, path):
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
        async with open_trainer(door, path):
            with a_loop(path) as third:
                assert await hear(third) == messages.Dismiss(ANOTHER)
        with a_loop(path) as fourth:
            await door.wait()
            fourth.send(PREPARED)
            async with open_trainer(door, path):
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
        async with open_trainer(door, path):
            assert isinstance(await hear(second), messages.Prepare)


async def test_a_loop_that_hangs_is_let_go(door: ScriptDoor, path: Path) -> None:
    """The node does not end a process that it has not started."""
    with a_loop(path) as loop:
        await door.wait()
        loop.send(PREPARED)
        with pytest.raises(TrainerError):
            async with open_trainer(door, path) as trainer:
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
        async with open_trainer(door, path):
            assert isinstance(await hear(loop), messages.Prepare)
            door.dismissal = "the node leaves the run"
        assert await hear(loop) == messages.Dismiss("the node leaves the run", is_over=True)

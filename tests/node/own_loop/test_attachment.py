"""A loop attaches to a node's door: the checks before it trains, and the effects when either side ends."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import trio
from torch import nn

from farandole.node.base.system.sockets import connect
from farandole.node.own_loop.attachment import Attachment
from farandole.node.own_loop.child_node import ChildNode
from farandole.node.trainer.script import ScriptDoor, open_script_door
from farandole.node.trainer.trainer import Trainer, TrainerError
from farandole.protocol.run.manifest import Manifest, ModelConfig
from farandole.protocol.run.own_model import ExternalModel, recipe_hash
from farandole.protocol.trainer import trainer_messages as messages
from farandole.training.base.errors import TrainingError
from farandole.training.cluster.external import Loop
from farandole.training.model.model import build_model

from ...patience import PATIENCE
from ..hosts import until
from ..small_runs import small_manifest
from ..trainer_commands import prepare_for, report_of

T = TypeVar("T")


def a_model() -> nn.Linear:
    return nn.Linear(3, 2)


def manifest(recipe: str = "", shapes: dict[str, tuple[int, ...]] | None = None) -> Manifest:
    parameters = shapes or {"weight": (2, 3), "bias": (2,)}
    external = ExternalModel(parameters, recipe_hash(recipe) if recipe else "")
    return Manifest(name="a run", model=ModelConfig(1, 0, 0, 0, 0, 0, external=external))


def attached(folder: Path, loop: Loop, run_id: bytes = b"") -> Attachment:
    return Attachment(ChildNode(folder, []), run_id, loop)


async def in_thread(function: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(function)


@asynccontextmanager
async def trainer_at(door: ScriptDoor, folder: Path, run: Manifest | None = None) -> AsyncIterator[Trainer]:
    with trio.fail_after(PATIENCE):
        await door.wait()
        async with door.open_trainer(prepare_for(run or manifest(), folder)) as trainer:
            yield trainer


@asynccontextmanager
async def follow(folder: Path, loop: Callable[[], None], run: Manifest | None = None) -> AsyncIterator[Trainer]:
    """Run a loop in a thread, and yield its trainer; at the end it goes away by itself."""
    async with open_script_door(folder / "trainer.sock") as door, trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, loop)
        with pytest.raises(TrainerError, match="gone") as raised:
            async with trainer_at(door, folder, run) as trainer:
                yield trainer
                while True:
                    await trainer.receive()
        assert raised.value.cause == "detached"


async def test_a_loop_takes_the_steps_of_a_round_and_keeps_its_last_outer_step(tmp_path: Path) -> None:
    model = a_model()
    attachment = attached(tmp_path, Loop(model, tokens_per_step=7))

    def loop() -> None:
        attachment.begin()
        for _ in range(3):
            with torch.no_grad():
                model.weight.add_(1.0)
            attachment.turns.step_taken()
        attachment.end()

    before = model.weight.detach().clone()
    async with follow(tmp_path, loop) as trainer:
        assert trainer.prepared.num_parameters == 8
        assert not trainer.prepared.has_loss
        assert trainer.prepared.pid == os.getpid()
        await trainer.send(messages.Train(4, 3))
        contributed = await report_of(trainer, messages.Contributed)
        assert (contributed.inner_steps_this_round, contributed.tokens_this_round) == (3, 21)
        await report_of(trainer, messages.Encoded)
        await trainer.send(messages.TakeOuterStep(4))
        await report_of(trainer, messages.OuterStepTaken)
        await trainer.send(messages.Train(5, 3))  # the loop has ended by now: it saves
        saved = await report_of(trainer, messages.Saved)
        assert (saved.round, saved.inner_steps, saved.tokens) == (5, 3, 21)
    assert not torch.equal(model.weight, before)


async def test_a_loop_goes_on_from_the_nodes_checkpoint_when_its_trainer_is_ended(tmp_path: Path) -> None:
    """The node does this to take newer weights: the loop waits in its step, and goes on from the saved checkpoint."""
    model = a_model()
    attachment = attached(tmp_path, Loop(model))
    seen: list[torch.Tensor] = []

    def loop() -> None:
        attachment.begin()
        for _ in range(4):
            seen.append(model.weight.detach().clone())
            with torch.no_grad():
                model.weight.add_(1.0)
            attachment.turns.step_taken()
        attachment.end()

    async with open_script_door(tmp_path / "trainer.sock") as door, trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, loop)
        async with trainer_at(door, tmp_path) as trainer:
            await trainer.send(messages.Save())
            await report_of(trainer, messages.Saved)
            await trainer.send(messages.Train(0, 2))
            await report_of(trainer, messages.Contributed)
        with pytest.raises(TrainerError, match="gone"):
            async with trainer_at(door, tmp_path) as trainer:
                assert trainer.prepared.resumed is not None
                await trainer.send(messages.Train(0, 3))
                await report_of(trainer, messages.Saved)
                await trainer.receive()
    assert torch.equal(seen[2], seen[0]), "the two steps after the checkpoint are lost"
    assert torch.equal(seen[3], seen[0] + 1)


async def test_the_first_loop_of_a_built_in_models_run_begins_with_the_seeds_weights(tmp_path: Path) -> None:
    run = small_manifest(seed=7)
    model = build_model(run.model, 1)
    attachment = attached(tmp_path, Loop(model, tokens_per_step=32))
    seen: list[torch.Tensor] = []

    def loop() -> None:
        attachment.begin()
        seen.append(model.embedding.weight.detach().clone())
        attachment.end()

    async with follow(tmp_path, loop, run) as trainer:
        assert trainer.prepared.resumed is None
        await trainer.send(messages.Train(0, 2))
    assert torch.equal(seen[0], build_model(run.model, 7).embedding.weight)


@pytest.mark.parametrize(
    ("run", "loop", "run_id", "words"),
    [
        (manifest("batches of 8"), Loop(a_model(), recipe="batches of 9"), b"", "recipe differs"),
        (manifest(), Loop(a_model(), recipe="batches of 9"), b"", "recipe differs"),
        (manifest(), Loop(a_model()), b"o" * 32, "the node is in run"),
        (small_manifest(), Loop(a_model(), recipe="batches of 9"), b"", "without a recipe"),
        (small_manifest(data={"epochs": 1}), Loop(a_model()), b"", "data.epochs"),
    ],
)
async def test_a_loop_for_another_run_is_refused_at_both_ends(
    tmp_path: Path, run: Manifest, loop: Loop, run_id: bytes, words: str
) -> None:
    attachment = attached(tmp_path, loop, run_id)
    before = loop.model.get_parameter("weight").detach().clone()

    def begin() -> None:
        with pytest.raises(TrainingError, match=words):
            attachment.begin()
        attachment.end()

    async with open_script_door(tmp_path / "trainer.sock") as door, trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, begin)
        with pytest.raises(TrainerError, match=words) as raised:
            async with trainer_at(door, tmp_path, run):
                pass
        assert raised.value.cause == "detached"
    assert torch.equal(loop.model.get_parameter("weight"), before)


async def test_a_loop_that_waits_is_told_why_its_node_rests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farandole.node.own_loop.attachment.LOOK_SECONDS", 0.01)
    reasons = iter(["quiet hours until 18:00", "quiet hours until 18:00", "paused"])

    def status_of(home: Path) -> dict[str, Any]:
        return {"phase": "paused", "phase_detail": reason} if (reason := next(reasons, "")) else {}

    monkeypatch.setattr("farandole.node.own_loop.attachment.status_of", status_of)
    attachment = attached(tmp_path, Loop(a_model()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, attachment.begin)
        with trio.fail_after(PATIENCE):
            await until(lambda: "paused" in caplog.text)
        await in_thread(attachment.end)
    assert caplog.text.count("quiet hours until 18:00") == 1


async def test_a_loop_ends_while_its_node_has_no_use_for_it(tmp_path: Path) -> None:
    """The user interrupts the loop, for example, while the node fetches weights."""
    attachment = attached(tmp_path, Loop(a_model()))

    async with open_script_door(tmp_path / "trainer.sock") as door, trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, attachment.begin)
        await door.wait()
        await in_thread(attachment.end)


async def test_a_loop_ends_at_the_moment_at_which_it_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = attached(tmp_path, Loop(a_model()))

    def connect_and_end(*arguments: Any) -> socket.socket:
        connection = connect(*arguments)
        with suppress(RuntimeError):  # this is the thread whose end it would wait for
            attachment.end()
        return connection

    monkeypatch.setattr("farandole.node.own_loop.attachment.connect", connect_and_end)
    async with open_script_door(tmp_path / "trainer.sock"):
        await in_thread(attachment.begin)


async def test_processes_that_the_loop_forks_do_not_hold_the_connection(tmp_path: Path) -> None:
    """A data loader's workers outlive a killed loop, and the node must see that the loop is gone."""
    attachment = attached(tmp_path, Loop(a_model()))
    reader, writer = os.pipe()
    children: list[int] = []

    def loop() -> None:
        attachment.begin()
        if (child := os.fork()) == 0:
            os.close(writer)
            os.read(reader, 1)  # until the test ends
            os._exit(0)
        children.append(child)
        attachment.turns.step_taken()
        attachment.end()

    try:
        async with follow(tmp_path, loop) as trainer:
            await trainer.send(messages.Train(0, 2))
    finally:
        os.close(writer)
        os.close(reader)
        for child in children:
            os.waitpid(child, 0)  # noqa: ASYNC222 - it ends at once

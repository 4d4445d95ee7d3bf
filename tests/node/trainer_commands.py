"""Commands of a mesh process to its trainer, and the reports that they lead to."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import trio

from farandole.node.trainer.trainer import Trainer
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.trainer_messages import Prepare, TrainerSettings

from ..patience import PATIENCE

ReportType = TypeVar("ReportType")


def prepare_for(manifest: Manifest, checkpoints: Path, **changes: object) -> Prepare:
    """Return a command for one thread of the CPU, without a pace, with any text that this machine has."""
    settings = TrainerSettings(device="cpu", checkpoints=str(checkpoints))
    return with_settings(Prepare(b"r" * 32, b"a" * 32, msgspec.msgpack.encode(manifest), settings), **changes)


def with_settings(command: Prepare, **changes: object) -> Prepare:
    """Return the command with some of its fields, or of its settings', changed."""
    settings = {name: value for name, value in changes.items() if name in TrainerSettings.__struct_fields__}
    others = {name: value for name, value in changes.items() if name not in settings}
    return msgspec.structs.replace(command, settings=msgspec.structs.replace(command.settings, **settings), **others)


async def report_of(trainer: Trainer, kind: type[ReportType]) -> ReportType:
    """Return the next report of a kind."""
    with trio.fail_after(PATIENCE):
        while not isinstance(report := await trainer.receive(), kind):
            pass
    return report


async def train_alone(trainer: Trainer, round_index: int) -> None:
    """Take a round of one inner step, and its outer step alone."""
    await trainer.send(messages.Train(round_index, 1))
    assert (await report_of(trainer, messages.Contributed)).round == round_index
    await trainer.send(messages.TakeOuterStep(round_index))
    assert (await report_of(trainer, messages.OuterStepTaken)).round == round_index


async def save_after_round(trainer: Trainer, round_index: int) -> messages.Saved:
    """Take a round alone, save, and return the report of the save."""
    await train_alone(trainer, round_index)
    await trainer.send(messages.Save())
    return await report_of(trainer, messages.Saved)

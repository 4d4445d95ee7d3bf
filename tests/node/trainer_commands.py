"""The first commands of a mesh process to its trainer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer.trainer_messages import Prepare, TrainerSettings


def prepare_for(manifest: Manifest, checkpoints: Path, **changes: object) -> Prepare:
    """Return a command for one thread of the CPU, without a pace, with any text that this machine has."""
    settings = TrainerSettings(device="cpu", checkpoints=str(checkpoints))
    return with_settings(Prepare(b"r" * 32, b"a" * 32, msgspec.msgpack.encode(manifest), settings), **changes)


def with_settings(command: Prepare, **changes: object) -> Prepare:
    """Return the command with some of its fields, or of its settings', changed."""
    settings = {name: value for name, value in changes.items() if name in TrainerSettings.__struct_fields__}
    others = {name: value for name, value in changes.items() if name not in settings}
    return msgspec.structs.replace(command, settings=msgspec.structs.replace(command.settings, **settings), **others)

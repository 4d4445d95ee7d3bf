"""The first commands of a mesh process to its trainer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer.trainer_messages import Prepare


def prepare_for(manifest: Manifest, checkpoints: Path, **changes: object) -> Prepare:
    """Return a command for one thread of the CPU, without a pace, with any text that this machine has."""
    command = Prepare(
        run_id=b"r" * 32,
        author=b"a" * 32,
        manifest=msgspec.msgpack.encode(manifest),
        data=[],
        tokenizer=None,
        device="cpu",
        threads=1,
        slow=1.0,
        step_seconds=0.0,
        checkpoints=str(checkpoints),
        outgoing=0,
        incoming=0,
    )
    return msgspec.structs.replace(command, **changes)

"""What a mesh process says to its trainer at the beginning."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farandole.protocol.manifest import Manifest
from farandole.protocol.trainer_messages import Prepare


def prepare_for(manifest: Manifest, checkpoints: Path, **changes: object) -> Prepare:
    """On one thread of the CPU, as fast as it can, with what text there is on this machine."""
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

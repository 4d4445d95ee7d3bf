"""What this node brings to the run, as its trainer takes it: text, tokenizer; and word of how far reading it is."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

from farandole.protocol.trainer_messages import Prepare, Preparing
from farandole.training.data import Bring

from ..store.disk_space import text_room
from ..trainer.channel import TrainerSocket

# Between two words: a person sees that something goes on.
TELL_SECONDS: Final = 2.0


def bring_of(prepare: Prepare, channel: TrainerSocket) -> Bring:
    """Tells the mesh process, every now and then, how far the tokenising is."""
    told_at = -math.inf

    def tell(position: int, size: int) -> None:
        nonlocal told_at
        if time.monotonic() >= told_at + TELL_SECONDS:
            told_at = time.monotonic()
            channel.send(Preparing(position, size))

    return Bring(
        paths=tuple(map(Path, prepare.data)),
        field=prepare.data_field,
        streams=tuple(prepare.streams),
        tokenizer=Path(prepare.tokenizer) if prepare.tokenizer else None,
        cache=Path(prepare.cache) if prepare.cache else None,
        cache_bytes=text_room(prepare.disk, prepare.checkpoint_bytes),
        progress=tell,
    )

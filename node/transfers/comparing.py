"""Compares a checkpoint that is being fetched with other members' weights (`farandole.protocol.checkpoints.sketches`).

The members are asked when the checkpoint's index has arrived, which fixes its weights. They compute while it is
fetched.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from farandole.protocol.checkpoints.blocks import Index
from farandole.protocol.checkpoints.sketches import (
    SEED_BYTES,
    Judgement,
    Sketch,
    SketchQuestion,
    SketchVerdict,
    choose_judges,
    judge,
    values_of,
)
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import short_name

from ..base.errors import PeerUnreachableError
from ..base.nurseries import open_service_nursery
from .downloads import Downloads
from .sketches import ask_for_sketch, sketch_path

# For a member to be dialled and to save its weights, and for each byte of these: to read it from a slow disk, to sketch
# it in 2 s a gigabyte, and to wait for another newcomer's sketch.
ANSWER_TIMEOUT: Final = 15.0
SECONDS_PER_BYTE: Final = 30e-9


class Comparison:
    """Other members' sketches for one checkpoint; made by `open_comparison`."""

    def __init__(self, downloads: Downloads, index: Index, judges: list[bytes]) -> None:
        self.num_asked = len(judges)
        self._downloads = downloads
        self._question = SketchQuestion(index.run_id, index.stage, secrets.token_bytes(SEED_BYTES))
        self._judges = judges
        self._sketches: list[Sketch] = []
        self._has_all = trio.Event()

    async def run(self) -> None:
        """Ask all members at once, and wait for their answers until the deadline."""
        num_bytes = self._downloads.files.required_bytes(self._question.stage)
        with trio.move_on_after(ANSWER_TIMEOUT + SECONDS_PER_BYTE * num_bytes):
            async with trio.open_nursery() as nursery:
                for member in self._judges:
                    nursery.start_soon(self._ask, member)
        self._has_all.set()

    async def _ask(self, member: bytes) -> None:
        try:
            sketch = await ask_for_sketch(self._downloads.host, member, self._question)
        except PeerUnreachableError as error:
            self._downloads.journal.note(f"weights are not compared with those of {short_name(member)}: {error}")
            return
        if sketch is not None:
            self._sketches.append(sketch)

    async def judge(self, path: Path) -> Judgement:
        """Compare the checkpoint, which is at ``path`` now, with the sketches of all members that answer in time.

        A file that cannot be read is left to the trainer, which reports why.
        """
        await self._has_all.wait()
        if not self._sketches:
            return Judgement(SketchVerdict.UNKNOWN)
        try:
            sketch = await sketch_path(path, self._question.seed)
        except (OSError, RemoteProtocolError) as error:
            self._downloads.journal.note(f"{path} cannot be compared: {error}")
            return Judgement(SketchVerdict.UNKNOWN)
        return judge(values_of(sketch), self._sketches)


@asynccontextmanager
async def open_comparison(downloads: Downloads, index: Index, holders: frozenset[bytes]) -> AsyncIterator[Comparison]:
    """Ask members about a checkpoint while the block runs; ``holders`` state that they have it."""
    membership = downloads.membership
    training = membership.nodes_of_stages()[index.stage] - {index.author}  # paused members have old weights
    members = [member for member in membership.donors(0, index.stage) if member in training]
    judges = choose_judges(members, {index.author, *holders}, membership.networks())
    comparison = Comparison(downloads, index, judges)
    async with open_service_nursery() as nursery:
        nursery.start_soon(comparison.run)
        yield comparison

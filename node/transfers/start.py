"""The weights that a run starts from, at one node: a consolidated checkpoint, which the manifest names by its hash.

A node with the folder (the run's creator, or any other) joins with it, ``--start FOLDER``, and gives it. The other
nodes fetch what their stage needs from it, and a node that holds the whole model gives it in turn. It is needed once:
as soon as a node has a checkpoint of its own, it resumes from that and gives that to others. No node begins from the
seed.
"""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import decode_signed_index, encode_signed_index
from farandole.protocol.run.manifest import StartConfig
from farandole.protocol.run.models import names_of_stage
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import short_name
from farandole.training.base.durable import replacing

from ..base.errors import JoinError, PeerUnreachableError
from ..state.membership import START_SLOT
from ..status.status import NO_START
from ..store.consolidated.folder import CHECKPOINT_NAME, INDEX_NAME, max_file_bytes, read_folder, verify_hashes
from ..store.consolidated.tensors import ConsolidatedError, write_file
from .giver import TELL_INTERVAL, Holding
from .receiver import Downloads, FetchProgress, ask_for_index, fetch_checkpoint

# Between two looks at which nodes have it, while none has.
RETRY_SECONDS: Final = 1.0
# Members that are asked for it in one turn.
MAX_ASKED: Final = 8
# Between two lines at the terminal that report what a node waits for.
REMIND_SECONDS: Final = 60.0
_WHO: Final = "a node that has them: farandole join MANIFEST --start FOLDER"


class Start:
    """The starting checkpoint at one node. `open` it before training, and `run` it during training."""

    def __init__(self, start: StartConfig, downloads: Downloads) -> None:
        self._start = start
        self._downloads = downloads
        self._files = downloads.files
        self._membership = downloads.membership
        self._journal = downloads.journal
        self._folder = self._files.settings.home / "start"
        self._held: Holding | None = None
        self._is_held = trio.Event()
        self._reminded_at = -math.inf

    async def run(self) -> None:
        """Once all of it is here, announce it to the run, until cancelled."""
        await self._is_held.wait()
        assert self._held is not None
        index = msgspec.structs.replace(self._held.index, round=0)
        while True:
            await self._membership.announcer.tell_held(START_SLOT, self._held.id, index)
            await trio.sleep(TELL_INTERVAL)

    def find(self, question: BlockQuestion) -> Holding | None:
        """Return the whole checkpoint if its id is asked for; None if it is another or not here."""
        return self._held if question.id == self._start.checkpoint else None

    def path_of(self, stage: int) -> Path | None:
        """Return the path of the file with a stage's weights, None if it is not here."""
        return next((path for path in (self._whole, self._part(stage)) if path.exists()), None)

    @property
    def _whole(self) -> Path:
        return self._folder / CHECKPOINT_NAME

    def _part(self, stage: int) -> Path:
        return self._folder / f"stage-{stage}.safetensors"

    async def open(self) -> None:
        """Take in the folder that was named, or what an earlier life has kept.

        Raises `JoinError` if the folder is not what this run starts from.
        """
        if self._whole.exists():
            await self._hold()
        named = self._files.settings.start
        if self._held is None and named is not None:
            self._journal.say(f"checking {named}, from which this run starts")
            await trio.to_thread.run_sync(self._take_in, named)
            await self._hold()

    def _take_in(self, path: Path) -> None:
        """Link the checkpoint if possible, to save room, else copy it; last, as its presence means all is here."""
        try:
            folder = read_folder(path)
            if folder.id != self._start.checkpoint:
                raise JoinError(
                    f"{path} is not what this run starts from: its id is {folder.id.hex()[:16]}..., the manifest names "
                    f"{self._start.id[:16]}..."
                )
            verify_hashes(folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(self._folder / INDEX_NAME, (path / INDEX_NAME).read_bytes())
            try:
                os.link(folder.checkpoint, self._whole)
            except OSError:  # another file system, or one without links
                with folder.checkpoint.open("rb") as source, replacing(self._whole) as file:
                    shutil.copyfileobj(source, file)
        except ConsolidatedError as error:
            raise JoinError(str(error)) from error
        except OSError as error:
            raise JoinError(f"cannot keep {path} in {self._folder}: {error.strerror or error}") from error

    async def _hold(self) -> None:
        """Open the checkpoint for others, and remove a damaged one."""

        def open_whole() -> Holding | None:
            try:
                raw = (self._folder / INDEX_NAME).read_bytes()
                signed, index = decode_signed_index(raw, self._start.run, max_file_bytes(self._files.manifest))
                if signed.id != self._start.checkpoint:
                    raise RemoteProtocolError("it is another checkpoint's")
                return Holding(self._whole, signed, index)
            except (OSError, RemoteProtocolError) as error:
                why = f"cannot be used ({error}): it is taken anew"
                self._journal.warn(f"the starting checkpoint in {self._folder} {why}")
                self._whole.unlink(missing_ok=True)
                return None

        self._held = await trio.to_thread.run_sync(open_whole)
        if self._held is not None:
            self._is_held.set()

    async def obtain(self, stage: int) -> bool:
        """Return whether a stage's weights are here now. If not, it has notified the owner and waited for some time."""
        if self.path_of(stage) is not None:
            return True
        if trio.current_time() >= self._reminded_at + REMIND_SECONDS:
            self._reminded_at = trio.current_time()
            self._journal.announce("fetching weights", "looking for the weights that this run starts from", _WHO)
        if await self._fetch(stage):
            return True
        self._journal.enter("fetching weights", NO_START, _WHO)
        await trio.sleep(RETRY_SECONDS)
        return False

    async def _fetch(self, stage: int) -> bool:
        """Fetch a stage's weights from the announced holders, or from members, which may announce it soon."""
        wanted_id, conditions = self._start.checkpoint, self._downloads.conditions
        holders = self._membership.start_holders(wanted_id)
        others = list(self._membership.everyone.difference(holders))
        names, is_whole = names_of_stage(self._files.manifest.model, stage), self._files.num_stages == 1
        path = self._whole if is_whole else self._part(stage)

        def show(progress: FetchProgress) -> None:
            self._journal.enter("fetching weights", f"what this run starts from: {progress}", "donors")

        def known(donor: bytes) -> Collection[bytes]:
            return dict.fromkeys((donor, *self._membership.start_holders(wanted_id)))

        for donor in [*holders, *random.sample(others, len(others))][:MAX_ASKED]:
            try:
                signed, index = await ask_for_index(
                    conditions,
                    donor,
                    0,
                    max_file_bytes(self._files.manifest),
                    wanted_id,
                    self._start.run,
                )
                self._folder.mkdir(parents=True, exist_ok=True)
                if is_whole:
                    raw = encode_signed_index(signed)
                    await trio.to_thread.run_sync(write_file, path.with_name(INDEX_NAME), raw)
                await fetch_checkpoint(
                    conditions,
                    signed,
                    index,
                    partial(known, donor),
                    lambda tensor: is_whole or tensor.partition("/")[2] in names,
                    path,
                    show,
                )
            except PeerUnreachableError as error:
                self._journal.enter("fetching weights", f"{short_name(donor)}: {error}", "another node")
                continue
            except OSError as error:
                self._journal.warn(f"the weights that this run starts from cannot be stored: {error}; trying again")
                return False
            what = "the model" if is_whole else f"stage {stage}"
            self._journal.say(f"{what} begins with the weights from which this run starts: hashes verified")
            if is_whole:
                await self._hold()
            return True
        return False

"""The copy that this node keeps of another node's checkpoint, for newcomers.

`farandole.protocol.checkpoints.copies` decides which checkpoints are copied: one of every stage, at two more nodes, or,
if the model is cut, at the nodes of the stage before, so that a stage whose members are all gone is not lost. A copy
lies in the folder of the node's own checkpoints. It consists of the author's first blocks, up to the last that a
newcomer needs, and the author's index; so it survives a restart.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from functools import partial
from pathlib import Path
from typing import Final

import trio

from farandole.protocol.checkpoints.blocks import decode_signed_index, max_index_bytes
from farandole.protocol.checkpoints.copies import copied_author, is_copier
from farandole.protocol.mesh.kademlia import checkpoint_key
from farandole.protocol.state.entries import CheckpointNotice
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import short_name

from ..base.errors import PeerUnreachableError
from ..store.folder import index_of
from .fetch import DonorBusyError, Downloads
from .holdings import Holding, Provider, write_index
from .partial_file import PARTIAL_SUFFIX

logger = logging.getLogger(__name__)

COPY_SUFFIX: Final = ".blocks"
# Copies take no more than this share of the time for downloads, however large the stage or slow the line.
COPY_SHARE: Final = 0.1
# An author that did not give the checkpoint to copy is skipped for this long: the next copy is another author's.
PASS_OVER_SECONDS: Final = 300.0
# The interval for announcing another one to the DHT: twenty peers keep each, for hours, and the run state has the
# newest.
PROVIDE_INTERVAL: Final = 600.0


class CopyService:
    """Keeps the copy of one node up to date, has it provided, and announces it in the DHT."""

    def __init__(self, downloads: Downloads, provider: Provider) -> None:
        self._downloads = downloads
        self._provider = provider
        self._files = downloads.files
        self._membership = downloads.membership
        self._passed_over: dict[bytes, float] = {}  # until when
        self._provided: bytes | None = None
        self._provide_after = -math.inf

    async def run(self) -> None:
        """Take up an earlier life's copy, and keep it new, until cancelled."""
        if self._has_room():
            await self._recall()
        else:
            await self._take(None)
        pause = interval = self._files.settings.backup_seconds
        while True:
            await trio.sleep(pause * random.uniform(0.75, 1.25))
            began_at = trio.current_time()
            await self._copy_newest()
            pause = max(interval, (trio.current_time() - began_at) / COPY_SHARE)
            await self._provide()

    def _has_room(self) -> bool:
        return self._files.plan(self._membership.stage).has_copy

    async def _copy_newest(self) -> None:
        copy, stage = self._provider.copy, self._files.copied_stage(self._membership.stage)
        if not self._has_room():
            if copy is not None:  # the text that was tokenised since needs its room
                await self._take(None)
            return
        found = self._choose(stage)
        if found is None or (copy is not None and copy.id == found[1].id):
            return
        author, notice = found
        try:
            signed, index = await self._downloads.ask(author, stage, notice.id)
        except DonorBusyError:
            return  # it serves others, and this node next time
        except PeerUnreachableError as error:
            self._downloads.journal.warn(f"no copy from {short_name(author)}: {error}")
            self._passed_over[author] = trio.current_time() + PASS_OVER_SECONDS
            return
        path = self.path(stage, signed.id)

        def keep() -> Holding:
            write_index(path, signed)
            return Holding.open(path, signed, index)

        with contextlib.suppress(OSError):  # the download says what is wrong
            await trio.to_thread.run_sync(partial(path.parent.mkdir, exist_ok=True))
        # On a slow line newer ones may keep coming before one is complete.
        await trio.to_thread.run_sync(self._remove, path, f".*{PARTIAL_SUFFIX}")
        if await self._downloads.fetch(signed, index, (author,), path, lambda progress: None, is_copy=True) is not None:
            try:
                await self._take(path, await trio.to_thread.run_sync(keep))
            except OSError as error:
                logger.warning("the copy of round %d cannot be kept: %s", index.round, error)

    def _choose(self, stage: int) -> tuple[bytes, CheckpointNotice] | None:
        """Choose the author and the checkpoint of a stage that this node must copy; None if there is none."""
        conditions, own, membership = self._downloads.conditions, self._downloads.host.author, self._membership
        now, announced = trio.current_time(), membership.announced(stage)
        self._passed_over = {peer: until for peer, until in self._passed_over.items() if until > now}
        author = copied_author(conditions.run_id, stage, announced.keys() - self._passed_over.keys())
        if author is None or author == own:
            return None
        if not conditions.shaping.may_spend(self._files.required_bytes(stage)):
            return None
        members = membership.nodes_of_stages()[stage]
        if self._files.num_stages == 1 and not is_copier(conditions.run_id, stage, members, author, own):
            return None
        return author, announced[author]

    async def _provide(self) -> None:
        """Announce the copied checkpoint in the DHT, which may have more providers than the run state knows."""
        newest, held = self._provider.newest, self._provider.copy
        host, run_id = self._downloads.host, self._downloads.conditions.run_id
        if newest is not None and self._membership.holders(newest.index.stage, newest.id):
            held = newest  # others have copied this node's own
        if held is None or held.id == self._provided or trio.current_time() < self._provide_after:
            return
        if self._provided is not None:
            host.dht.withdraw(checkpoint_key(run_id, self._provided))
        self._provided, self._provide_after = held.id, trio.current_time() + PROVIDE_INTERVAL
        await host.dht.provide(checkpoint_key(run_id, held.id))

    # Files

    def path(self, stage: int, checkpoint_id: bytes) -> Path:
        """Return the path for a copy."""
        return self._files.settings.checkpoints / f"copy-{stage}-{checkpoint_id.hex()[:16]}{COPY_SUFFIX}"

    async def _recall(self) -> None:
        """Open the copy that an earlier life kept, if there is one and it is of this run."""
        folder, run_id = self._files.settings.checkpoints, self._downloads.conditions.run_id
        max_size = max(map(self._files.max_bytes, range(self._files.num_stages)))

        def open_copy() -> Holding:
            with index_of(path).open("rb") as file:
                raw = file.read(max_index_bytes(max_size) + 1)
            return Holding.open(path, *decode_signed_index(raw, run_id, max_size))

        # One, unless that life was killed between making a new one and removing the old.
        for path in await trio.to_thread.run_sync(lambda: sorted(folder.glob(f"copy-*{COPY_SUFFIX}"))):
            with contextlib.suppress(OSError, RemoteProtocolError):
                await self._take(path, await trio.to_thread.run_sync(open_copy))
                return

    async def _take(self, path: Path | None, holding: Holding | None = None) -> None:
        """Make this file the copy, and remove older ones; None: there is no room for any."""
        self._provider.keep_copy(holding)
        await trio.to_thread.run_sync(self._remove, path)

    def _remove(self, kept: Path | None, suffix: str = "*") -> None:
        """Remove the files of all copies but the one kept."""
        for path in self._files.settings.checkpoints.glob(f"copy-*{COPY_SUFFIX}{suffix}"):
            if kept is None or not path.name.startswith(kept.name):
                with contextlib.suppress(OSError):
                    path.unlink()

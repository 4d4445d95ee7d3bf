"""What this node gives to others: its trainer's checkpoints, and the copy that it keeps of another node's.

`farandole.protocol.checkpoints.copies` decides which checkpoints are copied: one of every stage, at two more nodes, or,
if the model is cut, at the nodes of the stage before, so that a stage whose members are all gone is not lost.
"""

from __future__ import annotations

import contextlib
import math
import random
from functools import partial
from typing import Final

import trio

from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.copies import MAX_ROUNDS_OLDER, copied_author, is_copier
from farandole.protocol.mesh.records import checkpoint_key
from farandole.protocol.state.entries import CheckpointNotice
from farandole.protocol.trainer.trainer_messages import Saved
from farandole.protocol.wire.identity import short_name

from ..base.errors import PeerUnreachableError
from ..base.figures import duration
from ..state.membership import Membership
from ..status.journal import Journal
from ..store.disk_space import save_seconds
from .donor import DonorBusyError, fresh_save_timeout
from .downloads import Downloads
from .holdings import Holding
from .library import Library

# A newcomer that asks for weights waits for the answer (`transfers.donor.ANSWER_TIMEOUT`); a save must be shorter. For
# a large checkpoint both ends wait longer (`transfers.donor.fresh_save_timeout`).
FRESH_SAVE_TIMEOUT: Final = 6.0
# An announcement of a held checkpoint lives for a day (`farandole.protocol.state.entries`), and a copy of a stage that
# no node holds any more may have to wait longer than that for a node.
TELL_INTERVAL: Final = 6 * 3_600.0
# Copies take no more than this share of the time for downloads, however large the stage or slow the line.
COPY_SHARE: Final = 0.1
# A copy that arrives more rounds behind than newcomers accept is not worth its traffic. A node whose line is that slow
# looks again after this, in seconds: it may have become faster.
SLOW_COPY_INTERVAL: Final = 86_400.0
# The interval of looks for something new to copy, in seconds; a member announces a checkpoint a minute, or more.
COPY_INTERVAL: Final = 5.0
# An author that did not give the checkpoint to copy is skipped for this long: the next copy is another author's.
PASS_OVER_SECONDS: Final = 300.0
# The interval for announcing another one to the DHT: twenty peers keep each, for hours, and the run state has the
# newest.
PROVIDE_INTERVAL: Final = 600.0


class Giving:
    """Finds the checkpoints that others ask for in the library, and has the trainer save again for them."""

    def __init__(self, library: Library, membership: Membership, journal: Journal) -> None:
        self.trainer_stage: int | None = None
        """The stage of the trainer that was last started."""
        self.save_rate: float | None = None
        """Bytes a second at which the last checkpoint was written; None if none was measured."""
        self._library = library
        self._membership = membership
        self._journal = journal
        self._unopened: tuple[Saved, int] | None = None  # the trainer's newest, and its stage
        self._has_unopened = trio.Event()
        self._has_saved = trio.Event()
        self._save_wanted = trio.Event()

    async def find(self, question: BlockQuestion) -> Holding | None:
        """Return what is asked for, held for the peer that asks; the newest is saved again when it is old."""
        if question.id is not None:
            found = self._library.find(question.id)
        elif question.stage == self._membership.stage:
            return await self.find_own(question.stage)
        else:
            found = self._library.copy
        return found.hold() if found is not None and found.index.stage == question.stage else None

    async def find_own(self, stage: int) -> Holding | None:
        """Return this node's own newest checkpoint of a stage, saved again when it is old, held for the caller."""
        found = await self._fresh_checkpoint() if stage == self._membership.stage else None
        return found.hold() if found is not None and found.index.stage == stage else None

    async def _fresh_checkpoint(self) -> Holding | None:
        newest = self._library.newest
        if newest is None or self._journal.state.round - newest.index.round > MAX_ROUNDS_OLDER:
            if self._has_saved.is_set():  # otherwise another newcomer waits for the same save
                self._has_saved = trio.Event()
            self._save_wanted.set()
            with trio.move_on_after(self._patience()):
                await self._has_saved.wait()
        return self._library.newest

    def _patience(self) -> float:
        """Return how long a newcomer waits for a save; 0 if a save takes too long and there is an older checkpoint.

        The next newcomer gets the checkpoint that is saved then.
        """
        size = self._library.max_bytes
        patience = FRESH_SAVE_TIMEOUT + fresh_save_timeout(size)
        is_in_vain = self.save_rate is not None and save_seconds(size, self.save_rate) > patience
        return 0.0 if is_in_vain and self._library.newest is not None else patience

    async def save_wanted(self) -> None:
        """Wait until a peer wants a newer checkpoint than there is."""
        await self._save_wanted.wait()
        self._save_wanted = trio.Event()

    def note_saved(self, saved: Saved) -> None:
        """Note that the trainer has written a checkpoint, or resumes from it."""
        stage = self._membership.stage
        if saved.seconds > 0:
            self.save_rate = saved.size / saved.seconds
        if self.trainer_stage == stage:  # otherwise it is about to end, because this node has moved
            self._unopened = saved, stage
            self._has_unopened.set()

    def forget_saved(self) -> None:
        """Close the checkpoints of the stage that this node has left."""
        self._library.forget_own()

    async def run(self) -> None:
        """Open what the trainer saves, and announce what is held before the run forgets it, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._open_saved)
            while True:
                await trio.sleep(TELL_INTERVAL)
                self._library.announce()

    async def _open_saved(self) -> None:
        while True:
            await self._has_unopened.wait()
            self._has_unopened = trio.Event()
            assert self._unopened is not None
            saved, stage = self._unopened
            if stage == self._membership.stage:
                await self._library.note_saved(saved, stage)
                self._has_saved.set()


class CopyKeeper:
    """Keeps the copy in the library up to date, and announces it in the DHT."""

    def __init__(self, downloads: Downloads, library: Library) -> None:
        self._downloads = downloads
        self._library = library
        self._files = downloads.files
        self._membership = downloads.membership
        self._passed_over: dict[bytes, float] = {}  # until when
        self._provided: bytes | None = None
        self._provide_after = -math.inf
        self._slow_since: float | None = None

    async def run(self) -> None:
        """Take up an earlier life's copy, and keep it new, until cancelled."""
        if self._has_room():
            await self._library.recall_copy()
        else:
            await self._library.give_up_copies()
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
        if not self._has_room():
            if self._library.copy is not None:  # the text that was tokenised since needs its room
                await self._library.give_up_copies()
            return
        stage = self._files.copied_stage(self._membership.stage)
        found = self._choose(stage)
        copy = self._library.copy
        if found is None or (copy is not None and copy.id == found[1].id):
            return
        if self._is_in_vain(stage):
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
        path = self._library.copy_path(stage, signed.id)
        with contextlib.suppress(OSError):  # the download says what is wrong
            await trio.to_thread.run_sync(partial(path.parent.mkdir, exist_ok=True))
        await self._library.forget_begun(path)  # on a slow line newer ones may keep coming before one is complete
        if await self._downloads.fetch(signed, index, (author,), path, lambda progress: None, is_copy=True) is not None:
            await self._library.keep_copy(path, signed, index)

    def _is_in_vain(self, stage: int) -> bool:
        """Return whether a copy would be too old for newcomers on arrival, at the rate of the last download.

        If the model is cut, an old copy is better than none: it is all that is left of a stage that has died out.
        """
        downloads, now = self._downloads, trio.current_time()
        round_seconds = self._files.manifest.rounds.round_seconds
        seconds = self._files.required_bytes(stage) / downloads.rate
        is_slow = downloads.is_measured and 0 < MAX_ROUNDS_OLDER * round_seconds < seconds
        if not is_slow or self._files.num_stages > 1:
            self._slow_since = None
            return False
        if self._slow_since is None:
            self._slow_since = now
            downloads.journal.note(
                f"a copy of another's checkpoint takes {duration(seconds)} of this line, and would be "
                f"{seconds / round_seconds:.0f} rounds old: none is made for a day"
            )
        if now < self._slow_since + SLOW_COPY_INTERVAL:
            return True
        self._slow_since = None
        return False

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
        newest, held = self._library.newest, self._library.copy
        host, run_id = self._downloads.host, self._downloads.conditions.run_id
        if newest is not None and self._membership.holders(newest.index.stage, newest.id):
            held = newest  # others have copied this node's own
        if held is None or held.id == self._provided or trio.current_time() < self._provide_after:
            return
        if self._provided is not None:
            host.withdraw(checkpoint_key(run_id, self._provided))
        self._provided, self._provide_after = held.id, trio.current_time() + PROVIDE_INTERVAL
        await host.provide(checkpoint_key(run_id, held.id))

"""The checkpoints that this node provides to others: its trainer's, saved again for them, and the copy that it keeps.

An own checkpoint is opened, and its index signed, when the trainer has written it. It stays open while the run knows
that this node holds it, however many times the trainer saves in that time. What is provided is announced in the run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.copies import MAX_ROUNDS_OLDER
from farandole.protocol.trainer.trainer_messages import Saved

from ..state.membership import Membership
from ..status.journal import Journal
from ..store.consolidated.tensors import ConsolidatedError
from ..store.disk_space import WeightFiles, save_seconds
from .donor import fresh_save_timeout
from .holdings import Holding, open_own, write_index

logger = logging.getLogger(__name__)

# Own checkpoints that are kept open in addition to announced ones: the newest, and the one that is being announced.
NUM_OPEN: Final = 2
# A newcomer that asks for weights waits for the answer (`donor.ANSWER_TIMEOUT`); a save must be shorter. For a large
# checkpoint both ends wait longer (`donor.fresh_save_timeout`).
FRESH_SAVE_TIMEOUT: Final = 6.0
# An announcement of a held checkpoint lives for a day (`farandole.protocol.state.entries`), and a copy of a stage that
# no node holds any more may have to wait longer than that for a node.
TELL_INTERVAL: Final = 6 * 3_600.0


class Provider:
    """The open checkpoints of one node. Methods raise no `OSError`: what cannot be opened is not provided."""

    def __init__(
        self, files: WeightFiles, key: Ed25519PrivateKey, run_id: bytes, membership: Membership, journal: Journal
    ) -> None:
        self.copy: Holding | None = None
        """The copy that it keeps of another node's checkpoint."""
        self.trainer_stage: int | None = None
        """The stage of the trainer that was last started."""
        self.save_rate: float | None = None
        """Bytes a second at which the last checkpoint was written; None if none was measured."""
        self._files = files
        self._key = key
        self._run_id = run_id
        self._membership = membership
        self._journal = journal
        self._own: list[Holding] = []
        self._unopened: tuple[Saved, int] | None = None  # the trainer's newest, and its stage
        self._has_unopened = trio.Event()
        self._has_saved = trio.Event()
        self._save_wanted = trio.Event()

    @property
    def newest(self) -> Holding | None:
        """Return this node's own newest checkpoint."""
        return self._own[-1] if self._own else None

    # Questions of other nodes

    async def find(self, question: BlockQuestion) -> Holding | None:
        """Return what is asked for, held for the peer that asks; the newest is saved again when it is old."""
        if question.id is None and question.stage == self._membership.stage:
            return await self.find_own(question.stage)
        held = [each for each in (*self._own, self.copy) if each is not None and each.id == question.id]
        found = next(iter(held), None) if question.id is not None else self.copy
        return found.hold() if found is not None and found.index.stage == question.stage else None

    async def find_own(self, stage: int) -> Holding | None:
        """Return this node's own newest checkpoint of a stage, saved again when it is old, held for the caller."""
        if stage != self._membership.stage:
            return None
        if self.newest is None or self._journal.state.round - self.newest.index.round > MAX_ROUNDS_OLDER:
            if self._has_saved.is_set():  # otherwise another newcomer waits for the same save
                self._has_saved = trio.Event()
            self._save_wanted.set()
            with trio.move_on_after(self._patience()):
                await self._has_saved.wait()
        return self.newest.hold() if self.newest is not None and self.newest.index.stage == stage else None

    def _patience(self) -> float:
        """Return how long a newcomer waits for a save; 0 if a save takes too long and there is an older checkpoint.

        The next newcomer gets the checkpoint that is saved then.
        """
        size = self._files.max_bytes(self._membership.stage)
        patience = FRESH_SAVE_TIMEOUT + fresh_save_timeout(size)
        is_in_vain = self.save_rate is not None and save_seconds(size, self.save_rate) > patience
        return 0.0 if is_in_vain and self.newest is not None else patience

    async def save_wanted(self) -> None:
        """Wait until a peer wants a newer checkpoint than there is."""
        await self._save_wanted.wait()
        self._save_wanted = trio.Event()

    # What is provided

    def note_saved(self, saved: Saved) -> None:
        """Note that the trainer has written a checkpoint, or resumes from it."""
        stage = self._membership.stage
        if saved.seconds > 0:
            self.save_rate = saved.size / saved.seconds
        if self.trainer_stage == stage:  # otherwise it is about to end, because this node has moved
            self._unopened = saved, stage
            self._has_unopened.set()

    def forget_own(self) -> None:
        """Close the checkpoints of the stage that this node has left."""
        while self._own:
            self._own.pop().let_go()

    def keep_copy(self, holding: Holding | None) -> None:
        """Provide this copy of another node's checkpoint instead of the former one; None: no copy."""
        if self.copy is not None:
            self.copy.let_go()
        self.copy = holding
        if holding is not None:
            self._announce(holding)

    async def run(self) -> None:
        """Open what the trainer saves, and announce what is held before the run forgets it, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._open_saved)
            while True:
                await trio.sleep(TELL_INTERVAL)
                for holding in (self.newest, self.copy):
                    if holding is not None:
                        self._announce(holding)

    def _announce(self, holding: Holding) -> None:
        self._membership.announcer.checkpoint_held(holding.id, holding.index, is_copy=holding is self.copy)

    async def _open_saved(self) -> None:
        while True:
            await self._has_unopened.wait()
            self._has_unopened = trio.Event()
            assert self._unopened is not None
            saved, stage = self._unopened
            if stage != self._membership.stage:
                continue
            try:
                holding = await trio.to_thread.run_sync(self._open, saved, stage)
            except (OSError, ConsolidatedError, ValueError) as error:
                logger.warning("the checkpoint of round %d cannot be given to others: %s", saved.round, error)
            else:
                told = self._membership.told_checkpoints()
                for older in self._own[: max(0, len(self._own) + 1 - NUM_OPEN)]:
                    if older.id not in told:
                        self._own.remove(older)
                        older.let_go()
                self._own.append(holding)
                self._announce(holding)
            self._has_saved.set()

    def _open(self, saved: Saved, stage: int) -> Holding:
        holding = open_own(saved, self._key, self._run_id, stage, self._files.num_stages)
        try:
            write_index(Path(saved.path), holding.signed)
        except OSError as error:  # a full disk: the checkpoint is there all the same
            logger.warning("the index of %s is not written: %s", saved.path, error)
        return holding

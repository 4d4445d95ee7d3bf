"""Weights for this node's trainer, and for those who ask: where they come from, and which are kept.

A newcomer takes a checkpoint that several members hold, from all of them at once, or else the newest of one, who saves
it anew if it is old; where the run state knows of too few, the DHT may know of more. Which ones have copies says
`farandole.protocol.copies`: of every stage one, at two more nodes, or, where the model is cut, at the nodes of the
stage before, so that a stage whose members are all gone is not lost.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol import trainer_messages as messages
from farandole.protocol.block_transfer import Question
from farandole.protocol.blocks import (
    BLOCK_BYTES,
    Index,
    SignedIndex,
    encode_signed_index,
)
from farandole.protocol.copies import MAX_ROUNDS_OLDER, Choice, choose, copied_author, is_copier
from farandole.protocol.cut import stage_parameters
from farandole.protocol.entries import CheckpointNotice
from farandole.protocol.identity import short_name
from farandole.protocol.manifest import Manifest
from farandole.protocol.pairing import MAX_ROUNDS_BEHIND
from farandole.protocol.records import checkpoint_key, shard_key
from farandole.protocol.safetensors import MAX_HEADER_BYTES
from farandole.protocol.vectors import is_required, max_checkpoint_bytes, required_bytes

from ..base.bandwidth import Shaping
from ..base.errors import JoinError, PeerUnreachableError
from ..base.nurseries import open_service_nursery
from ..base.settings import NodeSettings
from ..bulk.transport import Channels
from ..mesh.host import Host
from ..state.membership import Membership
from ..status.journal import Journal
from ..store.disk_space import DiskPlan, Room, plan_disk, used_bytes
from ..store.fetch import Fetched, FetchProgress, ask_for_index, fetch_checkpoint
from ..store.folder import CheckpointFolder, saved_round
from ..store.holdings import Holding
from ..store.library import Library
from ..store.partial_file import has_partial, partial_path
from ..store.provider import Conditions, DonorBusyError
from .bootstrap import reachable_providers

# How long a newcomer to a run that is under way looks for somebody who gives it weights.
WEIGHTS_TIMEOUT: Final = 120.0
WEIGHTS_RETRY: Final = 2.0
# A newcomer that asks for weights waits for the answer (`checkpoints.taking.ANSWER_TIMEOUT`); a save must be shorter.
FRESH_SAVE_TIMEOUT: Final = 6.0
# A stage of which nobody says that he has weights begins from the run's seed after this: two announcements' time.
SEED_AFTER: Final = 20.0
# Copies take no more than this share of the time for downloads, however large the stage or slow the line.
COPY_SHARE: Final = 0.1
# How often a node looks whether there is something new to copy, in seconds; a member announces one a minute, or more.
COPY_INTERVAL: Final = 5.0
# So long whoever did not give the checkpoint that is to be copied is passed over: the next copy is another's then.
PASS_OVER_SECONDS: Final = 300.0
# How often it tells the DHT of another one: twenty peers keep each, for hours, and the run state has the newest.
PROVIDE_INTERVAL: Final = 600.0
# What a line is taken to carry until a download has been measured, bytes a second: 10 Mbit/s.
USUAL_RATE: Final = 1.25e6
# What a node says that it holds lives for a day (`farandole.protocol.entries`), and a copy of a stage that nobody holds
# any more may wait longer than that for somebody.
TELL_INTERVAL: Final = 6 * 3_600.0
# Members that are asked for their newest checkpoint in one turn, one after the other, each for as long as it takes to
# see that nobody answers. In the next turn they are others.
MAX_ASKED: Final = 8
# With fewer donors than this in the run state, the DHT is asked for more.
ENOUGH_DONORS: Final = 2
# How often a person at the terminal reads of a download's progress, in seconds.
SAY_INTERVAL: Final = 10.0

_Show = Callable[[FetchProgress], None]


class Weights:
    """The checkpoints of one node."""

    def __init__(
        self,
        settings: NodeSettings,
        key: Ed25519PrivateKey,
        journal: Journal,
        host: Host,
        membership: Membership,
        manifest: Manifest,
        run_id: bytes,
        shaping: Shaping,
    ) -> None:
        self.trainer_stage: int | None = None
        """Of the trainer that was last started."""
        self._settings = settings
        self._journal = journal
        self._host = host
        self._membership = membership
        self._model = manifest.model
        self._outer = manifest.outer
        self._origin = "seed" if manifest.start is None else "starting checkpoint"
        self._run_id = run_id
        self._shaping = shaping
        self._save_wanted = trio.Event()
        self._disk = round(settings.disk * 1e9)
        self._conditions = Conditions(host, run_id, shaping, room=Room(settings.home, self._disk))
        self._library = Library(
            settings.checkpoints,
            key,
            run_id,
            self._model.num_stages,
            self.max_bytes,
            membership.told_checkpoints,
            self._announce,
        )
        self._saved, self._to_note = trio.open_memory_channel[tuple[messages.Saved, int]](1)
        self._has_saved = trio.Event()
        self._taken: set[bytes] = set()  # ids of checkpoints that this life has fetched
        self._provided: bytes | None = None
        self._provide_after = -math.inf
        self._passed_over: dict[bytes, float] = {}  # until when
        self._measured_rate: float | None = None

    @property
    def conditions(self) -> Conditions:
        """Under which this node fetches checkpoints."""
        return self._conditions

    @property
    def channels(self) -> Channels[Any] | None:
        """Ways beside the streams."""
        return self._conditions.channels

    @channels.setter
    def channels(self, channels: Channels[Any]) -> None:
        self._conditions.channels = channels

    def file_stage(self, stage: int) -> int | None:
        """How the stage's files are named: None where the model is not cut."""
        return None if self._model.num_stages == 1 else stage

    def max_bytes(self, stage: int) -> int:
        """The most that a checkpoint of a stage takes."""
        return max_checkpoint_bytes(self._outer, stage_parameters(self._model, stage))

    def download_seconds(self, stage: int) -> float:
        """What fetching a stage may take this node, by its last download, or else by its cap."""
        rate = self._measured_rate or self._shaping.down.rate or USUAL_RATE
        return required_bytes(self._outer, stage_parameters(self._model, stage)) / rate

    @property
    def plan(self) -> DiskPlan:
        """What this node keeps on its disk, by its stage. Raises `DiskError` where it may not keep even the least."""
        stage, copied = self._membership.stage, self._copied_stage
        copy_bytes = required_bytes(self._outer, stage_parameters(self._model, copied)) + MAX_HEADER_BYTES + BLOCK_BYTES
        text_bytes = used_bytes(self._settings.tokens) if self._disk else 0  # of a file or two
        return plan_disk(self._disk, self.max_bytes(stage), copy_bytes, text_bytes)

    @property
    def _copied_stage(self) -> int:
        return (self._membership.stage + 1) % self._membership.num_stages

    async def own_round(self) -> int | None:
        """The round of this node's own checkpoint of its stage, if there is one."""
        files = CheckpointFolder(self._settings.checkpoints, self._membership.stage).files()
        return await trio.to_thread.run_sync(_newest_round, files)

    async def is_at_hand(self) -> bool:
        """Whether a trainer would find weights of this node's stage."""
        fetched = self._settings.fetched(self.file_stage(self._membership.stage))
        return await self.own_round() is not None or await trio.to_thread.run_sync(saved_round, fetched) is not None

    # For this node's trainer

    async def obtain(self) -> None:
        """Before each start of the trainer: where the run is under way, weights that are not too old for it.

        Raises `JoinError` if the run is under way, this node has none, and nobody gives any; `DiskError` if there may
        not be room for any.
        """
        journal, stage = self._journal, self._membership.stage
        folder = CheckpointFolder(self._settings.checkpoints, stage)
        await trio.to_thread.run_sync(folder.clean)
        if self._disk:
            await trio.to_thread.run_sync(self._trim, stage)
        own_round = await self.own_round()
        fetched = await trio.to_thread.run_sync(saved_round, self._settings.fetched(self.file_stage(stage)))
        newest = own_round if fetched is None else max(fetched, own_round or 0)
        if self._membership.current_round() - (newest or 0) <= (0 if newest is None else MAX_ROUNDS_BEHIND):
            return
        journal.announce("fetching weights", "the run is under way: fetching weights from members", "members' weights")
        began_at = trio.current_time()
        has_asked_dht = False
        show = _Teller(journal)
        while trio.current_time() < began_at + WEIGHTS_TIMEOUT:  # no download is cut short: each has its own limits
            if await self._fetch(stage, own_round, show):
                return
            if self._is_unheard_of(stage) and not has_asked_dht:
                has_asked_dht = True
                if await self._fetch_newest(await self._providers_of(stage), stage, show):
                    return
            if own_round is None and self._is_unheard_of(stage) and trio.current_time() >= began_at + SEED_AFTER:
                self._warn_of_seed(stage)
                return
            await trio.sleep(WEIGHTS_RETRY)
        if own_round is None:
            raise JoinError(
                "step 4, weights: the run is under way, but no member gave its weights within "
                f"{WEIGHTS_TIMEOUT:g} s. The last warning says why; try again later."
            )
        journal.warn(f"nobody gave newer weights: going on with this node's own of round {own_round}")

    def _trim(self, stage: int) -> None:
        """What the plan has no room for; checkpoints of stages that this node has left are not in it."""
        for each in range(self._model.num_stages):
            folder = CheckpointFolder(self._settings.checkpoints, each)
            folder.trim(self.plan.num_kept if each == stage else 0)

    async def fetch_ahead(self, stage: int) -> bool:
        """Before a move, beside the training: whether weights of the stage are here now, or nobody has any."""
        return await self._fetch(stage, None, lambda progress: None) or (
            self._is_unheard_of(stage) and not self._membership.donors(0, stage)
        )

    async def _fetch(self, stage: int, after_round: int | None, show: _Show) -> bool:
        """What several have, or a member's newest, or a copy of one who is gone; whether that went well."""
        membership, after = self._membership, after_round or 0
        notices = membership.notices(stage)
        oldest = max(after, membership.current_round() - MAX_ROUNDS_BEHIND - 1)
        recent = max(after, membership.current_round() - MAX_ROUNDS_OLDER - 1)
        for choice in (self._begun(notices, stage, oldest), choose(notices, recent)):
            if choice is not None and choice.id not in self._taken and await self._fetch_chosen(choice, stage, show):
                return True
        if await self._fetch_newest(membership.donors(after, stage)[:MAX_ASKED], stage, show):
            return True
        if membership.num_stages == 1:
            return False
        for notice in sorted(
            (notice for notices in membership.notices(stage).values() for notice in notices if notice.round > after),
            key=lambda notice: -notice.round,
        ):
            holders = membership.holders(stage, notice.id)
            if await self._fetch_chosen(Choice(notice.id, notice.round, tuple(holders)), stage, show):
                return True
        return await self._take_own_copy(stage, after, show)

    def _begun(
        self, notices: Mapping[bytes, Sequence[CheckpointNotice]], stage: int, after_round: int
    ) -> Choice | None:
        """A checkpoint that an earlier attempt, or life, has in part, and somebody has whole."""
        path = self._settings.fetched(self.file_stage(stage))
        for notice in itertools.chain.from_iterable(notices.values()):
            if notice.round > after_round and has_partial(path, notice.id):
                return Choice(notice.id, notice.round, tuple(self._membership.holders(stage, notice.id)))
        return None

    async def _fetch_chosen(self, choice: Choice, stage: int, show: _Show) -> bool:
        """A checkpoint by its id; its index from whoever gives that first."""
        for holder in choice.holders:
            found = await self._ask_for_index(holder, stage, choice.id)
            if found is not None:
                return await self._fetch_blocks(*found, choice.holders, show) is not None
        return False

    async def _fetch_newest(self, donors: Iterable[bytes], stage: int, show: _Show) -> bool:
        """The newest checkpoint of one of these; from others too, if they hold it."""
        again: list[tuple[bytes, SignedIndex, Index]] = []
        for donor in donors:
            found = await self._ask_for_index(donor, stage, None)
            if found is None:
                continue
            if found[0].id in self._taken:  # weights that were not good are taken again only if there are no others
                again.append((donor, *found))
            elif await self._fetch_blocks(*found, (donor,), show) is not None:
                return True
        for donor, signed, index in again:
            if await self._fetch_blocks(signed, index, (donor,), show) is not None:
                return True
        return False

    async def _ask_for_index(self, donor: bytes, stage: int, known: bytes | None) -> tuple[SignedIndex, Index] | None:
        try:
            return await ask_for_index(self._conditions, donor, stage, self.max_bytes(stage), known)
        except PeerUnreachableError as error:
            self._journal.warn(f"no weights from {short_name(donor)}: {error}")
            return None

    async def _fetch_blocks(
        self, signed: SignedIndex, index: Index, donors: tuple[bytes, ...], show: _Show
    ) -> Fetched | None:
        """Of a stage's checkpoint, what this node's trainer needs."""
        path = self._settings.fetched(self.file_stage(index.stage))
        fetched = await self._download(signed, index, donors, path, show, is_prefix=False)
        if fetched is not None:
            self._taken.add(signed.id)
            what = "weights" if self._membership.num_stages == 1 else f"weights of stage {index.stage},"
            names = ", ".join(map(short_name, fetched.num_by_donor)) or "this node's own copy"
            size = required_bytes(self._outer, stage_parameters(self._model, index.stage))
            self._journal.say(f"{what} of round {index.round} from {names}: {size / 1e6:.1f} MB, hashes verified")
        return fetched

    async def _download(
        self, signed: SignedIndex, index: Index, donors: tuple[bytes, ...], path: Path, show: _Show, *, is_prefix: bool
    ) -> Fetched | None:
        began_at, membership = trio.current_time(), self._membership
        in_dht: list[bytes] = []

        def known() -> dict[bytes, None]:
            return dict.fromkeys((*donors, *membership.holders(index.stage, signed.id), *in_dht))

        async def ask_dht() -> None:
            if len(known()) < ENOUGH_DONORS and not is_prefix:  # of a copy there is all the time in the world
                in_dht.extend(await reachable_providers(self._host, checkpoint_key(self._run_id, signed.id)))

        try:
            async with open_service_nursery() as nursery:
                nursery.start_soon(ask_dht)
                fetched = await fetch_checkpoint(
                    self._conditions,
                    signed,
                    index,
                    known,
                    partial(is_required, self._outer),
                    path,
                    show,
                    membership.announcer.accuse,
                    is_prefix=is_prefix,
                )
        except PeerUnreachableError as error:
            self._journal.warn(f"no weights of round {index.round}: {error}")
            return None
        self._journal.exchanges.bytes_received += fetched.num_bytes
        if fetched.num_bytes:
            self._measured_rate = fetched.num_bytes / max(trio.current_time() - began_at, 1e-3)
        return fetched

    async def _take_own_copy(self, stage: int, after_round: int, show: _Show) -> bool:
        """The copy that this node kept for others: its blocks are verified again, and nobody is asked."""
        copy = self._library.copy
        if copy is None or copy.index.stage != stage or copy.index.round <= after_round:
            return False
        path = self._settings.fetched(self.file_stage(stage))
        kept = self._library.copy_path(stage, copy.id)
        try:
            await trio.to_thread.run_sync(shutil.copyfile, kept, partial_path(path, copy.id))
        except OSError as error:
            self._journal.warn(f"this node's own copy of stage {stage} cannot be used: {error}")
            return False
        return await self._fetch_blocks(copy.signed, copy.index, (), show) is not None

    def _is_unheard_of(self, stage: int) -> bool:
        """Whether nobody says that he has weights of this stage of a model that is cut."""
        membership = self._membership
        return membership.num_stages > 1 and not membership.notices(stage)

    async def _providers_of(self, stage: int) -> list[bytes]:
        """Who is said to hold a stage, where the run state knows of nobody."""
        return await reachable_providers(self._host, shard_key(self._run_id, stage))

    def _warn_of_seed(self, stage: int) -> None:
        self._journal.warn(
            f"NOBODY HAS THE WEIGHTS OF STAGE {stage}: its members are gone, and no backup is to be had. It begins "
            f"again from the run's {self._origin}; what it had learnt is lost"
        )

    # For others

    async def find(self, question: Question) -> Holding | None:
        """What is asked for, held for whoever asks; the newest is saved anew when it is old."""
        if question.id is not None:
            found = self._library.find(question.id)
        elif question.stage == self._membership.stage:
            found = await self._fresh_checkpoint()
        else:
            found = self._library.copy
        return found.hold() if found is not None and found.index.stage == question.stage else None

    async def _fresh_checkpoint(self) -> Holding | None:
        newest = self._library.newest
        if newest is None or self._journal.state.round - newest.index.round > MAX_ROUNDS_OLDER:
            if self._has_saved.is_set():  # else another newcomer waits for the same
                self._has_saved = trio.Event()
            self._save_wanted.set()
            with trio.move_on_after(FRESH_SAVE_TIMEOUT):
                await self._has_saved.wait()
        return self._library.newest

    async def save_wanted(self) -> None:
        """Wait until a peer wants a newer checkpoint than there is."""
        await self._save_wanted.wait()
        self._save_wanted = trio.Event()

    def note_saved(self, saved: messages.Saved) -> None:
        """The trainer has written a checkpoint, or goes on from it."""
        stage = self._membership.stage
        if self.trainer_stage != stage:
            return  # it is about to end: this node has moved
        try:
            self._saved.send_nowait((saved, stage))
        except trio.WouldBlock:
            self._to_note.receive_nowait()  # of an older one, which nobody has heard of
            self._saved.send_nowait((saved, stage))

    def forget_saved(self) -> None:
        """This node has another stage now: what it saved is not of that."""
        self._library.forget_own()

    def _announce(self, holding: Holding, is_copy: bool) -> None:
        self._membership.announcer.checkpoint_held(holding.id, holding.index, is_copy=is_copy)

    async def run(self) -> None:
        """Open what the trainer saves, and keep copies of what others save, until cancelled."""
        if self.plan.has_copy:
            await self._library.recall_copy()
        else:
            await self._library.give_up_copies()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._open_saved)
            nursery.start_soon(self._keep_copies)
            nursery.start_soon(self._tell_again)

    async def _tell_again(self) -> None:
        while True:
            await trio.sleep(TELL_INTERVAL)
            for holding in (self._library.newest, self._library.copy):
                if holding is not None:
                    self._announce(holding, holding is self._library.copy)

    async def _open_saved(self) -> None:
        async for saved, stage in self._to_note:
            if stage == self._membership.stage:
                await self._library.note_saved(saved, stage)
                self._has_saved.set()

    # Copies

    async def _keep_copies(self) -> None:
        interval = COPY_INTERVAL if self._settings.backup_seconds is None else self._settings.backup_seconds
        pause = interval
        while True:
            await trio.sleep(pause * random.uniform(0.75, 1.25))
            began_at = trio.current_time()
            await self._copy_newest()
            pause = max(interval, (trio.current_time() - began_at) / COPY_SHARE)
            await self._provide()

    async def _copy_newest(self) -> None:
        if not self.plan.has_copy:
            if self._library.copy is not None:  # the text that was tokenised meanwhile needs its room
                await self._library.give_up_copies()
            return
        membership = self._membership
        is_cut = membership.num_stages > 1
        stage = self._copied_stage
        now, announced = trio.current_time(), membership.announced(stage)
        self._passed_over = {peer: until for peer, until in self._passed_over.items() if until > now}
        author = copied_author(self._run_id, stage, announced.keys() - self._passed_over.keys())
        if author is None or author == self._host.author:
            return
        if not self._shaping.may_spend(required_bytes(self._outer, stage_parameters(self._model, stage))):
            return
        members = membership.nodes_of_stages()[stage]
        if not is_cut and not is_copier(self._run_id, stage, members, author, self._host.author):
            return
        notice, copy = announced[author], self._library.copy
        if copy is not None and copy.id == notice.id:
            return
        try:
            signed, index = await ask_for_index(self._conditions, author, stage, self.max_bytes(stage), notice.id)
        except DonorBusyError:
            return  # it serves others, and this node next time
        except PeerUnreachableError as error:
            self._journal.warn(f"no copy from {short_name(author)}: {error}")
            self._passed_over[author] = trio.current_time() + PASS_OVER_SECONDS
            return
        path = self._library.copy_path(stage, signed.id)
        with contextlib.suppress(OSError):  # the download says what is wrong
            await trio.to_thread.run_sync(partial(path.parent.mkdir, exist_ok=True))
        await self._library.forget_begun(path)  # on a slow line there may be a newer one ever again before one is whole
        if await self._download(signed, index, (author,), path, lambda progress: None, is_prefix=True) is not None:
            await self._library.keep_copy(path, index, encode_signed_index(signed))

    async def _provide(self) -> None:
        """Tell the DHT of the copied checkpoint, in which there may be more to be found than in the run state."""
        copy, newest = self._library.copy, self._library.newest
        held = copy
        if newest is not None and self._membership.holders(newest.index.stage, newest.id):
            held = newest  # others have copied this node's own
        if held is None or held.id == self._provided or trio.current_time() < self._provide_after:
            return
        if self._provided is not None:
            self._host.withdraw(checkpoint_key(self._run_id, self._provided))
        self._provided, self._provide_after = held.id, trio.current_time() + PROVIDE_INTERVAL
        await self._host.provide(checkpoint_key(self._run_id, held.id))


class _Teller:
    """Shows a download's progress: always on the journal, now and then to the person at the terminal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._say_at = trio.current_time() + SAY_INTERVAL

    def __call__(self, progress: FetchProgress) -> None:
        self._journal.enter("fetching weights", str(progress), "members' weights")
        if trio.current_time() >= self._say_at:
            self._say_at = trio.current_time() + SAY_INTERVAL
            self._journal.say(str(progress))


def _newest_round(files: Iterable[Path]) -> int | None:
    """Of those that can be read; the newest come first."""
    return next((found for path in files if (found := saved_round(path)) is not None), None)

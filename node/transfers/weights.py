"""Weights for this node's trainer: whether it needs newer ones than it has, and which members give them.

A newcomer takes a checkpoint that several members hold, from all of them at once. Else it takes one member's newest,
who saves it again if it is old.

Members' claims are tested here. Weights that are far from most other members'
(`farandole.protocol.checkpoints.sketches`) are not given to the trainer. A member is not believed for a while
(`farandole.protocol.state.believing`) if it claims to be ahead and gives no weights, or weights that other members or
the trainer find unfit.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.checkpoints.blocks import Index, SignedIndex
from farandole.protocol.checkpoints.copies import MAX_ROUNDS_OLDER, Choice, choose
from farandole.protocol.checkpoints.sketches import SketchVerdict
from farandole.protocol.rounds.pairing import MAX_ROUNDS_BEHIND
from farandole.protocol.state.believing import MAX_LEAP
from farandole.protocol.wire.identity import short_name

from ..base.errors import JoinError, PeerUnreachableError
from ..status.journal import DISK
from ..store.disk_space import SECTOR
from .block_file import PARTIAL_SUFFIX, partial_path
from .giver import Provider
from .receiver import NO_WEIGHTS, Downloads, Fetched, FetchProgress, Show
from .sketches import Judge, open_comparison

# How long a newcomer to a run that is under way looks for a member that gives it weights.
WEIGHTS_TIMEOUT: Final = 120.0
WEIGHTS_RETRY: Final = 2.0
# How long a node waits until it has reached one of the members that were heard to have trained: a few rounds of dials.
CONTACT_TIMEOUT: Final = 20.0
CONTACT_INTERVAL: Final = 0.2
# A holder of copies of this many unfit checkpoints is doubted, as their authors are: an honest member may copy one,
# since it judges none that it keeps for others.
MAX_UNFIT_COPIES: Final = 2
# A stage of which no member announces weights begins from the run's seed after this: two announcements' time.
SEED_AFTER: Final = 20.0
# Weights that are far from the only other answering member's are taken after this: time to hear of others.
DISPUTED_AFTER: Final = 20.0
# Members that are asked for their newest checkpoint in one turn, one after the other, each for as long as it takes to
# see that it does not answer. The next turn asks others.
MAX_ASKED: Final = 8
# Between two looks whether the disk has room for the download, seconds.
ROOM_INTERVAL: Final = 5.0
_NO_ROOM: Final = f"{DISK}download"
# The interval for showing a download's progress at the terminal, in seconds.
SAY_INTERVAL: Final = 10.0


_Found = tuple[SignedIndex, Index, tuple[bytes, ...]]
"""A checkpoint, and its holders."""


class Weights:
    """The weights of one node: finds its trainer's; those of `provider` are for other nodes."""

    def __init__(self, key: Ed25519PrivateKey, downloads: Downloads) -> None:
        self.files = downloads.files
        self._downloads = downloads
        self._membership = downloads.membership
        self._journal = downloads.journal
        self.provider = Provider(key, downloads)
        self._taken: set[bytes] = set()  # ids of checkpoints that this life has fetched
        self._on_trial: tuple[Index, Sequence[bytes]] | None = None  # what was taken last, and its donors
        self._unfit_copies: Counter[bytes] = Counter()  # by donor
        self._refused: set[bytes] = set()  # authors of weights that were far from most others', in this search
        self._disputed: dict[bytes, _Found] = {}  # by author: what was far from the only answering member's
        self._asked_in_vain: set[bytes] = set()  # in this search

    def download_seconds(self, stage: int) -> float:
        """Return the seconds that fetching a stage may take this node."""
        return self.files.required_bytes(stage) / self._downloads.rate

    async def rounds(self) -> tuple[int | None, int | None]:
        """Return the rounds of this node's own checkpoint of its stage, and of the fetched one, if they are here."""
        return await trio.to_thread.run_sync(self.files.rounds, self._membership.stage)

    async def obtain(self) -> None:
        """Get weights that are not too old, if the run is under way; call it before each start of the trainer.

        Raises `JoinError` if the run is under way, this node has none, and no member gives any; `DiskError` if even the
        minimum of checkpoints does not fit the disk limit.
        """
        journal, membership, stage = self._journal, self._membership, self._membership.stage
        await trio.to_thread.run_sync(self.files.clean, stage)
        own_round, fetched_round = await self.rounds()
        were_unfit = self._note_verdict(own_round, fetched_round)
        newest = own_round if fetched_round is None else max(fetched_round, own_round or 0)
        # Members that were only heard of are not believed: one that trains must answer first. A run that is known to be
        # under way has members: a few seconds without heartbeats, as among liars that pass none on, must not make this
        # node begin from the run's seed.
        needs_anyone = were_unfit and newest is None
        with trio.move_on_after(CONTACT_TIMEOUT):
            while membership.awaits_contact() or (needs_anyone and not membership.everyone):
                journal.enter("fetching weights", "dialling members that train", "a member that answers")
                await trio.sleep(CONTACT_INTERVAL)
        if not self._is_behind(newest):
            return
        await self._await_room(stage)
        journal.announce("fetching weights", "the run is under way: fetching weights from members", "members' weights")
        self._begin_seeking()
        if await self._seek(stage, own_round, newest):
            journal.over(NO_WEIGHTS)
            return
        if newest is not None:
            membership.doubt_those_ahead(newest + MAX_ROUNDS_BEHIND)
            journal.warn(f"nobody gave newer weights: going on with this node's own of round {newest}")
            return
        membership.credit.lose(self._asked_in_vain, trio.current_time())
        if not membership.is_beginning():
            raise JoinError(
                "step 4, weights: the run is under way, but no member gave weights that are fit within "
                f"{WEIGHTS_TIMEOUT:g} s. The last warning says why; try again later."
            )
        journal.warn("members that claim to be far on gave no weights; the others begin, and so does this node")

    async def _await_room(self, stage: int) -> None:
        """Wait until the disk has room for a stage's blocks and the file that is made of them.

        A shortage is told of before a peer is asked for any byte.
        """
        path = self.files.fetched(stage)

        def shortage() -> str:
            try:
                here = sum(
                    SECTOR * part.stat().st_blocks for part in path.parent.glob(f"{path.name}.*{PARTIAL_SUFFIX}")
                )
                self._downloads.conditions.room.check(path.parent, max(0, 2 * self.files.required_bytes(stage) - here))
            except OSError as error:
                return error.strerror or str(error)
            return ""

        while words := await trio.to_thread.run_sync(shortage):
            self._journal.enter("fetching weights", words, "room on the disk")
            self._journal.warn(f"the disk has no room for the run's weights; {words}", _NO_ROOM)
            await trio.sleep(ROOM_INTERVAL)
        self._journal.over(_NO_ROOM)

    def _is_behind(self, newest: int | None) -> bool:
        """Return whether the weights that are here, of this round, are too old."""
        return self._membership.current_round() - (newest or 0) > (0 if newest is None else MAX_ROUNDS_BEHIND)

    def _begin_seeking(self) -> None:
        self._asked_in_vain.clear()
        self._refused.clear()
        self._disputed.clear()

    async def _seek(self, stage: int, own_round: int | None, newest: int | None) -> bool:
        """Look for weights until some are here, or the search fails, or none are needed (then with a warning)."""
        journal = self._journal
        began_at = said_at = trio.current_time()

        def show(progress: FetchProgress) -> None:
            """Show a download's progress: always on the journal, now and then to the person at the terminal."""
            nonlocal said_at
            journal.enter("fetching weights", str(progress), "members' weights")
            if trio.current_time() >= said_at + SAY_INTERVAL:
                said_at = trio.current_time()
                journal.say(str(progress))

        while trio.current_time() < began_at + WEIGHTS_TIMEOUT:  # no download is cut short: each has its own limits
            if await self._fetch(stage, own_round or 0, show):
                return True
            if own_round is None and self._is_unheard_of(stage) and trio.current_time() >= began_at + SEED_AFTER:
                origin = "seed" if self.files.manifest.start is None else "starting checkpoint"
                journal.warn(
                    f"NOBODY HAS THE WEIGHTS OF STAGE {stage}: its members are gone, and there is no backup. It "
                    f"begins again from the run's {origin}; what it had learnt is lost"
                )
                return True
            if trio.current_time() >= began_at + DISPUTED_AFTER:  # there are no better ones
                for found in random.sample(list(self._disputed.values()), len(self._disputed)):
                    if await self._take(*found, show, is_last_resort=True):
                        return True
            await trio.sleep(WEIGHTS_RETRY)
            if newest is not None and not self._is_behind(newest):
                return True  # partners have come that are not ahead
        return False

    def _note_verdict(self, own_round: int | None, fetched_round: int | None) -> bool:
        """Doubt what was taken last if it is gone without becoming this node's own: the trainer judged it unfit.

        Returns whether that is so.
        """
        if self._on_trial is None or fetched_round is not None:
            return False
        (index, donors), self._on_trial = self._on_trial, None
        if own_round is not None and own_round >= index.round:
            return False
        names = self._doubt(index, donors)
        self._journal.warn(f"the weights of round {index.round} are unfit: {names} is not believed for a while")
        return True

    def _doubt(self, index: Index, donors: Sequence[bytes]) -> str:
        """Take credit for unfit weights from their author, and from repeat donors of unfit copies; return the names.

        Donors do not judge the copies that they keep.
        """
        self._unfit_copies.update(donors)
        doubted = {index.author, *(donor for donor in donors if self._unfit_copies[donor] >= MAX_UNFIT_COPIES)}
        self._membership.credit.lose(doubted, trio.current_time())
        return ", ".join(sorted(map(short_name, doubted)))

    async def fetch_ahead(self, stage: int) -> bool:
        """Fetch a stage's weights before a move, during training; return whether they are here or no member has any."""
        self._begin_seeking()
        return await self._fetch(stage, 0, lambda progress: None) or (
            self._is_unheard_of(stage) and not self._membership.donors(0, stage)
        )

    def _is_unheard_of(self, stage: int) -> bool:
        """Return whether no member announces weights of this stage of a model that is cut."""
        return self.files.num_stages > 1 and not self._membership.notices(stage)

    async def _fetch(self, stage: int, after: int, show: Show) -> bool:
        """Fetch what several have, or a member's newest, or a copy of a lost member's; return whether it succeeded."""
        membership = self._membership
        notices, path = membership.notices(stage), self.files.fetched(stage)
        oldest = max(after, membership.current_round() - MAX_ROUNDS_BEHIND - 1)
        recent = max(after, membership.current_round() - MAX_ROUNDS_OLDER - 1)
        told = [
            Choice(notice.id, notice.round, tuple(membership.holders(stage, notice.id)))
            for notice in itertools.chain.from_iterable(notices.values())
            if notice.round > after
        ]
        # First what an earlier attempt, or life, has fetched in part, and a member has whole.
        begun = [choice for choice in told if choice.round > oldest and partial_path(path, choice.id).exists()]
        for choice in (*begun[:1], *choose(notices, recent, membership.networks())):
            if choice.id not in self._taken and await self._fetch_chosen(choice, stage, show):
                return True
        donors = sorted(membership.donors(after, stage), key=lambda donor: donor in self._asked_in_vain)
        if await self._fetch_newest(donors[:MAX_ASKED], stage, show):
            return True
        if self.files.num_stages == 1:
            return False
        for choice in sorted(told, key=lambda each: -each.round):
            if await self._fetch_chosen(choice, stage, show):
                return True
        return await self._take_own_copy(stage, after, show)

    async def _fetch_chosen(self, choice: Choice, stage: int, show: Show) -> bool:
        """Fetch a checkpoint by its id; its index comes from the first holder that gives it."""
        for holder in choice.holders:
            found = await self._ask(holder, stage, choice.id)
            if found is not None:
                return await self._take(*found, choice.holders, show)
        return False

    async def _fetch_newest(self, donors: Iterable[bytes], stage: int, show: Show) -> bool:
        """Fetch the newest checkpoint of one of these; from others too, if they hold it."""
        again: list[_Found] = []
        for donor in donors:
            found = await self._ask(donor, stage)
            if found is not None and found[0].id in self._taken:  # it was not good: again only if there are no others
                again.append((*found, (donor,)))
            elif found is not None and await self._take(*found, (donor,), show):
                return True
        for found_again in again:
            if await self._take(*found_again, show):
                return True
        return False

    async def _ask(self, donor: bytes, stage: int, known: bytes | None = None) -> tuple[SignedIndex, Index] | None:
        try:
            signed, index = await self._downloads.ask(donor, stage, known)
            most = self._membership.current_round() + MAX_LEAP
            if self.files.num_stages == 1 and index.round > most:
                raise PeerUnreachableError(f"its weights claim round {index.round}, members are in {most} at most")
            return signed, index
        except PeerUnreachableError as error:
            self._asked_in_vain.add(donor)
            self._journal.warn(f"no weights from {short_name(donor)}: {error}", NO_WEIGHTS)
            return None

    async def _take(
        self, signed: SignedIndex, index: Index, donors: tuple[bytes, ...], show: Show, *, is_last_resort: bool = False
    ) -> bool:
        """Fetch what this node's trainer needs of a stage's checkpoint; return whether it succeeded."""
        if index.author in self._refused or (index.author in self._disputed and not is_last_resort):
            return False
        path, is_fit = self.files.fetched(index.stage), False
        holders = frozenset((*donors, *self._membership.holders(index.stage, signed.id)))
        async with open_comparison(self._downloads, index, holders) as judge:
            fetched = await self._downloads.fetch(signed, index, donors, path, show, is_copy=False)
            if fetched is None:
                return False
            try:
                is_fit = await self._is_fit((signed, index, donors), fetched, judge, is_last_resort=is_last_resort)
            finally:
                if not is_fit:  # or this node ends before that is known: a next life would use the file as it is
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(path.unlink)
        if not is_fit:
            return False
        self._on_trial = index, tuple(fetched.num_by_donor)
        what = "weights" if self.files.num_stages == 1 else f"weights of stage {index.stage},"
        names = ", ".join(map(short_name, fetched.num_by_donor)) or "this node's own copy"
        size = self.files.required_bytes(index.stage)
        self._journal.say(f"{what} of round {index.round} from {names}: {size / 1e6:.1f} MB, hashes verified")
        return True

    async def _is_fit(self, found: _Found, fetched: Fetched, judge: Judge, *, is_last_resort: bool) -> bool:
        """Return whether fetched weights are of the round that their author states, and like other members' weights.

        If most members' are far, the author is doubted. If the only answering member's are, that member may be the
        liar: neither is doubted, so that neither can have the other's word discounted.
        """
        signed, index, _ = found
        journal, author = self._journal, index.author
        self._taken.add(signed.id)
        if (await self.rounds())[1] not in (None, index.round):
            journal.warn(f"{short_name(author)} lied about the round of its weights")
            self._membership.credit.lose([author], trio.current_time())
            return False
        if journal.state.phase == "fetching weights":  # not while this node trains, and would move to another stage
            journal.enter(journal.state.phase, "comparing the weights with other members'", "other members' sketches")
        whose = f"the weights of round {index.round} from {short_name(author)}"
        judgement = await judge(self.files.fetched(index.stage))
        match judgement.verdict:
            case SketchVerdict.FIT:
                journal.note(f"{whose} are {judgement}")
            case SketchVerdict.UNKNOWN:
                judges = "their loss on held-out text" if self.files.num_stages == 1 else "their magnitude"
                num_silent = judgement.num_silent
                why = f"none of {num_silent} members answered" if num_silent else "there is none"
                journal.say(f"{whose} are not compared with another member's: {why}. Only {judges} is judged")
            case SketchVerdict.DISPUTED:
                journal.warn(f"{whose} are {judgement}: they are taken only if there are no others")
                self._disputed[author] = found
                return is_last_resort
            case SketchVerdict.UNFIT:
                self._refused.add(author)
                names = self._doubt(index, tuple(fetched.num_by_donor))
                journal.warn(f"{whose} are {judgement}: {names} is not believed for a while")
                return False
        return True

    async def _take_own_copy(self, stage: int, after: int, show: Show) -> bool:
        """Take the copy that this node kept for others: its blocks are verified again, and no peer is asked."""
        copy = self.provider.copy
        if copy is None or copy.index.stage != stage or copy.index.round <= after:
            return False
        kept, path = self.provider.copy_path(stage, copy.id), partial_path(self.files.fetched(stage), copy.id)
        try:
            await trio.to_thread.run_sync(shutil.copyfile, kept, path)
        except OSError as error:
            self._journal.warn(f"this node's own copy of stage {stage} cannot be used: {error}")
            return False
        return await self._take(copy.signed, copy.index, (), show)

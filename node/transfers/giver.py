"""Gives checkpoints to peers, and keeps the ones that it can give: open files, each with its signed index.

They stay open so that an announced one remains readable when its file is replaced or removed: a trainer saves again,
and keeps two, long before all peers have heard of the newest. A node gives what its trainer saved (once more if it is
old), the copy that it keeps of another node's checkpoint, and the starts of its rounds (`Provider`).

`farandole.protocol.checkpoints.copies` decides which checkpoints are copied: one of every stage, at two more nodes, or,
if the model is cut, at the nodes of the stage before, so that a stage whose members are all gone is not lost. A copy
lies in the folder of the node's own checkpoints. It consists of the author's first blocks, up to the last that a
newcomer needs, and the author's index; so it survives a restart.

Serving blocks does no harm to this node's own training. A few peers are served at once, each over a stream and, where
there is a route, a bulk channel. They share the node's upload round-robin: under a bandwidth cap the shaper serves
pieces in the order of the requests, and each peer has one piece at a time in flight. Peers over the limit get a
retry-after. A peer that has been served for a while then makes room. So no peer has to wait for another's whole
checkpoint, and no slow reader keeps others out.

While the node's own exchange runs, blocks get a tenth of the time: the run's rounds come first. For that, only a small
part of the data may wait in the kernel, where it would go before the exchange.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.checkpoints import block_transfer as messages
from farandole.protocol.checkpoints import blocks
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import Index, SignedIndex
from farandole.protocol.checkpoints.copies import MAX_ROUNDS_OLDER, is_copier, ranked
from farandole.protocol.exchange.pipe import BULK_FROM, Pipe, RouteStep
from farandole.protocol.trainer.trainer_messages import KEPT_STARTS, Saved
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.identity import public_bytes, short_name

from ..base.errors import PeerUnreachableError
from ..base.streams import Stream, receive_frame
from ..bulk.exchange_service import ExchangeService
from ..bulk.pipe import BulkPipe, Outgoing, Patience
from ..state.membership import COPY_SLOT, OWN_SLOT
from ..store.consolidated.tensors import ConsolidatedError, open_tensors, write_file
from ..store.disk_space import save_seconds
from ..store.folder import index_of
from .block_file import PARTIAL_SUFFIX, BlockFile
from .receiver import ANSWER_TIMEOUT, Conditions, DonorBusyError, Downloads, fresh_save_timeout

logger = logging.getLogger(__name__)

# Starts of false rounds that are kept; each takes as much of the disk as a checkpoint.
KEPT_PROOFS: Final = 2


class Holding(BlockFile):
    """A checkpoint's first ``num_held`` blocks, as many as the file at ``path`` has."""

    def __init__(self, path: Path, signed: SignedIndex, index: Index) -> None:
        super().__init__(path, os.O_RDONLY)
        self.path = path
        self.id = signed.id
        self.signed = signed
        self.index = index
        self.num_held = blocks.num_blocks(index.size) if self.size >= index.size else self.size // blocks.BLOCK_BYTES
        if not self.num_held:
            raise OSError(f"{path.name} holds no block of its checkpoint")

    def read(self, block: int) -> bytes:
        """Read one of the blocks that are held. Blocks; raises `OSError`."""
        return self.read_range(*blocks.block_range(self.index.size, block))


# Own checkpoints that are kept open in addition to announced ones: the newest, and the one that is being announced.
NUM_OPEN: Final = 2
# A newcomer that asks for weights waits for the answer (`receiver.ANSWER_TIMEOUT`); a save must be shorter. For a large
# checkpoint both ends wait longer (`receiver.fresh_save_timeout`).
FRESH_SAVE_TIMEOUT: Final = 6.0
# An announcement of a held checkpoint lives for a day (`farandole.protocol.state.entries`), and a copy of a stage that
# no node holds any more may have to wait longer than that for a node.
TELL_INTERVAL: Final = 6 * 3_600.0

COPY_SUFFIX: Final = ".blocks"
# Copies take no more than this share of the time for downloads, however large the stage or slow the line.
COPY_SHARE: Final = 0.1
# An author that did not give the checkpoint to copy is skipped for this long: the next copy is another author's.
PASS_OVER_SECONDS: Final = 300.0


class Provider:
    """The checkpoints that one node gives: its own, and a copy of another node's, which it keeps up to date.

    To peers that replay rounds it gives the starts of its own newest rounds, and of false ones. They are ordinary
    checkpoints that no node announces: a peer learns the id from a commitment. Methods raise no `OSError`: what cannot
    be opened is not provided.
    """

    def __init__(self, key: Ed25519PrivateKey, downloads: Downloads) -> None:
        self.copy: Holding | None = None
        """The copy that it keeps of another node's checkpoint."""
        self.trainer_stage: int | None = None
        """The stage of the trainer that was last started."""
        self.save_rate: float | None = None
        """Bytes a second at which the last checkpoint was written; None if none was measured."""
        self._key = key
        self._downloads = downloads
        self._files = downloads.files
        self._membership = downloads.membership
        self._own: list[Holding] = []
        self._starts = deque[Holding](maxlen=KEPT_STARTS)
        self._proofs = deque[Holding](maxlen=KEPT_PROOFS)
        self._unopened: tuple[Saved, int] | None = None  # the trainer's newest, and its stage
        self._has_unopened = trio.Event()
        self._has_saved = trio.Event()
        self._save_wanted = trio.Event()
        self._passed_over: dict[bytes, float] = {}  # until when

    @property
    def newest(self) -> Holding | None:
        """Return this node's own newest checkpoint."""
        return self._own[-1] if self._own else None

    # Questions of other nodes

    async def find(self, question: BlockQuestion) -> Holding | None:
        """Return what is asked for; the newest is saved again when it is old."""
        if question.id is None and question.stage == self._membership.stage:
            return await self.find_own(question.stage)
        held = [each for each in (*self._own, self.copy, *self._starts, *self._proofs) if each is not None]
        found = self.copy if question.id is None else next((each for each in held if each.id == question.id), None)
        return found if found is not None and found.index.stage == question.stage else None

    async def find_own(self, stage: int) -> Holding | None:
        """Return this node's own newest checkpoint of a stage, saved again when it is old."""
        if stage != self._membership.stage:
            return None
        if self.newest is None or self._downloads.journal.state.round - self.newest.index.round > MAX_ROUNDS_OLDER:
            if self._has_saved.is_set():  # otherwise another newcomer waits for the same save
                self._has_saved = trio.Event()
            self._save_wanted.set()
            # The trainer may take too long to save: then the newcomer gets the older one, and the next one the new one.
            size = self._files.max_bytes(stage)
            patience = FRESH_SAVE_TIMEOUT + fresh_save_timeout(size)
            is_in_vain = self.save_rate is not None and save_seconds(size, self.save_rate) > patience
            with trio.move_on_after(0.0 if is_in_vain and self.newest is not None else patience):
                await self._has_saved.wait()
        return self.newest if self.newest is not None and self.newest.index.stage == stage else None

    async def save_wanted(self) -> None:
        """Wait until a peer wants a newer checkpoint than there is."""
        await self._save_wanted.wait()
        self._save_wanted = trio.Event()

    # Its own checkpoints

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
        self._own.clear()

    async def run(self) -> None:
        """Open what the trainer saves, keep a copy, and announce both before the run forgets them, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._open_own)
            nursery.start_soon(self._keep_copy)
            while True:
                await trio.sleep(TELL_INTERVAL)
                for holding in (self.newest, self.copy):
                    if holding is not None:
                        await self._announce(holding)

    async def _announce(self, holding: Holding) -> None:
        slot = COPY_SLOT if holding is self.copy else OWN_SLOT
        await self._membership.announcer.tell_held(slot, holding.id, holding.index)

    async def _open(self, saved: Saved, stage: int) -> Holding | None:
        """Open a checkpoint that the trainer has written, and sign its index; None if it is not there any more."""

        def open_saved() -> Holding:
            path = Path(saved.path)
            with open_tensors(path) as file:
                layout = bytes.fromhex(file.metadata.get("layout", ""))
            index = Index(
                run_id=self._downloads.conditions.run_id,
                author=public_bytes(self._key),
                stage=stage,
                num_stages=self._files.num_stages,
                round=saved.round,
                inner_steps=saved.inner_steps,
                tokens=saved.tokens,
                size=saved.size,
                layout=layout,
                hashes=saved.hashes,
            )
            holding = Holding(path, blocks.sign_index(self._key, index), index)
            if not index.is_block(0, holding.read(0)):  # which has the counters
                raise OSError(f"{path.name} has been replaced since")
            return holding

        try:
            return await trio.to_thread.run_sync(open_saved)
        except (OSError, ConsolidatedError, ValueError) as error:
            logger.warning("the checkpoint of round %d cannot be given to others: %s", saved.round, error)
            return None

    async def _open_own(self) -> None:
        while True:
            await self._has_unopened.wait()
            self._has_unopened = trio.Event()
            assert self._unopened is not None
            saved, stage = self._unopened
            if stage != self._membership.stage:
                continue
            if (holding := await self._open(saved, stage)) is not None:
                try:
                    raw = blocks.encode_signed_index(holding.signed)
                    await trio.to_thread.run_sync(write_file, index_of(holding.path), raw)
                except OSError as error:  # a full disk: the checkpoint is there all the same
                    logger.warning("the index of %s is not written: %s", saved.path, error)
                told = self._membership.told_checkpoints()
                older = [each for each in self._own[: 1 - NUM_OPEN] if each.id in told]
                self._own = [*older, *self._own[1 - NUM_OPEN :], holding]
                await self._announce(holding)
            self._has_saved.set()

    # Starts of rounds

    async def open_start(self, saved: Saved) -> bytes | None:
        """Open the start of an own round, and close the oldest ones; return its id, or None if it is not there."""
        if (holding := await self._open(saved, 0)) is None:
            return None
        self._starts.append(holding)
        return holding.id

    async def make_room(self, checkpoint_id: bytes) -> Path:
        """Return the path to fetch another node's start to; all other files but the proofs are removed."""
        path = self._files.settings.checkpoints / "replays" / f"{checkpoint_id.hex()[:16]}.safetensors"

        def clear() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            for other in set(path.parent.iterdir()) - {path, *(proof.path for proof in self._proofs)}:
                other.unlink(missing_ok=True)

        with contextlib.suppress(OSError):  # the download says what is wrong
            await trio.to_thread.run_sync(clear)
        return path

    def keep_proof(self, path: Path, signed: SignedIndex, index: Index) -> None:
        """Open the start of a false round as well, and close the oldest ones."""
        with contextlib.suppress(OSError):
            self._proofs.append(Holding(path, signed, index))

    # The copy of another node's

    def copy_path(self, stage: int, checkpoint_id: bytes) -> Path:
        """Return the path for a copy."""
        return self._files.settings.checkpoints / f"copy-{stage}-{checkpoint_id.hex()[:16]}{COPY_SUFFIX}"

    async def _keep_copy(self) -> None:
        """Take up an earlier life's copy of this run, and keep it new, until cancelled."""
        folder, run_id = self._files.settings.checkpoints, self._downloads.conditions.run_id
        max_size = max(map(self._files.max_bytes, range(self._files.num_stages)))

        def open_copy(path: Path) -> Holding:
            with index_of(path).open("rb") as file:
                raw = file.read(blocks.max_index_bytes(max_size) + 1)
            return Holding(path, *blocks.decode_signed_index(raw, run_id, max_size))

        if not self._has_room():
            await self._take(None)
        # One, unless that life was killed between making a new one and removing the old.
        for path in await trio.to_thread.run_sync(lambda: sorted(folder.glob(f"copy-*{COPY_SUFFIX}"))):
            with contextlib.suppress(OSError, RemoteProtocolError):
                await self._take(await trio.to_thread.run_sync(open_copy, path))
                break
        pause = interval = self._files.settings.backup_seconds
        while True:
            await trio.sleep(pause * random.uniform(0.75, 1.25))
            began_at = trio.current_time()
            await self._copy_newest()
            pause = max(interval, (trio.current_time() - began_at) / COPY_SHARE)

    def _has_room(self) -> bool:
        return self._files.plan(self._membership.stage).has_copy

    async def _take(self, holding: Holding | None) -> None:
        """Provide this copy instead of older ones, and remove these; None: there is no room for any."""
        self.copy = holding
        if holding is not None:
            await self._announce(holding)
        await trio.to_thread.run_sync(self._remove, holding and holding.path)

    def _remove(self, kept: Path | None, suffix: str = "*") -> None:
        """Remove the files of all copies but the one kept."""
        for path in self._files.settings.checkpoints.glob(f"copy-*{COPY_SUFFIX}{suffix}"):
            if kept is None or not path.name.startswith(kept.name):
                with contextlib.suppress(OSError):
                    path.unlink()

    async def _copy_newest(self) -> None:
        stage = self._files.copied_stage(self._membership.stage)
        if not self._has_room():
            if self.copy is not None:  # the text that was tokenised since needs its room
                await self._take(None)
            return
        conditions, own, membership = self._downloads.conditions, self._downloads.host.author, self._membership
        now, announced = trio.current_time(), membership.announced(stage)
        self._passed_over = {peer: until for peer, until in self._passed_over.items() if until > now}
        authors = ranked(conditions.run_id, stage, announced.keys() - self._passed_over.keys())
        author = authors[0] if authors else own
        if author == own or not conditions.shaping.may_spend(self._files.required_bytes(stage)):
            return
        members = membership.nodes_of_stages()[stage]
        if self._files.num_stages == 1 and not is_copier(conditions.run_id, stage, members, author, own):
            return
        notice = announced[author]
        if self.copy is not None and self.copy.id == notice.id:
            return
        try:
            signed, index = await self._downloads.ask(author, stage, notice.id)
        except DonorBusyError:
            return  # it serves others, and this node next time
        except PeerUnreachableError as error:
            self._downloads.journal.warn(f"no copy from {short_name(author)}: {error}")
            self._passed_over[author] = trio.current_time() + PASS_OVER_SECONDS
            return
        path = self.copy_path(stage, signed.id)

        def keep() -> Holding:
            write_file(index_of(path), blocks.encode_signed_index(signed))
            return Holding(path, signed, index)

        with contextlib.suppress(OSError):  # the download says what is wrong
            await trio.to_thread.run_sync(partial(path.parent.mkdir, exist_ok=True))
        # On a slow line newer ones may keep coming before one is complete.
        await trio.to_thread.run_sync(self._remove, path, f".*{PARTIAL_SUFFIX}")
        if await self._downloads.fetch(signed, index, (author,), path, lambda progress: None, is_copy=True) is not None:
            try:
                await self._take(await trio.to_thread.run_sync(keep))
            except OSError as error:
                logger.warning("the copy of round %d cannot be kept: %s", index.round, error)


# Service to peers

# Peers served at once. With an upload cap, as many as get more than `MIN_SHARE` of half of it, the other half being for
# exchanges, but at least one.
MAX_SERVED: Final = 4
MIN_SHARE: Final = 64 * 1024
# A peer that asks for nothing for this long has what it needs, or waits for another's blocks.
IDLE_TIMEOUT: Final = 20.0
# The minimum time for which a peer is served while others wait: on a line of 20 Mbit/s that is 75 MB. Then it has this
# long to take the block that is in flight.
TURN_SECONDS: Final = 30.0
GRACE_SECONDS: Final = 10.0
# Retry-after for a peer that is served over another stream: that may be about to close.
CLOSING_SECONDS: Final = 0.5
# Retry-after for a peer whose turn is over: others have come by then.
TURNED_OUT_SECONDS: Final = 5.0
# Retry-after for all peers while this node saves its month's traffic, which takes hours: other donors serve them.
SAVING_SECONDS: Final = 30.0
# Where a block takes long, or an exchange runs, blocks move in pieces of this size: a tenth of a second on a line of
# 20 Mbit/s. No more than this waits in the kernel of a channel.
PIECE_BYTES: Final = 256 * 1024
LONG_SECONDS: Final = 0.1
# A rest between two pieces while an exchange runs: nine times as long as the piece took, but short enough that the
# waiting peer does not take this node for dead (`block_transfer.SILENCE`).
REST: Final = 9.0
MAX_REST: Final = 2.0
# The share of the slowest piece's pace that is kept at the next one.
FORGETTING: Final = 0.9
# The peer that needs blocks opens the channel, and takes what it has asked for.
PATIENCE: Final = Patience(route=ANSWER_TIMEOUT, answer=ANSWER_TIMEOUT, write=messages.BLOCK_TIMEOUT)

Find = Callable[[BlockQuestion], Awaitable[Holding | None]]
"""Returns the checkpoint that is asked for; None if it is not here."""


class BlockService:
    """Serves blocks of the checkpoints that ``find`` finds, of one run. ``exchanges`` take precedence."""

    def __init__(self, conditions: Conditions, find: Find, exchanges: ExchangeService | None = None) -> None:
        self._conditions = conditions
        self._find = find
        self._exchanges = exchanges
        rate = conditions.shaping.up.rate
        self._max_served = min(MAX_SERVED, max(1, int(rate / (2 * MIN_SHARE)))) if rate else MAX_SERVED
        self._served: dict[bytes, _Turn] = {}
        """The peers that are served, in the order in which they came."""
        conditions.host.set_handler(messages.BLOCKS_PROTOCOL, self.serve)

    async def serve(self, stream: Stream) -> None:
        """Serve one peer, until it has what it needs. Peers that had their turn are asked to make room for another."""
        parser, peer, shaping = FrameParser(messages.MAX_MESSAGE_BYTES), stream.peer, self._conditions.shaping
        with trio.fail_after(ANSWER_TIMEOUT):
            question = messages.decode_question(await receive_frame(stream, parser))
        refusal: messages.Absent | messages.Busy | None = None
        if question.run_id != self._conditions.run_id:
            refusal = messages.Absent()
        elif not shaping.may_spend(blocks.BLOCK_BYTES):
            refusal = messages.Busy(SAVING_SECONDS)
        elif peer in self._served:
            refusal = messages.Busy(CLOSING_SECONDS)
        elif len(self._served) >= self._max_served:
            oldest = next(iter(self._served.values()))
            oldest.end_after_turn()
            refusal = messages.Busy(max(1.0, oldest.ends_at - trio.current_time()))
        if refusal is not None:
            await _answer(stream, refusal)
            return
        turn = self._served[peer] = _Turn(self._conditions, self._exchanges)
        try:
            with turn.scope:
                stream.is_bulk = False
                if (holding := await self._find(question)) is None:
                    await _answer(stream, messages.Absent())
                    return
                channels, size = self._conditions.channels, holding.index.size
                index = b"" if question.has_index else blocks.encode_signed_index(holding.signed)
                with channels.expecting(peer) if channels else contextlib.nullcontext():
                    await _answer(stream, messages.Here(holding.num_held, index), messages.max_answer_bytes(size))
                    await turn.give(stream, parser.take_rest(), holding)
        finally:
            del self._served[peer]


class _Turn:
    """The time for which a peer is served, and the blocks that it gets in it: at the pace that exchanges leave."""

    def __init__(self, conditions: Conditions, exchanges: ExchangeService | None) -> None:
        self.scope = trio.CancelScope()
        self.ends_at = trio.current_time() + TURN_SECONDS
        self._conditions = conditions
        self._shaping = conditions.shaping
        self._exchanges = exchanges
        self._pace = 0.0  # seconds a byte
        self._gives_until = math.inf

    def end_after_turn(self) -> None:
        """End the service after its turn, because others are waiting."""
        self._gives_until = self.ends_at
        self.scope.deadline = max(trio.current_time(), self.ends_at) + GRACE_SECONDS

    async def give(self, stream: Stream, received: bytes, holding: Holding) -> None:
        """Give blocks until the peer goes, falls silent, or others have their turn.

        ``received`` was read from the stream before.
        """
        pipe = Pipe(False, max_message_bytes=messages.MAX_MESSAGE_BYTES, is_large=holding.index.size >= BULK_FROM)
        channels, shaping = self._conditions.channels, self._shaping
        max_unsent = None if shaping.up.rate else PIECE_BYTES  # a cap already limits what waits in the kernel
        bulk = BulkPipe(pipe, stream, channels, shaping, max_unsent, self.piece_bytes, self.rest)
        wanted, has_more = messages.Wanted(holding.num_held), trio.lowlevel.ParkingLot()

        async def hear(payload: bytes) -> None:
            message = messages.decode_asked(payload)
            match message:
                case _ if bulk.pipe.step is RouteStep.UNROUTED:
                    raise RemoteProtocolError(f"{type(message).__name__} before the route")
                case messages.Want():
                    wanted.add(message)
                    has_more.unpark_all()
                case messages.Forget(block):
                    wanted.forget(block)

        async def read() -> None:
            await bulk.run(hear, received=received)
            nursery.cancel_scope.cancel()

        def announce(block: int, data: memoryview) -> tuple[bytes, Outgoing]:
            bulk.pipe.offer(block, data.nbytes)
            return bulk.pipe.send_message(messages.encode(messages.Give(block))), Outgoing(data)

        bulk.begin(PATIENCE)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                while trio.current_time() < self._gives_until and self._shaping.may_spend(blocks.BLOCK_BYTES):
                    if not wanted:
                        with trio.move_on_after(IDLE_TIMEOUT) as patience:
                            await has_more.park()
                        if patience.cancelled_caught:
                            break
                        continue
                    block = wanted.pop()
                    data = memoryview(await trio.to_thread.run_sync(holding.read, block))
                    with trio.fail_after(messages.BLOCK_TIMEOUT):
                        await bulk.send(partial(announce, block, data))
                else:
                    bulk.post(bulk.pipe.send_message(messages.encode(messages.Busy(TURNED_OUT_SECONDS))))
                    with trio.fail_after(ANSWER_TIMEOUT):
                        await bulk.drain()
                nursery.cancel_scope.cancel()
        except* (RemoteProtocolError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass  # the cause does not matter: the peer asks again, or asks another donor
        finally:
            bulk.close()

    def piece_bytes(self) -> int:
        """Return the maximum size of the next piece over a channel."""
        is_exchanging = self._exchanges is not None and self._exchanges.is_exchanging
        return PIECE_BYTES if self._pace * blocks.BLOCK_BYTES > LONG_SECONDS or is_exchanging else blocks.BLOCK_BYTES

    async def rest(self, num_bytes: int, seconds: float) -> None:
        """Wait while an exchange runs, after a piece of ``num_bytes`` that took ``seconds``."""
        # That is the line's pace only where the piece had to wait: after a rest there is room in buffers.
        rate = self._shaping.up.rate
        self._pace = max(seconds / num_bytes, FORGETTING * self._pace, 1 / rate if rate else 0.0)
        if self._exchanges is not None:
            with trio.move_on_after(min(REST * self._pace * num_bytes, MAX_REST)):
                await self._exchanges.wait_quiet()


async def _answer(stream: Stream, message: messages.Answered, max_bytes: int = messages.MAX_MESSAGE_BYTES) -> None:
    with trio.fail_after(ANSWER_TIMEOUT):
        await stream.send_all(frame(messages.encode(message), max_bytes))

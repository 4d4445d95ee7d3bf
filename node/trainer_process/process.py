"""The trainer: a process of its own, which owns torch and the replica and knows nothing of the network.

It obeys the commands of `farandole.protocol.trainer_messages`, one at a time. While it takes inner steps it looks at
the socket between two of them, so that the end of a round's box is seen within one step. When the mesh process goes
away, however it ends, the socket's end of file ends this one.

A contribution is sent while it is encoded, and the partner's is decoded while it arrives. How far either is stands in a
counter in the memory that both processes share (`farandole.node.base.system.memory.SharedCounter`). A count of an
earlier exchange is never believed: each exchange has a number of its own, the counter's epoch.

The next round may begin while the exchange of the last one runs: `Train` may come before the `TakeOuterStep` of the
round before. The contribution stays as it is in the shared memory, what comes of the partner's is decoded between two
inner steps, where the outer step is taken too, and their progress is kept. A round that is over before then waits for
it, so an outer step is at most one round late.

A checkpoint is written behind the inner steps, by a thread (`farandole.node.store.save`): they wait only for a
copy of what is in it.

Where the replica is on a GPU, a thread encodes the contribution, on a stream of its own, while this one goes on with
the next round's inner steps. Whatever needs the contribution waits for that thread.
"""

from __future__ import annotations

import abc
import contextlib
import mmap
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.protocol.manifest import decode_body
from farandole.protocol.trainer_messages import (
    Command,
    Contributed,
    DrawSlices,
    Encoded,
    FinishRound,
    OuterStepTaken,
    Ping,
    Pong,
    Prepare,
    Prepared,
    Progress,
    Save,
    Saved,
    Screen,
    Screened,
    SlicesTrained,
    Stop,
    TakeInnerStep,
    TakeOuterStep,
    Train,
    UseFragment,
    Validate,
    Validated,
    Work,
)
from farandole.training.durable import replacing
from farandole.training.errors import CheckpointError
from farandole.training.screening.history import MAX_BYTES, Histories
from farandole.training.screening.rule import Encounter, Refuse

from ..base.system.memory import MAX_EPOCHS, Count, SharedCounter, counted_size, map_shared_memory
from ..store.disk_space import plan_disk, used_bytes
from ..store.folder import CheckpointFolder, known_hashes
from ..store.save import Saver
from ..trainer.channel import TrainerSocket

if TYPE_CHECKING:
    from farandole.training.replica import Replica

PROGRESS_INTERVAL = 0.5
# How often to look, in seconds, how much of the partner's contribution has arrived, while there is nothing else to do.
LOOK_INTERVAL = 0.005


class UnfitWeightsError(Exception):
    """A peer gave a checkpoint that cannot be used; another's may do."""


class TrainerProcess(abc.ABC):
    """Carries out commands on one replica. What inner steps are, its subclasses say."""

    def __init__(self, channel: TrainerSocket, prepare: Prepare, replica: Replica, activation_bytes: int = 0) -> None:
        self._channel = channel
        self._author = prepare.author
        self._slow = prepare.slow
        self._run_id = prepare.run_id
        self._checkpoints = CheckpointFolder(Path(prepare.checkpoints), prepare.stage)
        text_bytes = used_bytes(Path(prepare.cache)) if prepare.cache else 0  # known by now
        plan = plan_disk(prepare.disk, prepare.checkpoint_bytes, copy_bytes=0, text_bytes=text_bytes)
        self._saver = Saver(self._checkpoints, channel.send, plan.num_kept)
        self._fragment = 0
        self._aside = ThreadPoolExecutor(1)
        self._encoding: Future[None] | None = None  # where the replica encodes aside
        self._size = 0  # of the newest contribution, and of the partner's for it
        self._round = 0
        self._tokens_before = 0  # this round
        self._round_began_at = self._reported_at = 0.0
        self._began_at: float | None = None
        self._busy_seconds = 0.0  # spent in inner steps
        self._replica = replica
        resumed, problem = self._resume(Path(prepare.fetched) if prepare.fetched else None)
        if resumed is None:
            self._begin(prepare)
        self._load_histories()
        size = replica.contribution_bytes
        self._outgoing: mmap.mmap = map_shared_memory(prepare.outgoing, counted_size(size))
        self._incoming: mmap.mmap = map_shared_memory(prepare.incoming, counted_size(size))
        self._encoded, self._arrived = SharedCounter(self._outgoing), SharedCounter(self._incoming)
        self._taken = self._arrived.read()
        for memory in (self._outgoing, self._incoming):
            replica.pin(memoryview(memory))
        channel.send(
            Prepared(
                device=replica.device.description,
                num_parameters=replica.layout.num_elements,
                contribution_bytes=size,
                layout=replica.layout.hash,
                round=replica.round,
                inner_steps=replica.steps,
                tokens=replica.tokens,
                activation_bytes=activation_bytes,
                num_slices=0 if replica.slices is None else replica.slices.num_slices,
                corpus=b"" if replica.slices is None else replica.slices.corpus,
                resumed=resumed,
                problem=problem,
            )
        )

    def _resume(self, fetched: Path | None) -> tuple[Saved | None, str]:
        """The checkpoint that is loaded, if there is one, and what is wrong with those that should have been.

        A peer's becomes this node's own only once it is proved to be fit.
        """
        if fetched is not None and fetched.exists():
            try:
                content = self._replica.load(fetched)
            except CheckpointError as error:
                fetched.unlink()
                raise UnfitWeightsError(f"a peer's weights are unfit: {error}") from error
            return self._saver.adopt(fetched, content, self._replica.counters), ""
        problems: list[str] = []
        for path in self._checkpoints.files():
            try:
                content = self._replica.load(path, known_hashes(path, self._run_id))
            except CheckpointError as error:
                problems.append(str(error))
                continue
            return self._saver.note(path, content, self._replica.counters), "; ".join(problems)
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self._checkpoints.path} can be loaded ({'; '.join(problems)}). Restore them, or "
                "move them away to begin with the weights of others"
            )
        return None, ""

    def _begin(self, prepare: Prepare) -> None:
        """With the weights that the manifest names, if it names any; else the seed has made them already."""
        start = decode_body(prepare.manifest).start
        if start is None:
            return
        path = Path(prepare.start)
        try:
            self._replica.start_from(path, start.inner_steps, start.tokens)
        except CheckpointError as error:
            with contextlib.suppress(OSError):
                path.unlink()  # its bytes were right once: they are again when it comes anew
            raise CheckpointError(
                f"the weights that this run starts from are unfit: {error}. They are removed here: join again to fetch "
                "them anew; if they are unfit again, the run was made with weights that nobody can start from"
            ) from error

    def _load_histories(self) -> None:
        """Continue with what the screening rule remembered of peers; without a file that can be read, with nothing."""
        try:
            with self._checkpoints.histories.open("rb") as file:
                self._replica.histories = Histories.decode(file.read(MAX_BYTES))
        except (OSError, ValueError):
            return

    def _save_histories(self) -> None:
        """Where the disk refuses it, the checkpoint's own save reports that."""
        if encoded := self._replica.histories.encode():
            with contextlib.suppress(OSError):
                self._checkpoints.path.mkdir(parents=True, exist_ok=True)
                with replacing(self._checkpoints.histories) as file:
                    file.write(encoded)

    def handle(self, command: Command) -> None:
        """Do what one command says and report it."""
        match command:
            case Train():
                self._train(command)
            case Screen():
                self._finish_encoding()
                self._look_at(Count(command.number % MAX_EPOCHS, command.size))
                encounter = self._encounter(command.partner, command.partner_tokens)
                verdict = self._replica.screen(memoryview(self._incoming)[: command.size], encounter)
                self._channel.send(Screened(verdict.reason if isinstance(verdict, Refuse) else "", command.number))
            case TakeOuterStep():
                self._take_outer_step(command)
            case Save(is_last):
                self._save(is_last)
            case Validate(num_batches):
                self._channel.send(self._validate(num_batches))
            case Ping():
                self._channel.send(Pong())
            case DrawSlices(epoch, ranges):
                if self._replica.slices is not None:
                    self._replica.slices.assign(epoch, ranges)
            case FinishRound() | UseFragment() | Work() | TakeInnerStep():
                pass  # it crossed our contribution: the round was over by its steps already
            case Prepare() | Stop():
                raise EOFError("asked to stop")

    def _train(self, command: Train) -> None:
        replica = self._replica
        if not replica.awaits_outer_step:
            replica.round = command.round
        self._begin_round(command)
        started_at = time.monotonic()
        if self._began_at is None:
            self._began_at = started_at
        busy_before = self._busy_seconds
        steps, loss = self._take_inner_steps(command)
        self._report_slices()
        seconds = time.monotonic() - started_at
        while replica.awaits_outer_step:
            self._obey(self._await_command(), command.round)
        replica.round = command.round
        self._size = replica.contribution_size(self._fragment)
        self._encoded.store(command.round, 0)
        self._taken = self._arrived.read()  # of an exchange before: what it has left there is of no use
        self._channel.send(
            Contributed(
                round=command.round,
                size=self._size,
                tokens_this_round=replica.tokens_contributed,
                inner_steps_this_round=steps,
                inner_steps=replica.steps,
                tokens=replica.tokens,
                loss=loss,
                seconds=seconds,
                fragment=self._fragment,
                busy_seconds=self._busy_seconds - busy_before,
                utilisation=self._busy_seconds / (time.monotonic() - self._began_at),
            )
        )
        self._begin_encoding(command.round)

    def _begin_round(self, command: Train) -> None:
        self._round, self._tokens_before = command.round, self._replica.tokens
        self._round_began_at = self._reported_at = time.monotonic()

    @abc.abstractmethod
    def _take_inner_steps(self, command: Train) -> tuple[int, float | None]:
        """Train until the round is over; how many steps were taken, and their mean loss, if it is known."""

    def _report_progress(self, steps: int, loss: Callable[[], float | None]) -> None:
        """Between two inner steps, not too often."""
        now = time.monotonic()
        if now - self._reported_at < PROGRESS_INTERVAL:
            return
        self._reported_at = now
        self._report_slices()
        replica = self._replica
        self._channel.send(
            Progress(
                round=self._round,
                inner_steps=replica.steps,
                inner_steps_this_round=steps,
                tokens=replica.tokens,
                loss=loss(),
                tokens_per_second=(replica.tokens - self._tokens_before) / (now - self._round_began_at),
                device_memory=replica.device.memory(),
            )
        )

    def _report_slices(self) -> None:
        """What has been trained on, if there is anything to say."""
        slices = self._replica.slices
        if slices is not None and (ranges := slices.take_trained()):
            self._channel.send(SlicesTrained(slices.epoch, ranges))

    def _begin_encoding(self, round_index: int) -> None:
        """On a GPU, the next round's inner steps need not wait for it."""
        self._finish_encoding()
        self._replica.freeze(self._fragment)
        if self._replica.encodes_aside:
            self._encoding = self._aside.submit(self._encode, round_index)
        else:
            self._encode(round_index)

    def _finish_encoding(self) -> None:
        """Raises what went wrong with it."""
        if self._encoding is not None:
            encoding, self._encoding = self._encoding, None
            encoding.result()

    def _encode(self, round_index: int) -> None:
        """The mesh process sends what is encoded while the rest is."""
        _, digest = self._replica.encode(memoryview(self._outgoing), partial(self._encoded.store, round_index))
        self._channel.send(Encoded(round_index, digest))

    def next_command(self) -> Command:
        """Wait for the next command, and decode meanwhile what arrives of the partner's contribution."""
        return self._channel.receive() if self._channel.has_pending else self._await_command()

    def _await_command(self) -> Command:
        """Wait for the next command that comes, past those that were put off."""
        while True:
            self._take_in()
            command = self._channel.poll(LOOK_INTERVAL if self._replica.awaits_outer_step else None)
            if command is not None:
                return command

    def _take_in(self) -> None:
        """Decode what has arrived of the partner's contribution, unless the own one is still being encoded."""
        if self._encoding is not None and self._encoding.done():
            self._finish_encoding()
        arrived = self._arrived.read()
        if arrived == self._taken or self._encoding is not None:
            return
        self._look_at(arrived)
        self._replica.take_in(memoryview(self._incoming)[: self._size], arrived.value)

    def _look_at(self, arrived: Count) -> None:
        """What was decoded of an exchange before this one is of no use."""
        if arrived.epoch != self._taken.epoch:
            self._replica.take_in(memoryview(self._incoming)[: self._size], 0)
        self._taken = arrived

    def _obey(self, command: Command, round_index: int) -> bool:
        """Do what cannot wait for the round's end, and put off the rest; whether the round ends."""
        match command:
            case FinishRound():
                return command.round == round_index
            case UseFragment():
                if command.round == round_index:
                    self._fragment = command.fragment
            case DrawSlices() | Ping():
                self.handle(command)
            case Screen() | TakeOuterStep() if self._replica.awaits_outer_step:  # of the round before
                self.handle(command)
            case Save():  # of the last outer step: the inner steps do not touch the slow weights
                self.handle(command)
            case Stop():
                raise EOFError("asked to stop")
            case _:
                self._channel.put_off(command)
        return False

    def _take_outer_step(self, command: TakeOuterStep) -> None:
        self._finish_encoding()
        partner = memoryview(self._incoming)[: command.partner_size] if command.partner_size else None
        # Both partners must add in one order, so that they round alike: the lesser key comes first.
        replica, is_first = self._replica, self._author < command.partner
        encounter = self._encounter(command.partner, command.partner_tokens)
        late = replica.outer_step(partner, encounter, own_first=is_first)
        self._channel.send(OuterStepTaken(command.round, late))

    def _encounter(self, partner: bytes, partner_tokens: int) -> Encounter:
        return Encounter(partner, self._replica.tokens_contributed, partner_tokens)

    @abc.abstractmethod
    def _validate(self, num_batches: int) -> Validated:
        """The loss on held-out text."""

    def _save(self, is_last: bool) -> None:
        """A full disk or a failed fsync costs a warning, never the training."""
        self._save_histories()
        replica, newest = self._replica, self._saver.newest
        if newest is not None and replica.is_in(newest.round, newest.inner_steps):
            self._channel.send(newest)
        elif is_last:
            self._saver.save(replica)
        else:
            try:
                snapshot = replica.snapshot()
            except MemoryError as error:
                self._saver.save(replica, f"there is no memory for a snapshot ({error}): training waited for the save")
            else:
                self._saver.save_behind(snapshot)

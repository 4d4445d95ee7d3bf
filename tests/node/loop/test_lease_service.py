"""The keeper with a real run state: its commands to a trainer, its entries in the run state, and its stored facts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from trio.testing import MockClock

from farandole.node.loop.lease_service import SAVE_SECONDS, LeaseService
from farandole.node.status.journal import Journal
from farandole.node.status.status import DataStatus
from farandole.protocol.epochs.lease_claims import SETTLE_SECONDS
from farandole.protocol.run.manifest import DataConfig, EpochsConfig, Manifest, StartConfig
from farandole.protocol.run.slices import Sections, parts
from farandole.protocol.state.believing import Partners
from farandole.protocol.state.entries import Delta, Kind, Lease, LeasedSlices, Payload
from farandole.protocol.state.liveness import Liveness
from farandole.protocol.state.state import RunState
from farandole.protocol.state.writer import Writer
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.wire.identity import public_bytes

from ..small_runs import MODEL
from ..state.test_credentials import Disk

RUN_ID, CORPUS, OTHER_TEXT = b"r" * 32, b"one text", b"another."
NUM_SLICES = 160
MANIFEST = Manifest("tiny", MODEL, data=DataConfig(epochs=2))
ALICE, BOB = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))
PREPARED = messages.Prepared("cpu", 1, 1, b"l" * 32, 0, 0, 0, resumed=None)
# Writers and states must agree on the time. It stands still here, so slots are written further and further ahead.
NOW = 1_800_000_000.0


class Run:
    """The run state, and the authors that write into it."""

    def __init__(self) -> None:
        self.state = RunState(RUN_ID, public_bytes(ALICE))
        self.liveness = Liveness(2.0)
        self.now = NOW

    async def publish(self, kind: Kind, index: int, payload: Payload) -> None:
        self.write(ALICE, index, payload, kind)
        await trio.lowlevel.checkpoint()

    def write(self, key: Ed25519PrivateKey, index: int, payload: Payload, kind: Kind = Kind.LEASE) -> None:
        self.now += 2.0
        writer = Writer(key, RUN_ID)
        if (mark := writer.mark_needed(kind, index, self.now)) is not None:
            writer.marked(mark)
        self.state.merge(Delta((writer.write(kind, index, payload, self.now).signed,)), self.now)

    def said(self, index: int = 0) -> Lease:
        lease = self.state.payload(public_bytes(ALICE), Lease, index)
        assert lease is not None
        return lease


class Node:
    """A keeper, with its outputs to the trainer and to the owner; what it knows and keeps outlives it."""

    def __init__(self, run: Run, disk: Disk, manifest: Manifest = MANIFEST) -> None:
        self.drawn: list[messages.DrawSlices] = []
        self.journal = Journal(lambda text: None)
        self.partners = Partners()
        self.others: frozenset[bytes] = frozenset()
        gossip: Any = run
        store: Any = disk
        membership: Any = self
        self.keeper = LeaseService(manifest, public_bytes(ALICE), gossip, store, self.journal, membership)

    def origins(self) -> frozenset[bytes]:
        return self.others

    def begin(self, corpus: bytes = CORPUS, num_slices: int = NUM_SLICES) -> None:
        prepared = msgspec.structs.replace(PREPARED, num_slices=num_slices, corpus=corpus)
        self.keeper.begin(prepared, self.drawn.append)

    @property
    def status(self) -> DataStatus:
        status = self.keeper.status()
        assert status is not None
        return status

    def train(self) -> None:
        """Train on all slices of the last assignment."""
        if self.drawn and self.drawn[-1].ranges:
            self.keeper.trained(messages.SlicesTrained(self.drawn[-1].epoch, self.drawn[-1].ranges))

    def train_on_three(self) -> tuple[int, int]:
        """Train on three slices of the first assignment, which is one lease; return it."""
        ((first, count),) = self.drawn[-1].ranges
        self.keeper.trained(messages.SlicesTrained(0, [(first, 3)]))
        return first, count


@asynccontextmanager
async def life(run: Run, disk: Disk, manifest: Manifest = MANIFEST) -> AsyncIterator[Node]:
    """Run a daemon from its start to its sudden end."""
    async with trio.open_nursery() as nursery:
        node = Node(run, disk, manifest)
        await node.keeper.restore()
        nursery.start_soon(node.keeper.run)
        yield node
        nursery.cancel_scope.cancel()


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def disk() -> Disk:
    return Disk()


async def test_another_life_goes_on_though_the_run_has_forgotten(run: Run, disk: Disk, clock: MockClock) -> None:
    async with life(run, disk) as node:
        node.begin()
        for _ in range(40):
            await trio.sleep(1)
            node.train()
        await trio.sleep(SAVE_SECONDS + 1)
        before = node.status
    assert before.done
    async with life(Run(), disk) as node:
        node.begin()
        assert (node.status.epoch, node.status.done) == (before.epoch, before.done)


DONE = [*range(40), *range(80, NUM_SLICES)]
DONE_BITS = sum(1 << index for index in DONE).to_bytes(NUM_SLICES // 8, "little")
GOES_ON = EpochsConfig(run_id="ab" * 32, corpus=CORPUS.hex(), epoch=1, done=DONE_BITS.hex())


@pytest.mark.parametrize(("corpus", "epoch", "done"), [(CORPUS, 2, len(DONE)), (OTHER_TEXT, 1, 0)])
async def test_a_run_that_starts_where_another_was_goes_on_with_its_epoch_if_the_text_is_the_same(
    run: Run, disk: Disk, clock: MockClock, corpus: bytes, epoch: int, done: int
) -> None:
    start = StartConfig("cd" * 32, "ab" * 32, epochs=GOES_ON)
    async with life(run, disk, msgspec.structs.replace(MANIFEST, start=start)) as node:
        node.begin(corpus)
        assert (node.status.epoch, node.status.done) == (epoch, done)
        assert len(node.journal.warnings) == (corpus != CORPUS)
        await trio.sleep(SETTLE_SECONDS + 2)
        for first, count in node.drawn[-1].ranges:
            assert not done or not set(DONE) & set(range(first, first + count))
        await trio.sleep(SAVE_SECONDS)
        assert sum("the data goes on" in event.text for event in node.journal.events) == (corpus == CORPUS)
    async with life(run, disk, msgspec.structs.replace(MANIFEST, start=start)) as node:
        node.begin(corpus)  # it goes on from its own state
        assert not any("the data goes on" in event.text for event in node.journal.events)


async def test_a_trainer_that_comes_back_goes_on_with_what_is_left(run: Run, disk: Disk, clock: MockClock) -> None:
    async with life(run, disk) as node:
        node.begin()
        await trio.sleep(SETTLE_SECONDS + 2)
        status = node.status
        first, count = node.train_on_three()
        assert (status.epoch, status.epochs, status.slices, status.leased) == (1, 2, NUM_SLICES, count)
        node.keeper.end()
        node.begin()
        assert node.drawn[-1].ranges == [(first + 3, count - 3)]


async def test_who_leaves_hands_over_what_is_left_and_is_done_with_it(run: Run, disk: Disk, clock: MockClock) -> None:
    async with life(run, disk) as node:
        node.begin()
        await trio.sleep(SETTLE_SECONDS + SAVE_SECONDS)
        first, _ = node.train_on_three()
        await node.keeper.leave()
        assert run.said().leases == (LeasedSlices(first, 3, 3),)
    async with life(Run(), disk) as node:
        node.begin()
        assert node.status.leased == 0


class SlowRun(Run):
    """The last payload for a slot is written, whichever call waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.meant: list[Payload] = []
        self.gate = trio.Event()

    async def publish(self, kind: Kind, index: int, payload: Payload) -> None:
        self.meant.append(payload)
        await self.gate.wait()


async def test_what_is_said_last_is_what_was_meant_last(disk: Disk, nursery: trio.Nursery) -> None:
    run = SlowRun()
    node = Node(run, disk)
    node.begin()
    earlier = Lease(0, CORPUS, (LeasedSlices(0, 9),))
    node.keeper._unsaid.extend([(1, Lease(0, CORPUS)), (0, earlier)])
    nursery.start_soon(node.keeper._say)
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(node.keeper.leave)
    await trio.testing.wait_all_tasks_blocked()
    run.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert run.meant[-2:] == [earlier, Lease(0, CORPUS)]


async def test_another_text_is_told_of_until_its_node_is_gone_for_good(run: Run, disk: Disk, clock: MockClock) -> None:
    async with life(run, disk) as node:
        node.others = frozenset({public_bytes(BOB)})
        run.write(BOB, 0, Lease(0, OTHER_TEXT))
        node.begin()
        await trio.sleep(3)
        (warning,) = node.journal.warnings
        assert "1 of 1 other nodes train on another text" in warning
        assert node.status.others_texts == 1
        run.state.expire(run.now + 2 * 3_600)
        await trio.sleep(3)
        assert node.status.others_texts == 0


async def test_what_a_member_that_never_exchanged_says_is_done_is_trained_on_all_the_same(
    run: Run, disk: Disk, clock: MockClock
) -> None:
    async with life(run, disk) as node:
        node.others = frozenset({public_bytes(BOB)})
        node.begin()
        run.write(BOB, 0, Lease(0, CORPUS, (LeasedSlices(0, 16, 16),)))
        for index, raw in enumerate(parts(Sections(NUM_SLICES).all), 1):
            run.write(BOB, index, Lease(0, CORPUS, (), raw))
        await trio.sleep(SETTLE_SECONDS + 3)
        assert (node.status.done, node.status.doubted) == (0, NUM_SLICES)
        drawn = set[int]()
        with trio.fail_after(3_000):
            while node.status.epoch == 1:
                drawn |= {index for first, count in node.drawn[-1].ranges for index in range(first, first + count)}
                node.train()
                await trio.sleep(1)
        assert drawn >= set(range(NUM_SLICES))


async def test_a_stage_that_draws_nothing_hears_of_the_end(run: Run, disk: Disk, clock: MockClock) -> None:
    async with life(run, disk) as node:
        node.others = frozenset({public_bytes(BOB)})
        node.begin(b"", 0)
        run.write(BOB, 0, Lease(1, CORPUS))
        await trio.sleep(3)
        assert node.keeper.status() is None
        assert not node.keeper.over.is_set()
        run.write(BOB, 0, Lease(2, CORPUS))
        await trio.sleep(3)
        assert node.keeper.over.is_set()

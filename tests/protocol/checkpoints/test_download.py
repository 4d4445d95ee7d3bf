"""A newcomer downloads from donors of all kinds, in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.protocol.checkpoints import block_transfer as transfer

ANN, BOB, CYD, DAN, EVE, FAY = (letter.encode() * 32 for letter in "abcdef")
TICK = 0.1


@dataclass
class Donor:
    """Gives blocks in the order of the requests, at a rate of its own."""

    rate: float
    """Blocks per second."""
    num_held: int = 1 << 18
    delay: float = 0.02
    """Round-trip time."""
    dies_at: float = float("inf")
    freezes_at: float = float("inf")
    lies_about: int = -1
    busy_until: float = 0.0
    trickles: bool = False
    """Whether it gives a byte now and then, and never a block."""
    ready_at: float | None = None
    queue: list[tuple[float, int]] = field(default_factory=list)
    """(asked at, block)"""
    progress: float = 0.0
    num_given: int = 0
    is_open: bool = False


class World:
    """Executes a download's outputs."""

    def __init__(self, donors: dict[bytes, Donor], num_blocks: int, have: frozenset[int] = frozenset()) -> None:
        self.donors = donors
        self.download = transfer.Download(0.0, have)
        self.now = 0.0
        self.arrived: Counter[int] = Counter()
        self.accused: list[tuple[bytes, int]] = []
        self.hung_up: list[tuple[bytes, float]] = []
        self.most_open = 0
        self.know(*donors)
        self.need(range(num_blocks))

    def know(self, *names: bytes) -> None:
        self.carry_out(self.download.know(names, self.now))

    def need(self, blocks: Iterable[int]) -> None:
        self.carry_out(self.download.need(blocks, self.now))

    def carry_out(self, outputs: Iterable[transfer.Output]) -> None:
        for output in outputs:
            self.carry_out_one(output)

    def carry_out_one(self, output: transfer.Output) -> None:
        match output:
            case transfer.DialDonor(name):
                self.donors[name].ready_at = self.now + self.donors[name].delay
            case transfer.Tell(name, transfer.Want(first, count)):
                assert count > 0
                self.donors[name].queue += [(self.now, block) for block in range(first, first + count)]
                assert len(self.donors[name].queue) <= 2 * transfer.MAX_WINDOW
            case transfer.Tell(name, transfer.Forget(block)):
                self.donors[name].queue = [item for item in self.donors[name].queue if item[1] != block]
            case transfer.HangUp(name, _, wrong_block):
                if wrong_block is not None:
                    self.accused.append((name, wrong_block))
                self.hung_up.append((name, self.now))
                self.donors[name].queue.clear()
                self.donors[name].is_open, self.donors[name].ready_at = False, None

    def run(self, seconds: float = 10_000.0) -> float:
        """Run until all blocks have arrived; return the seconds that it took."""
        began = self.now
        while self.download.num_missing:
            assert self.now < began + seconds, "never complete"
            self.now += TICK
            for name, donor in self.donors.items():
                self.let_give(name, donor)
            self.carry_out(self.download.tick(self.now))
            self.most_open = max(self.most_open, self.download.num_open)
        return self.now - began

    def stall(self, seconds: float) -> None:
        """Run for some time, in which not all blocks arrive."""
        with pytest.raises(AssertionError, match="never complete"):
            self.run(seconds)

    def let_give(self, name: bytes, donor: Donor) -> None:
        if self.now >= donor.dies_at:
            donor.queue.clear()
            if donor.is_open or donor.ready_at is not None:
                donor.is_open, donor.ready_at = False, None
                self.carry_out(self.download.lost(name, self.now))
            return
        if self.now >= donor.freezes_at:
            return
        if donor.ready_at is not None and self.now >= donor.ready_at:
            donor.ready_at = None
            if self.now < donor.busy_until:
                self.carry_out(self.download.lost(name, self.now, donor.busy_until - self.now))
            else:
                donor.is_open = True
                self.carry_out(self.download.opened(name, donor.num_held, self.now))
        due = [item for item in donor.queue if item[0] + donor.delay <= self.now]
        if not due:
            donor.progress = 0.0
            return
        self.carry_out(self.download.heard(name, self.now))
        if donor.trickles:
            return
        donor.progress += donor.rate * TICK
        while donor.progress >= 1.0 and donor.queue and donor.queue[0][0] + donor.delay <= self.now:
            donor.progress -= 1.0
            _, block = donor.queue.pop(0)
            assert block < donor.num_held
            if block == donor.lies_about:
                self.carry_out(self.download.refused(name, block, self.now))
                return
            donor.num_given += 1
            self.arrived[block] += 1
            self.carry_out(self.download.arrived(name, block, self.now))

    @property
    def num_twice(self) -> int:
        return self.arrived.total() - len(self.arrived)


def test_one_donor_gives_all_in_order_and_is_never_idle() -> None:
    world = World({ANN: Donor(20.0)}, 200)
    assert world.run() == pytest.approx(200 / 20, rel=0.1)
    assert list(world.arrived) == list(range(200))
    assert world.num_twice == 0


def test_each_gives_as_much_as_it_can() -> None:
    donors = {ANN: Donor(30.0), BOB: Donor(3.0), CYD: Donor(0.3)}
    world = World(donors, 400)
    assert world.run() <= 1.15 * 400 / 33.3
    assert donors[ANN].num_given > 8 * donors[BOB].num_given > 4 * 8 * donors[CYD].num_given
    assert world.num_twice <= transfer.MAX_WINDOW


def test_nobody_waits_at_the_end_for_the_slowest() -> None:
    world = World({ANN: Donor(10.0), BOB: Donor(0.01)}, 50)
    assert world.run() <= 1.2 * 50 / 10 + transfer.HELP_RATIO


def test_a_dead_donor_is_replaced() -> None:
    donors = {name: Donor(20.0, dies_at=2.0) for name in (ANN, BOB, CYD, DAN)} | {EVE: Donor(20.0)}
    world = World(donors, 400)
    assert world.run() <= 2 + (400 - 4 * 40) / 20 + 4
    assert world.most_open == transfer.MAX_DONORS


def test_the_only_donor_may_come_back() -> None:
    world = World({ANN: Donor(20.0, dies_at=1.0)}, 100)
    world.stall(20.0)
    so_far = sum(world.arrived.values())
    world.donors[ANN].dies_at = float("inf")
    world.run()
    assert world.arrived.total() == 100 > so_far > 10


def test_a_silent_donor_is_left_in_time_and_one_that_trickles_in_the_end() -> None:
    world = World({ANN: Donor(20.0, freezes_at=1.0)}, 100)
    world.stall(1.5 * transfer.SILENCE)
    assert world.hung_up[0][0] == ANN
    assert world.hung_up[0][1] == pytest.approx(1.0 + transfer.SILENCE, abs=1.0)
    world = World({ANN: Donor(1.0, trickles=True)}, 100)
    world.stall(1.5 * transfer.BLOCK_TIMEOUT)
    assert world.hung_up[0][1] == pytest.approx(transfer.BLOCK_TIMEOUT, abs=1.0)
    world = World({ANN: Donor(1.0, trickles=True), BOB: Donor(10.0)}, 100)
    assert world.run() <= 1.2 * 100 / 10


def test_a_liar_is_asked_for_nothing_more_and_reported() -> None:
    world = World({ANN: Donor(20.0, lies_about=7), BOB: Donor(10.0, lies_about=30), CYD: Donor(1.0)}, 60)
    world.run()
    given = world.donors[ANN].num_given
    assert [name for name, _ in world.accused] == [ANN, BOB]
    world.know(CYD)
    world.know(ANN, CYD)
    world.need(range(60, 120))
    world.run()
    assert world.donors[ANN].num_given == given
    assert set(world.arrived) == set(range(120))


def test_a_busy_donor_is_asked_again_when_it_said_and_no_sooner() -> None:
    world = World({ANN: Donor(20.0, busy_until=7.0)}, 20)
    assert 7.0 <= world.run() <= 7.0 + 20 / 20 + 1.0
    world = World({ANN: Donor(20.0, busy_until=7e9)}, 20)
    world.stall(200.0)


def test_a_download_is_given_up_when_nothing_comes_and_remembers_no_more_donors_than_needed() -> None:
    download = transfer.Download(100.0)
    download.need([0], 100.0)
    download.know((ANN,), 99.0 + transfer.PATIENCE)
    assert not download.is_hopeless(99.0 + transfer.PATIENCE)
    download.lost(ANN, 99.0 + transfer.PATIENCE, busy_seconds=30.0)
    assert not download.is_hopeless(128.0 + 2 * transfer.PATIENCE)
    assert download.is_hopeless(130.0 + 2 * transfer.PATIENCE)
    download = transfer.Download(0.0)
    for start in range(0, 10 * transfer.MAX_KNOWN, transfer.MAX_KNOWN):
        download.know([b"%d" % number for number in range(start, start + 2 * transfer.MAX_KNOWN)], 0.0)
    assert len(download._donors) <= transfer.MAX_KNOWN + transfer.MAX_DONORS


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_as_long_as_somebody_is_honest_it_ends_well(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.randrange(1, 120)

    def some_donor() -> Donor:
        donor = Donor(rng.choice([0.5, 3.0, 20.0, 100.0]), delay=rng.choice([0.001, 0.3]))
        match rng.randrange(7):
            case 0:
                donor.dies_at = rng.uniform(0, 10)
            case 1:
                donor.freezes_at = rng.uniform(0, 10)
            case 2:
                donor.lies_about = rng.randrange(num_blocks)
            case 3:
                donor.busy_until = rng.uniform(0, 20)
            case 4:
                donor.trickles = True
            case 5:
                donor.num_held = rng.randrange(num_blocks + 1)
            case _:
                pass
        return donor

    donors = {name: some_donor() for name in (ANN, BOB, CYD, DAN, EVE)} | {FAY: Donor(5.0)}
    have = frozenset(block for block in range(num_blocks) if rng.random() < 0.2)
    world = World(donors, num_blocks, have)
    world.run(4 * transfer.BLOCK_TIMEOUT)
    assert set(world.arrived) == set(range(num_blocks)) - have
    assert world.num_twice <= transfer.MAX_DONORS * transfer.MAX_WINDOW
    assert {name for name, _ in world.accused} <= {name for name, donor in donors.items() if donor.lies_about >= 0}

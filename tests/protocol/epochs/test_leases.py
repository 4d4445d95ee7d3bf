"""One node's leases, and two nodes in conflict; for many nodes see `tests/testnet/simulate/test_leases.py`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from farandole.protocol.epochs.lease_claims import MAX_SHARE, SETTLE_SECONDS, Standing
from farandole.protocol.epochs.leases import ASLEEP_SECONDS, Leases, Output
from farandole.protocol.state.entries import Lease, LeasedSlices
from farandole.protocol.trainer.trainer_messages import DrawSlices, SlicesTrained

from .test_lease_claims import CORPUS, OTHER_TEXT, bits

ALICE, BOB = b"a" * 32, b"b" * 32
NUM_SLICES = 320
PERIOD = 2.0


class Node:
    """A machine with its results: its newest entries and assignment."""

    def __init__(self, author: bytes = ALICE, *, live: Iterable[bytes] = (), num_epochs: int = 2) -> None:
        self.author = author
        self.leases = Leases(author, CORPUS, NUM_SLICES, num_epochs)
        self.live = frozenset(live)
        self.proven = self.live
        self.speeds = dict.fromkeys(self.live, 5.0)
        self.speed: float | None = None
        self.now = 1_000.0
        self.entries: dict[int, Lease] = {}
        self.assigned: DrawSlices | None = None
        self.epochs: list[int] = []
        self.trained: set[tuple[int, int]] = set()

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, DrawSlices):
                self.assigned = output
            else:
                self.entries[output[0]] = output[1]

    def tick(self, seconds: float = 0.0) -> None:
        for second in range(int(seconds) + 1):
            self.now += bool(second)
            epoch = self.leases.epoch
            self.take(self.leases.tick(Standing(self.live, self.proven, self.speeds, PERIOD, self.speed), self.now))
            if self.leases.epoch != epoch:
                self.epochs.append(self.leases.epoch)

    def hear(self, author: bytes, *entries: tuple[int, Lease]) -> None:
        for index, lease in entries:
            self.leases.hear(author, index, lease)

    @property
    def slices(self) -> set[int]:
        """Return the assigned slices that it has not trained on yet."""
        if self.assigned is None:
            return set()
        epoch = self.assigned.epoch
        indices = {index for first, count in self.assigned.ranges for index in range(first, first + count)}
        return {index for index in indices if (epoch, index) not in self.trained}

    @property
    def leased(self) -> set[int]:
        return {
            index
            for lease in self.entries[0].leases
            for index in range(lease.first + lease.done, lease.first + lease.count)
        }

    def train(self, count: int = NUM_SLICES) -> set[int]:
        trained = sorted(self.slices)[:count]
        self.trained |= {(self.leases.epoch, index) for index in trained}
        self.leases.trained(SlicesTrained(self.leases.epoch, [(index, 1) for index in trained]))
        return set(trained)


def test_a_lease_is_worked_on_when_it_has_settled_and_who_leaves_gives_back_what_it_has_not_done() -> None:
    alice = Node()
    alice.tick()
    assert alice.leased
    assert not alice.slices
    alice.tick(SETTLE_SECONDS)
    assert alice.slices == alice.leased
    done = alice.train(4)
    alice.take(alice.leases.leave())
    assert alice.leased == set()
    said = {index for lease in alice.entries[0].leases for index in range(lease.first, lease.first + lease.done)}
    assert said == done
    assert alice.leases.num_leased == 0
    assert alice.leases.tick(Standing(), alice.now) == []


def test_alone_a_node_trains_on_every_slice_of_every_epoch_once() -> None:
    alice = Node()
    trained: list[set[int]] = []
    while not alice.leases.is_over:
        alice.tick(1)
        trained.append(alice.train(3))
        assert alice.now < 5_000
    everything = sorted(index for part in trained for index in part)
    assert everything == sorted(2 * list(range(NUM_SLICES)))
    assert alice.epochs == [1, 2]
    assert alice.entries[0] == Lease(2, CORPUS)


def test_two_who_lease_the_same_agree_who_gives_way() -> None:
    alice, bob = Node(ALICE, live=[BOB]), Node(BOB, live=[ALICE])
    contested = (0, Lease(0, CORPUS, (LeasedSlices(100, 20),)))
    for node in (alice, bob):
        node.hear(node.author, contested)
        node.tick()
    alice.hear(BOB, *bob.entries.items())
    bob.hear(ALICE, *alice.entries.items())
    alice.tick(SETTLE_SECONDS + 1)
    bob.tick(SETTLE_SECONDS + 1)
    both = set(range(100, 120))
    assert not alice.slices & bob.slices
    assert both <= alice.slices | bob.slices


def test_leases_of_the_live_are_kept_and_those_of_the_dead_taken_over_where_they_ended() -> None:
    alice = Node(live=[BOB])
    alice.hear(BOB, (0, Lease(0, CORPUS, (LeasedSlices(0, 20, 5), LeasedSlices(20, 20)))))
    everything: set[int] = set()
    while len(everything) < NUM_SLICES - 40:
        alice.tick(1)
        everything |= alice.train(10)
    alice.tick(10)
    assert everything == set(range(40, NUM_SLICES))
    assert not alice.slices
    alice.live = frozenset()
    while not alice.epochs:
        alice.tick(1)
        everything |= alice.train(10)
    assert everything == set(range(5, NUM_SLICES))


def test_who_comes_back_goes_on_where_it_was_and_who_was_asleep_lets_go() -> None:
    alice = Node()
    alice.tick(SETTLE_SECONDS)
    leased, done = alice.leased, alice.train(4)
    again = Node()
    again.hear(ALICE, *alice.leases.saved())
    again.tick()
    assert again.slices == leased - done
    leased = alice.leased
    alice.now += ASLEEP_SECONDS + 1
    alice.tick()
    assert not alice.slices
    assert alice.leased != leased or alice.entries[0].leases


def test_who_has_another_text_shares_nothing_and_is_noticed() -> None:
    alice = Node(live=[BOB])
    alice.hear(BOB, (0, Lease(1, OTHER_TEXT, (LeasedSlices(0, 20, 20),))))
    alice.tick()
    assert alice.leases.strangers == {BOB}
    assert alice.leases.epoch == 0
    assert alice.leases.done.count == 0


@pytest.mark.parametrize(
    "lease",
    [
        LeasedSlices(0, NUM_SLICES),  # everything
        LeasedSlices(0, NUM_SLICES // MAX_SHARE + 1),
        LeasedSlices(0, NUM_SLICES, NUM_SLICES),  # and all done
        LeasedSlices(NUM_SLICES - 1, 2, 2),
        LeasedSlices(2**31 - 1, 2**31 - 1, 2**31 - 1),
        LeasedSlices(0, 3, 4),
        LeasedSlices(0, 0),
    ],
)
def test_leases_that_cannot_be_honest_are_nobodys(lease: LeasedSlices) -> None:
    alice = Node(live=[BOB])
    alice.hear(BOB, (0, Lease(0, CORPUS, (lease,) * 8)))
    alice.tick()
    assert alice.leases.done.count == 0
    assert not list(alice.leases._respected())


def test_a_peer_has_two_leases_at_a_time() -> None:
    alice = Node(live=[BOB])
    alice.hear(BOB, (0, Lease(0, CORPUS, tuple(LeasedSlices(20 * number, 20) for number in range(8)))))
    alice.tick()
    ((_, bob),) = alice.leases._respected()
    assert bob.mask.bit_count() == 40


def test_what_an_unmet_author_says_to_be_done_is_leased_last_and_trained_on() -> None:
    alice = Node(live=[BOB], num_epochs=1)
    alice.proven = frozenset()
    done = tuple(LeasedSlices(first, 20, 20) for first in range(0, 160, 20))
    alice.hear(BOB, (0, Lease(0, CORPUS, done)), *bits((1 << 160) - 1))
    trained: set[int] = set()
    while len(trained) < 150:
        alice.tick(1)
        trained |= alice.train(10)
    assert trained <= set(range(160, NUM_SLICES))
    assert alice.leases.num_doubted == 160
    while not alice.leases.is_over:
        alice.tick(1)
        trained |= alice.train(10)
    assert trained == set(range(NUM_SLICES))


def test_keys_that_were_ground_do_not_drive_a_node_from_place_to_place() -> None:
    """Bob's hash comes before all others, and he leases whatever Alice has leased."""

    class Trampled(Leases):
        def _rank(self, author: bytes, section: int) -> bytes:
            return b"" if author == BOB else super()._rank(author, section)

    alice = Node(live=[BOB], num_epochs=1)
    alice.proven = frozenset()
    alice.leases, alice.speed = Trampled(ALICE, CORPUS, NUM_SLICES, 1), 2.0
    num_trained = 0
    for _ in range(300):
        alice.tick(1)
        alice.hear(BOB, (0, Lease(0, CORPUS, alice.entries[0].leases[-2:])))
        num_trained += len(alice.train(2))
    assert num_trained == NUM_SLICES

"""The address book: what the next process finds in it, and whom it dials if an attacker has written most of it."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.join import address_book
from farandole.node.join.address_book import MAX_ISOLATION_INTERVAL, MAX_PEERS, AddressBook, keep_reconnecting
from farandole.node.join.bootstrap import Target, connect_to_run
from farandole.node.state.store import PeerRow, Store, StoreError, open_store
from farandole.node.status.journal import Journal
from farandole.protocol.state.believing import Partners

from ..base.test_bandwidth import Clock

ALICE, BOB, CAROL = b"a" * 32, b"b" * 32, b"c" * 32
HERE, THERE = "/ip4/1.1.1.1/tcp/1", "/ip4/2.2.2.2/tcp/2"


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.now = 1_800_000_000.0  # Unix time
    return clock


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "store.sqlite") as opened:
        yield opened


async def reopened(store: Store, clock: Clock) -> AddressBook:
    book = AddressBook(store, clock=clock, rng=random.Random(0))
    await book.load()
    return book


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


async def test_who_was_reached_last_comes_first_in_the_next_life(store: Store, clock: Clock) -> None:
    book = await reopened(store, clock)
    for peer in (ALICE, BOB):
        clock.now += 1
        book.note_reached(peer, [HERE, THERE])
    clock.now += 1
    await book.save()
    await store.save_peers([(CAROL, b'["/ip4/1.1.1.1/tcp/1"]', float("inf"))], [])
    again = await reopened(store, clock)  # a time in the future is now
    clock.now += 1
    again.note_reached(ALICE, [THERE])
    assert list(again.peers().items()) == [(ALICE, [THERE]), (CAROL, [HERE]), (BOB, [HERE, THERE])]


async def test_it_is_bounded_and_the_latest_are_not_all_that_are_given(store: Store, clock: Clock) -> None:
    book = await reopened(store, clock)
    for number in range(address_book.MAX_PEERS + 100):
        clock.now += 1
        book.note_reached(key(number), [HERE])
    await book.save()
    assert len(await store.load_peers()) == address_book.MAX_PEERS
    given = list((await reopened(store, clock)).peers())
    assert len(given) == address_book.NUM_LATEST + address_book.NUM_OTHERS
    newest = [
        key(number)
        for number in range(address_book.MAX_PEERS + 99, address_book.MAX_PEERS + 99 - address_book.NUM_LATEST, -1)
    ]
    assert given[: address_book.NUM_LATEST] == newest
    assert not set(given) & {key(number) for number in range(100)}


async def test_partners_have_half_of_the_book_and_no_more(store: Store, clock: Clock) -> None:
    partners = {key(number) for number in range(2 * address_book.MAX_PEERS)}
    book = AddressBook(store, partners.__contains__, clock=clock)
    for number in range(3 * address_book.MAX_PEERS):
        clock.now += 1
        book.note_reached(key(number), [HERE])
    await book.save()
    kept = {peer for peer, _, _ in await store.load_peers()}
    assert kept & partners == {
        key(number)
        for number in range(2 * address_book.MAX_PEERS - address_book.MAX_KEPT_PARTNERS, 2 * address_book.MAX_PEERS)
    }
    assert len(kept) == address_book.MAX_PEERS
    again = AddressBook(store, partners.__contains__, clock=clock, rng=random.Random(0))
    await again.load()
    assert len(again.peers().keys() & partners) == address_book.NUM_PARTNERS, "a crowd of newcomers displaces none"


async def test_who_was_not_reached_for_long_is_forgotten_on_disk_too(store: Store, clock: Clock) -> None:
    book = await reopened(store, clock)
    book.note_reached(ALICE, [HERE])
    await book.save()
    clock.now += address_book.MAX_AGE / 2
    book.note_reached(BOB, [THERE])
    await book.save()
    clock.now += address_book.MAX_AGE / 2 + 1
    book = await reopened(store, clock)
    assert list(book.peers()) == [BOB]
    await book.save()
    assert [peer for peer, _, _ in await store.load_peers()] == [BOB]


@dataclass
class CountingStore(Store):
    """Counts its writes, and cannot be read."""

    num_writes: int = 0

    async def load_peers(self) -> list[PeerRow]:
        await trio.lowlevel.checkpoint()
        raise StoreError("the disk is broken")

    async def save_peers(self, rows: Iterable[PeerRow], gone: Iterable[bytes]) -> None:
        await trio.lowlevel.checkpoint()
        self.num_writes += 1


async def test_news_is_written_at_once_and_times_seldom(clock: Clock) -> None:
    counting = CountingStore()
    book = AddressBook(counting, clock=clock)
    await book.load()  # a broken disk leads to a warning
    book.note_reached(ALICE, [HERE])
    await book.save()
    assert counting.num_writes == 1
    for _ in range(int(address_book.SAVE_INTERVAL / 10) - 1):
        clock.now += 10
        book.note_reached(ALICE, [HERE])
        await book.save()
    assert counting.num_writes == 1
    clock.now += 10
    book.note_reached(ALICE, [HERE])
    await book.save()
    assert counting.num_writes == 2
    book.note_reached(ALICE, [THERE])
    await book.save()
    assert counting.num_writes == 3
    await book.save()  # nothing new
    assert counting.num_writes == 3


@pytest.mark.parametrize(
    "row",
    [
        (b"short", b'["/ip4/1.1.1.1/tcp/1"]', 1_800_000_000.0),
        ("text", b'["/ip4/1.1.1.1/tcp/1"]', 1_800_000_000.0),
        (BOB, b"\xff\xfe", 1_800_000_000.0),
        (BOB, b"[" * 100_000, 1_800_000_000.0),
        (BOB, b"[]", 1_800_000_000.0),
        (BOB, b'["not an address"]', 1_800_000_000.0),
        (BOB, b'["/ip4/1.1.1.1/tcp/1\\u0007"]', 1_800_000_000.0),
        (BOB, b'["/' + b"x" * 10_000 + b'"]', 1_800_000_000.0),
        (BOB, b"[" + b",".join([b'"/a"'] * 1_000) + b"]", 1_800_000_000.0),
        (BOB, "text", 1_800_000_000.0),
        (BOB, b'["/ip4/1.1.1.1/tcp/1"]', "text"),
        (BOB, b'["/ip4/1.1.1.1/tcp/1"]', float("-inf")),
    ],
)
async def test_a_damaged_entry_costs_a_warning_and_no_other(
    row: PeerRow, store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    await store.save_peers([row, (ALICE, b'["/ip4/1.1.1.1/tcp/1"]', clock.now - 5)], [])
    with caplog.at_level(logging.WARNING):
        book = await reopened(store, clock)
    assert book.peers() == {ALICE: [HERE]}
    await book.save()
    assert [peer for peer, _, _ in await store.load_peers()] == [ALICE]


NUM_SEEDS = 100
SHARE_FALSE = 0.8
# Share of the honest peers that are online: volunteers' machines are switched off at times.
SHARE_ONLINE = 0.7
NUM_PARTNERS = 100
SECONDS = 60.0
MIN_HONEST = 3


@dataclass
class World:
    """Peers that answer soon, or not at all: then a dial takes the longest time allowed."""

    answering: set[bytes]
    author: bytes = bytes(32)
    connected: frozenset[bytes] = frozenset()
    dialled: list[bytes] = field(default_factory=list)

    async def connect(self, peer: bytes, addresses: Sequence[str], timeout: float) -> None:
        self.dialled.append(peer)
        if peer not in self.answering:
            await trio.sleep(timeout)
            raise PeerUnreachableError("nobody is there")
        await trio.sleep(0.2)
        self.connected |= {peer}


async def num_honest_reached(seed: int, do_false_answer: bool) -> int:
    """Count the honest peers reached after `SECONDS`. False peers were added later, with the same share of partners."""
    rng = random.Random(seed)
    num_honest = round((1 - SHARE_FALSE) * MAX_PEERS)
    honest, false = [key(n) for n in range(1, num_honest + 1)], [key(n) for n in range(num_honest + 1, MAX_PEERS + 1)]
    num_true = round((1 - SHARE_FALSE) * NUM_PARTNERS)
    partners = Partners()
    for peer in [*rng.sample(honest, num_true), *rng.sample(false, NUM_PARTNERS - num_true)]:
        partners.note(peer)
    store: Any = None
    clock = iter(range(1_000_000))
    book = AddressBook(store, partners.__contains__, clock=lambda: float(next(clock)), rng=rng)
    for peer in [*honest, *false]:
        book.note_reached(peer, ["/ip4/1.1.1.1/tcp/1"])

    online = {peer for peer in honest if rng.random() < SHARE_ONLINE}
    world: Any = World(online | set(false if do_false_answer else ()))
    journal = Journal(lambda text: None)
    target = Target(b"r" * 32, b"manifest", book.peers())
    with trio.move_on_after(SECONDS):
        await connect_to_run(world, target, journal)
        await keep_reconnecting(world, book, target, lambda: world.connected, journal)
    return len(world.connected & online)


@pytest.mark.parametrize("do_false_answer", [True, False])
async def test_three_of_the_honest_are_reached_though_most_of_the_book_is_one_strangers(
    do_false_answer: bool, autojump_clock: trio.testing.MockClock
) -> None:
    reached = [await num_honest_reached(seed, do_false_answer) for seed in range(NUM_SEEDS)]
    print(f"\n{min(reached)} to {max(reached)} of the honest, {sum(reached) / NUM_SEEDS:.1f} on average")
    assert sum(number >= MIN_HONEST for number in reached) >= 0.99 * NUM_SEEDS


async def test_a_member_cut_off_dials_without_end_says_so_and_stops_when_it_is_back(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world: Any = World(set())
    alice, mallory, store = key(1), key(2), cast("Any", None)
    book, journal = AddressBook(store), Journal(lambda text: None)
    book.note_reached(alice, ["/ip4/1.1.1.1/tcp/1"])
    target = Target(b"r" * 32, None, {mallory: ["/ip4/2.2.2.2/tcp/2"]})
    nursery.start_soon(keep_reconnecting, world, book, target, lambda: world.connected, journal)
    await trio.sleep(24 * 3600)
    assert set(world.dialled) == {alice, mallory}
    num_pauses = 24 * 3600 / MAX_ISOLATION_INTERVAL
    assert 2 * num_pauses / 2 < len(world.dialled) < 2 * num_pauses / 0.5
    assert "no member answered; next in" in journal.state.isolation
    world.connected = frozenset({alice})
    world.dialled.clear()
    await trio.sleep(3600)
    assert world.dialled == []
    assert journal.state.isolation == ""
    nursery.cancel_scope.cancel()

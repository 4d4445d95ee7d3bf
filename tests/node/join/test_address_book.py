"""The address book: what the next process finds in it, whatever was written there."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from farandole.node.join import address_book
from farandole.node.join.address_book import AddressBook
from farandole.node.state.store import PeerRow, Store, StoreError, open_store

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

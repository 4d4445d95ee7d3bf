"""A node that has lost its members, and dials those of its address book, which one attacker may have written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import trio
import trio.testing

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.join.address_book import MAX_ISOLATION_INTERVAL, MAX_PEERS, AddressBook, Reconnector
from farandole.node.join.bootstrap import Target, connect_to_run
from farandole.node.status.journal import Journal
from farandole.protocol.state.believing import Partners

NUM_SEEDS = 100
SHARE_FALSE = 0.8
# Share of the honest peers that are online: volunteers' machines are switched off at times.
SHARE_ONLINE = 0.7
NUM_PARTNERS = 100
SECONDS = 60.0
MIN_HONEST = 3


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


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
        await Reconnector(world, book, target, lambda: world.connected, journal).run()
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
    nursery.start_soon(Reconnector(world, book, target, lambda: world.connected, journal).run)
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

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio
import trio.testing

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.join.address_book import MAX_ISOLATION_INTERVAL, AddressBook, Reconnector
from farandole.node.join.bootstrap import Target
from farandole.node.status.journal import Journal

RUN = b"r" * 32
ME, MALLORY, ALICE = (bytes([number]) * 32 for number in range(1, 4))


async def test_a_member_cut_off_dials_without_end_says_so_and_stops_when_it_is_back(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    dialled: list[bytes] = []
    members: set[bytes] = set()
    store: Any = None

    async def connect(peer: bytes, *args: object, **settings: object) -> None:
        await trio.lowlevel.checkpoint()
        dialled.append(peer)
        raise PeerUnreachableError("nobody is there")

    host: Any = SimpleNamespace(author=ME, connected=frozenset(), connect=connect)
    book, journal = AddressBook(store), Journal(say=lambda text: None)
    book.note_reached(ALICE, ["/ip4/1.1.1.1/tcp/1"])
    target = Target(RUN, None, {MALLORY: ["/ip4/2.2.2.2/tcp/2"]})
    nursery.start_soon(Reconnector(host, book, target, lambda: frozenset(members), journal).run)
    await trio.sleep(24 * 3600)
    assert set(dialled) == {ALICE, MALLORY}
    assert (
        2 * 24 * 3600 / (1.5 * MAX_ISOLATION_INTERVAL) < len(dialled) < 2 * 24 * 3600 / (0.5 * MAX_ISOLATION_INTERVAL)
    )
    assert "no member answered; next in" in journal.state.isolation
    host.connected = frozenset({ALICE})
    members.add(ALICE)
    dialled.clear()
    await trio.sleep(3600)
    assert dialled == []
    assert journal.state.isolation == ""
    nursery.cancel_scope.cancel()

"""A peer whose release does not fit is named once, with the remedy, at both ends; a liar gains no more than that."""

from __future__ import annotations

from typing import Any, cast

import trio
from trio.testing import MockClock

from farandole.node.base.project import VERSION
from farandole.node.state.connections import LOOK_INTERVAL, LOOKS_PER_ASK, ReleaseWatch
from farandole.node.status.journal import Journal
from farandole.protocol.run.releases import Software

NEEDED = ("/farandole/push/2", "/farandole/exchange/5")
ALICE, BOB = b"a" * 32, b"b" * 32


class Host:
    """The connected peers, and what they run."""

    def __init__(self) -> None:
        self.software: dict[bytes, Software] = {}
        self.connected: frozenset[bytes] = frozenset()
        self.protocols = list(NEEDED)
        self.handlers = self.identify = self
        self.asked: list[float] = []

    def says(self, peer: bytes, version: str, *protocols: str) -> None:
        self.connected |= {peer}
        self.software[peer] = Software(version, frozenset(protocols))

    async def ask(self, peer: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.asked.append(trio.current_time())


def watched() -> tuple[Host, Journal, ReleaseWatch, list[str]]:
    host, said = Host(), list[str]()
    journal = Journal(said.append)
    return host, journal, ReleaseWatch(cast("Any", host), journal, NEEDED), said


def test_liars_about_their_release_cause_two_lines_however_many_they_are() -> None:
    """The attack: keys without end, each with another version, in order to fill this node's log and screen."""
    host, journal, watch, said = watched()
    for number in range(500):
        exchange = f"/farandole/exchange/{number % 2 * 9}"
        host.says(number.to_bytes(32, "big"), f"9.{number}", NEEDED[0], exchange)
        if number % 25 < 2:
            watch.look()
    assert len([line for line in said if line.startswith("warning")]) == 2
    assert len(journal.warnings) == 1
    assert max(map(len, said)) < 400
    fitting = Software("1", frozenset(NEEDED))
    host.software[BOB] = fitting
    host.connected |= {BOB}
    watch.look()
    assert BOB not in watch.apart  # no peer speaks for another one
    host.connected = frozenset()
    assert not watch.look()
    assert journal.state.release_conflict is None
    assert not watch.apart


async def test_a_peer_that_is_starting_is_asked_again_until_it_serves_what_is_needed(clock: MockClock) -> None:
    host, journal, watch, _ = watched()
    host.says(BOB, "0.0.7")
    ask_interval = LOOKS_PER_ASK * LOOK_INTERVAL
    with trio.move_on_after(10 * ask_interval + 1.0):
        await watch.run()
    assert host.asked[0] == ask_interval
    assert len(host.asked) == 10
    host.says(BOB, "0.0.7", *NEEDED)
    host.asked.clear()
    with trio.move_on_after(10 * ask_interval):
        await watch.run()
    assert not host.asked
    assert not journal.warnings


def test_builds_of_one_release_that_do_not_fit_are_told_apart() -> None:
    host, journal, watch, _ = watched()
    host.says(BOB, VERSION, "/farandole/push/1")
    watch.look()
    assert journal.warnings[0].startswith(f"1 connected peer runs another farandole {VERSION}; this node runs")

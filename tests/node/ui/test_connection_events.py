from __future__ import annotations

import trio
from trio.testing import MockClock

from farandole.node.ui.headline import CONNECTIONS_INTERVAL, Connections, changes, note_changes


def told(before: Connections, after: Connections) -> list[str]:
    return list(changes(before, after))


def test_relays_come_go_and_take_each_others_place() -> None:
    none, one, two = (Connections(relays=frozenset(names)) for names in ("", "a", "ab"))
    assert told(none, one) == ["others reach this node through the relay a"]
    assert told(two, one) == ["the relay b is one no more"]
    assert told(two, Connections(relays=frozenset("ac"))) == ["the relay b was replaced by c"]
    assert told(two, two) == []


def test_a_hole_that_is_punched_is_told_and_so_is_a_way_through_a_relay() -> None:
    relayed, punched, direct = (Connections(paths={"bob": path}) for path in ("relayed", "punched", "direct"))
    assert told(Connections(), relayed) == ["bob is reached through a relay"]
    assert told(relayed, punched) == ["a hole is punched to bob: what went through a relay goes directly"]
    assert told(relayed, direct) == ["bob is reached directly now, not through a relay"]
    assert told(Connections(), direct) == told(direct, Connections()) == []


def test_how_others_reach_a_node_is_told_once_it_is_known() -> None:
    assert told(Connections(), Connections("punchable")) == ["others reach this node by hole punching"]
    assert told(Connections("public"), Connections("unknown")) == []


async def test_it_looks_again_and_again(autojump_clock: MockClock) -> None:
    looks = iter([Connections(), Connections("public"), Connections("public", frozenset("a"))])
    last = Connections()
    noted: list[str] = []

    def look() -> Connections:
        nonlocal last
        last = next(looks, last)
        return last

    with trio.move_on_after(5 * CONNECTIONS_INTERVAL):
        await note_changes(look, noted.append)
    assert noted == ["others reach this node directly", "others reach this node through the relay a"]

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from farandole.node.loop.rest_service import BY_HAND, Rest


async def test_a_node_rests_while_there_is_any_reason() -> None:
    rest = Rest()
    rest.begin(BY_HAND, "paused by hand")
    rest.begin("quiet hours", "quiet until 07:00")
    assert rest.words == "paused by hand; quiet until 07:00"

    rest.end("quiet hours")
    assert rest.is_on
    rest.end(BY_HAND)
    assert not rest.is_on
    rest.end(BY_HAND)


async def test_who_waits_for_rest_or_for_its_end_is_told() -> None:
    rest, seen = Rest(), list[str]()

    async def watch() -> None:
        while not rest.is_on:
            await rest.changed()
        seen.append("begun")
        while rest.is_on:
            await rest.changed()
        seen.append("over")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await wait_all_tasks_blocked()
        assert seen == []
        rest.begin("a", "one")
        await wait_all_tasks_blocked()
        rest.begin("b", "two")
        rest.end("a")
        await wait_all_tasks_blocked()
        assert seen == ["begun"]
        rest.end("b")
    assert seen == ["begun", "over"]

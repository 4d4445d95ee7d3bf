from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from textual.pilot import Pilot

from farandole.node.status.status import Event, NodeStatus, Resources
from farandole.node.ui.watch.app import WatchApp
from farandole.protocol.wire.errors import FarandoleError

from ...statuses import BOB, NOW, STATUS

CAROL = "12D3KooWcarol"
FULL = msgspec.structs.replace(
    STATUS,
    at=NOW,
    round_steps=48,
    upload_mbit=5.0,
    bytes_sent_per_second=500_000.0,
    utilisation=0.95,
    resources=Resources(120_000_000, 400_000_000, 33, 55, 2_000_000_000, 24_000_000_000),
    relays=[BOB],
    reachability="punchable",
    members=[
        STATUS.members[0],
        msgspec.structs.replace(STATUS.members[1], path="punched"),
        msgspec.structs.replace(STATUS.members[1], peer_id=CAROL, path="relayed"),
    ],
    events=[
        Event(NOW - 9, "ooWcarol refused this node's contribution: its norm"),
        Event(NOW - 4, "round 6: 48 inner steps, loss 2.500; averaged with 6EYc7bLD, 2.00 MB each way in 0.21 s"),
    ],
)


def changed(**changes: object) -> NodeStatus:
    return msgspec.structs.replace(FULL, **changes)


News = NodeStatus | str
"""A status, or why the node does not answer."""


class FakeNode:
    """A node that answers with the test's news: statuses, or why it does not answer."""

    def __init__(self, *news: News) -> None:
        self.queue: queue.Queue[News | None] = queue.Queue()
        self.asked: list[str] = []
        self.refusal = ""
        for each in news:
            self.queue.put(each)

    def ask(self, method: str) -> object:
        if method != "status":
            if self.refusal:
                raise FarandoleError(self.refusal)
            self.asked.append(method)
            return f"asked to {method}"
        news = self.queue.get()
        if isinstance(news, NodeStatus):
            return msgspec.to_builtins(news)
        raise FarandoleError(news or "the test is over")


SIZES = [(80, 24), (200, 60), (45, 40)]
Story = Callable[["Watched"], Awaitable[None]]


class Watched:
    """The screen, its text, and its clock."""

    def __init__(self, *news: News) -> None:
        self.now = 1_000.0
        self.node = FakeNode(*news)
        self.app = WatchApp(self.node.ask, 0.0, lambda: self.now)
        self.pilot: Pilot[None]

    def text(self) -> str:
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())

    async def shows(self, *words: str) -> str:
        """Wait until all these words are on the screen; fail after a few seconds."""
        for _ in range(200):
            await self.pilot.pause(0.02)
            if all(word in self.text() for word in words):
                break
        text = self.text()
        assert [word for word in words if word not in text] == [], text
        return text

    async def tell(self, news: News) -> None:
        self.node.queue.put(news)
        await self.pilot.pause()


def play(story: Story, *news: News, size: tuple[int, int] = (80, 24)) -> Watched:
    watched = Watched(*news)

    async def run() -> None:
        async with watched.app.run_test(size=size, notifications=True) as watched.pilot:
            await story(watched)
        watched.node.queue.put(None)

    asyncio.run(run())
    return watched


@pytest.mark.parametrize("size", SIZES)
def test_all_questions_are_answered_on_any_screen(size: tuple[int, int]) -> None:
    async def story(watched: Watched) -> None:
        await watched.shows(
            *("WELL", "training with 2 others, round 7"),
            *("5.500", "held-out 2.610 (1.234 bpb)", "loss of all 2.550; 3 live, 1 gone", "28.0 k tokens/s"),
            *("round 7: 12 of 48 steps", "95% of the time", "120 MB", "400 MB", "2.00 GB of 24.0 GB"),
            *("up 4.00 Mbit/s (at most 5)", "no cap", "by hole punching"),
            *("6EYc7bLD", "punched", "ooWcarol", "relayed"),
            *("averaged with 6EYc7bLD", "q Quit", "p Pause"),
        )

    play(story, FULL, size=size)


def test_it_says_that_nothing_has_come_that_the_node_is_gone_and_that_it_is_back() -> None:
    async def story(watched: Watched) -> None:
        await watched.shows("WAIT", "asking the node")
        await watched.tell(FULL)
        await watched.shows("WELL")
        watched.now += 20
        await watched.tell("no node runs in /home/alice")
        await watched.shows(
            "TROUBLE  the node does not answer; what is below is 20 s old", "no node runs in /home/alice"
        )

        await watched.tell(changed(at=NOW + 25, pid=1, started_at=NOW + 21))
        assert "TROUBLE" not in await watched.shows("WELL")

    play(story)


def test_p_pauses_and_resumes() -> None:
    async def story(watched: Watched) -> None:
        await watched.shows("WELL")
        await watched.pilot.press("p")
        await watched.shows("asked to pause")
        await watched.tell(changed(phase="paused", phase_detail="paused; `farandole resume` goes on"))
        await watched.shows("WAIT", "not training: paused")
        await watched.pilot.press("p")
        await watched.shows("asked to resume")
        watched.node.refusal = "this node trains nothing"
        await watched.pilot.press("p")
        await watched.shows("this node trains nothing")

    assert play(story, FULL).node.asked == ["pause", "resume"]


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_it_ends_when_asked_to(key: str) -> None:
    async def story(watched: Watched) -> None:
        await watched.shows("WELL")
        await watched.pilot.press(key)
        await watched.pilot.pause()
        assert not watched.app.is_running

    play(story, FULL)


def test_what_peers_say_is_text_and_nothing_else() -> None:
    evil = "[bold red]x[/] [@click=app.quit]y[/]"

    async def story(watched: Watched) -> None:
        await watched.shows("[@click=app.quit]y[/]")

    play(story, changed(device=evil, events=[type(FULL.events[0])(NOW, evil)], phase_detail=evil), size=(200, 40))

"""A node controlled by a test, and statuses of it."""

from __future__ import annotations

import queue

import msgspec

from farandole.node.status.status import Event, ExchangeStatus, NodeStatus, Resources
from farandole.node.ui.watch.app import News
from farandole.protocol.wire.errors import FarandoleError

from ...statuses import BOB, NOW, STATUS

CAROL = "12D3KooWcarol"
FULL = msgspec.structs.replace(
    STATUS,
    at=NOW,
    round_steps=48,
    upload_mbit=5.0,
    bytes_sent_per_second=500_000.0,
    recent_utilisation=0.95,
    resources=Resources(120_000_000, 400_000_000, 33, 55, 2_000_000_000, 24_000_000_000),
    relays=[BOB],
    reachability="punchable",
    round_trips={BOB: 0.0123},
    recent_exchanges=[
        ExchangeStatus(3, CAROL, "failed: the partner aborted: refused: its norm", 0, 0, 0.1, NOW - 90),
        ExchangeStatus(6, BOB, "committed", 500_000, 500_000, 0.2, NOW - 4),
    ],
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

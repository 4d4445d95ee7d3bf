"""The state behind the screen: the newest status, its age, and the result of the last request for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ...status.status import Event, NodeStatus
from ..headline import Headline, headline

# A node answers within seconds, or says that it is stopped; a dead ssh connection says nothing at all.
STALE_SECONDS: Final = 12.0
# Most events of the screen itself; nodes come and go less often.
MAX_OWN_EVENTS: Final = 50


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """The node answered."""

    status: NodeStatus


@dataclass(frozen=True, slots=True)
class Lost:
    """The node did not answer; ``why`` is for people."""

    why: str


News = NodeSeen | Lost


@dataclass(frozen=True, slots=True)
class NodeView:
    """The last status of a node; ``read_at`` and each method's ``now`` are on the viewer's monotonic clock."""

    status: NodeStatus | None = None
    read_at: float = 0.0
    lost: str = ""
    """Why the node does not answer; empty while it does."""
    own_events: tuple[Event, ...] = ()
    """Events that the node cannot know: its end and its return."""

    def told(self, news: News, now: float) -> NodeView:
        """Return the view with these news."""
        match news:
            case NodeSeen(status):
                return self._seen(status, now)
            case Lost(why):
                view = replace(self, lost=why)
                return view if self.lost else view._noting(f"the node does not answer: {why}", now)

    def _seen(self, status: NodeStatus, now: float) -> NodeView:
        view = replace(self, status=status, read_at=now, lost="")
        before = self.status
        if before is not None and (before.pid, before.started_at) != (status.pid, status.started_at):
            return view._noting("the node was started anew", now, is_warning=False)
        return view._noting("the node answers again", now, is_warning=False) if self.lost else view

    def _noting(self, text: str, now: float, *, is_warning: bool = True) -> NodeView:
        event = Event(self.node_time(now), text, is_warning)
        return replace(self, own_events=(*self.own_events, event)[-MAX_OWN_EVENTS:])

    def node_time(self, now: float) -> float:
        """Return Unix seconds by the node's own clock, which may be another machine's."""
        return 0.0 if self.status is None else self.status.at + now - self.read_at

    def trouble(self, now: float) -> str:
        """Return why the view is out of date; empty if it is current."""
        silent = now - self.read_at
        if self.lost or silent < STALE_SECONDS:
            return self.lost
        return "nothing has come yet" if self.status is None else f"nothing was heard of the node for {silent:.0f} s"

    def headline(self, now: float) -> Headline:
        """Return the first line."""
        if trouble := self.trouble(now):
            age = "" if self.status is None else f"; what is below is {now - self.read_at:.0f} s old"
            return Headline("trouble", f"the node does not answer{age}", trouble)
        if self.status is None:
            return Headline("busy", "asking the node")
        return headline(self.status, self.node_time(now))

    def events(self) -> list[Event]:
        """Return the events of the node and of this screen, oldest first."""
        events = [] if self.status is None else self.status.events
        return sorted([*events, *self.own_events], key=lambda event: event.at)

"""Events that follow from looking at a node: changes of its connections, and remedies for what lasts.

Two looks at the connections, a few seconds apart, are compared, so that the parts that connect a node need no text for
people. The remedies are those of the status's first line: a person who watches the terminal of ``farandole join`` or
``farandole relay`` need not know `farandole status` to read what to do. Each is printed once, and again only after
another one or after the node was well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from ..status.status import NodeStatus
from .headline import headline

CONNECTIONS_INTERVAL: Final = 2.0
# The status of a run with a thousand members takes some milliseconds.
STATUS_INTERVAL: Final = 5.0
# A trouble that is over sooner, such as the moment between the loss of a peer and the next one, needs no person.
REMIND_AFTER: Final = 30.0
_REACHED: Final = {"public": "directly", "punchable": "by hole punching", "relay only": "through a relay only"}


@dataclass(frozen=True, slots=True)
class Connections:
    """A node's connections, by the peers' short names."""

    reachability: str = "unknown"
    """As in `farandole.node.status.status.NodeStatus`."""
    relays: frozenset[str] = frozenset()
    """Relays through which others reach this node."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Peer -> ``direct``, ``punched`` or ``relayed``."""


def changes(before: Connections, after: Connections) -> Iterator[str]:
    """Yield the changes between two states in words."""
    if after.reachability != before.reachability and after.reachability in _REACHED:
        yield f"others reach this node {_REACHED[after.reachability]}"
    yield from _of_relays(sorted(before.relays - after.relays), sorted(after.relays - before.relays))
    for peer, path in after.paths.items():
        was = before.paths.get(peer, "")
        if path == "relayed" and was != path:
            yield f"{peer} is reached through a relay"
        elif was == "relayed" and path == "punched":
            yield f"a hole is punched to {peer}: what went through a relay goes directly"
        elif was == "relayed" and path != was:
            yield f"{peer} is reached directly now, not through a relay"


def _of_relays(lost: list[str], found: list[str]) -> Iterator[str]:
    for old, new in zip(lost, found, strict=False):
        yield f"the relay {old} was replaced by {new}"
    for old in lost[len(found) :]:
        yield f"the relay {old} is one no more"
    for new in found[len(lost) :]:
        yield f"others reach this node through the relay {new}"


async def note_changes(look: Callable[[], Connections], note: Callable[[str], None]) -> None:
    """Note changes until cancelled."""
    seen = Connections()
    while True:
        before, seen = seen, look()
        for text in changes(before, seen):
            note(text)
        await trio.sleep(CONNECTIONS_INTERVAL)


class Reminder:
    """Decides which remedies to print."""

    def __init__(self) -> None:
        self._told = self._seen = ""
        self._seen_at = 0.0
        self._past: Sequence[str] = ()
        """Warnings from before the node was last well."""

    def look(self, status: NodeStatus, now: float) -> str:
        """Return the line to print, empty if there is none; ``now`` is monotonic."""
        found = headline(status, status.at)
        if found.level == "well":
            self._told, self._past = "", status.warnings
        elif found.remedy and any(text.endswith(found.remedy) for text in status.warnings if text not in self._past):
            self._told = found.remedy  # it was printed when the warning arose
        if found.remedy != self._seen:
            self._seen, self._seen_at = found.remedy, now
        is_new = found.remedy not in ("", self._told)
        if not is_new or max(found.lasts, now - self._seen_at) < REMIND_AFTER:
            return ""
        self._told = found.remedy
        return f"{found.text}. {found.remedy}"


async def keep_reminding(look: Callable[[], NodeStatus], remind: Callable[[str], None]) -> None:
    """Print remedies until cancelled."""
    reminder = Reminder()
    while True:
        await trio.sleep(STATUS_INTERVAL)
        if line := reminder.look(look(), trio.current_time()):
            remind(line)

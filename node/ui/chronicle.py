"""Changes of a node's connections in words, which are kept among its events.

Two states of the node, a few seconds apart, are compared, so that the parts that connect it need no text for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import trio

LOOK_INTERVAL: Final = 2.0
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


async def keep_chronicle(look: Callable[[], Connections], note: Callable[[str], None]) -> None:
    """Note changes until cancelled."""
    seen = Connections()
    while True:
        before, seen = seen, look()
        for text in changes(before, seen):
            note(text)
        await trio.sleep(LOOK_INTERVAL)

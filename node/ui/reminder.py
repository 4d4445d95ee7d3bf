"""The remedies of the status's first line at the terminal of ``farandole join`` and ``farandole relay``.

A person who watches the terminal of a node that cannot reach any peer need not know `farandole status` to read what to
do. Each remedy is printed once, and again only after another one or after the node was well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio

from ..status.status import NodeStatus
from .headline import headline

# A trouble that is over sooner, such as the moment between the loss of a peer and the next one, needs no person.
REMIND_AFTER: Final = 30.0
# The status of a run with a thousand members takes some milliseconds.
LOOK_INTERVAL: Final = 5.0


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
        await trio.sleep(LOOK_INTERVAL)
        if line := reminder.look(look(), trio.current_time()):
            remind(line)

"""Notices of the run's creator: a message to all members, or an order to pause, resume or stop training.

The creator's node publishes them, and renews daily what still holds. Each other node shows them and rests or stops as
ordered, unless its owner has set ``ignore_notices``: the machine is the owner's. A pause ends, too, when its entry
expires, a week after the creator's node was last there: a creator who is gone stops no node for good.

Slot 0 has what holds now (pause, resume, stop), slot 1 the newest message. The run state has checked that a notice is
the creator's and newer than the last.
"""

from __future__ import annotations

from typing import Final

import msgspec
import trio

from farandole.protocol.state.entries import Kind, Notice
from farandole.protocol.wire.errors import FarandoleError

from ..state.gossip import GossipService
from ..status.journal import Journal
from .rest_service import Rest

STATE_SLOT, MESSAGE_SLOT = 0, 1
RENEW_INTERVAL: Final = 86_400.0
# No entry arrives when an entry expires, so the board looks at this interval.
LOOK_INTERVAL: Final = 30.0
NOTICE_REASON: Final = "notice"
_DEEDS: Final = {"pause": "paused", "stop": "stopped"}
_ANYWAY: Final = "`farandole join --ignore-notices` trains all the same"


class NoticeError(FarandoleError):
    """A notice cannot be published; the message says why."""


class NoticeBoard:
    """One node's view of the creator's notices. ``is_ignored``: the owner trains whatever they say."""

    def __init__(
        self, creator: bytes, author: bytes, gossip: GossipService, rest: Rest, journal: Journal, *, is_ignored: bool
    ) -> None:
        self.stopped = trio.Event()
        """Set when the creator stops the run while this node trains."""
        self._creator = creator
        self._author = author
        self._gossip = gossip
        self._rest = rest
        self._journal = journal
        self._is_ignored = is_ignored
        self._renewed_at = -RENEW_INTERVAL
        self._shown: tuple[Notice | None, Notice | None] = (None, None)

    @property
    def words(self) -> str:
        """Return the text of the creator's notices, for display; empty: none."""
        state, message = self._shown
        told = [_words(state)] if state is not None and state.action in _DEEDS else []
        return "; ".join([*told, message.text] if message is not None and message.text else told)

    async def publish(self, action: str, text: str) -> None:
        """Write a notice; it leaves within seconds. Raises `NoticeError`."""
        if self._author != self._creator:
            raise NoticeError("only the run's creator can do this: run it where the creator's node runs")
        try:
            notice = msgspec.convert([action, text], Notice)
        except msgspec.ValidationError as error:
            raise NoticeError(f"a notice has at most 256 characters, all of them ASCII: {error}") from error
        self._renewed_at = trio.current_time()  # a renewal must not replace the notice that waits to be written
        await self._gossip.publish(Kind.NOTICE, MESSAGE_SLOT if action == "say" else STATE_SLOT, notice)

    def begin(self) -> None:
        """Take in the notices that hold already, before training starts. In a stopped run no trainer starts."""
        self._look(is_training=False)

    async def run(self) -> None:
        """Follow the notices until cancelled."""
        while True:
            self._look(is_training=True)
            await self._renew()
            with trio.move_on_after(LOOK_INTERVAL):
                await self._gossip.changed()

    def _look(self, *, is_training: bool) -> None:
        payload = self._gossip.state.payload
        state = payload(self._creator, Notice, STATE_SLOT)
        message = payload(self._creator, Notice, MESSAGE_SLOT)
        (last_state, last_message), self._shown = self._shown, (state, message)
        if message is not None and message != last_message:
            self._journal.say(f"the run's creator says: {message.text}")
        if state == last_state:
            return
        words = _words(state)
        if state is not None:
            self._journal.say(
                f"{words}; this node ignores it" if self._is_ignored and state.action in _DEEDS else words
            )
        if self._is_ignored:
            return
        if state is not None and state.action == "stop" and is_training and not self._rest.is_on:
            self.stopped.set()
        elif state is not None and state.action in _DEEDS:
            self._rest.begin(NOTICE_REASON, f"{words} ({_ANYWAY})")
        else:
            self._rest.end(NOTICE_REASON)

    async def _renew(self) -> None:
        """Keep a pause or a stop from expiring while the creator's node is there: at each start, and daily."""
        state, now = self._shown[0], trio.current_time()
        if self._author != self._creator or state is None or state.action not in _DEEDS:
            return
        if now - self._renewed_at >= RENEW_INTERVAL:
            self._renewed_at = now
            await self._gossip.publish(Kind.NOTICE, STATE_SLOT, state)


def _words(state: Notice | None) -> str:
    """Describe what a notice does, for display."""
    if state is None:
        return ""
    deed = _DEEDS.get(state.action, "resumed")
    return f"the run's creator has {deed} the training" + (f": {state.text}" if state.text else "")

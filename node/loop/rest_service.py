"""Whether this node rests, and why: on its owner's or the run creator's request, and in the quiet hours.

A node trains while there is no reason to rest. Reasons come and go independently: a node that its owner pauses by hand
during the quiet hours is still paused when they are over. A node that rests stays in the mesh: it keeps the run state,
relays and gives checkpoints, but has no trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import datetime
from functools import partial
from typing import Final

import msgspec
import trio

from farandole.protocol.state.entries import Kind, Notice
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.errors import FarandoleError

from ..base.quiet_hours import parse_quiet_hours, quiet_until
from ..state.gossip import GossipService
from ..state.store import Store
from ..status.journal import Journal
from .idle_service import IdleService

BY_HAND: Final = "by hand"
PAUSED: Final = "paused; `farandole resume` goes on"


class Rest:
    """The reasons to rest, by name."""

    def __init__(self) -> None:
        self.quiet_hours: tuple[str, ...] = ()
        """The quiet hours that this node keeps, for display."""
        self._reasons: dict[str, str] = {}
        self.changed = trio.lowlevel.ParkingLot()
        """Where to wait until the reasons or their words change."""

    @property
    def is_on(self) -> bool:
        """Return whether there is any reason to rest."""
        return bool(self.words)

    @property
    def words(self) -> str:
        """Return all reasons, for display."""
        return "; ".join(filter(None, self._reasons.values()))

    def set(self, reason: str, words: str) -> None:
        """Set a reason; ``words`` describe it, and what ends it, for display. Empty words end it."""
        if words != self._reasons.get(reason, ""):
            self._reasons[reason] = words
            self.changed.unpark_all()


PAUSED_FACT: Final = "paused"
QUIET: Final = "quiet hours"
IN_USE: Final = "in use"
# A few seconds more or less of the quiet hours do not matter; a clock that is set is noticed. The owner who starts a
# game waits for its memory no longer than the game takes to load: two looks and a pause.
LOOK_INTERVAL: Final = 5.0


@dataclass(eq=False)
class RestService:
    """Pauses the node by hand, in the quiet hours, and while others use the machine.

    ``hours``: quiet hours, each as `parse_quiet_hours` reads it, which may raise `QuietHoursError`. ``clock`` gives the
    local time; ``idle``: None if it does not matter who uses the machine.
    """

    rest: Rest
    store: Store
    hours: InitVar[Sequence[str]]
    clock: Callable[[], datetime]
    journal: Journal
    idle: IdleService | None = None

    def __post_init__(self, hours: Sequence[str]) -> None:
        self.change_hours(hours)

    async def begin(self) -> None:
        """Rest if an earlier life was paused by hand; call it before anything else."""
        if await self.store.get_fact(PAUSED_FACT):
            self.rest.set(BY_HAND, PAUSED)

    async def run(self) -> None:
        """Look at the clock and at the machine, until cancelled."""
        while True:
            await self.look()
            await trio.sleep(LOOK_INTERVAL)

    async def look(self) -> None:
        """Rest, or rest no more, by the clock and the machine; the first look is before anything is trained."""
        self._look_at_clock()
        if self.idle is not None:
            self.rest.set(IN_USE, await self.idle.look())

    async def pause(self) -> None:
        """Pause until `resume`, in later lives too."""
        self.rest.set(BY_HAND, PAUSED)
        await self._remember(b"1")

    async def resume(self) -> None:
        """End a pause by hand. It does not end the quiet hours, which the owner has set as well."""
        self.rest.set(BY_HAND, "")
        await self._remember(b"")

    def change_hours(self, hours: Sequence[str]) -> None:
        """Rest in other quiet hours. Raises `QuietHoursError`."""
        self._hours = [parse_quiet_hours(text) for text in hours]
        self.rest.quiet_hours = tuple(hours)
        self._look_at_clock()

    async def _remember(self, value: bytes) -> None:
        loss = "after a restart this node does not know whether it was paused"
        await self.store.remember(PAUSED_FACT, value, self.journal, loss)

    def _look_at_clock(self) -> None:
        until = quiet_until(self._hours, self.clock())
        self.rest.set(QUIET, "" if until is None else f"quiet hours until {until:%a %H:%M}")


# Notices of the run's creator: a message to all members, or an order to pause, resume or stop training.
#
# The creator's node publishes them, and renews daily what still holds. Each other node shows them and rests or stops as
# ordered, unless its owner has set ``ignore_notices``: the machine is the owner's. A pause ends, too, when its entry
# expires, a week after the creator's node was last there: a creator who is gone stops no node for good.
#
# Slot 0 has what holds now (pause, resume, stop), slot 1 the newest message. The run state has checked that a notice is
# the creator's and newer than the last.

STATE_SLOT, MESSAGE_SLOT = 0, 1
RENEW_INTERVAL: Final = 86_400.0
# No entry arrives when an entry expires, so the board looks at this interval.
NOTICE_INTERVAL: Final = 30.0
NOTICE_REASON: Final = "notice"
_ACTIONS: Final = {"pause": "paused", "stop": "stopped"}
_ANYWAY: Final = "`farandole join --ignore-notices` trains all the same"


@dataclass(eq=False)
class NoticeBoard:
    """One node's view of the creator's notices. ``is_ignored``: the owner trains whatever they say."""

    author: bytes
    gossip: GossipService
    rest: Rest
    journal: Journal
    is_ignored: bool
    stopped: trio.Event = field(default_factory=trio.Event)
    """Set when the creator stops the run while this node trains."""
    _renewed_at: float = -RENEW_INTERVAL
    _shown: tuple[Notice | None, Notice | None] = (None, None)

    @property
    def words(self) -> str:
        """Return the text of the creator's notices, for display; empty: none."""
        return notice_words(*self._shown)

    async def publish(self, action: str, text: str) -> None:
        """Write a notice; it leaves within seconds. Raises `FarandoleError`."""
        if self.author != self.gossip.state.creator:
            raise FarandoleError("only the run's creator can do this: run it where the creator's node runs")
        try:
            notice = msgspec.convert([action, text], Notice)
        except msgspec.ValidationError as error:
            raise FarandoleError(f"a notice has at most 256 characters, all of them ASCII: {error}") from error
        self._renewed_at = trio.current_time()  # a renewal must not replace the notice that waits to be written
        await self.gossip.publish(Kind.NOTICE, MESSAGE_SLOT if action == "say" else STATE_SLOT, notice)

    async def run(self) -> None:
        """Follow the notices until cancelled."""
        while True:
            self.look(is_training=True)
            # A pause or a stop must not expire while the creator's node is there: renewed at each start, and daily.
            state, now = self._shown[0], trio.current_time()
            is_own = self.author == self.gossip.state.creator and state is not None and state.action in _ACTIONS
            if state is not None and is_own and now - self._renewed_at >= RENEW_INTERVAL:
                self._renewed_at = now
                await self.gossip.publish(Kind.NOTICE, STATE_SLOT, state)
            with trio.move_on_after(NOTICE_INTERVAL):
                await self.gossip.changed.park()

    def look(self, *, is_training: bool) -> None:
        """Take in the notices that hold now; at first before training starts, so in a stopped run no trainer starts."""
        (last_state, last_message), self._shown = self._shown, notices_of(self.gossip.state)
        state, message = self._shown
        if message is not None and message != last_message:
            self.journal.say(f"the run's creator says: {message.text}")
        if state == last_state:
            return
        words = _words(state)
        if state is not None:
            self.journal.say(
                f"{words}; this node ignores it" if self.is_ignored and state.action in _ACTIONS else words
            )
        if self.is_ignored:
            return
        if state is not None and state.action == "stop" and is_training and not self.rest.is_on:
            self.stopped.set()
        else:
            holds = state is not None and state.action in _ACTIONS
            self.rest.set(NOTICE_REASON, f"{words} ({_ANYWAY})" if holds else "")


def notices_of(state: RunState) -> tuple[Notice | None, Notice | None]:
    """Return the creator's notice that holds now, and the newest message."""
    of_slot = partial(state.payload, state.creator, Notice)
    return of_slot(STATE_SLOT), of_slot(MESSAGE_SLOT)


def notice_words(state: Notice | None, message: Notice | None) -> str:
    """Return the text of the creator's notices, for display; empty: none."""
    told = [_words(state)] if state is not None and state.action in _ACTIONS else []
    return "; ".join([*told, message.text] if message is not None and message.text else told)


def _words(state: Notice | None) -> str:
    """Describe what a notice does, for display."""
    if state is None:
        return ""
    done = _ACTIONS.get(state.action, "resumed")
    return f"the run's creator has {done} the training" + (f": {state.text}" if state.text else "")

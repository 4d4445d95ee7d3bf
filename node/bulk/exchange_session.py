"""One session of `protocol.exchange.exchange` over its stream: a pipe that moves the contributions, and the script.

The trainer process works on both contributions: it encodes its own while it is sent (`Outgoing`), and decodes the
partner's while it arrives. The progress of each is in the memory that both processes share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import trio

from farandole.protocol.exchange.exchange import (
    ASK_FROM,
    DATA_UNTIL,
    DECIDE_UNTIL,
    Aborted,
    Accepted,
    Commit,
    Committed,
    Control,
    Exchange,
    Offer,
    Outcomes,
    Step,
    reason_of,
)
from farandole.protocol.rounds.pairing_events import StartExchange
from farandole.protocol.wire.errors import RemoteProtocolError

from ..base.figures import duration, mbit, size
from ..status.status import SCREENED_LATE
from .pipe import BulkPipe, Outgoing, Patience

# The share of the time to the deadline in which a bulk channel has to open.
ROUTE_UNTIL = 0.2
# How long a channel may be silent, as a share of the whole time; then a NAT has forgotten it, or the partner is frozen.
# A line that loses packets is silent for a second or two.
SILENT_FOR = 0.15
# Messages that a partner may send in a session: each once.
MAX_MESSAGES = 5
# Time to deliver the decision, or the reason of an abort, to the partner.
FAREWELL_TIMEOUT = 2.0
# Prefix of a reason that is a verdict on a contribution: the side that receives it need not look for another partner.
REFUSED = "refused: "
# The reason if the time ended before both contributions were done. This node's own result has figures (`too_slow`).
TOO_LONG = "the contributions took too long"
# A partner that gives this reason before this share of the time is wrong: its reason is passed on as the partner's.
SLOW_FROM = DATA_UNTIL / 2


Judge = Callable[[int, int], Awaitable[str | None]]
"""Returns why the partner's complete contribution is refused, or None: by its size, and the tokens that its offer
claims. What it saw of a contribution that is not committed does not count."""


class _FailedError(Exception):
    """The session comes to nothing, for this reason. Never leaves this file."""

    def __init__(self, reason: str, *, is_refused: bool = False, is_too_slow: bool = False) -> None:
        super().__init__(reason)
        self.is_refused = is_refused
        """Whether one of the two contributions is refused by whom it is for."""
        self.is_too_slow = is_too_slow
        """Whether the time was over before both contributions were."""


class ExchangeSession:
    """A session for as long as its stream lasts."""

    def __init__(
        self,
        exchange: Exchange,
        outgoing: Outgoing,
        judge: Judge,
        start: StartExchange,
        outcomes: Outcomes,
    ) -> None:
        self.is_committed = False
        self.is_refused = False
        """Whether either side refused a contribution; else a session that does not commit has only broken."""
        self.is_too_slow = False
        """Whether it failed because the contributions took too long, as this node or its partner reports."""
        self.bulk: BulkPipe | None = None
        """None until there is a stream."""
        self._exchange = exchange
        self._outgoing = outgoing
        self._judge = judge
        self._outcomes = outcomes
        self._started_at = trio.current_time()
        self._deadline = start.deadline
        self._offer_by = start.offer_by
        self._heard, self._messages = trio.open_memory_channel[Control](MAX_MESSAGES)
        self._script = trio.CancelScope()
        self._failure = _FailedError("out of time")

    @property
    def is_in_doubt(self) -> bool:
        """Return whether this node has promised to commit and must ask for the decision."""
        return self._exchange.is_in_doubt and not self.is_committed

    @property
    def offer_by(self) -> float:
        """The time by which the partner's offer must be here."""
        return min(self._offer_by, self.data_by)

    @property
    def data_by(self) -> float:
        """The time by which both contributions must be received and screened."""
        return self._at(DATA_UNTIL)

    def _at(self, share: float) -> float:
        return self._started_at + share * (self._deadline - self._started_at)

    async def hold(self, bulk: BulkPipe, received: bytes) -> str:
        """Run the session over this pipe, of whose stream ``received`` was read; return why it failed, or ""."""
        self.bulk = bulk
        reason = ""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run, bulk, received)
            try:
                with self._script:
                    await self._share_contributions(bulk)
                    await (self._decide(bulk) if self._exchange.is_initiator else self._await_decision(bulk))
                if self._script.cancelled_caught:
                    raise self._failure
            except _FailedError as error:
                reason, self.is_refused, self.is_too_slow = str(error), error.is_refused, error.is_too_slow
                await self._abort(bulk, reason)
            nursery.cancel_scope.cancel()
        return reason

    def give_up(self, reason: str) -> None:
        """End the running session, if it is not decided, and send the partner the reason."""
        self._failure = _FailedError(reason)
        self._script.cancel()

    def close(self) -> None:
        """Close the session: its channel is kept for others if it was committed."""
        if self.bulk is not None:
            self.bulk.close(is_clean=self.is_committed)

    # The script

    async def _share_contributions(self, bulk: BulkPipe) -> None:
        try:
            with _until(self.data_by, TOO_LONG, is_too_slow=True) as scope:
                if not self._exchange.is_initiator:
                    await self._read_offer()
                seconds_left = max(0.0, self._deadline - trio.current_time())
                self._say(bulk, msgspec.structs.replace(self._exchange.offer, seconds_left=seconds_left))
                if self._exchange.is_initiator:
                    await self._read_offer()
                scope.deadline = self.data_by
                seconds = self._deadline - self._started_at
                bulk.add(self._outgoing)
                bulk.begin(Patience(route=ROUTE_UNTIL * seconds, silent=SILENT_FOR * seconds))
                await bulk.wait_received()
            offer = self._exchange.partner_offer
            assert offer is not None, "a contribution follows its offer"
            with _until(self.data_by, SCREENED_LATE):
                refusal = await self._judge(offer.size, offer.tokens)
            if refusal is not None:
                raise _FailedError(f"{REFUSED}{refusal}", is_refused=True)
            with _until(self.data_by, TOO_LONG, is_too_slow=True):
                await bulk.wait_delivered()
        except trio.ClosedResourceError:
            raise self._failure from None

    async def _read_offer(self) -> None:
        """Read the partner's offer; the earlier deadline of the two holds for both."""
        with _until(self.offer_by, "the partner did not begin in time"):
            theirs = await self._next()
        if isinstance(theirs, Offer):
            self._deadline = min(self._deadline, trio.current_time() + theirs.seconds_left)

    async def _decide(self, bulk: BulkPipe) -> None:
        decide_by = self._at(DECIDE_UNTIL)
        with _until(decide_by, "the partner's verdict took too long"):
            await self._next()  # the table lets nothing come but Accepted
        if trio.current_time() >= decide_by:  # this process was frozen in between
            raise _FailedError("too late to decide")
        self.is_committed = self._outcomes.decide(self._exchange.offer.session, committed=True)
        with trio.move_on_after(FAREWELL_TIMEOUT), contextlib.suppress(_FailedError):
            self._say(bulk, Commit())
            await self._next()

    async def _await_decision(self, bulk: BulkPipe) -> None:
        with _until(self._at(ASK_FROM), "the decision took too long"):
            self._say(bulk, Accepted())
            await self._next()
        self.is_committed = True
        with trio.move_on_after(FAREWELL_TIMEOUT):
            self._say(bulk, Committed())
            await bulk.drain()

    async def _abort(self, bulk: BulkPipe, reason: str) -> None:
        """Send the partner the reason, if the stream is open and this node has not promised to commit."""
        if self._exchange.can_abort and not bulk.is_over:
            with trio.move_on_after(FAREWELL_TIMEOUT):
                self._say(bulk, Aborted(reason_of(reason)))
                await bulk.drain()

    # Messages

    def _say(self, bulk: BulkPipe, message: Control) -> None:
        if Step.ABORTED not in (self._exchange.ours, self._exchange.theirs):
            bulk.post(self._exchange.send(message))

    async def _next(self) -> Control:
        """Return the next message; the protocol's table lets only allowed messages through."""
        try:
            return await self._messages.receive()
        except trio.EndOfChannel:
            raise self._failure from None

    async def _hear(self, payload: bytes) -> None:
        message = self._exchange.receive(payload)
        if isinstance(message, Aborted):
            is_too_slow = message.reason == TOO_LONG and trio.current_time() >= self._at(SLOW_FROM)
            self._failure = _FailedError(
                f"the partner aborted: {message.reason}",
                is_refused=message.reason.startswith(REFUSED),
                is_too_slow=is_too_slow,
            )
            self._script.cancel()
        else:
            self._heard.send_nowait(message)

    async def _run(self, bulk: BulkPipe, received: bytes) -> None:
        """Run until the stream ends or the partner breaks the protocol; earlier messages are still read."""
        try:
            await bulk.run(self._hear, received=received)
            self._failure = _FailedError("the partner closed the stream")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._failure = _FailedError(f"the connection broke: {error}")
        except RemoteProtocolError as error:
            self._failure = _FailedError(f"the partner broke the protocol: {error}")
        self._heard.close()


@contextlib.contextmanager
def _until(deadline: float, reason: str, *, is_too_slow: bool = False) -> Iterator[trio.CancelScope]:
    try:
        with trio.fail_at(deadline) as scope:
            yield scope
    except trio.TooSlowError:
        raise _FailedError(reason, is_too_slow=is_too_slow) from None


def too_slow(num_bytes: int, seconds: float, sent: int, received: int) -> str:
    """Explain why ``num_bytes`` each way took too long, when ``sent`` and ``received`` of them had moved."""
    late = [(sent, "up"), (received, "down")]
    rates = [f"{mbit(moved / seconds)} {way}" for moved, way in late if moved < num_bytes and seconds > 0]
    if not rates:  # all was there, and the verdict was not
        return TOO_LONG
    return f"{size(num_bytes)} did not fit into {duration(seconds)} at {' and '.join(rates)}"

"""One session of `farandole.protocol.exchange` over its stream: a pipe that moves the contributions, and the script.

Both contributions are worked on in the trainer process, which encodes the own one while it is sent (`Outgoing`), and
decodes the partner's while it arrives. How far either is stands in the memory that both processes share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec
import trio

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.exchange import ASK_FROM, DATA_UNTIL, DECIDE_UNTIL, Exchange
from farandole.protocol.exchange_messages import (
    Aborted,
    Accepted,
    Commit,
    Committed,
    Control,
    Offer,
    reason_of,
)
from farandole.protocol.exchange_steps import Step
from farandole.protocol.outcomes import Outcomes
from farandole.protocol.pipe import Pipe

from ..base.figures import duration, mbit, size
from ..base.streams import Stream
from .pipe import BulkPipe, Patience

# How often to look, in seconds, while there is nothing to send: in that time a trainer encodes a few megabytes.
LOOK_INTERVAL: Final = 0.002
# The share of the time to the deadline in which a bulk channel has to open.
ROUTE_UNTIL = 0.2
# So long nothing may come over a channel, as a share of the whole time: a NAT has forgotten it, or the partner is
# frozen. A line that loses packets is silent for a second or two.
SILENT_FOR = 0.15
# What the protocol lets a partner say in a session: each message once.
MAX_MESSAGES = 5
# The decision is taken, or there is nothing more to decide: so long is the partner helped to know it.
FAREWELL_TIMEOUT = 2.0
# How a reason begins that is a verdict on a contribution: the partner of whoever says so need not look for another.
REFUSED = "refused: "
# The reason if the time was over before both contributions were. What is told here has figures (`too_slow`).
TOO_LONG = "the contributions took too long"
# A partner that says so before this share of the time cannot mean it: then its word is passed on as its word.
SLOW_FROM = DATA_UNTIL / 2


class Outgoing:
    """The own contribution: ``memory`` is filled from the front, and nothing beyond `num_ready` is to be read.

    ``look`` returns how many bytes are ready, for what is filled by another process.
    """

    def __init__(self, memory: memoryview, look: Callable[[], int] = lambda: 0) -> None:
        self.memory = memory.cast("B")
        self.digest: bytes | None = None
        """BLAKE3 of all of it; known when all is ready."""
        self._look = look
        self._num_ready = 0
        self._more = trio.Event()

    @classmethod
    def whole(cls, memory: memoryview, digest: bytes) -> Outgoing:
        """One that is encoded already."""
        outgoing = cls(memory)
        outgoing.seal(digest)
        return outgoing

    @property
    def num_ready(self) -> int:
        """Bytes that are ready."""
        return max(self._num_ready, self._look())

    def advance(self, num_ready: int, digest: bytes | None = None) -> None:
        """So many bytes are ready now; with the hash, all are."""
        self._num_ready, self.digest = num_ready, digest
        self._more.set()
        self._more = trio.Event()

    def seal(self, digest: bytes) -> None:
        """All is ready, and this is its hash."""
        self.advance(self.memory.nbytes, digest)

    async def wait_beyond(self, position: int) -> int:
        """Wait until more than ``position`` bytes are ready; returns how many are."""
        while (num_ready := self.num_ready) <= position:
            with trio.move_on_after(LOOK_INTERVAL):
                await self._more.wait()
        return num_ready

    async def wait_whole(self) -> bytes:
        """Wait until all is ready; returns its hash."""
        while self.digest is None:
            await self._more.wait()
        return self.digest


class Judge(Protocol):
    """Who judges the partner's contribution. What it saw of one that does not commit, it forgets."""

    async def refusal(self, size: int, tokens: int) -> str | None:
        """All of it is there, with its hash: why it is refused, or None. ``tokens``: what its offer claims."""


class _FailedError(Exception):
    """The session comes to nothing, for this reason. Never leaves this file."""


class _RefusedError(_FailedError):
    """One of the two contributions is refused by whom it is for."""


class _TooSlowError(_FailedError):
    """The time was over before both contributions were."""


class ExchangeSession:
    """One session while its stream lasts."""

    def __init__(
        self,
        exchange: Exchange,
        outgoing: Outgoing,
        judge: Judge,
        deadline: float,
        outcomes: Outcomes,
        open_pipe: Callable[[Pipe, Stream], BulkPipe],
    ) -> None:
        self.is_committed = False
        self.is_refused = False
        """By either side; else what does not commit has only broken."""
        self.is_too_slow = False
        """Whether it failed because the contributions took too long, by this node's word or by its partner's."""
        self.bulk: BulkPipe | None = None
        """Once there is a stream."""
        self._exchange = exchange
        self._outgoing = outgoing
        self._judge = judge
        self._outcomes = outcomes
        self._open_pipe = open_pipe
        self._started_at = trio.current_time()
        self._deadline = deadline
        self._heard, self._messages = trio.open_memory_channel[Control](MAX_MESSAGES)
        self._script = trio.CancelScope()
        self._failure = _FailedError("out of time")

    @property
    def is_in_doubt(self) -> bool:
        """Whether this node has promised to commit and must ask for the decision."""
        return self._exchange.is_in_doubt and not self.is_committed

    @property
    def data_by(self) -> float:
        """When both contributions must be in and screened."""
        return self._at(DATA_UNTIL)

    def _at(self, share: float) -> float:
        return self._started_at + share * (self._deadline - self._started_at)

    async def hold(self, stream: Stream, received: bytes) -> str:
        """Hold the session over this stream, of which ``received`` was read. Why it failed; "" if it did not."""
        bulk = self.bulk = self._open_pipe(self._exchange.pipe, stream)
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
                reason, self.is_refused = str(error), isinstance(error, _RefusedError)
                self.is_too_slow = isinstance(error, _TooSlowError)
                await self._abort(bulk, reason)
            nursery.cancel_scope.cancel()
        return reason

    def give_up(self, reason: str) -> None:
        """End the session that is held, if it is not decided; the partner is told why."""
        self._end(_FailedError(reason))

    def _end(self, failure: _FailedError) -> None:
        self._failure = failure
        self._script.cancel()

    def close(self) -> None:
        """The session is over: its channel is kept for others if it was committed."""
        if self.bulk is not None:
            self.bulk.close(is_clean=self.is_committed)

    # The script

    @property
    def _partner_tokens(self) -> int:
        """Tokens that the partner's offer claims."""
        offer = self._exchange.partner_offer
        assert offer is not None, "a contribution follows its offer"
        return offer.tokens

    async def _share_contributions(self, bulk: BulkPipe) -> None:
        with _until(self.data_by, TOO_LONG, _TooSlowError) as scope:
            await self._share_offers(bulk)
            scope.deadline = self.data_by
            seconds = self._deadline - self._started_at
            bulk.add(self._outgoing)
            bulk.begin(Patience(route=ROUTE_UNTIL * seconds, silent=SILENT_FOR * seconds))
            try:
                await bulk.wait_received()
                refusal = await self._judge.refusal(self._exchange.offer.size, self._partner_tokens)
                if refusal is not None:
                    raise _RefusedError(f"{REFUSED}{refusal}")
                await bulk.wait_delivered()
            except trio.ClosedResourceError:
                raise self._failure from None

    async def _share_offers(self, bulk: BulkPipe) -> None:
        if not self._exchange.is_initiator:
            await self._read_offer()
        seconds_left = max(0.0, self._deadline - trio.current_time())
        self._say(bulk, msgspec.structs.replace(self._exchange.offer, seconds_left=seconds_left))
        if self._exchange.is_initiator:
            await self._read_offer()

    async def _read_offer(self) -> None:
        """The lesser of both partners' deadlines holds for both."""
        theirs = await self._next()
        if isinstance(theirs, Offer):
            self._deadline = min(self._deadline, trio.current_time() + theirs.seconds_left)

    async def _decide(self, bulk: BulkPipe) -> None:
        decide_by = self._at(DECIDE_UNTIL)
        with _until(decide_by, "the partner's verdict took too long"):
            await self._next()  # the table lets nothing come but Accepted
        if trio.current_time() >= decide_by:  # we were frozen meanwhile
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
        """Tell the partner, if it still listens and we have not promised to commit."""
        if self._exchange.can_abort and not bulk.is_over:
            with trio.move_on_after(FAREWELL_TIMEOUT):
                self._say(bulk, Aborted(reason_of(reason)))
                await bulk.drain()

    # Messages

    def _say(self, bulk: BulkPipe, message: Control) -> None:
        if Step.ABORTED not in (self._exchange.ours, self._exchange.theirs):
            bulk.post(self._exchange.send(message))

    async def _next(self) -> Control:
        """The next message: the protocol's table lets no other come than may."""
        try:
            return await self._messages.receive()
        except trio.EndOfChannel:
            raise self._failure from None

    async def _hear(self, payload: bytes) -> None:
        message = self._exchange.receive(payload)
        if isinstance(message, Aborted):
            kind = _RefusedError if message.reason.startswith(REFUSED) else _FailedError
            if message.reason == TOO_LONG and trio.current_time() >= self._at(SLOW_FROM):
                kind = _TooSlowError
            self._end(kind(f"the partner aborted: {message.reason}"))
        else:
            self._heard.send_nowait(message)

    async def _run(self, bulk: BulkPipe, received: bytes) -> None:
        """Until the stream ends or the partner breaks the protocol; what it said before is still read."""
        try:
            await bulk.run(self._hear, lambda name: None, received)
            self._failure = _FailedError("the partner closed the stream")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._failure = _FailedError(f"the connection broke: {error}")
        except RemoteProtocolError as error:
            self._failure = _FailedError(f"the partner broke the protocol: {error}")
        self._heard.close()


@contextlib.contextmanager
def _until(deadline: float, reason: str, kind: type[_FailedError] = _FailedError) -> Iterator[trio.CancelScope]:
    try:
        with trio.fail_at(deadline) as scope:
            yield scope
    except trio.TooSlowError:
        raise kind(reason) from None


def too_slow(num_bytes: int, seconds: float, sent: int, received: int) -> str:
    """Why contributions of ``num_bytes`` each way took too long, of which so many were ``sent`` and ``received``."""
    late = [(sent, "up"), (received, "down")]
    rates = [f"{mbit(moved / seconds)} {way}" for moved, way in late if moved < num_bytes and seconds > 0]
    if not rates:  # all was there, and the verdict was not
        return TOO_LONG
    return f"{size(num_bytes)} did not fit into {duration(seconds)} at {' and '.join(rates)}"

"""One session of `farandole.protocol.exchange` over its stream: a task that always reads, and the script.

The contributions move beside it: large ones by threads over a channel of `farandole.node.bulk.negotiation`, others, and
those for which no channel opens, over the stream itself, a chunk at a time. A channel that breaks or falls silent is
replaced by another or by the stream, and the rest goes over that one. What is sent is still being encoded meanwhile,
and what has come is decoded (`farandole.node.bulk.contributions`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import trio

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.exchange import (
    ASK_FROM,
    BULK_FROM,
    DATA_UNTIL,
    DECIDE_UNTIL,
    MAX_ROUTES,
    ContributionReceived,
    Event,
    Exchange,
)
from farandole.protocol.exchange_messages import (
    CHUNK_BYTES,
    Aborted,
    Accepted,
    Chunk,
    Commit,
    Committed,
    Control,
    Offer,
    Received,
    Reroute,
    Route,
    Sealed,
    reason_of,
)
from farandole.protocol.exchange_steps import Step
from farandole.protocol.outcomes import Outcomes

from ..base.bandwidth import Shaping
from ..base.streams import READ_BYTES, Stream
from .channel import ChannelError
from .contributions import Judge, Outgoing
from .transport import Channel, Transport

logger = logging.getLogger(__name__)

# The share of the time to the deadline in which a bulk channel has to open.
ROUTE_UNTIL = 0.2
# So long nothing may come over a channel, as a share of the whole time: a NAT has forgotten it, or the partner is
# frozen. A line that loses packets is silent for a second or two.
SILENT_FOR = 0.15
# In that time, how often it is looked at: three channels that fall silent must leave the stream its time.
SILENT_CHECKS = 8
# What has come over a channel is told to the judge so often, in seconds: a few times in 100 MB at a channel's best.
TAKE_IN_INTERVAL = 0.02
# What the protocol lets a partner say in a session: an offer, a Route and a Reroute for each way, a hash, a Received,
# the contribution, a verdict, a decision and an abort; and of this node's own one for each way.
MAX_EVENTS = 3 * MAX_ROUTES + 9
# The decision is taken, or there is nothing more to decide: so long is the partner helped to know it.
FAREWELL_TIMEOUT = 2.0
# How a reason begins that is a verdict on a contribution: the partner of whoever says so need not look for another.
REFUSED = "refused: "


class _FailedError(Exception):
    """The session comes to nothing, for this reason. Never leaves this file."""


class _RefusedError(_FailedError):
    """One of the two contributions is refused by whom it is for."""


@dataclass(frozen=True)
class _Here:
    """All of the partner's contribution has come over the channel."""


@dataclass(frozen=True)
class _Stuck:
    """The partner's contribution does not come any further over the channel of this route."""

    route: int


@dataclass(frozen=True)
class _Written:
    """Our contribution has gone into the stream."""


class Conversation:
    """One session while its stream lasts."""

    def __init__(
        self,
        exchange: Exchange,
        outgoing: Outgoing,
        judge: Judge,
        deadline: float,
        outcomes: Outcomes,
        transport: Transport,
        shaping: Shaping,
    ) -> None:
        self.transport = transport
        self.is_committed = False
        self.is_refused = False
        """By either side; else what does not commit has only broken."""
        self.is_held = False
        """Whether there is a stream now."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self._exchange = exchange
        self._outgoing = outgoing
        self._judge = judge
        self._outcomes = outcomes
        self._shaping = shaping
        self._started_at = trio.current_time()
        self._deadline = deadline
        self._events, self._coming = trio.open_memory_channel[Event | _Here | _Stuck | _Written](MAX_EVENTS)
        self._failure = ""
        self._script = trio.CancelScope()
        self._given_up_for = ""
        self._is_sealed = trio.Event()  # our hash is said, or nobody listens any more
        self._lacks_hash = False  # all of the partner's contribution came over the channel, before its hash
        self._is_here, self._is_delivered = False, False  # the partner's contribution, with its hash, and ours
        self._proposed: Route | None = None  # by the initiator, unanswered
        self._screened = trio.Event()
        self._refusal: str | None = None
        self._write_lock = trio.Lock()

    @property
    def is_in_doubt(self) -> bool:
        """Whether this node has promised to commit and must ask for the decision."""
        return self._exchange.is_in_doubt and not self.is_committed

    @property
    def data_by(self) -> float:
        """When both contributions must be in and screened."""
        return self._at(DATA_UNTIL)

    def _at(self, share: float) -> float:
        return self._started_at + share * self._seconds

    @property
    def _seconds(self) -> float:
        return self._deadline - self._started_at

    async def hold(self, stream: Stream, received: bytes) -> str:
        """Hold the session over this stream, of which ``received`` was read. Why it failed; "" if it did not."""
        self._stream = stream
        stream.is_bulk = True
        reason = ""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._read, received)
            self.is_held = True
            try:
                with self._script:
                    await self._share_contributions()
                    await (self._decide() if self._exchange.is_initiator else self._await_decision())
                if self._script.cancelled_caught:
                    raise _FailedError(self._given_up_for)
            except _FailedError as error:
                reason, self.is_refused = str(error), isinstance(error, _RefusedError)
                await self._abort(reason)
            self.is_held = False
            nursery.cancel_scope.cancel()
        return reason

    def give_up(self, reason: str) -> None:
        """End the session that is held, if it is not decided; the partner is told why."""
        self._given_up_for = reason
        self._script.cancel()

    # The script

    async def _share_contributions(self) -> None:
        with _until(self.data_by, "the contributions took too long") as scope:
            await self._share_offers()
            scope.deadline = self.data_by
            self._nursery.start_soon(self._seal)
            if self._exchange.offer.size >= BULK_FROM:
                await self._agree_on_route()
            while self.transport.channel is not None and not await self._move_over(self.transport.channel):
                self.transport.discard()
                await self._agree_on_route()
            if self._exchange.channel is None:
                self._nursery.start_soon(self._write_contribution)
                await self._until_moved()
            await self._screened.wait()
            if self._refusal is not None:
                raise _RefusedError(f"{REFUSED}{self._refusal}")

    async def _share_offers(self) -> None:
        if self._exchange.is_initiator:
            await self._write_offer()
            await self._read_offer()
        else:
            await self._read_offer()
            await self._write_offer()

    async def _write_offer(self) -> None:
        seconds_left = max(0.0, self._deadline - trio.current_time())
        await self._write(msgspec.structs.replace(self._exchange.offer, seconds_left=seconds_left))

    async def _read_offer(self) -> None:
        """The lesser of both partners' deadlines holds for both."""
        theirs = await self._next()
        if isinstance(theirs, Offer):
            self._deadline = min(self._deadline, trio.current_time() + theirs.seconds_left)

    async def _decide(self) -> None:
        decide_by = self._at(DECIDE_UNTIL)
        with _until(decide_by, "the partner's verdict took too long"):
            await self._await(Accepted)
        if trio.current_time() >= decide_by:  # we were frozen meanwhile
            raise _FailedError("too late to decide")
        self.is_committed = self._outcomes.decide(self._exchange.offer.session, committed=True)
        with trio.move_on_after(FAREWELL_TIMEOUT), contextlib.suppress(_FailedError):
            await self._write(Commit())
            await self._await(Committed)

    async def _await_decision(self) -> None:
        with _until(self._at(ASK_FROM), "the decision took too long"):
            await self._write(Accepted())
            await self._await(Commit)
        self.is_committed = True
        with trio.move_on_after(FAREWELL_TIMEOUT):
            await self._write(Committed())

    async def _abort(self, reason: str) -> None:
        """Tell the partner, if it still listens and we have not promised to commit."""
        if self._failure or not self._exchange.can_abort:
            return
        with trio.move_on_after(FAREWELL_TIMEOUT):
            await self._write(Aborted(reason_of(reason)))

    # The contributions

    async def _agree_on_route(self) -> None:
        """Where they move from now on; nothing moves meanwhile."""
        await self._take_whole()
        if self._exchange.is_initiator:
            is_last = self._exchange.num_routes == MAX_ROUTES - 1
            name = None if is_last else await self.transport.open(trio.current_time() + ROUTE_UNTIL * self._seconds)
            await self._write(Route(name, self._exchange.num_received))
            await self._await(Route)
            if self._exchange.channel is None:
                self.transport.discard()  # the responder has it not
        else:
            if self._proposed is None:
                await self._await(Route)
            assert self._proposed is not None, "the initiator's Route is the only one that a responder gets"
            name = self.transport.take(self._proposed.channel)
            self._proposed = None
            await self._write(Route(name, self._exchange.num_received))

    async def _move_over(self, channel: Channel) -> bool:
        """Whether all has arrived at both ends, or another way is to be found. Nothing moves any more then."""
        is_moved, failure = False, None
        async with trio.open_nursery() as nursery:
            sent = trio.Event()
            nursery.start_soon(self._send_over, channel, sent)
            if not self._is_here:
                nursery.start_soon(self._receive_over, channel)
            try:
                is_moved = await self._until_moved()
                if is_moved:
                    await sent.wait()  # a channel on which sending was broken off is lost
            except _FailedError as error:
                failure = error  # raised out of the nursery, which would wrap it in a group
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return is_moved

    async def _until_moved(self) -> bool:
        """Until both have everything (True), or another way is to be found."""
        while not (self._is_here and self._is_delivered):
            event = await self._next()
            match event:
                case _Here() if self._exchange.partner_digest is None:
                    self._lacks_hash = True
                case _Here():
                    await self._take_whole()
                case Sealed() if self._lacks_hash:
                    await self._take_whole()
                case _Stuck(route) if route == self._exchange.num_routes:
                    if self._exchange.is_initiator:
                        return False
                    await self._write(Reroute())
                case Reroute() | Route():
                    self._note(event)
                    return False
                case _:
                    self._note(event)
        return True

    def _note(self, event: Event | _Here | _Stuck | _Written) -> None:
        match event:
            case Received() | _Written():
                self._is_delivered = True
            case Route() if not self._exchange.is_initiator:
                self._proposed = event
            case ContributionReceived():
                self._be_here()

    async def _take_whole(self) -> None:
        """If all of the partner's contribution has come over the channel, compare its hash, and say that it is here.

        For when no thread receives any more: it would hash at the same time.
        """
        exchange = self._exchange
        if self._is_here or exchange.channel is None or exchange.num_received < exchange.offer.size:
            return
        try:
            exchange.check_whole()
        except RemoteProtocolError as error:
            raise _FailedError(f"the partner broke the protocol: {error}") from None
        self._be_here()
        await self._write(Received())

    def _be_here(self) -> None:
        self._is_here = True
        self._nursery.start_soon(self._screen_contribution)

    async def _screen_contribution(self) -> None:
        offer = self._exchange.partner_offer
        assert offer is not None, "a contribution follows its offer"
        self._refusal = await self._judge.refusal(self._exchange.num_received, offer.tokens)
        self._screened.set()

    async def _seal(self) -> None:
        """Never cancelled in the middle of the message, while there is a session."""
        await self._write(Sealed(await self._outgoing.wait_whole()))
        self._is_sealed.set()

    async def _wait_beyond(self, position: int) -> int:
        """Until more than ``position`` bytes may be sent; how many. The last ones may after the hash."""
        num_ready = await self._outgoing.wait_beyond(position)
        if num_ready == self._exchange.offer.size:
            await self._is_sealed.wait()
        return num_ready

    async def _send_over(self, channel: Channel, sent: trio.Event) -> None:
        before, position = channel.num_sent, self._exchange.num_sent
        try:
            while position < self._exchange.offer.size:
                end = await self._wait_beyond(position)
                await channel.send(self._outgoing.memory[position:end])
                position = end
        except ChannelError as error:
            logger.debug("sending over the bulk channel broke off: %s", error)  # the partner says what it lacks
        finally:
            self.bytes_sent += channel.num_sent - before
            sent.set()

    async def _receive_over(self, channel: Channel) -> None:
        incoming, route = self._exchange.incoming, self._exchange.num_routes
        before = incoming.position
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_when_silent, channel, nursery.cancel_scope)
                nursery.start_soon(self._let_take_in)
                try:
                    await channel.receive(incoming)
                except ChannelError as error:
                    logger.debug("receiving over the bulk channel broke off: %s", error)
                nursery.cancel_scope.cancel()
        finally:
            self.bytes_received += incoming.position - before
        self._put(_Here() if incoming.position == self._exchange.offer.size else _Stuck(route))

    async def _cancel_when_silent(self, channel: Channel, scope: trio.CancelScope) -> None:
        """By what comes at all: on a slow line, what counts comes in pieces of seconds."""
        patience = SILENT_FOR * self._seconds
        before, heard_at = channel.num_received, trio.current_time()
        while True:
            await trio.sleep(patience / SILENT_CHECKS)
            now = trio.current_time()
            if channel.num_received > before:
                before, heard_at = channel.num_received, now
            elif now >= heard_at + patience:
                return scope.cancel()

    async def _let_take_in(self) -> None:
        while True:
            self._judge.take_in(self._exchange.num_received)
            await trio.sleep(TAKE_IN_INTERVAL)

    async def _write_contribution(self) -> None:
        size = min(CHUNK_BYTES, self._shaping.up.quantum)
        while (position := self._exchange.num_sent) < self._exchange.offer.size:
            end = min(position + size, await self._wait_beyond(position))
            chunk = Chunk(position, self._outgoing.memory[position:end])
            await self._shaping.up.wait(chunk.data.nbytes)
            if not await self._write(chunk):
                return
        self._put(_Written())

    # Reading and writing

    async def _await(self, kind: type[Event]) -> None:
        """The event that the script is at; what comes before it belongs to the contributions."""
        event = await self._next()
        self._note(event)
        while not isinstance(event, kind):
            event = await self._next()
            self._note(event)

    async def _next(self) -> Event | _Here | _Stuck | _Written:
        """The next event: the protocol's table lets no other come from the partner than may, or an abort."""
        try:
            event = await self._coming.receive()
        except trio.EndOfChannel:
            raise _FailedError(self._failure) from None
        if isinstance(event, Aborted):
            kind = _RefusedError if event.reason.startswith(REFUSED) else _FailedError
            raise kind(f"the partner aborted: {event.reason}")
        return event

    async def _read(self, received: bytes | bytearray) -> None:
        """Read until the stream ends or the partner breaks the protocol, whatever we are busy with."""
        try:
            while True:
                self.bytes_received += len(received)
                so_far = self._exchange.num_received
                self._take_in(bytes(received))
                if self._exchange.num_received > so_far and self._exchange.channel is None:
                    self._judge.take_in(self._exchange.num_received)
                    await self._shaping.down.wait(len(received))
                else:
                    self._shaping.down.charge(len(received))
                received = await self._stream.receive_some(min(READ_BYTES, self._shaping.down.quantum))
                if not received:
                    return self._fail("the partner closed the stream")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._fail(f"the connection broke: {error}")
        except RemoteProtocolError as error:
            self._fail(f"the partner broke the protocol: {error}")

    def _take_in(self, received: bytes) -> None:
        self._exchange.receive_data(received)
        while (event := self._exchange.next_event()) is not None:
            self._put(event)

    def _put(self, event: Event | _Here | _Stuck | _Written) -> None:
        with contextlib.suppress(trio.ClosedResourceError):  # it has failed meanwhile
            self._events.send_nowait(event)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._events.close()

    async def _write(self, message: Control | Chunk) -> bool:
        """Whether it could be sent. If not, `_next` says why: what the partner said before is still to be read."""
        async with self._write_lock:
            if Step.ABORTED in (self._exchange.ours, self._exchange.theirs):
                return False
            data = self._exchange.send(message)
            if not isinstance(message, Chunk):
                self._shaping.up.charge(len(data))
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
            self.bytes_sent += len(data)
            return True


@contextlib.contextmanager
def _until(deadline: float, reason: str) -> Iterator[trio.CancelScope]:
    try:
        with trio.fail_at(deadline) as scope:
            yield scope
    except trio.TooSlowError:
        raise _FailedError(reason) from None

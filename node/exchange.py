"""Carries out exchanges: one session of `farandole.protocol.exchange` over one stream, with a deadline on every wait.

`ExchangeService.run` returns by its deadline whatever the partner does: dies, freezes, lies, or never comes. What a
partner does wrong is in the result's reason, never an exception. Contributions go in and out of memory that the caller
holds: large ones by threads over a channel of `farandole.node.bulk`, while the session goes on over its stream; others,
and those for which no channel opens, over the stream itself, hashed a chunk at a time on arrival.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import trio

from farandole.protocol.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.exchange import (
    ASK_FROM,
    BULK_FROM,
    CHUNK_BYTES,
    DATA_UNTIL,
    DECIDE_UNTIL,
    Aborted,
    Accepted,
    Chunk,
    Commit,
    Committed,
    Control,
    Event,
    Exchange,
    Offer,
    Outcome,
    Outcomes,
    Resolution,
    Resolve,
    Route,
    Step,
    decode_resolution,
    decode_resolve,
    encode_resolve,
    peek_offer,
    resolve_parser,
)
from farandole.protocol.framing import FrameParser
from farandole.protocol.pairing import StartExchange

from .bulk_channel import ChannelError
from .errors import PeerUnreachableError
from .shaping import Shaping

EXCHANGE_PROTOCOL = "/farandole/exchange/1"
RESOLVE_PROTOCOL = "/farandole/resolve/1"
# The share of the time to the deadline in which a bulk channel has to open.
ROUTE_UNTIL = 0.2
# Read at a time; about a chunk's frame.
READ_BYTES = 65_536
# Streams that have not said yet which session they belong to, or whose session is not expected yet. Of honest peers
# there is one at a time: the partner, whose Begin is on its way on another stream.
MAX_UNCLAIMED = 32
# As many of them may be one peer's: its last round's, given up, and this one's.
MAX_UNCLAIMED_PER_PEER = 4
# How long such a stream may stay: the partner's Begin was sent before it was opened.
CLAIM_TIMEOUT = 5.0
DIAL_TIMEOUT = 8.0
# A session has at most six events (offer, route, contribution, verdict, decision, abort); its protocol allows no more.
MAX_EVENTS = 8
# The decision is taken, or there is nothing more to decide: so long is the partner helped to know it.
FAREWELL_TIMEOUT = 2.0
# One question to an initiator, dial included, and the pause before the next one.
RESOLVE_TIMEOUT, RESOLVE_INTERVAL = 5.0, 0.5

Screen = Callable[[int], Awaitable[str | None]]
"""Called with the size of the contribution received; why it is refused, or None."""


class ExchangeStream(Protocol):
    """What is used of a `farandole.node.host.Stream`."""

    is_bulk: bool
    """That its user keeps to the caps."""

    @property
    def peer(self) -> bytes:
        """The remote's public key, authenticated."""

    async def send_all(self, data: bytes) -> None:
        """Send, or raise `trio.BrokenResourceError`."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Some bytes, none at the end; or raise `trio.BrokenResourceError`."""

    async def aclose(self) -> None:
        """Close; forcefully if cancelled."""


class ExchangeHost(Protocol):
    """What is used of a `farandole.node.host.Host`."""

    def set_handler(self, protocol: str, handler: Callable[[ExchangeStream], Awaitable[None]]) -> None:
        """Serve incoming streams."""

    async def open_stream(self, peer: bytes, protocol: str, timeout: float) -> ExchangeStream:  # noqa: ASYNC109
        """Open a stream, or raise `PeerUnreachableError`."""


class Channel(Protocol):
    """What is used of a `farandole.node.bulk_channel.BulkChannel`."""

    @property
    def session(self) -> bytes:
        """Its name at both ends."""

    async def send(self, data: memoryview) -> bytes:
        """Send all, or raise `ChannelError`; the BLAKE3 of it."""

    async def receive_into(self, memory: memoryview) -> bytes:
        """Fill the memory, or raise `ChannelError`; the BLAKE3 of it. Nothing touches it once this is over."""


C = TypeVar("C", bound=Channel)


class Channels(Protocol[C]):
    """What is used of a `farandole.node.bulk.BulkService`."""

    def expecting(self, peer: bytes) -> contextlib.AbstractContextManager[None]:
        """While the block runs, the peer may open channels."""

    async def acquire(self, peer: bytes) -> C | None:
        """A channel with the peer, if there is a way."""

    def take(self, peer: bytes, session: bytes) -> C | None:
        """The channel that the peer has acquired."""

    def release(self, channel: C) -> None:
        """Keep it for the next exchange."""

    def discard(self, channel: C) -> None:
        """Close it."""


@dataclass(frozen=True, slots=True)
class ExchangeResult:
    """How a session ended for this node."""

    session: bytes
    partner: bytes
    round: int
    """Our own."""
    committed: bool
    """The partner's contribution is to be used; it lies whole in the incoming memory."""
    reason: str
    """Why it was not committed, for people; empty if it was."""
    bytes_sent: int
    """On the stream, framing included, and on the channel."""
    bytes_received: int
    seconds: float
    partner_round: int
    partner_tokens: int
    partner_size: int
    """Bytes of the contribution received; 0, like the two above, if it was not committed."""
    path: str
    """"bulk" if the contributions moved, or were to move, over a bulk channel, else "stream"."""


class ExchangeService:
    """All exchanges of one node: opens streams as initiator, matches incoming ones to the sessions it expects."""

    def __init__(
        self, host: ExchangeHost, channels: Channels[Any] | None = None, shaping: Shaping | None = None
    ) -> None:
        self.channels = channels
        """Ways beside the streams; without them everything goes over the streams."""
        self._host = host
        self._shaping = shaping or Shaping()
        self._outcomes = Outcomes()
        self._expected: dict[bytes, _Expected] = {}
        self._expected_more = trio.Event()
        self._unclaimed: Counter[bytes] = Counter()
        host.set_handler(EXCHANGE_PROTOCOL, self._serve_exchange)
        host.set_handler(RESOLVE_PROTOCOL, self._serve_resolve)

    async def run(
        self, start: StartExchange, offer: Offer, outgoing: memoryview, incoming: memoryview, screen: Screen
    ) -> ExchangeResult:
        """Exchange contributions as `Pairing` has asked; returns by ``start.deadline``.

        ``offer`` describes ``outgoing``; the partner's contribution is received into ``incoming`` and then screened.
        Nothing in ``incoming`` counts unless the result is committed. ``start.deadline`` is of `trio.current_time`.
        """
        exchange = Exchange(start.is_initiator, offer, incoming)
        way = _Way(start.peer, self.channels)
        conversation = _Conversation(exchange, outgoing, screen, start.deadline, self._outcomes, way, self._shaping)
        started_at = trio.current_time()
        if start.is_initiator:
            self._outcomes.begin(start.session, start.peer)
        reason = "out of time"
        try:
            with trio.move_on_at(start.deadline):
                take_part = self._initiate if start.is_initiator else self._respond
                reason = await take_part(start, conversation)
        finally:
            way.close(conversation.is_committed)
            if start.is_initiator:
                self._outcomes.decide(start.session, committed=False)  # unless it is decided already
        if conversation.is_in_doubt:
            reason = "the initiator's decision could not be learnt in time"
        is_committed = conversation.is_committed
        partner = exchange.partner_offer if is_committed else None
        return ExchangeResult(
            session=start.session,
            partner=start.peer,
            round=start.round,
            committed=is_committed,
            reason="" if is_committed else reason,
            bytes_sent=conversation.bytes_sent,
            bytes_received=conversation.bytes_received,
            seconds=trio.current_time() - started_at,
            partner_round=partner.round if partner else 0,
            partner_tokens=partner.tokens if partner else 0,
            partner_size=partner.size if partner else 0,
            path="stream" if exchange.channel is None else "bulk",
        )

    async def _initiate(self, start: StartExchange, conversation: _Conversation) -> str:
        try:
            stream = await self._host.open_stream(start.peer, EXCHANGE_PROTOCOL, DIAL_TIMEOUT)
        except PeerUnreachableError as error:
            return str(error)
        try:
            return await conversation.hold(stream, b"")
        finally:
            await _close(stream)

    async def _respond(self, start: StartExchange, conversation: _Conversation) -> str:
        expected = self._expected[start.session] = _Expected(start.peer)
        self._expected_more.set()
        self._expected_more = trio.Event()
        try:
            with trio.move_on_at(conversation.data_by):
                await expected.arrived.wait()
            if expected.stream is None:
                return "the partner opened no stream"
            with conversation.way.expecting():
                reason = await conversation.hold(expected.stream, expected.received)
        finally:
            del self._expected[start.session]
            expected.done.set()
        if conversation.is_in_doubt:
            return await self._resolve(start, conversation)
        return reason

    async def _serve_exchange(self, stream: ExchangeStream) -> None:
        """An incoming stream: find the session that expects it, and keep it open until that is over."""
        try:
            expected = await self._claim_in_time(stream)
            if expected is not None:
                await expected.done.wait()
        finally:
            await _close(stream)

    async def _claim_in_time(self, stream: ExchangeStream) -> _Expected | None:
        peer = stream.peer
        if self._unclaimed.total() >= MAX_UNCLAIMED or self._unclaimed[peer] >= MAX_UNCLAIMED_PER_PEER:
            return None
        self._unclaimed[peer] += 1
        try:
            with trio.move_on_after(CLAIM_TIMEOUT), contextlib.suppress(RemoteProtocolError, trio.BrokenResourceError):
                return await self._claim(stream)
        finally:
            self._unclaimed[peer] -= 1
            self._unclaimed += Counter()  # forgets the zeros
        return None

    async def _claim(self, stream: ExchangeStream) -> _Expected | None:
        received, offer = await _receive_offer(stream)
        while offer.session not in self._expected:
            await self._expected_more.wait()
        expected = self._expected[offer.session]
        if expected.peer != stream.peer or expected.stream is not None:
            return None
        expected.stream, expected.received = stream, received
        expected.arrived.set()
        return expected

    async def _resolve(self, start: StartExchange, conversation: _Conversation) -> str:
        """We have promised to commit and do not know the decision: ask until the deadline."""
        while True:
            outcome: Outcome = "undecided"
            with trio.move_on_after(RESOLVE_TIMEOUT):
                outcome = await self._ask(start.peer, start.session)
            if outcome != "undecided":
                conversation.is_committed = outcome == "committed"
                return "the partner had aborted"
            await trio.sleep(RESOLVE_INTERVAL)

    async def _ask(self, peer: bytes, session: bytes) -> Outcome:
        """One question; "undecided" if there is no answer."""
        try:
            stream = await self._host.open_stream(peer, RESOLVE_PROTOCOL, RESOLVE_TIMEOUT)
        except PeerUnreachableError:
            return "undecided"
        try:
            await stream.send_all(encode_resolve(Resolve(session)))
            return decode_resolution(await _receive_frame(stream, resolve_parser())).outcome
        except (trio.BrokenResourceError, RemoteProtocolError):
            return "undecided"
        finally:
            await _close(stream)

    async def _serve_resolve(self, stream: ExchangeStream) -> None:
        """A responder in doubt asks; one question a stream."""
        try:
            with (
                trio.move_on_after(RESOLVE_TIMEOUT),
                contextlib.suppress(RemoteProtocolError, trio.BrokenResourceError),
            ):
                question = decode_resolve(await _receive_frame(stream, resolve_parser()))
                answer = self._outcomes.answer(question.session, stream.peer)
                await stream.send_all(encode_resolve(Resolution(answer)))
        finally:
            await _close(stream)


@dataclass(slots=True, eq=False)
class _Expected:
    """A session that this node awaits as responder, and the stream that has come for it."""

    peer: bytes
    arrived: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)
    stream: ExchangeStream | None = None
    received: bytes = b""
    """What was read from the stream so far: the offer, and perhaps more."""


class _FailedError(Exception):
    """The session comes to nothing, for this reason. Never leaves this file."""


class _Way:
    """The bulk channel of one session, if it comes to one."""

    def __init__(self, peer: bytes, channels: Channels[Any] | None) -> None:
        self.channel: Channel | None = None
        self._peer = peer
        self._channels = channels

    def expecting(self) -> contextlib.AbstractContextManager[None]:
        """The partner may open a channel while the block runs."""
        return self._channels.expecting(self._peer) if self._channels else contextlib.nullcontext()

    async def propose(self, until: float) -> Route:
        """The initiator's word, which may take until then."""
        if self._channels is not None:
            with trio.move_on_at(until):
                self.channel = await self._channels.acquire(self._peer)
        return Route(self.channel.session if self.channel else None)

    def answer(self, proposed: Route) -> Route:
        """The responder's word."""
        if self._channels is not None and proposed.channel is not None:
            self.channel = self._channels.take(self._peer, proposed.channel)
        return Route(self.channel.session if self.channel else None)

    def close(self, is_clean: bool) -> None:
        """Keep the channel for the next session if nothing more is to come over it from this one."""
        channel, self.channel = self.channel, None
        if channel is not None and self._channels is not None:
            (self._channels.release if is_clean else self._channels.discard)(channel)


class _Conversation:
    """One session while its stream lasts: a task that always reads, one that writes chunks, and the script."""

    def __init__(
        self,
        exchange: Exchange,
        outgoing: memoryview,
        screen: Screen,
        deadline: float,
        outcomes: Outcomes,
        way: _Way,
        shaping: Shaping,
    ) -> None:
        self.way = way
        self.is_committed = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self._exchange = exchange
        self._outgoing = outgoing.cast("B")
        self._screen = screen
        self._outcomes = outcomes
        self._shaping = shaping
        self._started_at = trio.current_time()
        self._deadline = deadline
        self._events, self._coming = trio.open_memory_channel[Event](MAX_EVENTS)
        self._failure = ""
        self._writing, self._receiving = trio.CancelScope(), trio.CancelScope()
        self._written = trio.Event()
        self._channel_problem = ""
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
        return self._started_at + share * (self._deadline - self._started_at)

    async def hold(self, stream: ExchangeStream, received: bytes) -> str:
        """Hold the session over this stream, of which ``received`` was read. Why it failed; "" if it did not."""
        self._stream = stream
        stream.is_bulk = True
        reason = ""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, received)
            try:
                await self._share_contributions(nursery)
                await (self._decide() if self._exchange.is_initiator else self._await_decision())
            except _FailedError as error:
                reason = str(error)
                await self._abort(reason)
            nursery.cancel_scope.cancel()
        return reason

    # The script

    async def _share_contributions(self, nursery: trio.Nursery) -> None:
        with _until(self.data_by, "the contributions took too long") as scope:
            await self._share_offers()
            scope.deadline = self.data_by
            if self._exchange.offer.size >= BULK_FROM:
                await self._agree_on_route()
            if self._exchange.channel is not None and self.way.channel is not None:
                nursery.start_soon(self._send_over, self.way.channel)
                await self._receive_over(self.way.channel)
            else:
                nursery.start_soon(self._write_contribution)
                await self._next()  # ContributionReceived
            refusal = await self._screen(self._exchange.num_received)
            if refusal is not None:
                raise _FailedError(f"refused: {refusal}")
            await self._written.wait()
            if self._exchange.num_sent < self._exchange.offer.size:
                await self._fail_as_told()

    async def _share_offers(self) -> None:
        if self._exchange.is_initiator:
            await self._write_offer()
            await self._read_offer()
        else:
            await self._read_offer()
            await self._write_offer()

    async def _agree_on_route(self) -> None:
        if self._exchange.is_initiator:
            await self._write(await self.way.propose(self._at(ROUTE_UNTIL)))
            await self._next()  # the responder's Route
        else:
            proposed = await self._next()
            if isinstance(proposed, Route):
                await self._write(self.way.answer(proposed))

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
            await self._next()  # Accepted
        if trio.current_time() >= decide_by:  # we were frozen meanwhile
            raise _FailedError("too late to decide")
        self.is_committed = self._outcomes.decide(self._exchange.offer.session, committed=True)
        with trio.move_on_after(FAREWELL_TIMEOUT), contextlib.suppress(_FailedError):
            await self._write(Commit())
            await self._next()  # Committed

    async def _await_decision(self) -> None:
        with _until(self._at(ASK_FROM), "the decision took too long"):
            await self._write(Accepted())
            await self._next()  # Commit
        self.is_committed = True
        with trio.move_on_after(FAREWELL_TIMEOUT):
            await self._write(Committed())

    async def _abort(self, reason: str) -> None:
        """Tell the partner, if it still listens and we have not promised to commit."""
        if self._failure or not self._exchange.can_abort:
            return
        with trio.move_on_after(FAREWELL_TIMEOUT):
            await self._write(Aborted(reason[:256]))

    async def _next(self) -> Event:
        """The partner's next event: the protocol's table lets no other come than the script awaits, or an abort."""
        try:
            event = await self._coming.receive()
        except trio.EndOfChannel:
            raise _FailedError(self._failure) from None
        if isinstance(event, Aborted):
            raise _FailedError(f"the partner aborted: {event.reason}")
        return event

    # Reading and writing

    async def _read(self, received: bytes | bytearray) -> None:
        """Read until the stream ends or the partner breaks the protocol, whatever we are busy with."""
        try:
            while True:
                self.bytes_received += len(received)
                so_far = self._exchange.num_received
                self._take_in(bytes(received))
                if self._exchange.num_received > so_far:
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
            self._events.send_nowait(event)
            if isinstance(event, Aborted):
                self._stop_moving()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._events.close()
        self._stop_moving()

    def _stop_moving(self) -> None:
        self._writing.cancel()
        self._receiving.cancel()

    async def _write_contribution(self) -> None:
        with self._writing:
            size = min(CHUNK_BYTES, self._shaping.up.quantum)
            for offset in range(0, self._exchange.offer.size, size):
                chunk = Chunk(offset, self._outgoing[offset : min(offset + size, self._exchange.offer.size)])
                await self._shaping.up.wait(chunk.data.nbytes)
                if not await self._write(chunk):
                    break
        self._written.set()

    async def _send_over(self, channel: Channel) -> None:
        with self._writing:
            try:
                self._exchange.send_whole(await channel.send(self._outgoing[: self._exchange.offer.size]))
                self.bytes_sent += self._exchange.offer.size
            except (ChannelError, LocalProtocolError) as error:
                self._channel_problem = str(error)
                self._receiving.cancel()
        self._written.set()

    async def _receive_over(self, channel: Channel) -> None:
        try:
            with self._receiving:
                digest = await channel.receive_into(self._exchange.incoming)
                self.bytes_received += self._exchange.offer.size
                return self._exchange.receive_whole(digest)
        except ChannelError as error:
            self._channel_problem = str(error)
        except RemoteProtocolError as error:
            raise _FailedError(f"the partner broke the protocol: {error}") from None
        await self._fail_as_told()

    async def _fail_as_told(self) -> None:
        """Moving was broken off: say why, by what the channel or the partner has said, perhaps after a verdict."""
        if self._channel_problem:
            raise _FailedError(f"the bulk channel broke: {self._channel_problem}")
        while True:
            await self._next()

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


async def _receive_offer(stream: ExchangeStream) -> tuple[bytes, Offer]:
    """Read until the offer is complete: all that was read, and the offer. `RemoteProtocolError` if it is none."""
    received = b""
    while (offer := peek_offer(received)) is None:
        more = await stream.receive_some(READ_BYTES)
        if not more:
            raise RemoteProtocolError("the stream ended before its offer")
        received += more
    return received, offer


async def _receive_frame(stream: ExchangeStream, parser: FrameParser) -> bytes:
    """Read one frame; `RemoteProtocolError` if there is none."""
    while (payload := parser.next_frame()) is None:
        data = await stream.receive_some(READ_BYTES)
        if not data:
            raise RemoteProtocolError("the stream ended before its frame")
        parser.receive_data(data)
    return payload


async def _close(stream: ExchangeStream) -> None:
    """Close, so that what was sent still arrives; break it off if that takes too long, or when cancelled."""
    with trio.move_on_after(FAREWELL_TIMEOUT):
        await stream.aclose()

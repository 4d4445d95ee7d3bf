"""Carries out exchanges: one session of `protocol.exchange.exchange` over one stream, with a deadline on every wait.

`ExchangeService.run` returns by its deadline whatever the partner does: dies, freezes, lies, or never comes. A
partner's faults are in the result's reason, never an exception. Contributions go in and out of memory that the caller
holds. This module matches sessions with their streams; the messages of a session are in
`farandole.node.bulk.exchange_session`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from farandole.protocol.exchange.exchange import (
    Exchange,
    Offer,
    Outcome,
    Outcomes,
    Resolution,
    Resolve,
    decode_resolution,
    decode_resolve,
    encode_resolve,
    peek_offer,
    resolve_parser,
)
from farandole.protocol.exchange.pipe import Pipe
from farandole.protocol.rounds.pairing_events import ExchangeEnded, StartExchange
from farandole.protocol.wire.errors import RemoteProtocolError

from ..base.bandwidth import Shaping
from ..base.errors import PeerUnreachableError
from ..base.streams import DIAL_TIMEOUT, READ_BYTES, Stream, StreamHost, close_stream, receive_frame
from .exchange_session import ExchangeSession, Judge, too_slow
from .negotiation import BulkService
from .pipe import BulkPipe, Outgoing

EXCHANGE_PROTOCOL = "/farandole/exchange/1"
RESOLVE_PROTOCOL = "/farandole/resolve/1"
# Streams that have not named their session yet, or whose session is not expected yet. Honest peers have one at a time:
# the partner's, while its Begin is on its way on another stream.
MAX_UNCLAIMED = 32
# Unclaimed streams of one peer: its last round's, given up, and this one's.
MAX_UNCLAIMED_PER_PEER = 4
# How long such a stream may stay: the partner's Begin was sent before it was opened.
CLAIM_TIMEOUT = 5.0
# One question to an initiator, dial included, and the pause before the next one.
RESOLVE_TIMEOUT, RESOLVE_INTERVAL = 5.0, 0.5


class ExchangeService:
    """The exchanges of one node: opens streams as initiator, matches incoming ones to the sessions it expects."""

    def __init__(self, host: StreamHost, channels: BulkService | None = None, shaping: Shaping | None = None) -> None:
        self.channels = channels
        """Bulk channels in addition to the streams; without them everything goes over the streams."""
        self._host = host
        self._shaping = shaping or Shaping()
        self._outcomes = Outcomes()
        self._running: dict[ExchangeSession, trio.CancelScope] = {}
        self._one_ended = trio.Event()
        self._expected: dict[bytes, _Expected] = {}
        self._expected_more = trio.Event()
        self._unclaimed: Counter[bytes] = Counter()
        host.set_handler(EXCHANGE_PROTOCOL, self._serve_exchange)
        host.set_handler(RESOLVE_PROTOCOL, self._serve_resolve)

    @property
    def is_exchanging(self) -> bool:
        """Return whether contributions are under way."""
        return bool(self._running)

    async def wait_quiet(self) -> None:
        """Wait until no contributions are under way."""
        while self._running:
            await self._one_ended.wait()

    async def run(
        self,
        start: StartExchange,
        offer: Offer,
        outgoing: Outgoing,
        incoming: memoryview,
        judge: Judge,
        on_advance: Callable[[int], None] | None = None,
    ) -> ExchangeEnded:
        """Exchange contributions as `Pairing` has asked; return by ``start.deadline``.

        ``offer`` describes ``outgoing``; the partner's contribution is received into ``incoming`` and then judged;
        ``on_advance`` gets the number of bytes of it that have arrived, in whichever thread receives them.
        ``incoming`` is valid only if the result is committed. ``start.deadline`` is of `trio.current_time`.
        """
        exchange = Exchange(start.is_initiator, offer, incoming, on_advance)
        session = ExchangeSession(exchange, outgoing, judge, start, self._outcomes)
        started_at = trio.current_time()
        if start.is_initiator:
            self._outcomes.begin(start.session, start.peer)
        reason = "out of time"
        try:
            expecting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self.channels is not None and not start.is_initiator:  # who opens channels
                expecting = self.channels.expecting(start.peer)
            with expecting, trio.move_on_at(start.deadline) as self._running[session]:
                take_part = self._initiate if start.is_initiator else self._respond
                reason = await take_part(start, session, exchange.pipe)
        finally:
            del self._running[session]
            self._one_ended.set()
            self._one_ended = trio.Event()
            session.close()
            if start.is_initiator:
                self._outcomes.decide(start.session, committed=False)  # unless it is decided already
        seconds = trio.current_time() - started_at
        if session.is_in_doubt:
            reason = "the initiator's decision could not be learnt in time"
        elif session.is_too_slow and session.bulk is not None:
            reason = too_slow(offer.size, seconds, session.bulk.bytes_sent, session.bulk.bytes_received)
        is_committed = session.is_committed
        partner = exchange.partner_offer if is_committed else None
        return ExchangeEnded(
            start.session,
            start.peer,
            is_committed,
            is_broken=not is_committed and not session.is_refused,
            reason="" if is_committed else reason,
            round=start.round,
            bytes_sent=session.bulk.bytes_sent if session.bulk else 0,
            bytes_received=session.bulk.bytes_received if session.bulk else 0,
            seconds=seconds,
            partner_round=partner.round if partner else 0,
            partner_tokens=partner.tokens if partner else 0,
            partner_size=partner.size if partner else 0,
            partner_digest=exchange.pipe.received_digest if partner else b"",
            path="stream" if exchange.pipe.channel is None else "bulk",
        )

    def give_up(self, reason: str) -> None:
        """End every running session that is not decided, and send the partners the reason; `run` returns soon.

        A responder that has promised to commit keeps asking for the decision.
        """
        for session, scope in self._running.items():
            if session.bulk is not None:
                session.give_up(reason)
            else:
                scope.cancel()

    async def _initiate(self, start: StartExchange, session: ExchangeSession, pipe: Pipe) -> str:
        try:
            stream = await self._host.open_stream(start.peer, EXCHANGE_PROTOCOL, DIAL_TIMEOUT)
        except PeerUnreachableError as error:
            return str(error)
        try:
            return await session.hold(BulkPipe(pipe, stream, self.channels, self._shaping), b"")
        finally:
            await close_stream(stream)

    async def _respond(self, start: StartExchange, session: ExchangeSession, pipe: Pipe) -> str:
        expected = self._expected[start.session] = _Expected(start.peer)
        self._expected_more.set()
        self._expected_more = trio.Event()
        try:
            with trio.move_on_at(session.offer_by):
                await expected.arrived.wait()
            if expected.stream is None:
                return "the partner opened no stream in time"
            bulk = BulkPipe(pipe, expected.stream, self.channels, self._shaping)
            reason = await session.hold(bulk, expected.received)
        finally:
            del self._expected[start.session]
            expected.done.set()
        if session.is_in_doubt:
            session.is_committed = await self._resolve(start) == "committed"
            return "the partner had aborted"
        return reason

    async def _serve_exchange(self, stream: Stream) -> None:
        """Handle an incoming stream: find the session that expects it, and keep it open until the session is over."""
        peer, expected = stream.peer, None
        try:
            if self._unclaimed.total() < MAX_UNCLAIMED and self._unclaimed[peer] < MAX_UNCLAIMED_PER_PEER:
                self._unclaimed[peer] += 1
                try:
                    with (
                        trio.move_on_after(CLAIM_TIMEOUT),
                        contextlib.suppress(RemoteProtocolError, trio.BrokenResourceError),
                    ):
                        expected = await self._claim(stream)
                finally:
                    self._unclaimed[peer] -= 1
                    self._unclaimed += Counter()  # forgets the zeros
            if expected is not None:
                await expected.done.wait()
        finally:
            await close_stream(stream)

    async def _claim(self, stream: Stream) -> _Expected | None:
        """Read a stream's offer and give the stream to its session; None if that is another peer's, or has one."""
        received = b""
        while (offer := peek_offer(received)) is None:
            more = await stream.receive_some(READ_BYTES)
            if not more:
                raise RemoteProtocolError("the stream ended before its offer")
            received += more
        while offer.session not in self._expected:
            await self._expected_more.wait()
        expected = self._expected[offer.session]
        if expected.peer != stream.peer or expected.stream is not None:
            return None
        expected.stream, expected.received = stream, received
        expected.arrived.set()
        return expected

    async def _resolve(self, start: StartExchange) -> Outcome:
        """Ask for the decision until the deadline; this node has promised to commit and does not know it."""
        while True:
            with (
                trio.move_on_after(RESOLVE_TIMEOUT),
                contextlib.suppress(PeerUnreachableError, trio.BrokenResourceError, RemoteProtocolError),
            ):
                stream = await self._host.open_stream(start.peer, RESOLVE_PROTOCOL, RESOLVE_TIMEOUT)
                try:
                    await stream.send_all(encode_resolve(Resolve(start.session)))
                    outcome = decode_resolution(await receive_frame(stream, resolve_parser())).outcome
                finally:
                    await close_stream(stream)
                if outcome != "undecided":
                    return outcome
            await trio.sleep(RESOLVE_INTERVAL)

    async def _serve_resolve(self, stream: Stream) -> None:
        """Answer a responder in doubt; one question per stream."""
        try:
            with (
                trio.move_on_after(RESOLVE_TIMEOUT),
                contextlib.suppress(RemoteProtocolError, trio.BrokenResourceError),
            ):
                question = decode_resolve(await receive_frame(stream, resolve_parser()))
                answer = self._outcomes.answer(question.session, stream.peer)
                await stream.send_all(encode_resolve(Resolution(answer)))
        finally:
            await close_stream(stream)


@dataclass(slots=True, eq=False)
class _Expected:
    """A session that this node expects as responder, and the stream that has come for it."""

    peer: bytes
    arrived: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)
    stream: Stream | None = None
    received: bytes = b""
    """The bytes read from the stream up to now: the offer, and perhaps more."""

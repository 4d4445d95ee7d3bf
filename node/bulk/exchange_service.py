"""Carries out exchanges: one session of `protocol.exchange.exchange` over one stream, with a deadline on every wait.

`ExchangeService.run` returns by its deadline whatever the partner does: dies, freezes, lies, or never comes. A
partner's faults are in the result's reason, never an exception. Contributions go in and out of memory that the caller
holds. A session is a pipe that moves the contributions, and a script of messages. The service matches sessions with
their streams.

The trainer process works on both contributions: it encodes its own while it is sent (`Outgoing`), and decodes the
partner's while it arrives. The progress of each is in the memory that both processes share.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import trio

from farandole.protocol.exchange.exchange import (
    ASK_FROM,
    DATA_UNTIL,
    DECIDE_UNTIL,
    JUDGE_FOR,
    JUDGE_UNTIL,
    MAX_FIRST_BYTES,
    MAX_RESOLVE_BYTES,
    Aborted,
    Accepted,
    Commit,
    Committed,
    Control,
    Exchange,
    Offer,
    Outcome,
    Outcomes,
    Step,
    decode_answer,
    decode_first,
    decode_question,
    reason_of,
)
from farandole.protocol.exchange.pipe import Pipe
from farandole.protocol.rounds.pairing_events import ExchangeEnded, StartExchange
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.messagepack import encode

from ..base.bandwidth import Shaping
from ..base.errors import PeerUnreachableError
from ..base.figures import duration, mbit, size
from ..base.streams import DIAL_TIMEOUT, Stream, StreamHost, ask, counted, receive_frame
from ..status.status import NO_STREAM, NOT_BEGUN
from .negotiation import BulkService
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
claims. If it is cancelled, the exchange goes on, and the trainer judges before it averages. What it saw of a
contribution that is not committed does not count."""


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
        self, exchange: Exchange, outgoing: Outgoing, judge: Judge, start: StartExchange, outcomes: Outcomes
    ) -> None:
        self.is_committed = False
        self.failure = _FailedError("out of time")
        """Why it is not committed."""
        self.bulk: BulkPipe | None = None
        """None until there is a stream."""
        self.arrived = trio.Event()
        """Set once a responder's stream is here."""
        self.stream: Stream | None = None
        self.received = b""
        """The bytes read from a responder's stream before the session: the offer, and perhaps more."""
        self.ended = trio.Event()
        self.peer = start.peer
        self._exchange = exchange
        self._outgoing = outgoing
        self._judge = judge
        self._outcomes = outcomes
        self._started_at = trio.current_time()
        self._deadline = start.deadline
        self._offer_by = start.offer_by
        self._heard, self._messages = trio.open_memory_channel[Control](MAX_MESSAGES)
        self._script = trio.CancelScope()

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

    async def hold(self, bulk: BulkPipe, received: bytes) -> None:
        """Run the session over this pipe, of whose stream ``received`` was read."""
        self.bulk = bulk

        async def run() -> None:  # until the stream ends or the partner breaks the protocol
            try:
                await bulk.run(self._hear, received=received)
                self.failure = _FailedError("the partner closed the stream")
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self.failure = _FailedError(f"the connection broke: {error}")
            except RemoteProtocolError as error:
                self.failure = _FailedError(f"the partner broke the protocol: {error}")
            self._heard.close()  # earlier messages are still read

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            try:
                with self._script:
                    await self._share_contributions(bulk)
                    await self._settle(bulk)
                if self._script.cancelled_caught:
                    raise self.failure
            except _FailedError as error:
                self.failure = error
                if self._exchange.can_abort and not bulk.is_over:  # tell the partner, unless a commit is promised
                    with trio.move_on_after(FAREWELL_TIMEOUT):
                        self._say(bulk, Aborted(reason_of(str(error))))
                        await bulk.drain()
            nursery.cancel_scope.cancel()

    def give_up(self, reason: str) -> None:
        """End the running session, if it is not decided, and send the partner the reason."""
        self.failure = _FailedError(reason)
        self._script.cancel()

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
            refusal = None
            judge_by = min(self._at(JUDGE_UNTIL), trio.current_time() + self._at(JUDGE_FOR) - self._started_at)
            with trio.move_on_at(judge_by):  # a busy machine costs no average, and is not waited for
                refusal = await self._judge(offer.size, offer.tokens)
            if refusal is not None:
                raise _FailedError(f"{REFUSED}{refusal}", is_refused=True)
            with _until(self.data_by, TOO_LONG, is_too_slow=True):
                await bulk.wait_delivered()
        except trio.ClosedResourceError:
            raise self.failure from None

    async def _read_offer(self) -> None:
        """Read the partner's offer; the earlier deadline of the two holds for both."""
        with _until(self.offer_by, NOT_BEGUN):
            theirs = await self._next()
        if isinstance(theirs, Offer):
            self._deadline = min(self._deadline, trio.current_time() + theirs.seconds_left)

    async def _settle(self, bulk: BulkPipe) -> None:
        """Decide, or as the responder wait for the decision; the table lets nothing come but the next message."""
        if self._exchange.is_initiator:
            decide_by = self._at(DECIDE_UNTIL)
            with _until(decide_by, "the partner's verdict took too long"):
                await self._next()
            if trio.current_time() >= decide_by:  # this process was frozen in between
                raise _FailedError("too late to decide")
            self.is_committed = self._outcomes.decide(self._exchange.offer.session, committed=True)
            with trio.move_on_after(FAREWELL_TIMEOUT), contextlib.suppress(_FailedError):
                self._say(bulk, Commit())
                await self._next()
        else:
            with _until(self._at(ASK_FROM), "the decision took too long"):
                self._say(bulk, Accepted())
                await self._next()
            self.is_committed = True
            with trio.move_on_after(FAREWELL_TIMEOUT):
                self._say(bulk, Committed())
                await bulk.drain()

    # Messages

    def _say(self, bulk: BulkPipe, message: Control) -> None:
        if Step.ABORTED not in (self._exchange.ours, self._exchange.theirs):
            bulk.post(self._exchange.send(message))

    async def _next(self) -> Control:
        """Return the next message; the protocol's table lets only allowed messages through."""
        try:
            message = await self._messages.receive()
        except trio.EndOfChannel:
            raise self.failure from None
        await trio.lowlevel.checkpoint_if_cancelled()  # the partner's abort may have come right behind it
        return message

    async def _hear(self, payload: bytes) -> None:
        message = self._exchange.receive(payload)
        if isinstance(message, Aborted):
            is_too_slow = message.reason == TOO_LONG and trio.current_time() >= self._at(SLOW_FROM)
            self.failure = _FailedError(
                f"the partner aborted: {message.reason}",
                is_refused=message.reason.startswith(REFUSED),
                is_too_slow=is_too_slow,
            )
            self._script.cancel()
        else:
            self._heard.send_nowait(message)


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
    if not received:  # even a slow line delivers something
        return f"nothing of the partner's {size(num_bytes)} arrived in {duration(seconds)}"
    return f"{size(num_bytes)} did not fit into {duration(seconds)} at {' and '.join(rates)}"


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
        self._one_ended = trio.lowlevel.ParkingLot()
        self._expected: dict[bytes, ExchangeSession] = {}
        self._expected_more = trio.lowlevel.ParkingLot()
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
            await self._one_ended.park()

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
        take_part = self._initiate if start.is_initiator else self._respond
        started_at = trio.current_time()
        if start.is_initiator:
            self._outcomes.begin(start.session, start.peer)
        try:
            opener = None if start.is_initiator else self.channels  # the initiator opens channels
            expecting = opener.expecting(start.peer) if opener else contextlib.nullcontext()
            with expecting, trio.move_on_at(start.deadline) as self._running[session]:
                await take_part(start, session, exchange.pipe)
        finally:
            del self._running[session]
            self._one_ended.unpark_all()
            if session.bulk is not None:  # its channel is kept for others if it was committed
                session.bulk.close(is_clean=session.is_committed)
            if start.is_initiator:
                self._outcomes.decide(start.session, committed=False)  # unless it is decided already
        seconds, is_committed, reason = trio.current_time() - started_at, session.is_committed, str(session.failure)
        sent, received = (session.bulk.bytes_sent, session.bulk.bytes_received) if session.bulk else (0, 0)
        if session.failure.is_too_slow:
            reason = too_slow(offer.size, seconds, sent, received)
        partner = exchange.partner_offer if is_committed else None
        return ExchangeEnded(
            start.session,
            start.peer,
            is_committed,
            is_broken=not is_committed and not session.failure.is_refused,
            reason="" if is_committed else reason,
            round=start.round,
            bytes_sent=sent,
            bytes_received=received,
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

    async def _initiate(self, start: StartExchange, session: ExchangeSession, pipe: Pipe) -> None:
        try:
            stream = await self._host.open_stream(start.peer, EXCHANGE_PROTOCOL, DIAL_TIMEOUT)
        except PeerUnreachableError as error:
            session.failure = _FailedError(str(error))
            return
        async with contextlib.aclosing(stream):
            await session.hold(BulkPipe(pipe, stream, self.channels, self._shaping), b"")

    async def _respond(self, start: StartExchange, session: ExchangeSession, pipe: Pipe) -> None:
        self._expected[start.session] = session
        self._expected_more.unpark_all()
        try:
            with trio.move_on_at(session.offer_by):
                await session.arrived.wait()
            if session.stream is None:
                session.failure = _FailedError(NO_STREAM)
            else:
                await session.hold(BulkPipe(pipe, session.stream, self.channels, self._shaping), session.received)
        finally:
            del self._expected[start.session]
            session.ended.set()
        if session.is_in_doubt:
            session.failure = _FailedError("the initiator's decision could not be learnt in time")
            session.is_committed = await self._resolve(start) == "committed"
            session.failure = _FailedError("the partner had aborted")  # unless it is committed

    async def _serve_exchange(self, stream: Stream) -> None:
        """Give an incoming stream to the session that its offer names; return, which closes it, when that is over.

        Raises `RemoteProtocolError` for a stream that does not begin with an offer.
        """
        peer, parser, session = stream.peer, FrameParser(MAX_FIRST_BYTES), None
        if self._unclaimed.total() >= MAX_UNCLAIMED or self._unclaimed[peer] >= MAX_UNCLAIMED_PER_PEER:
            return
        with counted(self._unclaimed, peer), trio.move_on_after(CLAIM_TIMEOUT):
            first = await receive_frame(stream, parser)
            name = decode_first(first).session
            while name not in self._expected:
                await self._expected_more.park()
            session = self._expected[name]
        if session is None or session.peer != peer or session.stream is not None:
            return  # it is another peer's, or has its stream
        session.stream, session.received = stream, frame(first, MAX_FIRST_BYTES) + parser.take_rest()
        session.arrived.set()
        await session.ended.wait()

    async def _resolve(self, start: StartExchange) -> Outcome:
        """Ask for the decision until the deadline; this node has promised to commit and does not know it."""
        while True:
            with (
                trio.move_on_after(RESOLVE_TIMEOUT),
                contextlib.suppress(PeerUnreachableError, trio.BrokenResourceError, RemoteProtocolError),
            ):
                question = encode((start.session,))
                answer = await ask(self._host, start.peer, RESOLVE_PROTOCOL, question, MAX_RESOLVE_BYTES)
                (outcome,) = decode_answer(answer)
                if outcome != "undecided":
                    return outcome
            await trio.sleep(RESOLVE_INTERVAL)

    async def _serve_resolve(self, stream: Stream) -> None:
        """Answer a responder in doubt; one question per stream. Raises `RemoteProtocolError` for any other."""
        with trio.move_on_after(RESOLVE_TIMEOUT):
            (session,) = decode_question(await receive_frame(stream, FrameParser(MAX_RESOLVE_BYTES)))
            answer = self._outcomes.answer(session, stream.peer)
            await stream.send_all(frame(encode((answer,)), MAX_RESOLVE_BYTES))

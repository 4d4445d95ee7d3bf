"""Pipe: bulk data between two peers, over a channel separate from their message stream, or over that stream.

    opener     Route         data            Sealed  Received
    answerer          Route        data  Sealed               Received

A pipe moves *transfers*: bytes of a size that both ends know before they move. It knows their names, sizes, positions
and hashes, but not their contents. In each direction they move one after the other, in the order in which the messages
of the pipe's user announced them; so a position is a number: the bytes of all transfers before it.

The opener names a bulk channel (`farandole.protocol.exchange.bulk`) in its `Route`, and the answerer's `Route` names
the same one if it has it too. Otherwise the transfers move over the stream, as chunks between the user's messages. A
small pipe needs no route: it is on the stream from the beginning.

A channel that breaks does not end the pipe. An end that lacks something asks for another route: the opener by `Route`,
the answerer by `Reroute`, which the opener answers by `Route`. Each `Route` says how much its sender has, and the rest
goes over the new route, so nothing moves twice. A pipe has at most `MAX_ROUTES` routes, and the stream is the last one.

Data on a channel are not acknowledged on the stream, so the receiver reports each transfer by `Received`. Data on the
stream arrive, or the stream ends and the pipe with it: there a transfer is over with its last chunk.

The transfers of a hashed pipe end with a hash: the sender sends `Sealed` before the last byte, and the receiver
compares. The hash detects bytes that were damaged, or sent before they were ready. Noise and the seals of the channel's
records keep out bytes of third parties.

`TRANSITIONS` is the table of what either end may send in each step of the route. It holds for what is sent
(`LocalProtocolError`) and for what is received (`RemoteProtocolError`). Each end keeps one step, which the messages of
both ends move. The two may differ only while messages cross: the answerer's `Reroute` and `Received` may cross the
opener's `Route`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Annotated, Any, Final

import msgspec
from blake3 import blake3

from ..wire.errors import LocalProtocolError, RemoteProtocolError
from ..wire.framing import LENGTH_BYTES
from ..wire.messagepack import MessageDecoder, Session, encode

# Routes of one pipe: three channels, each of which may break, and the stream.
MAX_ROUTES = 4


class RouteStep(enum.Enum):
    """The route that two ends have agreed on, or are about to agree on."""

    IDLE = "idle"  # nothing may move yet
    UNROUTED = "without a route"
    PROPOSED = "proposing the first route"
    CHANNEL = "on a channel"
    LOST = "asked for another route"
    REPLACING = "proposing another route"
    STREAM = "on the stream"  # the last one


# Kinds of messages, as the table needs them.
PROPOSE, REROUTE, RECEIVED = "Route of the opener", "Reroute", "Received"
AGREE, DECLINE = "Route of the answerer to a channel", "Route of the answerer to the stream"
OPENER, ANSWERER = True, False
# Step -> messages that may be sent in it: each with its senders and the following step. Besides, a `Sealed` may be sent
# in every step but the first, and chunks on the stream.
TRANSITIONS: dict[RouteStep, dict[str, tuple[set[bool], RouteStep]]] = {
    RouteStep.IDLE: {},
    RouteStep.UNROUTED: {PROPOSE: ({OPENER}, RouteStep.PROPOSED)},
    RouteStep.PROPOSED: {
        AGREE: ({ANSWERER}, RouteStep.CHANNEL),
        DECLINE: ({ANSWERER}, RouteStep.STREAM),
    },
    RouteStep.CHANNEL: {
        PROPOSE: ({OPENER}, RouteStep.REPLACING),
        REROUTE: ({ANSWERER}, RouteStep.LOST),
        RECEIVED: ({OPENER, ANSWERER}, RouteStep.CHANNEL),
    },
    RouteStep.LOST: {PROPOSE: ({OPENER}, RouteStep.REPLACING), RECEIVED: ({OPENER}, RouteStep.LOST)},
    RouteStep.REPLACING: {
        AGREE: ({ANSWERER}, RouteStep.CHANNEL),
        DECLINE: ({ANSWERER}, RouteStep.STREAM),
        REROUTE: ({ANSWERER}, RouteStep.REPLACING),
        RECEIVED: ({ANSWERER}, RouteStep.REPLACING),
    },
    RouteStep.STREAM: {},
}

# Smaller transfers are done over the stream before a channel is open (milliseconds locally, round trips elsewhere).
BULK_FROM: Final = 1_000_000
# A chunk's frame fills one Noise message: 65,535 bytes less the tag (16) and yamux's header (12).
CHUNK_FRAME_BYTES: Final = 65_507
MESSAGE_KIND, CHUNK_KIND, CONTROL_KIND = 0, 1, 2
KIND_BYTES: Final = 1
HEADER_BYTES: Final = LENGTH_BYTES + KIND_BYTES
OFFSET_BYTES: Final = 8
CHUNK_OVERHEAD_BYTES: Final = HEADER_BYTES + OFFSET_BYTES
CHUNK_BYTES: Final = CHUNK_FRAME_BYTES - CHUNK_OVERHEAD_BYTES
# The longest of the pipe's own messages, a Sealed or a Route, has some 40 bytes.
MAX_CONTROL_BYTES: Final = 64
DIGEST_BYTES: Final = 32
# Transfers of one direction that are announced and not known to have arrived: on a channel, the ones in its buffers.
MAX_OPEN: Final = 8
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Route(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """The route of the transfers: a bulk channel, or (None) this stream. The answerer's `Route` decides."""

    channel: Session | None
    received: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """The position up to which its sender has everything: the other end goes on from there."""


class Reroute(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """The answerer lacks something, and nothing arrives any more: the opener must propose another `Route`."""


class Sealed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The sender's oldest transfer without a hash is ready to its end. Sent before the last of its bytes."""

    digest: _Digest
    """BLAKE3 of the transfer; SHA-256 would take as long as the rest of the transfer's work."""


class Received(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The receiver's oldest open transfer has arrived over a channel, whole and, where there is one, with its hash."""


Control = Route | Reroute | Sealed | Received


@dataclass(frozen=True, slots=True)
class TransferReceived:
    """A transfer is in its memory, whole and, where there is one, with its hash."""

    name: int


Event = bytes | Control | TransferReceived
"""What comes from the other end: a message of the pipe's user, or of the pipe, or all of a transfer."""


@dataclass(eq=False)
class Transfer:
    """Bytes of a known size that move one way.

    The receiver fills ``memory`` from the front, over any route, and hashes it as it fills if ``is_hashed``.
    """

    memory: memoryview
    _on_advance: Callable[[int], None] | None = None
    """Called with the number of bytes received, in the thread that fills the memory."""
    name: int = 0
    end: int = 0
    """The position behind its last byte."""
    is_hashed: InitVar[bool] = True

    def __post_init__(self, is_hashed: bool) -> None:
        self.source: Any = None
        """Where the sender has it from, for the user of the pipe."""
        self.position = 0
        """Bytes received, all of them hashed."""
        self.sealed: bytes | None = None
        """BLAKE3, once its sender has sent it."""
        self.is_whole = False
        """Whether all of it is in the memory, with its hash."""
        self._hash = blake3() if is_hashed else None

    @property
    def rest(self) -> memoryview:
        """The unfilled memory, where the next bytes go."""
        return self.memory[self.position :]

    def write(self, data: memoryview) -> None:
        """Copy in the next bytes, and hash them."""
        self.memory[self.position : self.position + len(data)] = data
        self.advance(len(data))

    def advance(self, num_bytes: int) -> None:
        """Note that the next ``num_bytes`` are in the memory; hash them first, while the processor's cache has them."""
        if self._hash is not None:
            self._hash.update(self.rest[:num_bytes])
        self.position += num_bytes
        if self._on_advance is not None:
            self._on_advance(self.position)

    def digest(self) -> bytes:
        """Return the BLAKE3 hash of the bytes received. Requires ``is_hashed``."""
        assert self._hash is not None, "it was to be hashed"
        return self._hash.digest()


_NOWHERE: Final = memoryview(b"")


class Direction:
    """The transfers of one direction, in their order."""

    def __init__(self, is_hashed: bool) -> None:
        self.open: deque[Transfer] = deque()
        """Transfers that are announced, and not known to be whole at the receiver; at most `MAX_OPEN`."""
        self.settled = 0
        self.end = 0
        """The position behind everything announced."""
        self._is_hashed = is_hashed

    @property
    def head_end(self) -> int:
        """Return where the oldest open transfer ends; `settled` if there is none."""
        return self.open[0].end if self.open else self.settled

    @property
    def is_head_sealed(self) -> bool:
        """Return whether the hash of the oldest open transfer was sent, or none is needed."""
        return not self._is_hashed or self.open[0].sealed is not None

    @property
    def awaits_hash(self) -> bool:
        """Return whether there is a transfer whose hash was not sent yet."""
        return self._is_hashed and any(transfer.sealed is None for transfer in self.open)

    def add(
        self, name: int, size: int, memory: memoryview = _NOWHERE, on_advance: Callable[[int], None] | None = None
    ) -> None:
        """Add the next transfer, which was announced; ``memory`` is where it goes."""
        self.end += size
        is_hashed = self._is_hashed and memory is not _NOWHERE
        self.open.append(Transfer(memory, on_advance, name=name, end=self.end, is_hashed=is_hashed))

    def settle(self) -> Transfer:
        """Remove the oldest open transfer, which the receiver has, and return it."""
        self.settled = self.open[0].end
        return self.open.popleft()


class Pipe:
    """One end of a pipe. Sans-IO: bytes in by `receive_data`, events out by `next_event`, bytes by ``send``.

    ``is_large``: a channel is worth the wait for it. ``is_hashed``: each transfer has a hash. `begin` comes before
    anything but messages. `RemoteProtocolError`: close the stream. `LocalProtocolError`: this may not be sent now.
    """

    def __init__(self, is_opener: bool, *, max_message_bytes: int, is_large: bool, is_hashed: bool = False) -> None:
        self.is_opener = is_opener
        self.is_large = is_large
        self.step = RouteStep.IDLE
        self.channel: bytes | None = None
        """The bulk channel that both ends have named."""
        self.num_routes = 0
        self.outgoing = Direction(is_hashed)
        self.incoming = Direction(is_hashed)
        self.received_digest = b""
        """BLAKE3 of the last received transfer, of a hashed pipe."""
        self.num_sent = 0
        """The position of the next byte to send; over a channel, as far as the user reported it or the peer has it."""
        self.proposed: bytes | None = None
        """The bulk channel that the opener has named."""
        self.is_over = False
        """Whether the other end sends nothing more."""
        self._max_message_bytes = max_message_bytes
        self._input = memoryview(b"")
        self.head = bytearray()
        """Of an unfinished frame, without a chunk's bytes; a message at most."""
        self._chunk_left = 0

    @property
    def arriving(self) -> Transfer | None:
        """Return the oldest transfer that this end lacks."""
        return self.incoming.open[0] if self.incoming.open else None

    @property
    def num_received(self) -> int:
        """Return the position up to which everything is in memory."""
        return self.incoming.settled + (self.arriving.position if self.arriving else 0)

    def begin(self) -> None:
        """Allow transfers from now on, over the stream at once unless the pipe is large."""
        self.step = RouteStep.UNROUTED if self.is_large else RouteStep.STREAM

    # Transfers

    @property
    def can_offer(self) -> bool:
        """Return whether a transfer may be announced: the ones before it were sent, and both ends know the route."""
        is_sent = self.num_sent >= self.outgoing.end and len(self.outgoing.open) < MAX_OPEN
        return is_sent and self.step in (RouteStep.UNROUTED, RouteStep.CHANNEL, RouteStep.STREAM)

    def offer(self, name: int, size: int) -> None:
        """Add a transfer that this end sends and has announced to the other."""
        if not self.can_offer:
            raise LocalProtocolError("a transfer before the one before it was sent, or while a route is sought")
        self.outgoing.add(name, size)

    def expect(self, name: int, memory: memoryview, on_advance: Callable[[int], None] | None = None) -> None:
        """Add a transfer that the other end has announced, of the size of ``memory``: writable and contiguous.

        The memory is kept until the transfer is over, and undefined until then. Transfers may share it: one is over
        before the next one is written. ``on_advance`` gets the number of received bytes of the transfer. Raises
        `RemoteProtocolError` if no transfer may be announced now.
        """
        if memory.readonly:
            raise LocalProtocolError("a transfer needs writable memory")
        most = MAX_OPEN if self.step in (RouteStep.CHANNEL, RouteStep.LOST, RouteStep.REPLACING) else 1
        if len(self.incoming.open) >= most:
            raise RemoteProtocolError("a transfer is announced before the one before it was sent")
        self.incoming.add(name, memory.nbytes, memory.cast("B"), on_advance)

    def check_whole(self) -> int:
        """Compare the hash of the oldest transfer, whose last byte has arrived after it; return the transfer's name.

        (Over a channel, the hash comes separately on the stream: wait for `is_head_sealed`.)
        """
        if (arriving := self.arriving) is None or arriving.rest:
            raise LocalProtocolError("a transfer that is not here yet")
        if not self.incoming.is_head_sealed:
            raise RemoteProtocolError("all of the transfer, and no hash")
        if arriving.sealed is not None and arriving.digest() != arriving.sealed:
            raise RemoteProtocolError("the hash of a transfer is not what its sender says")
        arriving.is_whole = True
        self.received_digest = arriving.sealed or b""
        return arriving.name

    # Sending

    def send_message(self, payload: bytes) -> bytes:
        """Return the frame of a message of the user's."""
        if not 0 < len(payload) <= self._max_message_bytes:
            raise LocalProtocolError(f"a message of {len(payload)} bytes")
        return _frame(MESSAGE_KIND, payload)

    def send(self, message: Control) -> bytes:
        """Return the bytes to write to the stream, in the order of the calls."""
        if isinstance(message, Received) and not (self.arriving and self.arriving.is_whole):
            raise LocalProtocolError("Received before the transfer is here")
        if isinstance(message, Route) and message.received != self.num_received:
            raise LocalProtocolError("a Route from elsewhere than where we are")
        self._apply(message, by_us=True)
        return _frame(CONTROL_KIND, encode(message))

    def send_chunk(self, data: memoryview) -> bytes:
        """Return the frame of the next bytes of a transfer on the stream, at most `CHUNK_BYTES`; copies them."""
        size, flow = data.nbytes, self.outgoing
        start, end = self.num_sent, self.num_sent + size
        if self.step is not RouteStep.STREAM:
            raise LocalProtocolError(f"a chunk while the pipe is {self.step.value}")
        if not 0 < size <= CHUNK_BYTES or end > flow.head_end:
            raise LocalProtocolError(f"a chunk of {size} bytes at {start}")
        if end == flow.head_end:
            if not flow.is_head_sealed:
                raise LocalProtocolError("the last chunk before the hash")
            flow.settle()
        self.num_sent = end
        length = (KIND_BYTES + OFFSET_BYTES + size).to_bytes(LENGTH_BYTES, "big")
        return b"".join((length, bytes((CHUNK_KIND,)), start.to_bytes(OFFSET_BYTES, "big"), data))

    # Receiving

    def receive_data(self, data: bytes | bytearray) -> None:
        """Add bytes from the stream, and take all events that they complete before adding more."""
        self._input = memoryview(bytes(self._input) + data) if self._input else memoryview(data)

    def next_event(self) -> Event | None:
        """Return the next event from the other end, or None until more data comes."""
        while self._input:
            if self.is_over:
                raise RemoteProtocolError("data after the end of the session")
            if not self._chunk_left:
                if (event := self._take_frame()) is not None:
                    return event
                continue
            piece, arriving = self._take(self._chunk_left), self.arriving
            assert arriving is not None, "what comes has a place"
            arriving.write(piece)
            self._chunk_left -= len(piece)
            if self.num_received == self.incoming.head_end:
                self.check_whole()
                return TransferReceived(self.incoming.settle().name)
        return None

    def _take_frame(self) -> bytes | Control | None:
        """Complete a message, or begin a chunk."""
        if not self._fill_head(LENGTH_BYTES):
            return None
        length = int.from_bytes(self.head[:LENGTH_BYTES], "big") - KIND_BYTES
        if not 0 <= length <= max(self._max_message_bytes, OFFSET_BYTES + CHUNK_BYTES):
            raise RemoteProtocolError(f"a frame of {length} bytes")
        if not self._fill_head(HEADER_BYTES):
            return None
        kind = self.head[LENGTH_BYTES]
        if kind == CHUNK_KIND:
            if self._fill_head(HEADER_BYTES + OFFSET_BYTES):
                offset, size = int.from_bytes(self.head[HEADER_BYTES:], "big"), length - OFFSET_BYTES
                self.head.clear()
                if self.step is not RouteStep.STREAM:
                    raise RemoteProtocolError(f"a chunk while the pipe is {self.step.value}")
                if not 0 < size <= CHUNK_BYTES or offset != self.num_received or offset + size > self.incoming.head_end:
                    raise RemoteProtocolError(f"a chunk of {size} bytes at {offset}, not at {self.num_received}")
                self._chunk_left = size
            return None
        most = {MESSAGE_KIND: self._max_message_bytes, CONTROL_KIND: MAX_CONTROL_BYTES}.get(kind, 0)
        if not 0 < length <= most:
            raise RemoteProtocolError(f"a frame of kind {kind} and {length} bytes")
        if not self._fill_head(HEADER_BYTES + length):
            return None
        payload = bytes(self.head[HEADER_BYTES:])
        self.head.clear()
        if kind == MESSAGE_KIND:
            return payload
        message = decode_control(payload)
        self._apply(message, by_us=False)
        return message

    # Both

    def _apply(self, message: Control, by_us: bool) -> None:
        """Apply a message of either end; raise the error of its sender's fault if it may not be sent now."""
        kind = ""  # a hash does not move the route
        match message:
            case Route(channel):
                answer = DECLINE if channel is None else AGREE
                kind = PROPOSE if self.is_opener is by_us else answer
            case Reroute() | Received():
                kind = type(message).__name__
        if problem := self._problem(message, kind, by_us):
            raise (LocalProtocolError if by_us else RemoteProtocolError)(problem)
        match message:
            case Route(channel, received):
                if not by_us:
                    self.num_sent = received
                if kind == PROPOSE:
                    self.num_routes += 1
                    self.proposed = channel
                else:
                    self.channel = channel
            case Sealed(digest):
                flow = self.outgoing if by_us else self.incoming
                next(transfer for transfer in flow.open if transfer.sealed is None).sealed = digest
            case Received() if by_us:
                self.incoming.settle()
            case Received():
                self.outgoing.settle()
                self.num_sent = max(self.num_sent, self.outgoing.settled)
        if kind:
            self.step = TRANSITIONS[self.step][kind][1]

    def _problem(self, message: Control, kind: str, by_us: bool) -> str:
        """Return why an end may not send this now, by the table or by what it cannot express; empty if it may."""
        senders = TRANSITIONS[self.step].get(kind, ((), self.step))[0]
        if (self.is_opener is by_us) not in senders if kind else self.step is RouteStep.IDLE:
            return f"{kind or 'Sealed'} while the pipe is {self.step.value}"
        sending, receiving = (self.outgoing, self.incoming) if by_us else (self.incoming, self.outgoing)
        match message:
            case Route(channel, received):
                if kind == PROPOSE and self.num_routes >= MAX_ROUTES:
                    return "a Route beyond those of a pipe"
                if kind == PROPOSE and self.step is RouteStep.CHANNEL and not receiving.open:
                    return "a Route that nobody needs"
                if kind == AGREE and channel != self.proposed:
                    return "a channel that the opener has not named"
                if not receiving.settled <= received < max(receiving.head_end, receiving.settled + 1):
                    return "a Route from a position where its sender cannot be"
            case Sealed() if not sending.awaits_hash:
                return "a second hash, or one of nothing"
            case Reroute() | Received() if not receiving.open:
                return f"{type(message).__name__} by an end that lacks nothing"
            case Received() if not receiving.is_head_sealed:
                return "Received before the other's hash was said"
        return ""

    def _fill_head(self, size: int) -> bool:
        self.head += self._take(size - len(self.head))
        return len(self.head) >= size

    def _take(self, size: int) -> memoryview:
        piece, self._input = self._input[: max(size, 0)], self._input[max(size, 0) :]
        return piece


decode_control = MessageDecoder[Control](Control, "a message of a pipe")


def _frame(kind: int, payload: bytes) -> bytes:
    return (KIND_BYTES + len(payload)).to_bytes(LENGTH_BYTES, "big") + bytes((kind,)) + payload

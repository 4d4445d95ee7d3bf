"""Adds strands to a bulk channel (`farandole.protocol.exchange.strands`): one over each further line of either end.

A channel of nodes without such lines stays as it was. Where a strand does not open, the channel has one less.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import trio

from farandole.protocol.exchange.strands import (
    MAX_MESSAGE_BYTES,
    MAX_STRANDS,
    Bound,
    Lines,
    decode_strands,
    strand_session,
)
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.messagepack import encode

from ..base.backoff import Backoff
from ..base.errors import PeerUnreachableError
from ..base.streams import Stream, StreamHost, close_stream, receive_frame
from .bundle import Bundle
from .channel import BulkChannel, ChannelError
from .lines import FIRST_RETRY_AFTER, MAX_RETRY_AFTER, Line

logger = logging.getLogger(__name__)

M = TypeVar("M", Lines, Bound)
STRANDS_PROTOCOL: Final = "/farandole/strands/1"
# For all strands of a channel together; an exchange waits for it, since both ends must know what the channel has.
OPEN_TIMEOUT: Final = 3.0
# In addition, for the stream and its messages: two round trips.
AGREE_TIMEOUT: Final = 3.0


@dataclass(frozen=True, eq=False)
class Way:
    """How this node takes part in a negotiation: as `DIRECT`, as `LETS_IN`, or by a line."""

    line: Line | None = None
    """It dials through this line, and offers no address of its own."""


DIRECT: Final = Way()
"""It offers its addresses, and dials the other end's."""
LETS_IN: Final = Way()
"""It offers its addresses, and dials nothing: the other end dials through a line."""


@dataclass
class Place:
    """A strand that the other end may negotiate."""

    peer: bytes
    way: Way
    is_tried: bool = False
    """Whether the other end has begun to."""
    opened: BulkChannel | None = None


class Negotiator(Protocol):
    """The part of `farandole.node.bulk.negotiation.BulkService` that is used here."""

    async def negotiate(self, peer: bytes, session: bytes, way: Way) -> BulkChannel:
        """Negotiate a channel as the asker. Raises what `BulkService.acquire` treats as a failure."""

    def expects(self, peer: bytes) -> bool:
        """Return whether this node expects channels of a peer now."""

    def take(self, peer: bytes, session: bytes) -> BulkChannel | Bundle | None:
        """Take a kept channel by its name."""

    def release(self, channel: BulkChannel | Bundle) -> None:
        """Keep a channel."""


@dataclass
class _Strands:
    """The strands of one channel while they open, by index."""

    base: BulkChannel
    opened: dict[int, BulkChannel] = field(default_factory=dict)

    def bundle(self, indices: Sequence[int]) -> BulkChannel | Bundle:
        """Return the channel with the strands of these indices; close the others."""
        for index, strand in self.opened.items():
            if index not in indices:
                strand.close()
        return Bundle([self.base, *(self.opened[index] for index in indices)]) if indices else self.base

    def close(self) -> None:
        """Close the strands, except the first."""
        for strand in self.opened.values():
            strand.close()


class StrandService:
    """The strands of one node's channels. ``lines``: the node's, besides its own."""

    def __init__(self, host: StreamHost, channels: Negotiator, lines: Sequence[Line]) -> None:
        self.places: dict[bytes, Place] = {}
        """By session: the strands that other ends may negotiate now."""
        self._host = host
        self._channels = channels
        self._lines = lines
        self._own = [Way(line) for line in lines]
        self._doubts = Backoff(FIRST_RETRY_AFTER, MAX_RETRY_AFTER)
        """Of peers that did not come over a line that they claim."""
        host.set_handler(STRANDS_PROTOCOL, self._answer)

    def _is_due(self, peer: bytes, way: Way) -> bool:
        """Return whether to try a strand: it has not just failed with this peer."""
        return self._doubts.is_due(peer, (), trio.current_time()) if way.line is None else way.line.is_due(peer)

    async def add(self, base: BulkChannel | Bundle) -> BulkChannel | Bundle | None:
        """Add strands to a channel, once in its life; return None if the channel can no longer be used."""
        if isinstance(base, Bundle) or base.has_all_lines:
            return base
        strands = _Strands(base)
        try:
            return await self._add(strands)
        except BaseException:  # cancelled, too: nothing else owns the channel
            strands.close()
            base.close()
            raise

    async def _add(self, strands: _Strands) -> BulkChannel | Bundle | None:
        base, is_agreed = strands.base, False
        try:
            stream = await self._host.open_stream(base.peer, STRANDS_PROTOCOL, AGREE_TIMEOUT)
        except PeerUnreachableError:  # an earlier release
            base.has_all_lines = True
            return base
        try:
            with trio.fail_after(AGREE_TIMEOUT + OPEN_TIMEOUT):
                await _send(stream, Lines(base.session, len(self._lines)))
                theirs = await _receive(stream, Lines)
                ways = _ways(self._own, [LETS_IN] * theirs.count)
                if not ways:
                    base.has_all_lines = True
                    return base
                await self._open(strands, ways)
                is_agreed = True  # from here on, the other end may have a channel of other strands
                await _send(stream, Bound(sorted(strands.opened)))
                agreed = (await _receive(stream, Bound)).strands
                if not set(agreed) <= strands.opened.keys() or len(set(agreed)) < len(agreed):
                    raise RemoteProtocolError("strands that nobody has opened")
                return strands.bundle(agreed)
        except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("no strands for a channel: %s", error)
            strands.close()
            if not is_agreed:
                return base
            base.close()
            return None
        finally:
            await close_stream(stream)

    async def _open(self, strands: _Strands, ways: Sequence[Way]) -> None:
        """Open the strands, each in its own negotiation."""
        peer = strands.base.peer

        async def open_one(index: int, way: Way) -> None:
            session = strand_session(strands.base.session, index)
            try:
                strands.opened[index] = await self._channels.negotiate(peer, session, way)
            except (ChannelError, PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError) as error:
                logger.debug("a strand did not open: %s", error)

        due = {index: way for index, way in enumerate(ways, 1) if self._is_due(peer, way)}
        # The caller may have less time, in which both ends have to agree as well.
        until = trio.current_time() + OPEN_TIMEOUT
        until = min(until, (trio.current_time() + trio.current_effective_deadline()) / 2)
        try:
            with trio.move_on_at(until):
                async with trio.open_nursery() as nursery:
                    for index, way in due.items():
                        nursery.start_soon(open_one, index, way)
        finally:  # cancelled, too: the next exchange would wait as long
            self._note(peer, due, strands.opened.keys())

    def _note(self, peer: bytes, tried: Mapping[int, Way], opened: Collection[int]) -> None:
        """Remember which strands with a peer have opened, of those tried."""
        for index, way in tried.items():
            if way.line is not None:
                way.line.note(peer, has_opened=index in opened)
            elif index in opened:
                self._doubts.note_success(peer)
            else:
                self._doubts.note_failure(peer, (), trio.current_time())

    async def _answer(self, stream: Stream) -> None:
        """Answer a peer that would add strands to a channel that is kept here."""
        try:
            if not self._channels.expects(stream.peer):
                return
            with trio.fail_after(AGREE_TIMEOUT + OPEN_TIMEOUT):
                theirs = await _receive(stream, Lines)
                if self._lines or theirs.count:
                    await self._let_add(stream, theirs.session, theirs.count)
                else:
                    await _send(stream, Lines(theirs.session, 0))
        except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("no strands for a channel: %s", error)
        finally:
            await close_stream(stream)

    async def _let_add(self, stream: Stream, session: bytes, num_theirs: int) -> None:
        base = self._channels.take(stream.peer, session)
        if isinstance(base, Bundle):
            self._channels.release(base)
        if not isinstance(base, BulkChannel):
            raise RemoteProtocolError("strands for a channel that is not kept here")
        ways = _ways([LETS_IN] * num_theirs, self._own)
        places = {index: Place(stream.peer, way) for index, way in enumerate(ways, 1)}
        named = {strand_session(session, index): place for index, place in places.items()}
        strands, is_agreed = _Strands(base), False
        self.places.update(named)
        try:
            await _send(stream, Lines(session, len(self._lines)))
            bound = await _receive(stream, Bound)
            strands.opened = {index: place.opened for index, place in places.items() if place.opened is not None}
            agreed = [index for index in dict.fromkeys(bound.strands) if index in strands.opened]
            is_agreed = True
            self._channels.release(strands.bundle(agreed))
            await _send(stream, Bound(agreed))
        finally:
            for name in named:  # a strand that opens later finds no place
                del self.places[name]
            tried = {index: place.way for index, place in places.items() if place.is_tried and place.way.line}
            self._note(stream.peer, tried, [index for index, place in places.items() if place.opened is not None])
            if not is_agreed:
                for place in places.values():
                    if place.opened is not None:
                        place.opened.close()
                self._channels.release(base)


def _ways(asker: Sequence[Way], answerer: Sequence[Way]) -> list[Way]:
    """Return how this node takes part in each strand: the asker's lines come first."""
    return [*asker, *answerer][: MAX_STRANDS - 1]


async def _send(stream: Stream, message: Lines | Bound) -> None:
    await stream.send_all(frame(encode(message), MAX_MESSAGE_BYTES))


async def _receive(stream: Stream, kind: type[M]) -> M:
    message = decode_strands(await receive_frame(stream, FrameParser(MAX_MESSAGE_BYTES)))
    if not isinstance(message, kind):
        raise RemoteProtocolError(f"a {type(message).__name__} where another message belongs")
    return message

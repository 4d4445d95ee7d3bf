"""Multistream-select 1.0 (github.com/multiformats/multistream-select): two ends agree on a protocol, and it is served.

One end proposes protocol ids, and the other echoes the one that it accepts, or answers that it knows none. Messages are
bounded in size and number for any peer: py-libp2p 0.8.1 allocates whatever length it reads.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container
from typing import Final

import trio

from farandole.protocol.wire.errors import RemoteProtocolError

from .delimited import read_delimited
from .libp2p_parts import encode_delim
from .yamux import Libp2pStream

logger = logging.getLogger(__name__)

MULTISTREAM: Final = "/multistream/1.0.0"
IDENTIFY_PROTOCOL: Final = "/ipfs/id/1.0.0"
PUSH_PROTOCOL: Final = "/ipfs/id/push/1.0.0"
PING_PROTOCOL: Final = "/ipfs/ping/1.0.0"
# A message is a protocol id; go-libp2p allows 1,024 bytes too.
MAX_NEGOTIATION_BYTES: Final = 1024
# Messages of one negotiation: the greeting, and proposals; a peer that knows farandole proposes one.
MAX_NEGOTIATION_MESSAGES: Final = 16
NEGOTIATION_TIMEOUT: Final = 8.0
NOT_AVAILABLE: Final = "na"
# A peer that has dialled proposes its first protocol within a round trip of the greetings.
ROLE_PAUSE: Final = 0.7

Handler = Callable[[Libp2pStream], Awaitable[None]]


class ProtocolRefusedError(RemoteProtocolError):
    """The peer does not speak the protocol that was proposed to it, or says why it does not."""


class Negotiation:
    """One negotiation on a connection or a stream."""

    def __init__(self, receive: Callable[[int], Awaitable[bytes]], send: Callable[[bytes], Awaitable[None]]) -> None:
        """``receive``: returns at most that many bytes, none at the end."""
        self._receive = receive
        self._send = send
        self._num_received = 0

    async def propose(self, protocol: str) -> None:
        """Agree on this protocol; raise `ProtocolRefusedError` if the peer refuses."""
        await self._say(MULTISTREAM, protocol)
        await self._expect_greeting()
        await self._expect(protocol)

    async def answer(self, protocols: Container[str]) -> str:
        """Accept the first proposal that is in ``protocols``; raise `RemoteProtocolError` if there is none."""
        await self._say(MULTISTREAM)
        await self._expect_greeting()
        while (proposal := await self._next()) not in protocols:
            await self._say(NOT_AVAILABLE)
        await self._say(proposal)
        return proposal

    async def refuse(self, reason: str) -> None:
        """Answer the peer's first proposal with a reason, which implementations show as an unexpected answer."""
        await self._say(MULTISTREAM)
        await self._expect_greeting()
        await self._next()
        await self._say(reason)

    async def find_role(self, protocol: str) -> bool:
        """Negotiate on an accepted connection whose other end may be a peer that waits for us.

        Return whether it waits: then it proposes nothing, and we are the initiator. A peer that dials in the usual way
        proposes at once.
        """
        await self._say(MULTISTREAM)
        await self._expect_greeting()
        proposal = None
        with trio.move_on_after(ROLE_PAUSE):
            proposal = await self._next()
        if proposal not in (None, protocol):
            raise RemoteProtocolError("the peer proposes something else")
        await self._say(protocol)
        if proposal is None:
            await self._expect(protocol)
        return proposal is None

    async def _expect_greeting(self) -> None:
        if await self._next() != MULTISTREAM:
            raise RemoteProtocolError("the peer does not speak multistream-select")

    async def _expect(self, protocol: str) -> None:
        answer = await self._next()
        if answer == NOT_AVAILABLE:
            raise ProtocolRefusedError(f"the peer does not speak {protocol}")
        if answer != protocol:
            raise ProtocolRefusedError(f"the peer refuses {protocol}: {answer!r}")

    async def _next(self) -> str:
        self._num_received += 1
        if self._num_received > MAX_NEGOTIATION_MESSAGES:
            raise RemoteProtocolError("too many negotiation messages")
        message = await read_delimited(self._receive, MAX_NEGOTIATION_BYTES)
        if message is None:
            raise RemoteProtocolError("the peer ended the negotiation")
        if not message.endswith(b"\n"):
            raise RemoteProtocolError("a negotiation message without its newline")
        return message[:-1].decode(errors="replace")

    async def _say(self, *texts: str) -> None:
        await self._send(b"".join(encode_delim(text.encode()) for text in texts))


class ProtocolHandlers:
    """The handlers of one host."""

    def __init__(self) -> None:
        self.admits: Callable[[bytes, str], bool] = lambda peer, protocol: True
        """Whether a peer may open streams of a protocol; to others it is one that this node does not serve."""
        self._handlers: dict[str, tuple[Handler, int | None]] = {}

    @property
    def protocols(self) -> list[str]:
        """The protocols that this node serves."""
        return list(self._handlers)

    def set(self, protocol: str, handler: Handler, max_bytes: int | None = None) -> None:
        """Serve a protocol. A stream on which the peer sends more than ``max_bytes`` is reset."""
        self._handlers[protocol] = (handler, max_bytes)

    def remove(self, protocol: str) -> None:
        """Stop serving a protocol."""
        self._handlers.pop(protocol, None)

    async def serve(self, stream: Libp2pStream, note_negotiated: Callable[[], None]) -> None:
        """Agree on a protocol for a stream that a peer has opened, and run its handler. Raises nothing.

        The stream is closed when the handler returns, and reset when it raises, which is logged unless the error is
        the peer's fault or the network's.
        """
        try:
            try:
                with trio.fail_after(NEGOTIATION_TIMEOUT):
                    offered = [protocol for protocol in self._handlers if self.admits(stream.peer, protocol)]
                    stream.protocol = await Negotiation(stream.receive_some, stream.send_all).answer(offered)
                handler, max_bytes = self._handlers[stream.protocol]
            finally:
                note_negotiated()
            if max_bytes is not None:
                stream.limit(max_bytes)
            await handler(stream)
            await stream.aclose()
        except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("a stream of %s ended: %r", stream.protocol, error)
        except Exception:  # a defect of ours: it costs this stream, and neither the others nor the host
            logger.exception("the handler of %s failed", stream.protocol)
        finally:
            stream.reset()


async def propose(stream: Libp2pStream, protocol: str) -> Libp2pStream:
    """Negotiate a protocol for a stream that we have opened; raise as `Negotiation.propose`, and reset it then."""
    try:
        with trio.fail_after(NEGOTIATION_TIMEOUT):
            await Negotiation(stream.receive_some, stream.send_all).propose(protocol)
    except BaseException:  # also when cancelled: nothing else owns the stream
        stream.reset()
        raise
    stream.protocol = protocol
    return stream

"""The protocols that this node serves, and the negotiation of one for each stream."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from farandole.protocol.wire.errors import RemoteProtocolError

from .libp2p_stream import Libp2pStream
from .multistream import NEGOTIATION_TIMEOUT, Negotiation

logger = logging.getLogger(__name__)

Handler = Callable[[Libp2pStream], Awaitable[None]]


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

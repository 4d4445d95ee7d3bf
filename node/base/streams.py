"""Interface of `farandole.node.mesh.host.Host` and its streams, so that services and their tests need no libp2p."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Protocol, TypeVar

import trio

from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.identity import peer_id_of

from .errors import PeerUnreachableError

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Most bytes that a stream hands over at once: all that one pass of the connection's reader has read, so a reader that
# keeps up leaves nothing unread.
READ_BYTES = 256 * 1024
# The dial timeout: from the first packet to a connection, whatever is dialled and however many of its addresses. The
# dials below are of another kind, and need less. The steps inside a dial have timeouts of their own, beside the step.
DIAL_TIMEOUT = 8.0
# A peer in this machine's network.
NEIGHBOUR_DIAL_TIMEOUT = 5.0
# A witness that tries whether it can dial this node: a lost SYN is sent again after one second and after three.
DIAL_BACK_TIMEOUT = 4.0
# A peer that is silent, to find out whether it is gone.
SUSPICION_DIAL_TIMEOUT = 3.0


class Stream(Protocol):
    """A stream to a peer."""

    is_bulk: bool
    """Whether its user keeps to the node's bandwidth caps (`farandole.node.base.bandwidth`)."""

    @property
    def peer(self) -> bytes:
        """The remote's public key, authenticated."""

    @property
    def handshake_hash(self) -> bytes:
        """32 bytes that name the connection: both ends know them, and no other connection has them."""

    @property
    def room(self) -> int:
        """Number of bytes that `send_now` may be given now."""

    def send_now(self, data: bytes) -> None:
        """Send at most `room` bytes, without a wait."""

    async def send_all(self, data: bytes) -> None:
        """Send all of it, or raise `trio.BrokenResourceError`."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return at least one byte, or none at the end of the stream; raise `trio.BrokenResourceError`."""

    async def aclose(self) -> None:
        """Close both sides; data that was sent still arrives. It waits for nothing."""


class StreamHost(Protocol):
    """Opens and serves streams."""

    def set_handler(self, protocol: str, handler: Callable[[Stream], Awaitable[None]]) -> None:
        """Serve incoming streams."""

    async def open_stream(self, peer: bytes, protocol: str, timeout: float = DIAL_TIMEOUT) -> Stream:
        """Open a stream, connecting if needed, or raise `PeerUnreachableError`."""


@contextmanager
def counted(counts: Counter[T], key: T) -> Iterator[None]:
    """Count one more of what has a limit, such as a peer's streams, for as long as the block runs."""
    counts[key] += 1
    try:
        yield
    finally:
        counts -= Counter((key,))


@contextmanager
def expecting_answer(peer: bytes, timeout: float) -> Iterator[None]:
    """Wait for a peer; raise `PeerUnreachableError` if it is late, breaks off, or says what no honest peer says."""
    try:
        with trio.fail_after(timeout):
            yield
    except trio.TooSlowError as error:
        raise PeerUnreachableError(f"{peer_id_of(peer)} did not answer in {timeout:g} s") from error
    except (RemoteProtocolError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise PeerUnreachableError(f"{peer_id_of(peer)} gives no answer: {error!r}") from error


async def read_exactly(read: Callable[[int], Awaitable[bytes | bytearray]], size: int) -> bytes:
    """Read ``size`` bytes and no more; `RemoteProtocolError` if the stream ends before.

    ``read``: returns at most the requested number of bytes, none at the end.
    """
    received = bytearray()
    while len(received) < size:
        piece = await read(size - len(received))
        if not piece:
            raise RemoteProtocolError(f"the stream ended {size - len(received)} bytes too early")
        received += piece
    return bytes(received)


async def read_delimited(read: Callable[[int], Awaitable[bytes | bytearray]], max_bytes: int) -> bytes | None:
    """Return a message after its length as a varint, None at the end; `RemoteProtocolError` if too long or cut short.

    Nothing after the message is read. (libp2p's functions for this either allocate whatever length they read, or do not
    distinguish the end of the stream from half a message.) ``read``: as for `read_exactly`.
    """
    size = shift = 0
    while True:
        if not (byte := await read(1)):
            if shift:
                raise RemoteProtocolError("the stream ended inside a length")
            return None
        size |= (byte[0] & 0x7F) << shift
        shift += 7
        if size > max_bytes or shift > 21:
            raise RemoteProtocolError(f"a message of more than {max_bytes} bytes")
        if byte[0] < 0x80:
            return await read_exactly(read, size)


async def receive_frame(stream: Stream, parser: FrameParser) -> bytes:
    """Read one frame; `RemoteProtocolError` if the stream ends before."""
    while (payload := parser.next_frame()) is None:
        data = await stream.receive_some(READ_BYTES)
        if not data:
            raise RemoteProtocolError("the stream ended before its frame")
        parser.receive_data(data)
    return payload


async def ask(host: StreamHost, peer: bytes, protocol: str, question: bytes, max_bytes: int) -> bytes:
    """Ask a peer over a stream of its own; return its answer, a frame of at most ``max_bytes``."""
    async with aclosing(await host.open_stream(peer, protocol)) as stream:
        await stream.send_all(frame(question, len(question)))
        return await receive_frame(stream, FrameParser(max_bytes))


async def ask_all(ask: Callable[[bytes], Awaitable[T]], peers: Iterable[bytes]) -> list[T]:
    """Ask all peers at once and return the answers that came; each question has its deadline."""
    answers: list[T] = []

    async def ask_one(peer: bytes) -> None:
        try:
            answers.append(await ask(peer))
        except (PeerUnreachableError, RemoteProtocolError) as error:
            logger.debug("no answer: %s", error)

    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(ask_one, peer)
    return answers

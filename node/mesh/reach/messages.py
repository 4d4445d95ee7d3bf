"""Small messages in frames, as the services of this folder exchange them, each with a short timeout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import trio

from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.messagepack import encode

from ...base.errors import PeerUnreachableError
from ...base.streams import receive_frame
from ..yamux import Libp2pStream

MESSAGE_TIMEOUT: Final = 5.0


async def tell(stream: Libp2pStream, message: msgspec.Struct, max_bytes: int) -> None:
    """Send a message; raise `trio.TooSlowError` if the peer does not take it."""
    with trio.fail_after(MESSAGE_TIMEOUT):
        await stream.send_all(frame(encode(message), max_bytes))


async def hear(stream: Libp2pStream, max_bytes: int, timeout: float = MESSAGE_TIMEOUT) -> bytes:
    """Return the payload of the next frame; raise `trio.TooSlowError` if there is none in ``timeout`` seconds."""
    with trio.fail_after(timeout):
        return await receive_frame(stream, FrameParser(max_bytes))


@contextmanager
def answered(stream: Libp2pStream) -> Iterator[None]:
    """Ask a peer over a stream, which is reset at the end; raise `PeerUnreachableError` if it fails to answer."""
    try:
        yield
    except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
        raise PeerUnreachableError(f"no answer: {error!r}") from error
    finally:
        stream.reset()

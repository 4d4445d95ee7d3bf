"""A circuit, one end of a stream through a relay, in the place of a TCP socket; and the question to a relay for one."""

from __future__ import annotations

from typing import Final

import trio

from farandole.protocol.mesh.relay import MAX_MESSAGE_BYTES
from farandole.protocol.wire.identity import short_name

from ..base.errors import PeerUnreachableError
from .delimited import encode_delimited, receive_message
from .libp2p_parts import HopMessage, RelayStatus
from .links import RawLink
from .yamux import Libp2pStream

# Fraction of a relay's limits: what is left then, three of 16 GiB and an hour of six, is for transfers under way.
WORN_AT: Final = 0.8


class Circuit(RawLink):
    """A stream to a relay, which copies it to a peer and back.

    The connection over it shapes its own traffic, as every connection does. So the stream below is not shaped, and has
    lower priority than what this node sends to the relay itself.
    """

    is_relayed = True

    def __init__(self, stream: Libp2pStream, address: str, max_bytes: int = 0, max_seconds: int = 0) -> None:
        """``address``: the other end, a multiaddr with ``/p2p-circuit`` at its end; the limits, 0 for none.

        The relay states the limits, and breaks the circuit off when one is reached.
        """
        super().__init__(stream, address, None)
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._opened_at = trio.current_time()
        self._num_moved = 0
        stream.is_bulk = True
        self._stream = stream

    @property
    def is_worn(self) -> bool:
        """Return whether the circuit is near a limit and needs a replacement."""
        age = trio.current_time() - self._opened_at
        has_moved = bool(self._max_bytes) and self._num_moved >= WORN_AT * self._max_bytes
        return has_moved or (bool(self._max_seconds) and age >= WORN_AT * self._max_seconds)

    async def _receive_some(self, max_bytes: int) -> bytes:
        data = await super()._receive_some(max_bytes)
        self._num_moved += len(data)
        return data

    def write_now(self, data: bytes) -> None:
        """See `RawLink`."""
        self._num_moved += len(data)
        super().write_now(data)

    def abort(self) -> None:
        """See `RawLink`."""
        self._stream.reset()


async def ask_relay(stream: Libp2pStream, question: HopMessage) -> HopMessage:
    """Return a relay's answer on a new stream to it; raise `PeerUnreachableError` if it refuses.

    The stream is reset if there is no answer that agrees.
    """
    try:
        await stream.send_all(encode_delimited(question))
        answer = await receive_message(stream, HopMessage, MAX_MESSAGE_BYTES)
        if answer.type != HopMessage.STATUS or answer.status != RelayStatus.OK:
            raise PeerUnreachableError(f"the relay {short_name(stream.peer)} refuses (status {answer.status})")
    except BaseException:  # also when cancelled: the relay must not keep a circuit that no task uses
        stream.reset()
        raise
    return answer

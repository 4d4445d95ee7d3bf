"""The encrypted messages of a connection whose Noise handshake is over.

Keys and ciphers are libp2p's. The framing follows its specification (noise/README.md, "Wire format"): two bytes of
length, then that many bytes of ciphertext. libp2p's own reader makes six calls and three copies for each message, which
takes longer than decrypting it.
"""

from __future__ import annotations

from typing import Final, cast

from .libp2p_parts import ISecureConn, NoiseTransportReadWriter, SecureSession
from .raw_link import RawLink

LENGTH_BYTES: Final = 2


class NoiseSession:
    """Reads and writes messages of at most 65,519 bytes. One task may read, and one may write."""

    def __init__(self, session: ISecureConn, link: RawLink) -> None:
        """``session``: libp2p's, over the same link; it must not be in the middle of a message."""
        self._handshake: SecureSession | None = cast("SecureSession", session)
        self._state = cast("NoiseTransportReadWriter", self._handshake.conn).noise_state
        self._link = link

    @property
    def handshake_hash(self) -> bytes:
        """The hash of the handshake: 32 bytes, the same at both ends and nowhere else."""
        return bytes(self._state.get_handshake_hash())

    async def read(self) -> bytes:
        """Return the next message.

        Raises `trio.BrokenResourceError` at the end of the connection, and `NoiseInvalidMessage` if it was changed.
        """
        if (session := self._handshake) is not None:
            self._handshake = None
            if session.high_watermark > session.low_watermark:  # it came with the last message of the negotiation
                return bytes(await session.read())
        size = int.from_bytes(await self._link.read(LENGTH_BYTES), "big")
        return bytes(self._state.decrypt(await self._link.read(size)))

    def write_now(self, message: bytes) -> None:
        """Send a message as far as this needs no wait. `flush` sends the rest; send nothing else before."""
        sealed = self._state.encrypt(message)
        self._link.write_now(len(sealed).to_bytes(LENGTH_BYTES, "big") + sealed)

    @property
    def has_unwritten(self) -> bool:
        """Return whether `flush` has something to send."""
        return self._link.has_unwritten

    async def flush(self) -> None:
        """Send the rest of a message. Raises `trio.BrokenResourceError` if the connection is over."""
        await self._link.flush()

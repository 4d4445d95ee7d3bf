"""A peer's messages as MessagePack: bytes that are not a message of the expected type are the peer's fault."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from .errors import RemoteProtocolError

_T = TypeVar("_T")
# Errors that msgspec raises for bytes that are not a message of the type, or nested without end.
DECODING_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError)

# Pattern of a peer's words: terminals show them, so no control characters.
PRINTABLE: Final = r"\A[\x20-\x7e]*\Z"

SESSION_BYTES = 16
Session = Annotated[bytes, msgspec.Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
"""Names a session of two peers. Drawn at random by the one that proposes it."""

encode: Final = msgspec.msgpack.Encoder().encode
"""Encode a message."""


class TaggedMessage(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """A message with its type's name, as an array."""


class MessageDecoder(Generic[_T]):
    """Decodes messages of one type, which may be a union of tagged ones; ``name``, with its article, is for errors."""

    def __init__(self, kind: Any, name: str, max_bytes: int = sys.maxsize) -> None:
        """``max_bytes``: longer messages are not even parsed; only needed where nothing before it has a bound."""
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._name = name
        self._max_bytes = max_bytes

    def __call__(self, payload: bytes | bytearray | memoryview) -> _T:
        """Return the message in these bytes; raise `RemoteProtocolError` if they hold none, or are too many."""
        if len(payload) > self._max_bytes:
            raise RemoteProtocolError(f"{self._name} has at most {self._max_bytes} bytes, this has {len(payload)}")
        try:
            message: _T = self._decode(payload)
        except DECODING_ERRORS as error:
            raise RemoteProtocolError(f"not {self._name}: {error}") from error
        return message

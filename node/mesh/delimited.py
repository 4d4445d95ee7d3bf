"""Protobuf messages on a stream, each prefixed with its length as a varint, as in libp2p's protocols."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from multiaddr import Multiaddr

from farandole.protocol.wire.errors import RemoteProtocolError

from ..base.streams import Stream, read_exactly
from .addresses import MAX_ADDRESS_BYTES, MAX_ADDRESSES, is_multiaddr
from .libp2p_parts import encode_varint_prefixed

M = TypeVar("M", bound=Message)


def encode_delimited(message: Message) -> bytes:
    """Return a message with its length in front."""
    return encode_varint_prefixed(message.SerializeToString())


async def read_delimited(read: Callable[[int], Awaitable[bytes | bytearray]], max_bytes: int) -> bytes | None:
    """Return the bytes after the length, or None at the end; `RemoteProtocolError` if too long or cut short.

    Nothing after the message is read. (The library's functions for this either allocate whatever length they read, or
    do not distinguish the end of the stream from half a message.) ``read`` returns at most that many bytes, none at the
    end.
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


async def next_message(stream: Stream, kind: type[M], max_bytes: int) -> M | None:
    """Return the next message, or None at the end of the stream; `RemoteProtocolError` for anything else."""
    payload = await read_delimited(stream.receive_some, max_bytes)
    if payload is None:
        return None
    message = kind()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise RemoteProtocolError(f"not a {kind.__name__}") from error
    return message


async def receive_message(stream: Stream, kind: type[M], max_bytes: int) -> M:
    """Return the next message, as `next_message`; the end of the stream is an error."""
    message = await next_message(stream, kind, max_bytes)
    if message is None:
        raise RemoteProtocolError("the stream ended before its message")
    return message


def multiaddr_bytes(addresses: Iterable[str]) -> list[bytes]:
    """Encode multiaddrs as messages carry them."""
    return [Multiaddr(address).to_bytes() for address in addresses]


def multiaddr_texts(addresses: Iterable[bytes]) -> list[str]:
    """Decode the first `MAX_ADDRESSES` multiaddrs of a message as text; skip invalid and too long ones."""
    texts = (_text_of(address) for address in addresses if len(address) <= MAX_ADDRESS_BYTES)
    return list(itertools.islice(filter(is_multiaddr, texts), MAX_ADDRESSES))


def _text_of(address: bytes) -> str:
    try:
        return str(Multiaddr(address))
    except Exception:  # the library raises many kinds of errors for bytes that are no address
        return ""

"""Protobuf messages on a stream, each behind its length as a varint, as libp2p's protocols have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from multiaddr import Multiaddr

from farandole.protocol.errors import RemoteProtocolError

from ..base.streams import Stream, receive_exactly

M = TypeVar("M", bound=Message)


def encode_delimited(message: Message) -> bytes:
    """A message behind its length."""
    payload = message.SerializeToString()
    length = bytearray()
    rest = len(payload)
    while rest >= 0x80:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((*length, rest)) + payload


async def receive_delimited(stream: Stream, max_bytes: int, begun: bytes = b"") -> bytes:
    """A message behind its length; `RemoteProtocolError` if it is longer, or the stream ends before.

    ``begun``: its first byte, where that has been read already. Nothing behind the message is read.
    """
    size = shift = 0
    while True:
        (byte,) = begun or await receive_exactly(stream, 1)
        begun = b""
        size |= (byte & 0x7F) << shift
        shift += 7
        if size > max_bytes or shift > 21:
            raise RemoteProtocolError(f"a message of more than {max_bytes} bytes")
        if byte < 0x80:
            return await receive_exactly(stream, size)


def parse(kind: type[M], payload: bytes) -> M:
    """A protobuf message; `RemoteProtocolError` if these bytes are none."""
    message = kind()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise RemoteProtocolError(f"not a {kind.__name__}") from error
    return message


def multiaddr_bytes(addresses: Iterable[str]) -> list[bytes]:
    """Multiaddrs as messages carry them."""
    return [Multiaddr(address).to_bytes() for address in addresses]


def multiaddr_texts(addresses: Iterable[bytes], max_addresses: int, max_bytes: int) -> tuple[str, ...]:
    """The first multiaddrs of a message as text, without those that are none or longer than ``max_bytes``."""
    texts: list[str] = []
    for address in addresses:
        if len(texts) == max_addresses:
            break
        if len(address) <= max_bytes:
            try:
                text = str(Multiaddr(address))
                Multiaddr(text)
            except Exception:  # the library parses hostile bytes with whatever exception comes
                continue
            texts.append(text)
    return tuple(texts)

"""Attacks of strangers on an open port, for the benchmark of a hostile internet, and for tests.

They only ever target loopback (`check_target`): this is a load generator for our own listener. Each attack is one
connection; it ends when the other end closes it, or at its timeout.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import ISecureConn

from farandole.node.mesh.links import Socket
from farandole.node.mesh.upgrading import Upgrader
from farandole.protocol.wire.errors import FarandoleError

MULTISTREAM: Final = "/multistream/1.0.0"
YAMUX: Final = "/yamux/1.0.0"
# A false length: 256 MiB, as a varint.
LIE: Final = b"\x80\x80\x80\x80\x01"
# Limit of one connection, however patient the victim is.
MAX_SECONDS: Final = 20.0
# Streams that one connection opens, or tries to open.
NUM_STREAMS: Final = 3_000
_HEADER: Final = struct.Struct("!BBHII")
_DATA, _WINDOW_UPDATE, _PING = 0, 1, 2
_SYN: Final = 1
_READ_BYTES: Final = 65_536


class TargetError(FarandoleError):
    """Attacks are for ports on loopback."""


class AttackTarget:
    """A port on loopback, and the key of the node that listens there."""

    def __init__(self, port: int, peer: bytes) -> None:
        self.port = port
        self.peer = peer


@contextlib.asynccontextmanager
async def connected(target: AttackTarget, source: str) -> AsyncIterator[trio.SocketStream]:
    """Open a TCP connection from an address of 127.0.0.0/8; `TargetError` for any other."""
    if not ipaddress.ip_address(source).is_loopback:
        raise TargetError(f"{source} is not on loopback")
    plain = trio.socket.socket()
    with plain:
        await plain.bind((source, 0))
        await plain.connect(("127.0.0.1", target.port))
        yield trio.SocketStream(plain)


def message(text: str) -> bytes:
    """Return one multistream message."""
    return bytes((len(text) + 1,)) + text.encode() + b"\n"


def frame(kind: int, flags: int, stream_id: int, length: int, version: int = 0) -> bytes:
    """Return a yamux header."""
    return _HEADER.pack(version, kind, flags, stream_id, length)


async def read_to_end(stream: trio.SocketStream) -> None:
    """Read until the other end closes."""
    while await stream.receive_some(_READ_BYTES):
        pass


# Before authentication

Raw = Callable[[trio.SocketStream, random.Random], Awaitable[None]]


async def be_silent(stream: trio.SocketStream, rng: random.Random) -> None:
    """Connect, and send nothing."""
    await read_to_end(stream)


async def send_noise(stream: trio.SocketStream, rng: random.Random) -> None:
    """Send random bytes."""
    await stream.send_all(rng.randbytes(rng.randrange(1, 4_096)))
    await read_to_end(stream)


async def lie_about_length(stream: trio.SocketStream, rng: random.Random) -> None:
    """Announce a message of 256 MiB."""
    await stream.send_all(message(MULTISTREAM) + LIE + rng.randbytes(1_000))
    await read_to_end(stream)


async def propose_endlessly(stream: trio.SocketStream, rng: random.Random) -> None:
    """Propose unknown protocols in well-formed messages, endlessly."""
    await stream.send_all(message(MULTISTREAM))
    while True:
        await stream.send_all(message(f"/none/{rng.randrange(10)}") * 100)


async def drip(stream: trio.SocketStream, rng: random.Random) -> None:
    """Negotiate at a byte per quarter of a second."""
    for byte in message(MULTISTREAM) + message("/noise"):
        await stream.send_all(bytes((byte,)))
        await trio.sleep(0.25)
    await read_to_end(stream)


async def begin_handshake(stream: trio.SocketStream, rng: random.Random) -> None:
    """Send Noise's first message and nothing else: the other end has computed its answer in vain."""
    await stream.send_all(message(MULTISTREAM) + message("/noise") + struct.pack("!H", 32) + rng.randbytes(32))
    await read_to_end(stream)


async def garble_handshake(stream: trio.SocketStream, rng: random.Random) -> None:
    """Send Noise's first message, and garbage for the third."""
    garbage = rng.randbytes(rng.randrange(1, 2_000))
    hello = message(MULTISTREAM) + message("/noise") + struct.pack("!H", 32) + rng.randbytes(32)
    await stream.send_all(hello + struct.pack("!H", len(garbage)) + garbage)
    await read_to_end(stream)


async def garble_negotiation(stream: trio.SocketStream, rng: random.Random) -> None:
    """Send multistream's first message, and then random bytes."""
    await stream.send_all(message(MULTISTREAM) + rng.randbytes(rng.randrange(1, 4_096)))
    await read_to_end(stream)


# After it

Authenticated = Callable[[ISecureConn, random.Random], Awaitable[None]]


async def read_secure(conn: ISecureConn) -> None:
    """Read until the other end closes."""
    while await conn.read():
        pass


async def send_unknown_frames(conn: ISecureConn, rng: random.Random) -> None:
    """Send frames of an unknown type."""
    await conn.write(frame(rng.randrange(4, 256), 0, 1, 0) * 10)
    await read_secure(conn)


async def send_random_frames(conn: ISecureConn, rng: random.Random) -> None:
    """Send random bytes in place of frames, half of the time behind a plausible header."""
    await conn.write((frame(_DATA, _SYN, 1, 100) if rng.random() < 0.5 else b"") + rng.randbytes(2_000))
    await read_secure(conn)


async def overflow_window(conn: ISecureConn, rng: random.Random) -> None:
    """Send more on one stream than its window holds."""
    await conn.write(frame(_WINDOW_UPDATE, _SYN, 1, 0))
    while True:
        await conn.write(frame(_DATA, 0, 1, 60_000) + bytes(60_000))


async def exceed_frame(conn: ISecureConn, rng: random.Random) -> None:
    """Announce a frame longer than any window."""
    await conn.write(frame(_DATA, _SYN, 1, 2**31) + bytes(1_000))
    await read_secure(conn)


async def open_thousands(conn: ISecureConn, rng: random.Random) -> None:
    """Open streams, and in each begin a negotiation that goes no further."""
    opening = message(MULTISTREAM)
    for first in range(0, NUM_STREAMS, 200):
        ids = range(2 * first + 1, 2 * (first + 200) + 1, 2)
        await conn.write(b"".join(frame(_DATA, _SYN, index, len(opening)) + opening for index in ids))
    await read_secure(conn)


async def fill_windows(conn: ISecureConn, rng: random.Random) -> None:
    """Fill the windows of many streams, behind a negotiation that does not end."""
    for index in range(1, 512, 2):
        await conn.write(frame(_WINDOW_UPDATE, _SYN, index, 0))
        for _ in range(4):
            await conn.write(frame(_DATA, 0, index, 60_000) + b"\xff" * 60_000)
    await read_secure(conn)


async def flood_pings(conn: ISecureConn, rng: random.Random) -> None:
    """Send pings as fast as possible, and read no answer."""
    while True:
        await conn.write(frame(_PING, _SYN, 0, 7) * 1_000)


async def stay(conn: ISecureConn, rng: random.Random) -> None:
    """Open one stream without a negotiation, on an idle connection."""
    await conn.write(frame(_WINDOW_UPDATE, _SYN, 1, 0))
    await read_secure(conn)


RAW: Final[dict[str, Raw]] = {
    "silence": be_silent,
    "random bytes": send_noise,
    "lying lengths": lie_about_length,
    "endless proposals": propose_endlessly,
    "a byte at a time": drip,
    "half a handshake": begin_handshake,
    "garbage in Noise": garble_handshake,
    "garbage in multistream": garble_negotiation,
}
AUTHENTICATED: Final[dict[str, Authenticated]] = {
    "unknown frames": send_unknown_frames,
    "random frames": send_random_frames,
    "overflowing windows": overflow_window,
    "overlong frames": exceed_frame,
    "thousands of streams": open_thousands,
    "full windows": fill_windows,
    "pings without end": flood_pings,
    "idle connections": stay,
}
ATTACKS: Final = (*RAW, *AUTHENTICATED)


async def attack(
    name: str, target: AttackTarget, source: str, rng: random.Random, seconds: float = MAX_SECONDS
) -> None:
    """Make one connection and misbehave, until the other end closes it or the time is over.

    Raises `TargetError` if the source is not on loopback.
    """
    # The library has an exception of its own for every way in which a connection may fail.
    with trio.move_on_after(min(seconds, MAX_SECONDS)), contextlib.suppress(OSError, trio.BrokenResourceError):
        async with connected(target, source) as stream:
            if name in RAW:
                await RAW[name](stream, rng)
            else:
                with contextlib.suppress(Exception):
                    await AUTHENTICATED[name](await authenticate(stream, target), rng)


async def authenticate(stream: trio.SocketStream, target: AttackTarget) -> ISecureConn:
    """Authenticate with a fresh key, up to the start of yamux."""
    socket = Socket(stream)
    secure = await Upgrader(Ed25519PrivateKey.generate()).authenticate(socket, target.peer)
    socket.finish_handshake()
    await secure.write(message(MULTISTREAM) + message(YAMUX))
    return secure

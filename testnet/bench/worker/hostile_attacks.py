"""Attacks of strangers on an open port, for the benchmark of a hostile internet, and for tests.

They only ever target loopback (`connect`): this is a load generator for our own listener. Each attack is one
connection, on which it sends what its function yields and then reads; it ends when the other end closes it, or at its
timeout.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import ISecureConn

from farandole.node.mesh.links import Socket
from farandole.node.mesh.yamux import Upgrader
from farandole.protocol.mesh.yamux import DATA, HEADER, PING, SYN, WINDOW_UPDATE
from farandole.protocol.wire.errors import FarandoleError

# A false length: 256 MiB, as a varint.
LIE: Final = b"\x80\x80\x80\x80\x01"
# Limit of one connection, however patient the victim is.
MAX_SECONDS: Final = 20.0
# Streams that one connection opens, or tries to open.
NUM_STREAMS: Final = 3_000
# Between two pieces of the attack that sends a byte at a time.
DRIP_INTERVAL: Final = 0.25
_READ_BYTES: Final = 65_536


class TargetError(FarandoleError):
    """Attacks are for ports on loopback."""


async def connect(port: int, source: str) -> trio.SocketStream:
    """Open a TCP connection to a port of this machine from an address of 127.0.0.0/8; `TargetError` for any other."""
    if not ipaddress.ip_address(source).is_loopback:
        raise TargetError(f"{source} is not on loopback")
    return await trio.open_tcp_stream("127.0.0.1", port, local_address=source)


def message(text: str) -> bytes:
    """Return one multistream message."""
    return bytes((len(text) + 1,)) + text.encode() + b"\n"


def frame(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    """Return a yamux header."""
    return HEADER.pack(0, kind, flags, stream_id, length)


OPENING: Final = message("/multistream/1.0.0")

Pieces = Callable[[random.Random], Iterable[bytes]]


def _half_a_handshake(rng: random.Random) -> bytes:
    """Return all up to Noise's first message: the other end computes its answer in vain."""
    return OPENING + message("/noise") + struct.pack("!H", 32) + rng.randbytes(32)


def _garbage_in_noise(rng: random.Random) -> Iterator[bytes]:
    """Send Noise's first message, and garbage for the third."""
    garbage = rng.randbytes(rng.randrange(1, 2_000))
    yield _half_a_handshake(rng) + struct.pack("!H", len(garbage)) + garbage


def _endless_proposals(rng: random.Random) -> Iterator[bytes]:
    """Propose unknown protocols in well-formed messages, endlessly."""
    yield OPENING
    while True:
        yield message(f"/none/{rng.randrange(10)}") * 100


RAW: Final[dict[str, Pieces]] = {
    "silence": lambda rng: (),
    "random bytes": lambda rng: [rng.randbytes(rng.randrange(1, 4_096))],
    "lying lengths": lambda rng: [OPENING + LIE + rng.randbytes(1_000)],
    "endless proposals": _endless_proposals,
    "a byte at a time": lambda rng: (bytes((byte,)) for byte in OPENING + message("/noise")),
    "half a handshake": lambda rng: [_half_a_handshake(rng)],
    "garbage in Noise": _garbage_in_noise,
    "garbage in multistream": lambda rng: [OPENING + rng.randbytes(rng.randrange(1, 4_096))],
}
"""Before authentication: name -> what is sent."""


def _random_frames(rng: random.Random) -> Iterator[bytes]:
    """Send random bytes in place of frames, half of the time behind a plausible header."""
    yield (frame(DATA, SYN, 1, 100) if rng.random() < 0.5 else b"") + rng.randbytes(2_000)


def _thousands_of_streams(rng: random.Random) -> Iterator[bytes]:
    """Open streams, and in each begin a negotiation that goes no further."""
    for first in range(0, NUM_STREAMS, 200):
        ids = range(2 * first + 1, 2 * (first + 200) + 1, 2)
        yield b"".join(frame(DATA, SYN, index, len(OPENING)) + OPENING for index in ids)


def _full_windows(rng: random.Random) -> Iterator[bytes]:
    """Fill the windows of many streams, behind a negotiation that does not end."""
    for index in range(1, 512, 2):
        yield frame(WINDOW_UPDATE, SYN, index, 0)
        yield from repeat(frame(DATA, 0, index, 60_000) + b"\xff" * 60_000, 4)


AUTHENTICATED: Final[dict[str, Pieces]] = {
    "unknown frames": lambda rng: [frame(rng.randrange(4, 256), 0, 1, 0) * 10],
    "random frames": _random_frames,
    # More on one stream than its window holds.
    "overflowing windows": lambda rng: chain(
        [frame(WINDOW_UPDATE, SYN, 1, 0)], repeat(frame(DATA, 0, 1, 60_000) + bytes(60_000))
    ),
    # A frame longer than any window.
    "overlong frames": lambda rng: [frame(DATA, SYN, 1, 2**31) + bytes(1_000)],
    "thousands of streams": _thousands_of_streams,
    "full windows": _full_windows,
    # No answer is read.
    "pings without end": lambda rng: repeat(frame(PING, SYN, 0, 7) * 1_000),
    # One stream without a negotiation.
    "idle connections": lambda rng: [frame(WINDOW_UPDATE, SYN, 1, 0)],
}
"""After it, up to the start of yamux: name -> what is sent."""
ATTACKS: Final = (*RAW, *AUTHENTICATED)


async def attack(
    name: str, port: int, peer: bytes, source: str, rng: random.Random, seconds: float = MAX_SECONDS
) -> None:
    """Make one connection and misbehave, until the other end closes it or the time is over.

    ``port`` is on loopback, and ``peer`` the key of the node that listens there. Raises `TargetError` if the source is
    not on loopback.
    """
    with trio.move_on_after(min(seconds, MAX_SECONDS)), contextlib.suppress(OSError, trio.BrokenResourceError):
        async with await connect(port, source) as stream:
            if name in RAW:
                for piece in RAW[name](rng):
                    await stream.send_all(piece)
                    if name == "a byte at a time":
                        await trio.sleep(DRIP_INTERVAL)
                while await stream.receive_some(_READ_BYTES):
                    pass
                return
            # The library has an exception of its own for every way in which a connection may fail.
            with contextlib.suppress(Exception):
                secure = await authenticate(stream, peer)
                for piece in AUTHENTICATED[name](rng):
                    await secure.write(piece)
                while await secure.read():
                    pass


async def authenticate(stream: trio.SocketStream, peer: bytes) -> ISecureConn:
    """Authenticate with a fresh key, up to the start of yamux."""
    socket = Socket(stream)
    secure = await Upgrader(Ed25519PrivateKey.generate()).authenticate(socket, peer)
    socket.finish_handshake()
    await secure.write(OPENING + message("/yamux/1.0.0"))
    return secure

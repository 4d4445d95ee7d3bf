"""Serves and asks for the measurements of a node's checkup: `farandole.protocol.mesh.checkup`.

A line's speed is measured with a few megabytes, rarely, by one peer at a time, within this node's caps, and only over
direct connections: relays carry nothing for this.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from farandole.protocol.mesh.checkup import (
    CLOCK_PROTOCOL,
    ECHO_PROTOCOL,
    MAX_MESSAGE_BYTES,
    MAX_SPEED_BYTES,
    SPEED_PROTOCOL,
    SPEED_SECONDS,
    TOKEN_BYTES,
    ClockAnswer,
    EchoAnswer,
    Offset,
    SpeedAnswer,
    SpeedRequest,
    decode_clock,
    decode_echo,
    decode_speed,
    decode_speed_request,
    measure_offset,
)
from farandole.protocol.wire.token_bucket import TokenBucket

from ...base.bandwidth import Shaper, Shaping
from ...base.errors import PeerUnreachableError
from .messages import MESSAGE_TIMEOUT, answered, hear, tell

if TYPE_CHECKING:
    from ..host import Host
    from ..libp2p_stream import Libp2pStream

# Datagrams are repeated, since any may be lost; each waits for its echo.
NUM_DATAGRAMS: Final = 4
DATAGRAM_INTERVAL: Final = 0.5
# A port is open for one asker for `ECHO_SECONDS`, and for `MAX_ECHOING` askers at once; others must ask another peer.
ECHO_SECONDS: Final = 5.0
MAX_ECHOING: Final = 16
# Echoes for an asker that shows the token.
MAX_ECHOES: Final = 8
# Time for the last bytes under way.
GRACE: Final = 2.0
CHUNK_BYTES: Final = 65_536
# Measurements at once, for any askers, and seconds per further one: a stranger with many keys gets 1.6 Mbit/s.
MAX_AT_ONCE: Final = 4
INTERVAL: Final = 30.0


class CheckupService:
    """Answers the peers of one host. ``clock``: Unix seconds."""

    def __init__(self, host: Host, shaping: Shaping, clock: Callable[[], float] = time.time) -> None:
        self._shaping = shaping
        self._clock = clock
        self._num_echoing = 0
        self._is_busy = False
        self._leave = TokenBucket(MAX_AT_ONCE, 1 / INTERVAL, trio.current_time())
        host.set_handler(CLOCK_PROTOCOL, self._tell_time)
        host.set_handler(ECHO_PROTOCOL, self._echo)
        host.set_handler(SPEED_PROTOCOL, self._measure)

    async def _tell_time(self, stream: Libp2pStream) -> None:
        await tell(stream, ClockAnswer(max(0, int(self._clock() * 1_000))), MAX_MESSAGE_BYTES)

    async def _echo(self, stream: Libp2pStream) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        if stream.remote_address is None or self._num_echoing >= MAX_ECHOING:
            await tell(stream, EchoAnswer(0, token), MAX_MESSAGE_BYTES)
            return
        is_ipv6 = ":" in stream.remote_address[0]
        family = trio.socket.AF_INET6 if is_ipv6 else trio.socket.AF_INET
        self._num_echoing += 1
        try:
            with trio.socket.socket(family, trio.socket.SOCK_DGRAM) as socket:
                await socket.bind(("::" if is_ipv6 else "0.0.0.0", 0))
                await tell(stream, EchoAnswer(socket.getsockname()[1], token), MAX_MESSAGE_BYTES)
                with trio.move_on_after(ECHO_SECONDS):
                    await _echo_token(socket, token)
        finally:
            self._num_echoing -= 1

    async def _measure(self, stream: Libp2pStream) -> None:
        request = decode_speed_request(await hear(stream, MAX_MESSAGE_BYTES))
        is_dear = not self._shaping.may_spend(MAX_SPEED_BYTES)
        if stream.is_relayed or self._is_busy or is_dear or not self._leave.take(trio.current_time()):
            await tell(stream, SpeedAnswer(0), MAX_MESSAGE_BYTES)
            return
        self._is_busy = True
        try:
            await tell(stream, SpeedAnswer(MAX_SPEED_BYTES), MAX_MESSAGE_BYTES)
            stream.is_bulk = True
            if request.is_up:
                received = await _receive(stream, MAX_SPEED_BYTES, self._shaping.down)
                await tell(stream, received, MAX_MESSAGE_BYTES)
            else:
                await _send(stream, MAX_SPEED_BYTES, self._shaping.up)
        finally:
            self._is_busy = False


async def _echo_token(socket: trio.socket.SocketType, token: bytes) -> None:
    for _ in range(MAX_ECHOES):
        data, sender = await socket.recvfrom(TOKEN_BYTES + 1)
        while data != token:
            data, sender = await socket.recvfrom(TOKEN_BYTES + 1)
        await socket.sendto(token, sender)


async def ask_time(host: Host, peer: bytes, clock: Callable[[], float] = time.time) -> Offset:
    """Return how far this node's clock is ahead of a peer's; raise `PeerUnreachableError` if it does not answer."""
    stream = await host.open_stream(peer, CLOCK_PROTOCOL)
    asked_at, began_at = clock(), trio.current_time()
    with answered(stream):
        answer = decode_clock(await hear(stream, MAX_MESSAGE_BYTES))
    # Elapsed time is from the steady clock, so setting the clock in between does no harm.
    return measure_offset(asked_at, asked_at + trio.current_time() - began_at, answer)


async def ask_echo(host: Host, peer: bytes) -> bool:
    """Return whether a datagram to a peer is echoed.

    Raises `PeerUnreachableError` if the peer is too busy, or is not reached directly.
    """
    stream = await host.open_stream(peer, ECHO_PROTOCOL)
    with answered(stream):
        answer = decode_echo(await hear(stream, MAX_MESSAGE_BYTES))
        remote = stream.remote_address
        if not answer.port or remote is None:
            raise PeerUnreachableError("the peer echoes nothing now")
        family = trio.socket.AF_INET6 if ":" in remote[0] else trio.socket.AF_INET
        with trio.socket.socket(family, trio.socket.SOCK_DGRAM) as socket:
            return await _is_echoed(socket, answer.token, (remote[0], answer.port))


async def _is_echoed(socket: trio.socket.SocketType, token: bytes, target: tuple[str, int]) -> bool:
    try:
        await socket.connect(target)
        for _ in range(NUM_DATAGRAMS):
            await socket.send(token)
            with trio.move_on_after(DATAGRAM_INTERVAL):
                return await socket.recv(TOKEN_BYTES + 1) == token
    except OSError:
        return False  # a router says that it lets nothing through
    return False


async def _send(stream: Libp2pStream, size: int, shaper: Shaper) -> None:
    """Send ``size`` bytes, or as many as the time allows; then end the stream."""
    with trio.move_on_after(SPEED_SECONDS):
        while size > 0:
            count = min(size, CHUNK_BYTES, shaper.quantum)
            await shaper.wait(count)
            await stream.send_all(bytes(count))
            size -= count
    with trio.fail_after(GRACE):
        await stream.send_eof()


async def _receive(stream: Libp2pStream, size: int, shaper: Shaper) -> SpeedAnswer:
    """Receive until the end, or until the time is over; the first piece starts the clock, and does not count."""
    num_received, began_at, ended_at = 0, None, 0.0
    with trio.move_on_after(SPEED_SECONDS + GRACE):
        while num_received < size and (data := await stream.receive_some(CHUNK_BYTES)):
            ended_at = trio.current_time()
            if began_at is None:
                began_at = ended_at
            else:
                num_received += len(data)
            for start in range(0, len(data), shaper.quantum):
                await shaper.wait(min(shaper.quantum, len(data) - start))
    seconds = ended_at - (began_at or ended_at)
    return SpeedAnswer(min(num_received, size), round(seconds * 1_000))


async def measure(host: Host, peer: bytes, *, is_up: bool) -> float:
    """Measure bytes a second to a peer, or from it; raise `PeerUnreachableError` if it does not take part."""
    stream = await host.open_stream(peer, SPEED_PROTOCOL)
    with answered(stream):
        await tell(stream, SpeedRequest(is_up), MAX_MESSAGE_BYTES)
        allowed = decode_speed(await hear(stream, MAX_MESSAGE_BYTES))
        if not allowed.size:
            raise PeerUnreachableError("the peer has no time for this now")
        stream.is_bulk = True
        if is_up:
            await _send(stream, allowed.size, Shaper())
            payload = await hear(stream, MAX_MESSAGE_BYTES, SPEED_SECONDS + MESSAGE_TIMEOUT)
            came = decode_speed(payload)
        else:
            came = await _receive(stream, allowed.size, Shaper())
    if not came.size:
        raise PeerUnreachableError("nothing came")
    return came.size / max(came.milliseconds / 1_000, 1e-3)

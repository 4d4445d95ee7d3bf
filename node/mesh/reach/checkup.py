"""Serving, and asking for, what tells a node how it is off: `farandole.protocol.checkup`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from farandole.protocol.checkup import (
    CLOCK_PROTOCOL,
    ECHO_PROTOCOL,
    MAX_MESSAGE_BYTES,
    TOKEN_BYTES,
    ClockAnswer,
    EchoAnswer,
    Offset,
    decode_clock,
    decode_echo,
    encode,
    measure_offset,
)
from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.framing import FrameParser, frame

from ...base.errors import PeerUnreachableError
from ...base.streams import receive_frame

if TYPE_CHECKING:
    from ..host import Host
    from ..libp2p_stream import Stream

ANSWER_TIMEOUT: Final = 5.0
# Datagrams are sent so often, since any may be lost, and so far apart; each waits for its echo.
NUM_DATAGRAMS: Final = 4
DATAGRAM_INTERVAL: Final = 0.5
# A port is open for one asker for so long, and for so many askers at once; others are told to ask another.
ECHO_SECONDS: Final = 5.0
MAX_ECHOING: Final = 16
# Whoever shows the token gets so many echoes.
MAX_ECHOES: Final = 8


class CheckupService:
    """Answers peers of one host. ``clock``: Unix seconds."""

    def __init__(self, host: Host, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._num_echoing = 0
        host.set_handler(CLOCK_PROTOCOL, self._tell_time)
        host.set_handler(ECHO_PROTOCOL, self._echo)

    async def _tell_time(self, stream: Stream) -> None:
        with trio.fail_after(ANSWER_TIMEOUT):
            answer = ClockAnswer(max(0, int(self._clock() * 1_000)))
            await stream.send_all(frame(encode(answer), MAX_MESSAGE_BYTES))

    async def _echo(self, stream: Stream) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        if stream.remote_address is None or self._num_echoing >= MAX_ECHOING:
            await self._offer(stream, 0, token)
            return
        is_ipv6 = ":" in stream.remote_address[0]
        family = trio.socket.AF_INET6 if is_ipv6 else trio.socket.AF_INET
        self._num_echoing += 1
        try:
            with trio.socket.socket(family, trio.socket.SOCK_DGRAM) as socket:
                await socket.bind(("::" if is_ipv6 else "0.0.0.0", 0))
                await self._offer(stream, socket.getsockname()[1], token)
                with trio.move_on_after(ECHO_SECONDS):
                    await _echo_token(socket, token)
        finally:
            self._num_echoing -= 1

    async def _offer(self, stream: Stream, port: int, token: bytes) -> None:
        with trio.fail_after(ANSWER_TIMEOUT):
            await stream.send_all(frame(encode(EchoAnswer(port, token)), MAX_MESSAGE_BYTES))


async def _echo_token(socket: trio.socket.SocketType, token: bytes) -> None:
    for _ in range(MAX_ECHOES):
        data, sender = await socket.recvfrom(TOKEN_BYTES + 1)
        while data != token:
            data, sender = await socket.recvfrom(TOKEN_BYTES + 1)
        await socket.sendto(token, sender)


async def ask_time(host: Host, peer: bytes, clock: Callable[[], float] = time.time) -> Offset:
    """How far this node's clock is ahead of a peer's; `PeerUnreachableError` if it does not say."""
    stream = await host.open_stream(peer, CLOCK_PROTOCOL)
    asked_at, began_at = clock(), trio.current_time()
    try:
        answer = decode_clock(await _answer(stream))
    finally:
        stream.reset()
    # By the steady clock, so that one that is set meanwhile does no harm.
    return measure_offset(asked_at, asked_at + trio.current_time() - began_at, answer)


async def ask_echo(host: Host, peer: bytes) -> bool:
    """Whether a datagram that goes to a peer comes back.

    Raises `PeerUnreachableError` if it has no time for it, or is not reached directly.
    """
    stream = await host.open_stream(peer, ECHO_PROTOCOL)
    try:
        answer = decode_echo(await _answer(stream))
        remote = stream.remote_address
        if not answer.port or remote is None:
            raise PeerUnreachableError("the peer echoes nothing now")
        family = trio.socket.AF_INET6 if ":" in remote[0] else trio.socket.AF_INET
        with trio.socket.socket(family, trio.socket.SOCK_DGRAM) as socket:
            return await _is_echoed(socket, answer.token, (remote[0], answer.port))
    except RemoteProtocolError as error:
        raise PeerUnreachableError(str(error)) from error
    finally:
        stream.reset()


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


async def _answer(stream: Stream) -> bytes:
    try:
        with trio.fail_after(ANSWER_TIMEOUT):
            return await receive_frame(stream, FrameParser(MAX_MESSAGE_BYTES))
    except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
        raise PeerUnreachableError(f"no answer: {error!r}") from error

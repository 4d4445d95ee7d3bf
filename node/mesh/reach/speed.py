"""How fast a peer's line is, by a few megabytes; and letting peers measure theirs, seldom and one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from farandole.protocol.checkup import (
    MAX_MESSAGE_BYTES,
    MAX_SPEED_BYTES,
    SPEED_PROTOCOL,
    SPEED_SECONDS,
    SpeedAnswer,
    SpeedRequest,
    decode_speed,
    decode_speed_request,
    encode,
)
from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.framing import FrameParser, frame
from farandole.protocol.token_bucket import TokenBucket

from ...base.bandwidth import Shaper, Shaping
from ...base.errors import PeerUnreachableError
from ...base.streams import receive_frame

if TYPE_CHECKING:
    from ..host import Host
    from ..libp2p_stream import Stream

ANSWER_TIMEOUT: Final = 5.0
# Time for the last bytes that are under way.
GRACE: Final = 2.0
CHUNK_BYTES: Final = 65_536
# Measured at once, whoever asks, and then one more every so many seconds: a stranger with many keys gets 1.6 Mbit/s.
MAX_AT_ONCE: Final = 4
INTERVAL: Final = 30.0


class SpeedService:
    """Lets peers measure, within this node's caps, directly connected ones alone: relays carry nothing for this."""

    def __init__(self, host: Host, shaping: Shaping) -> None:
        self._shaping = shaping
        self._is_busy = False
        self._leave = TokenBucket(MAX_AT_ONCE, 1 / INTERVAL, trio.current_time())
        host.set_handler(SPEED_PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        with trio.fail_after(ANSWER_TIMEOUT):
            request = decode_speed_request(await receive_frame(stream, FrameParser(MAX_MESSAGE_BYTES)))
        is_dear = not self._shaping.may_spend(MAX_SPEED_BYTES)
        if stream.is_relayed or self._is_busy or is_dear or not self._leave.take(trio.current_time()):
            await _answer(stream, SpeedAnswer(0))
            return
        self._is_busy = True
        try:
            await _answer(stream, SpeedAnswer(MAX_SPEED_BYTES))
            stream.is_bulk = True
            if request.is_up:
                await _answer(stream, await _receive(stream, MAX_SPEED_BYTES, self._shaping.down))
            else:
                await _send(stream, MAX_SPEED_BYTES, self._shaping.up)
        finally:
            self._is_busy = False


async def _answer(stream: Stream, answer: SpeedAnswer) -> None:
    with trio.fail_after(ANSWER_TIMEOUT):
        await stream.send_all(frame(encode(answer), MAX_MESSAGE_BYTES))


async def _send(stream: Stream, size: int, shaper: Shaper) -> None:
    """So many bytes, or as many as go in the time; then the end of the stream."""
    with trio.move_on_after(SPEED_SECONDS):
        while size > 0:
            count = min(size, CHUNK_BYTES, shaper.quantum)
            await shaper.wait(count)
            await stream.send_all(bytes(count))
            size -= count
    with trio.fail_after(GRACE):
        await stream.send_eof()


async def _receive(stream: Stream, size: int, shaper: Shaper) -> SpeedAnswer:
    """What came until the end, or until the time is over; the first piece starts the clock, and does not count."""
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
    """Bytes a second to a peer, or from it. Raises `PeerUnreachableError` if it does not take part."""
    stream = await host.open_stream(peer, SPEED_PROTOCOL)
    parser = FrameParser(MAX_MESSAGE_BYTES)
    try:
        with trio.fail_after(ANSWER_TIMEOUT):
            await stream.send_all(frame(encode(SpeedRequest(is_up)), MAX_MESSAGE_BYTES))
            allowed = decode_speed(await receive_frame(stream, parser))
        if not allowed.size:
            raise PeerUnreachableError("the peer has no time for this now")
        stream.is_bulk = True
        if is_up:
            await _send(stream, allowed.size, Shaper())
            with trio.fail_after(SPEED_SECONDS + ANSWER_TIMEOUT):
                came = decode_speed(await receive_frame(stream, parser))
        else:
            came = await _receive(stream, allowed.size, Shaper())
    except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
        raise PeerUnreachableError(f"no answer about speed: {error!r}") from error
    finally:
        stream.reset()
    if not came.size:
        raise PeerUnreachableError("nothing came")
    return came.size / max(came.milliseconds / 1_000, 1e-3)

"""Tells peers this node's time, and asks for theirs: `farandole.protocol.mesh.clock`."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from farandole.protocol.mesh.clock import (
    CLOCK_PROTOCOL,
    MAX_MESSAGE_BYTES,
    ClockAnswer,
    Offset,
    decode_clock,
    measure_offset,
)

from ..host import Host
from ..yamux import Libp2pStream
from .dialback import answered, hear, tell


def tell_time(host: Host, clock: Callable[[], float] = time.time) -> None:
    """Answer the peers of a host. ``clock``: Unix seconds."""

    async def tell_time_to(stream: Libp2pStream) -> None:
        await tell(stream, ClockAnswer(max(0, int(clock() * 1_000))), MAX_MESSAGE_BYTES)

    host.set_handler(CLOCK_PROTOCOL, tell_time_to)


async def ask_time(host: Host, peer: bytes, clock: Callable[[], float] = time.time) -> Offset:
    """Return how far this node's clock is ahead of a peer's; raise `PeerUnreachableError` if it does not answer."""
    stream = await host.open_stream(peer, CLOCK_PROTOCOL)
    asked_at, began_at = clock(), trio.current_time()
    with answered(stream):
        answer = decode_clock(await hear(stream, MAX_MESSAGE_BYTES))
    # Elapsed time is from the steady clock, so setting the clock in between does no harm.
    return measure_offset(asked_at, asked_at + trio.current_time() - began_at, answer)

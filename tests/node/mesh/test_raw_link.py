"""Writing to a connection without waiting: what its socket does not take is sent by the flush, in order."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from farandole.node.mesh.links import Socket
from farandole.protocol.run.invite import NETWORK_KEY_BYTES

from ...patience import PATIENCE

# More than the kernel buffers of a connection.
LARGE = 64_000_000


@asynccontextmanager
async def both_ends() -> AsyncIterator[tuple[Socket, Socket]]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    near = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
    async with listener, near, await listener.accept() as far:
        with trio.fail_after(PATIENCE):
            ends = Socket(near), Socket(far)
            for end in ends:
                end.finish_handshake()
            yield ends


@pytest.mark.parametrize("is_private", [False, True])
async def test_everything_arrives_in_order(is_private: bool) -> None:
    large, small = random.Random(0).randbytes(LARGE), b"small"
    async with both_ends() as (near, far), trio.open_nursery() as nursery:
        if is_private:
            async with trio.open_nursery() as beginning:
                beginning.start_soon(far.begin_private, bytes(NETWORK_KEY_BYTES))
                beginning.start_soon(near.begin_private, bytes(NETWORK_KEY_BYTES))
        near.write_now(small)
        assert not near.has_unwritten
        assert await far.read(len(small)) == small
        near.write_now(large)
        assert near.has_unwritten, "no buffer takes as much"
        nursery.start_soon(near.flush)
        assert await far.read(LARGE) == large
        await trio.testing.wait_all_tasks_blocked()
        near.write_now(small)
        assert not near.has_unwritten
        assert await far.read(len(small)) == small


async def test_a_broken_connection_is_noticed_by_the_flush() -> None:
    async with both_ends() as (near, far):
        far.leave_nothing()
        await far.close()
        while not near.has_unwritten:  # until the kernel knows
            near.write_now(b"nobody reads this")
            await trio.sleep(0.01)
        with pytest.raises(trio.BrokenResourceError):
            await near.flush()


async def test_a_connection_closed_here_takes_nothing() -> None:
    async with both_ends() as (near, _):
        await near.close()
        near.write_now(b"too late")
        assert near.has_unwritten
        with pytest.raises(trio.BrokenResourceError):
            await near.flush()

"""Yamux over a pipe in memory, against a peer whose frames the test writes."""

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from farandole.node.base.bandwidth import Shaper, Shaping
from farandole.node.mesh import yamux as driver
from farandole.node.mesh.yamux import Libp2pStream, MuxedConn, UnreadBudget
from farandole.protocol.mesh.yamux import MAX_MESSAGE_BYTES, PIECE_BYTES

from ...patience import PATIENCE
from ...protocol.mesh.test_yamux import ACK, DATA, FIN, GO_AWAY, PING, RST, SYN, WINDOW_UPDATE, encode
from ..base.test_bandwidth import num_counted

PEER = bytes(32)


class Pipe:
    """A secure connection of the library's, reduced to what yamux uses."""

    is_relayed, remote, handshake_hash = False, None, b""

    def __init__(self, stream: trio.StapledStream) -> None:
        self.stream = stream
        self.takes_at_once = False
        self.taken: list[bytes] = []
        self._unwritten = b""

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self.stream.receive_some(n))

    def write_now(self, data: bytes) -> None:
        assert len(data) <= MAX_MESSAGE_BYTES
        assert not self._unwritten
        if self.takes_at_once:
            self.taken.append(data)
        else:
            self._unwritten = data

    @property
    def has_unwritten(self) -> bool:
        return bool(self._unwritten)

    async def flush(self) -> None:
        await self.stream.send_all(self._unwritten)
        self._unwritten = b""


@asynccontextmanager
async def open_conn(
    shaping: Shaping | None = None, budget: UnreadBudget | None = None
) -> AsyncIterator[tuple[MuxedConn, trio.StapledStream]]:
    """Open an inbound connection, and yield it with the dialler's bare end."""
    near, far = memory_stream_pair()
    pipe = cast("Any", Pipe(near))
    conn = MuxedConn(pipe, pipe, PEER, shaping, budget, is_initiator=False)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(conn.start)
            await wait_all_tasks_blocked()
            yield conn, far
            nursery.cancel_scope.cancel()


async def receive_frame(far: trio.StapledStream) -> tuple[int, int, int, int]:
    header = b""
    while len(header) < 12:
        header += await far.receive_some(12 - len(header))
    _, kind, flags, stream_id, length = struct.unpack("!BBHII", header)
    return kind, flags, stream_id, length


async def accept(conn: MuxedConn, far: trio.StapledStream, stream_id: int = 1) -> Libp2pStream:
    await far.send_all(encode(WINDOW_UPDATE, SYN, stream_id, 0))
    stream = await conn.accept_stream()
    assert await receive_frame(far) == (WINDOW_UPDATE, ACK, stream_id, 0)
    return stream


async def test_an_end_before_the_connections_end_stays_a_clean_end() -> None:
    async with open_conn() as (conn, far):
        ended, torn = await accept(conn, far, 1), await accept(conn, far, 3)
        await far.send_all(encode(DATA, FIN, 1, 2, b"ab") + encode(DATA, 0, 3, 2, b"ab"))
        await far.aclose()
        await conn.event_closed.wait()
        assert await ended.receive_some() == await torn.receive_some() == b"ab"
        assert await ended.receive_some() == b""
        with pytest.raises(trio.BrokenResourceError):
            await torn.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            await conn.accept_stream()
        with pytest.raises(trio.BrokenResourceError):
            await conn.open_stream()


@pytest.mark.parametrize("last", [b"\1" + bytes(11), encode(GO_AWAY, 0, 0, 0), encode(PING, SYN, 0, 1) * 1_000])
async def test_what_no_honest_peer_sends_or_a_farewell_ends_the_connection(last: bytes) -> None:
    async with open_conn() as (conn, far):
        await far.send_all(last)
        await conn.event_closed.wait()


@pytest.mark.parametrize("is_read", [True, False])
async def test_an_end_is_announced_and_waits_for_no_peer_that_reads_nothing(
    is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "CLOSE_TIMEOUT", PATIENCE if is_read else 0.05)
    async with open_conn() as (conn, far):
        if not is_read:
            cast("Any", conn.session).stream.send_stream.send_all_hook = trio.sleep_forever
        conn.end()
        assert conn.is_closing
        await conn.event_closed.wait()
        if is_read:
            assert await receive_frame(far) == (GO_AWAY, 0, 0, 0)


async def test_control_frames_wait_behind_one_piece_of_bulk_at_most() -> None:
    async with open_conn() as (conn, far):
        bulk, control = await accept(conn, far), await accept(conn, far, 3)
        bulk.state.is_bulk = True
        pipe, is_taken = cast("Any", conn.session).stream.send_stream, trio.Event()
        deliver = pipe.send_all_hook

        async def deliver_when_taken() -> None:
            await is_taken.wait()
            await deliver()

        pipe.send_all_hook = deliver_when_taken
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bulk.send_all, bytes(3 * PIECE_BYTES))
            await wait_all_tasks_blocked()
            await control.send_all(b"now")
            is_taken.set()
        headers = []
        for _ in range(4):
            headers.append(await receive_frame(far))
            left = headers[-1][3]
            while left:
                left -= len(await far.receive_some(left))
        assert headers == [(DATA, 0, 1, PIECE_BYTES), (DATA, 0, 3, 3), *[(DATA, 0, 1, PIECE_BYTES)] * 2]


async def test_what_needs_no_wait_is_written_before_any_other_task_runs() -> None:
    async with open_conn() as (conn, far):
        stream, pipe = await accept(conn, far), cast("Any", conn.session)
        pipe.takes_at_once = True
        assert stream.room == PIECE_BYTES
        stream.send_now(b"first")
        stream.send_now(bytes(PIECE_BYTES))
        assert pipe.taken == [encode(DATA, 0, 1, 5, b"first"), encode(DATA, 0, 1, PIECE_BYTES, bytes(PIECE_BYTES))]
        pipe.takes_at_once = False
        stream.state.is_bulk = True
        stream.send_now(b"second")
        assert stream.room == 0, "no bulk behind bulk"
        pipe.takes_at_once = True
        stream.state.is_bulk = False
        stream.send_now(b"third")
        assert len(pipe.taken) == 2, "nothing overtakes"
        assert await receive_frame(far) == (DATA, 0, 1, 6)
        assert await far.receive_some(6) == b"second"
        await wait_all_tasks_blocked()
        assert pipe.taken[2:] == [encode(DATA, 0, 1, 5, b"third")]


async def test_everything_counts_but_the_payload_of_bulk() -> None:
    shaping = Shaping(*(Shaper(clock=lambda: 0.0) for _ in range(2)))
    async with open_conn(shaping) as (conn, far):
        bulk, control = await accept(conn, far), await accept(conn, far, 3)
        bulk.state.is_bulk = True
        assert (num_counted(shaping.down), num_counted(shaping.up)) == (24, 24)  # two frames in each direction
        await bulk.send_all(b"abc")
        await control.send_all(b"defgh")
        await far.send_all(encode(DATA, 0, 1, 2, b"ab") + encode(DATA, 0, 3, 4, b"cdef"))
        assert await bulk.receive_some() == b"ab"
        assert await control.receive_some() == b"cdef"
        assert num_counted(shaping.up) == 24 + 12 + 12 + 5
        assert num_counted(shaping.down) == 24 + 12 + 12 + 4


# Strangers that are many


async def test_strangers_share_what_may_be_unread_and_who_is_needed_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "MAX_STRANGERS_UNREAD_BYTES", 1000)
    budget = UnreadBudget()
    async with (
        open_conn(budget=budget) as (needed, from_needed),
        open_conn(budget=budget) as (small, from_small),
        open_conn(budget=budget) as (large, from_large),
    ):
        needed.peer = b"needed"
        budget.is_needed = lambda peer: peer == needed.peer
        streams = [
            await accept(conn, far) for conn, far in ((needed, from_needed), (small, from_small), (large, from_large))
        ]
        await from_needed.send_all(encode(DATA, 0, 1, 5000, bytes(5000)))
        await from_large.send_all(encode(DATA, 0, 1, 700, bytes(700)))
        await from_small.send_all(encode(DATA, 0, 1, 301, bytes(301)))
        assert await receive_frame(from_large) == (WINDOW_UPDATE, RST, 1, 0)
        assert [stream.state.is_reset for stream in streams] == [False, False, True]
        assert [len(await stream.receive_some()) for stream in streams[:2]] == [5000, 301]
        assert budget.num_unread == 0
    assert not budget.conns

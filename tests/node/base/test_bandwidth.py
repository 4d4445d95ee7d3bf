"""Caps: exact by a test clock; on real sockets what is counted, and who waits."""

from __future__ import annotations

import math
import socket

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from farandole.node.base.bandwidth import (
    BULK_SHARE,
    MAX_DEBT_SECONDS,
    MAX_QUANTUM,
    METER_SECONDS,
    MIN_QUANTUM,
    Shaper,
    Shaping,
)
from farandole.node.base.figures import BYTES_PER_MBIT
from farandole.node.bulk.exchange_service import SILENT_FOR
from farandole.node.transfers.giver import MAX_SERVED
from farandole.protocol.exchange.pipe import Transfer
from farandole.protocol.run.rules import RoundConfig
from farandole.protocol.wire.record_layer import HEADER_BYTES, OVERHEAD_BYTES, RECORD_BYTES

from ..bulk.channels.parties import move
from ..sockets import channel_pair

PATIENCE = 30.0
RATES = [2_000.0, 125_000.0, 1_250_000.0, 12_500_000.0, 1.25e9]
MIB = 1 << 20


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def assert_within(shaper: Shaper, moved: list[tuple[float, int]], late: int = 0) -> None:
    """Assert that no window of ``moved``, (time, bytes), holds more than burst, rate and late bytes."""
    total, worst = 0, -math.inf  # bytes until now; max of rate * beginning - bytes before it
    for at, count in sorted(moved):
        worst = max(worst, shaper.rate * at - total)
        total += count
        assert total + worst - shaper.rate * at <= shaper.burst + late + 1  # rounding of large numbers


@given(
    st.sampled_from(RATES),
    st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 3), st.floats(0.01, 1)), min_size=1, max_size=60),
)
def test_no_window_holds_more_than_the_burst_and_the_rate(rate: float, asked: list[tuple[float, int, float]]) -> None:
    clock = Clock()
    shaper = Shaper(rate, clock)
    moved = []
    for pause, num_flows, share in asked:
        clock.now += pause
        for _ in range(num_flows):
            count = max(1, int(share * shaper.quantum))
            moved.append((clock.now + shaper.reserve(count), count))
    assert_within(shaper, moved)


@pytest.mark.parametrize("rate", RATES[:-1])
def test_a_busy_flow_gets_the_whole_rate(rate: float) -> None:
    clock = Clock()
    shaper = Shaper(rate, clock)
    began, moved = clock.now, []
    for number in range(1_000):
        clock.now += shaper.reserve(shaper.quantum) + (0.02 if number % 50 == 49 else 0)  # sometimes woken late
        moved.append((clock.now, shaper.quantum))
    assert sum(count for _, count in moved) >= rate * (clock.now - began) * 0.999
    assert_within(shaper, moved, late=shaper.quantum)


def test_a_cap_can_change_while_it_is_used() -> None:
    clock = Clock()
    shaper = Shaper(0, clock)
    assert shaper.reserve(10**9) == 0.0
    shaper.set_rate(125_000.0)
    assert shaper.quantum < MAX_QUANTUM
    moved = []
    for _ in range(200):
        clock.now += shaper.reserve(shaper.quantum)
        moved.append((clock.now, shaper.quantum))
    assert_within(shaper, moved)
    shaper.reserve(10 * 125_000)  # as a flow does that began without a cap
    shaper.set_rate(0.0)
    assert shaper.reserve(10**9) == 0.0
    with pytest.raises(ValueError, match="bytes a second"):
        shaper.set_rate(-1.0)
    assert shaper.rate == 0.0


def move_bulk(shaper: Shaper, clock: Clock, seconds: float, flood: float = 0.0) -> int:
    """Return the bytes that one flow moves, while control traffic uses ``flood`` times the rate."""
    ends_at, moved = clock.now + seconds, 0
    while (wait := shaper.reserve(shaper.quantum)) + clock.now < ends_at:
        shaper.charge(round(flood * shaper.rate * wait))
        clock.now += wait
        moved += shaper.quantum
    clock.now = ends_at
    return moved


def test_a_flood_of_control_is_paid_for_so_long_and_no_longer() -> None:
    clock = Clock()
    shaper = Shaper(125_000, clock)
    for _ in range(10_000):
        shaper.charge(10_000)
    slow = MAX_DEBT_SECONDS / (1 - BULK_SHARE)
    assert move_bulk(shaper, clock, slow) == pytest.approx(BULK_SHARE * slow * 125_000, abs=2 * shaper.quantum)
    assert move_bulk(shaper, clock, 2) == pytest.approx(2 * 125_000, abs=2 * shaper.quantum)


@pytest.mark.parametrize("mbit", [0.5, 5, 500])
def test_no_partner_takes_a_flood_for_silence(mbit: float) -> None:
    """Each of the possible flows gets its next piece long before an exchange of 30 s takes another way."""
    shaper = Shaper(mbit * BYTES_PER_MBIT, Clock())
    shaper.charge(round(1_000 * shaper.rate))
    waits = [shaper.reserve(shaper.quantum) for _ in range(1 + MAX_SERVED)]
    assert max(waits) < SILENT_FOR * RoundConfig().exchange_seconds / 1.5


async def test_flows_share_evenly_and_control_goes_at_once(autojump_clock: trio.testing.MockClock) -> None:
    shaper = Shaper(125_000, trio.current_time)
    moved = [0, 0, 0]

    async def flow(index: int) -> None:
        while True:
            await shaper.wait(shaper.quantum)
            moved[index] += shaper.quantum

    with trio.move_on_after(20):
        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(flow, index)
            while True:
                await trio.sleep(0.5)
                before = trio.current_time()
                shaper.charge(12_500)
                assert trio.current_time() == before
    assert max(moved) - min(moved) <= 2 * shaper.quantum
    left_for_bulk = 20 * (125_000 - 25_000)
    assert sum(moved) == pytest.approx(left_for_bulk, abs=shaper.burst + 4 * shaper.quantum + 12_500)


def test_the_rate_of_late_is_of_the_last_seconds() -> None:
    clock = Clock()
    shaper = Shaper(0, clock)
    for _ in range(3 * METER_SECONDS):
        clock.now += 1
        shaper.reserve(600)
        shaper.charge(400)
    assert shaper.per_second() == pytest.approx(1_000, rel=0.2)
    clock.now += 2 * METER_SECONDS
    assert shaper.per_second() == 0.0


# On real sockets


def num_counted(shaper: Shaper) -> float:
    """Return all bytes that it has counted, if its clock stands at 0."""
    return shaper.per_second() * (METER_SECONDS - 1)


async def test_a_channel_counts_what_it_moves() -> None:
    near, far = (Shaping(*(Shaper(clock=lambda: 0.0) for _ in range(2))) for _ in range(2))
    size = 2 * RECORD_BYTES + 1
    with channel_pair(near, far) as (sender, receiver, _):
        await move(sender, receiver, bytes(size))
    assert num_counted(near.up) == size + 3 * OVERHEAD_BYTES
    assert num_counted(near.up) <= num_counted(far.down) <= num_counted(near.up) + HEADER_BYTES  # of the next record
    assert num_counted(near.down) == num_counted(far.up) == 0


@pytest.mark.parametrize("is_sending", [True, False])
async def test_a_thread_that_waits_for_its_turn_ends_when_it_is_cancelled(is_sending: bool) -> None:
    rate = MIN_QUANTUM / (2 * PATIENCE)  # the second piece may move only when it is too late
    with channel_pair(Shaping(Shaper(rate), Shaper(rate))) as (capped, free, _):
        first, all_of_it = memoryview(bytearray(MIN_QUANTUM - OVERHEAD_BYTES)), memoryview(bytearray(MIB))
        async with trio.open_nursery() as nursery:
            if is_sending:
                nursery.start_soon(capped.send, all_of_it)
                await free.receive(Transfer(first))
            else:
                nursery.start_soon(capped.receive, Transfer(all_of_it))
                await free.send(memoryview(bytes(3 * MIN_QUANTUM)))  # in one record
            nursery.cancel_scope.cancel()
        assert not capped.is_fit


@pytest.mark.parametrize("mbit", [0.5, 5, 500])
async def test_the_kernel_is_left_with_little_to_send(mbit: float) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as dialled,
    ):
        free = dialled.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        Shaping().fit_buffers(dialled)
        assert dialled.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == free
        Shaping.of_mbit(mbit, mbit).fit_buffers(dialled)
        assert dialled.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) <= MAX_QUANTUM

"""A host among strangers: each attack's resources are bounded, honest newcomers get in, and nothing is left over."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
import trio.lowlevel
from trio.testing import wait_all_tasks_blocked

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.mesh import yamux
from farandole.node.mesh.connections import MAX_NEGOTIATIONS_PER_CONNECTION
from farandole.node.mesh.host import MAX_HANDSHAKES, MAX_HANDSHAKES_PER_ADDRESS, Host
from farandole.testnet.bench.worker.hostile_attacks import ATTACKS, TargetError, attack

from ..hosts import ECHO, assert_answers, echo, host_at_loopback, num_tasks, port_of


@asynccontextmanager
async def attacked(host: Host, names: Sequence[str], number: int, sources: int = 1) -> AsyncIterator[None]:
    """Attack with ``number`` connections, of these kinds in turn, all at once, until the block ends."""
    rng = random.Random(0)
    async with trio.open_nursery() as nursery:
        for index in range(number):
            source = f"127.0.0.{1 + index % sources}"
            nursery.start_soon(attack, names[index % len(names)], port_of(host), host.author, source, rng)
        yield
        nursery.cancel_scope.cancel()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", ATTACKS)
async def test_newcomers_get_in_beside_strangers_who_leave_nothing_behind(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with host_at_loopback() as bob:
        bob.set_handler(ECHO, echo)
        await assert_answers(bob)
        await wait_all_tasks_blocked(0.05)
        before = num_tasks(), num_descriptors()
        async with attacked(bob, [name], 24):
            for _ in range(3):
                await assert_answers(bob)
                assert bob.connections.budget.num_unread <= yamux.MAX_STRANGERS_UNREAD_BYTES
        while num_tasks() > before[0] or num_descriptors() > before[1] or bob.connected:
            await wait_all_tasks_blocked(0.05)
        assert not bob.acceptor.handshakes
        assert not bob.connections.by_peer
        assert bob.connections.budget.num_unread == 0
        assert not bob.connections.budget.conns
    assert not caplog.records, "strangers fill no log"


@pytest.mark.parametrize(("sources", "most"), [(1, MAX_HANDSHAKES_PER_ADDRESS), (100, MAX_HANDSHAKES)])
async def test_unfinished_handshakes_are_bounded_by_address_and_in_all(sources: int, most: int) -> None:
    async with host_at_loopback() as bob:
        bob.set_handler(ECHO, echo)
        async with attacked(bob, ["silence", "half a handshake", "a byte at a time"], 300, sources):
            for _ in range(3):
                await assert_answers(bob)
                assert len(bob.acceptor.handshakes) <= most


async def test_connections_in_all_are_bounded_and_who_is_needed_stays() -> None:
    async with host_at_loopback() as bob, host_at_loopback() as friend:
        bob.set_handler(ECHO, echo)
        bob.connections.max_connections = 10
        bob.connections.protect(lambda peer: peer == friend.author)
        await friend.connect(bob.author, bob.addresses)
        async with attacked(bob, ["idle connections"], 30):
            # If ten more strangers come before it has opened a stream, it has to connect again.
            for _ in range(30):
                with contextlib.suppress(PeerUnreachableError, trio.BrokenResourceError):
                    await assert_answers(bob)
                    break
            else:
                pytest.fail("a newcomer never got in")
            assert len(bob.connections.live) <= 10
            assert friend.author in bob.connected


async def test_who_does_not_even_identify_itself_makes_room_before_others_without_streams() -> None:
    async with host_at_loopback() as bob, host_at_loopback() as carol, host_at_loopback() as dave:
        bob.connections.max_connections = 2
        async with attacked(bob, ["idle connections"], 1):
            while not bob.connected:
                await wait_all_tasks_blocked(0.05)
            await carol.connect(bob.author, bob.addresses)
            while any(conn.muxed.streams for conn in bob.connections.of(carol.author)):
                await wait_all_tasks_blocked(0.05)
            await dave.connect(bob.author, bob.addresses)
            await wait_all_tasks_blocked(0.1)
            assert bob.connected == {carol.author, dave.author}


async def test_a_connection_negotiates_few_streams_at_once() -> None:
    async with host_at_loopback() as bob, attacked(bob, ["thousands of streams"], 1):
        while not (conns := bob.connections.live):
            await trio.lowlevel.checkpoint()
        (conn,) = conns
        while not conn.muxed.is_closing:
            theirs = [stream for stream in conn.muxed.streams if stream.state.stream_id % 2]
            assert sum(not stream.protocol for stream in theirs) <= MAX_NEGOTIATIONS_PER_CONNECTION + 1  # one waits
            await trio.lowlevel.checkpoint()


async def test_attacks_are_for_loopback_only() -> None:
    with pytest.raises(TargetError):
        await attack("silence", 1, bytes(32), "192.0.2.1", random.Random(0))

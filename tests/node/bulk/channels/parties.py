"""Nodes with bulk channels over loopback TCP, whose libp2p streams are in memory."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio
import trio.testing
from blake3 import blake3

from farandole.node.bulk.channel import BulkChannel
from farandole.node.bulk.negotiation import BulkService, open_bulk
from farandole.protocol.exchange.bulk import Proposal, decode_proposal
from farandole.protocol.exchange.pipe import Transfer
from farandole.protocol.wire.framing import frame

from ....patience import PATIENCE
from ...parties import ALICE, BOB, RUN_ID, MemoryHost, MemoryStream


class BulkStream(MemoryStream):
    """One end of a libp2p stream; ``change`` alters the proposals sent through it."""

    def __init__(self, stream: trio.abc.Stream, peer: bytes, host: BulkHost) -> None:
        super().__init__(stream, peer, host.faults)
        self._host = host
        self.handshake_hash = host.handshake_hash

    async def send_all(self, data: bytes) -> None:
        if self._host.is_frozen:
            await trio.sleep_forever()
        if self._host.change is not None:
            proposal = self._host.change(decode_proposal(data[4:]))
            data = frame(msgspec.msgpack.encode(proposal), 4_096)
        await super().send_all(data)


@dataclass
class BulkHost(MemoryHost):
    """A host that negotiates bulk channels."""

    change: Callable[[Proposal], Proposal] | None = None
    is_frozen: bool = False
    streams_opened: int = 0
    remote_port: int = 4_001
    unreachable: set[bytes] = field(default_factory=set)
    observed: list[tuple[str, int]] = field(default_factory=list)
    run_id: bytes = RUN_ID
    handshake_hash: bytes = MemoryStream.handshake_hash
    network_key: bytes = b""

    @property
    def upgrader(self) -> BulkHost:
        return self  # which has the key

    @property
    def puncher(self) -> BulkHost:
        return self

    def is_out_of_reach(self, peer: bytes) -> bool:
        return peer in self.unreachable

    def observe_port(self, port: int) -> contextlib.AbstractAsyncContextManager[list[tuple[str, int]]]:
        return contextlib.nullcontext(self.observed)

    def remote_addresses(self, peer: bytes) -> list[str]:
        return [f"/ip4/127.0.0.1/tcp/{self.remote_port}"]

    async def open_stream(self, peer: bytes, protocol: str, timeout: float = 8.0) -> Any:
        self.streams_opened += 1
        return await super().open_stream(peer, protocol, timeout)

    def end_of(self, stream: trio.abc.Stream, peer: bytes, protocol: str) -> BulkStream:
        return BulkStream(stream, peer, self)


@dataclass
class Party:
    """A node with its bulk service."""

    host: BulkHost
    service: BulkService
    channels: list[BulkChannel] = field(default_factory=list)
    """The ones of `meet`, closed at the end."""

    @property
    def port(self) -> int:
        return int(self.service._listeners[socket.AF_INET].getsockname()[1])


@asynccontextmanager
async def two_parties(
    run_id: bytes = RUN_ID, handshake_hash: bytes = MemoryStream.handshake_hash, network_key: bytes = b""
) -> AsyncIterator[tuple[Party, Party]]:
    """Open Alice and Bob; ``run_id`` and ``handshake_hash`` are Bob's."""
    network: dict[bytes, MemoryHost] = {}
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            hosts: list[Any] = [BulkHost(ALICE, nursery, network), BulkHost(BOB, nursery, network)]
            hosts[1].run_id, hosts[1].handshake_hash = run_id, handshake_hash
            hosts[0].network_key = hosts[1].network_key = network_key
            async with (
                open_bulk(hosts[0], hosts[0].run_id, reach=hosts[0]) as first,
                open_bulk(hosts[1], hosts[1].run_id, reach=hosts[1]) as second,
            ):
                both = Party(hosts[0], first), Party(hosts[1], second)
                yield both
                for channel in (*both[0].channels, *both[1].channels):
                    channel.close()
            nursery.cancel_scope.cancel()


async def meet(alice: Party, bob: Party) -> tuple[BulkChannel, BulkChannel]:
    """Return both ends of a channel."""
    with bob.service.expecting(ALICE):
        near = await alice.service.acquire(BOB)
    assert near is not None
    far = bob.service.take(ALICE, near.session)
    assert isinstance(near, BulkChannel)
    assert isinstance(far, BulkChannel)
    alice.channels.append(near)
    bob.channels.append(far)
    return near, far


async def assert_no_channel(alice: Party, bob: Party) -> None:
    """Assert that there is no channel once the negotiation is over at both ends."""
    for service in (alice.service, bob.service):
        while service._races:
            await trio.lowlevel.checkpoint()
        assert not any(channel.is_fit for channel in service._idle.values())


async def assert_refused(alice: Party, bob: Party, peer: bytes = BOB) -> None:
    """Assert that Alice, whom Bob expects, gets no channel to the peer."""
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(peer) is None
    await assert_no_channel(alice, bob)


def noted(*parties: Party) -> list[Proposal]:
    """Return a list that will have the proposals of these parties, in their order."""
    proposals: list[Proposal] = []

    def note(proposal: Proposal) -> Proposal:
        proposals.append(proposal)
        return proposal

    for party in parties:
        party.host.change = note
    return proposals


async def move(sender: BulkChannel, receiver: BulkChannel, data: bytes) -> None:
    """Send data and compare them, including the hash."""
    memory, so_far = bytearray(len(data)), sender.num_sent
    incoming = Transfer(memoryview(memory))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.send, memoryview(data))
        await receiver.receive(incoming)
    assert memory == data
    assert incoming.digest() == blake3(data).digest()
    assert sender.num_sent - so_far == len(data)

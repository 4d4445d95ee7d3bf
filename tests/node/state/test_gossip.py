"""Gossip services with each other in virtual time, and under floods of valid gossip between real hosts."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from trio.testing import MockClock

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.base.streams import Stream
from farandole.node.mesh import links
from farandole.node.mesh.connections import STRANGER_SECONDS
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.links import Site
from farandole.node.state.gossip import GossipService
from farandole.node.state.messenger import Messenger, open_messenger
from farandole.node.state.store import StoreError
from farandole.protocol.state.antientropy import PROTOCOL as SYNC_PROTOCOL
from farandole.protocol.state.antientropy import SyncHello, encode_frame
from farandole.protocol.state.entries import (
    DOMAIN,
    RULES,
    Beat,
    Delta,
    Kind,
    Member,
    Payload,
    Progress,
    Proof,
    Signed,
    encode_body,
)
from farandole.protocol.state.gossip import INBOUND_LIMITS, JOIN_LEAD_SECONDS
from farandole.protocol.state.push import MAX_PUSH_BYTES, Batch
from farandole.protocol.state.push import PROTOCOL as PUSH_PROTOCOL
from farandole.protocol.state.state import MergeReport, RunState
from farandole.protocol.state.writer import Mark, Writer
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.identity import public_bytes, sign
from farandole.protocol.wire.messagepack import encode

from ...patience import PATIENCE
from ...protocol.authors import CREATOR, NOW, RUN_ID, author_of, key_of, member, notice
from ..hosts import LOOPBACK, hang, host_at_loopback
from ..parties import Handler, MemoryHost

HOUR = 3_600.0


@dataclass
class Wires:
    """Hosts and messengers of all nodes in one process."""

    nursery: trio.Nursery
    hosts: dict[bytes, MemoryHost] = field(default_factory=dict)


class GossipHost(MemoryHost):
    """The parts of a host and of a messenger that a gossip service uses."""

    def __init__(self, wires: Wires, author: bytes) -> None:
        super().__init__(author, wires.nursery, wires.hosts)
        self.dialler = self
        self.receivers: dict[str, Callable[[bytes, bytes], None]] = {}
        self.on_failed: Callable[[bytes], None] | None = None
        self.networks: dict[bytes, str] = {}
        self.at_fault: list[bytes] = []
        self.connected: frozenset[bytes] = frozenset()

    def network_of(self, peer: bytes) -> str:
        return self.networks.get(peer, "")

    def shut_out(self, peer: bytes, seconds: float) -> None:
        pass

    def add_addresses(self, peer: bytes, addresses: Sequence[str], *, is_hearsay: bool) -> None:
        pass

    def set_handler(self, protocol: str, handler: Handler) -> None:
        async def handle(stream: Stream) -> None:
            try:
                await handler(stream)
            except RemoteProtocolError:
                self.at_fault.append(stream.peer)

        super().set_handler(protocol, handle)

    def set_receiver(
        self,
        protocol: str,
        max_bytes: int,
        receive: Callable[[bytes, bytes], None],
        on_failed: Callable[[bytes], None] | None = None,
    ) -> None:
        self.receivers[protocol] = receive
        self.on_failed = on_failed

    def send_nowait(self, peer: bytes, protocol: str, payload: bytes) -> None:
        other = self.network.get(peer)
        if not isinstance(other, GossipHost) or protocol not in other.receivers:
            if self.on_failed is not None:
                self.on_failed(peer)
            return
        try:
            other.receivers[protocol](self.author, payload)
        except RemoteProtocolError:
            other.at_fault.append(self.author)


class MemoryStore:
    """A store that may be full."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.mark: Mark = ()
        self.is_full = False

    def _check(self) -> None:
        if self.is_full:
            raise StoreError("no space left on device")

    async def load_authors(self) -> dict[bytes, bytes]:
        return dict(self.rows)

    async def save_authors(self, rows: Mapping[bytes, bytes | None]) -> None:
        self._check()
        for author, row in rows.items():
            self.rows.pop(author, None)
            if row is not None:
                self.rows[author] = row

    async def load_mark(self) -> Mark:
        return self.mark

    async def save_mark(self, mark: Mark) -> None:
        self._check()
        self.mark = mark


def gossip_over(
    number: int, state: RunState, host: Any, store: Any, unix: Callable[[], float] = lambda: NOW
) -> GossipService:
    """Make a node's gossip over a host and a store in memory."""
    writer, rng = Writer(key_of(number), RUN_ID), random.Random(number)
    return GossipService(state, writer, host, host, store, rng, base_period=2.0, unix=unix)


class GossipNode:
    """A service with everything that it needs."""

    def __init__(self, wires: Wires, number: int, store: MemoryStore | None = None) -> None:
        self.author = public_bytes(key_of(number))
        self.host = GossipHost(wires, self.author)
        self.store = store or MemoryStore()
        self.state = RunState(RUN_ID, CREATOR)
        self.service = gossip_over(number, self.state, self.host, self.store, lambda: NOW + trio.current_time())

    async def live(self, bootstrap: Sequence[GossipNode] = ()) -> None:
        """Join, announce and send heartbeats, as a daemon does."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.service.run)
            self.host.connected = frozenset(node.author for node in bootstrap)
            await self.service.join()
            await self.service.publish(Kind.MEMBER, 0, Member(device="cpu", addresses=("/ip4/10.0.0.1/tcp/4001",)))
            while True:
                await self.service.publish(Kind.BEAT, 0, Beat(0, 0, None, 0))
                await trio.sleep(2.0)


@pytest.fixture
async def wires(nursery: trio.Nursery) -> Wires:
    return Wires(nursery)


async def running(wires: Wires, number: int, store: MemoryStore | None = None) -> GossipNode:
    node = GossipNode(wires, number, store)
    await wires.nursery.start(node.service.run)
    return node


async def test_a_newcomer_fetches_the_run_state_once_and_then_what_it_has_not(wires: Wires, clock: MockClock) -> None:
    donors = [GossipNode(wires, number) for number in range(2, 5)]
    for index, donor in enumerate(donors):
        donor.state.merge(Delta(tuple(member(number) for number in (*range(20, 40), 50 + index))), NOW)
        await wires.nursery.start(donor.service.run)
    node, num_merged = GossipNode(wires, 1), 0

    def merge(delta: Delta, *arguments: Any, **named: Any) -> MergeReport:
        nonlocal num_merged
        num_merged += len(delta.entries)
        return RunState.merge(node.state, delta, *arguments, **named)

    node.state.merge = merge  # type: ignore[method-assign]  # to count
    await wires.nursery.start(node.service.run)
    node.host.connected = frozenset(donor.author for donor in donors)
    assert await node.service.join() == 3
    assert set(node.state.authors) == {author_of(number) for number in (*range(20, 40), 50, 51, 52)}
    assert num_merged == 23


async def test_a_restart_takes_up_what_was_stored(wires: Wires, clock: MockClock) -> None:
    store = MemoryStore()
    async with trio.open_nursery() as life:
        node = GossipNode(Wires(life), 1, store)
        life.start_soon(node.live)
        await trio.sleep(1.0)
        node.state.merge(Delta((notice(2), member(3, device="a"), member(3, device="b"))), NOW)
        await trio.sleep(4.0)
        root = node.state.root
        life.cancel_scope.cancel()
    store.rows[author_of(4)] = b"damaged"
    store.rows[author_of(5)] = encode(Delta((notice(6),)))[:-9] + bytes(9)
    reborn = await running(wires, 1, store)
    assert reborn.state.root == root
    past = reborn.state.get(reborn.author, Kind.MEMBER)
    assert past is not None
    await reborn.service.publish(Kind.MEMBER, 0, Member(device="again"))
    now = reborn.state.get(reborn.author, Kind.MEMBER)
    assert now is not None
    assert now.tick > past.tick
    assert reborn.state.proof_of(reborn.author) is None
    await trio.sleep(4.0)
    assert author_of(4) not in store.rows


async def test_nothing_is_said_that_a_crash_could_contradict(wires: Wires, clock: MockClock) -> None:
    node = await running(wires, 1)
    node.store.is_full = True
    await node.service.publish(Kind.MEMBER, 0, Member(device="old"))
    await node.service.publish(Kind.MEMBER, 0, Member(device="new"))
    await trio.sleep(5.0)
    assert node.state.get(node.author, Kind.MEMBER) is None
    node.store.is_full = False
    await trio.sleep(5.0)
    assert node.state.payload(node.author, Member) == Member(device="new")
    entry = node.state.get(node.author, Kind.MEMBER)
    assert entry is not None
    assert entry.written_at <= node.store.mark[-1][1]
    assert node.author in node.store.rows


async def test_what_comes_too_fast_is_said_later_the_newest_first(wires: Wires, clock: MockClock) -> None:
    node = await running(wires, 1)
    for value in range(5):
        await node.service.publish(Kind.PROGRESS, 0, Progress(0, 0, value, 0, 0))
    said = node.state.payload(node.author, Progress)
    assert said is not None
    assert said.tokens < 4
    await trio.sleep(130.0)
    assert node.state.payload(node.author, Progress) == Progress(0, 0, 4, 0, 0)


async def test_garbage_costs_its_sender_and_nobody_else(wires: Wires, clock: MockClock) -> None:
    node, attacker = await running(wires, 1), GossipHost(wires, author_of(2))
    for payload in (b"", b"\xff" * 100, bytes(1 << 20)):
        attacker.send_nowait(node.author, PUSH_PROTOCOL, payload)
    assert node.host.at_fault == [attacker.author] * 3
    for data in (b"\xff" * 50, encode_frame(SyncHello(1, b"o" * 32, 0, bytes(32)))):
        stream = await attacker.open_stream(node.author, SYNC_PROTOCOL)
        await stream.send_all(data)
        assert await stream.receive_some(1000) == b""
    assert node.host.at_fault == [attacker.author] * 5


async def test_sessions_that_peers_begin_are_bounded(wires: Wires, clock: MockClock) -> None:
    node, eager = await running(wires, 1), GossipHost(wires, author_of(2))
    first = await eager.open_stream(node.author, SYNC_PROTOCOL)
    await trio.sleep(0.1)
    second = await eager.open_stream(node.author, SYNC_PROTOCOL)
    assert await second.receive_some(1) == b"", "one at a time"
    await first.send_all(encode_frame(SyncHello(1, RUN_ID, 0, node.state.root)))
    assert await first.receive_some(1) != b""
    num_served = 0
    for _ in range(20):
        stream = await eager.open_stream(node.author, SYNC_PROTOCOL)
        try:
            await stream.send_all(encode_frame(SyncHello(1, RUN_ID, 0, node.state.root)))
            num_served += await stream.receive_some(1) != b""
        except trio.BrokenResourceError:
            continue
    assert num_served < 10


def clock_ahead_by(seconds: float) -> Callable[[], float]:
    return lambda: NOW + trio.current_time() + seconds


async def test_a_stranger_that_calls_has_no_vote(wires: Wires, clock: MockClock) -> None:
    node, stranger = await running(wires, 1), GossipHost(wires, author_of(2))
    node.host.connected = frozenset({stranger.author})
    stream = await stranger.open_stream(node.author, SYNC_PROTOCOL)
    await stream.send_all(encode_frame(SyncHello(1, RUN_ID, int(NOW + HOUR), node.state.root)))
    assert await stream.receive_some(1) != b"", "it is served"
    await trio.sleep(60.0)
    assert node.service.clock_skew is None


async def test_a_clock_that_is_set_right_is_fine_at_once(wires: Wires, clock: MockClock) -> None:
    nodes, late = [GossipNode(wires, number) for number in range(1, 5)], GossipNode(wires, 5)
    late.service.unix = clock_ahead_by(-HOUR)
    for node in nodes:
        await wires.nursery.start(node.service.run)
        late.host.networks[node.author] = "10.0.0.0/24"
    wires.nursery.start_soon(late.live, nodes)
    skew = None
    for _ in range(10):  # it asks members at random
        await trio.sleep(30.0)
        if (skew := late.service.clock_skew) is not None and skew.num_members == len(nodes):
            break
    assert skew is not None
    assert (skew.is_agreed, skew.is_harmful, skew.num_members) == (True, True, 4)
    assert skew.seconds == pytest.approx(-HOUR, abs=2.0)
    late.service.unix = clock_ahead_by(0.0)
    assert late.service.clock_skew is None
    await trio.sleep(60.0)
    assert late.service.clock_skew is None


async def test_silent_peers_do_not_keep_a_newcomer_from_the_others(wires: Wires, clock: MockClock) -> None:
    donor = GossipNode(wires, 2)
    donor.state.merge(Delta((member(20),)), NOW)
    await wires.nursery.start(donor.service.run)
    tarpits = [GossipHost(wires, author_of(number)) for number in (3, 4)]

    for tarpit in tarpits:
        tarpit.set_handler(SYNC_PROTOCOL, hang)
    node = await running(wires, 1)
    node.host.connected = frozenset({donor.author, *(tarpit.author for tarpit in tarpits)})
    wires.nursery.start_soon(node.service.join)
    await trio.sleep(2 * JOIN_LEAD_SECONDS + 1.0)
    assert author_of(20) in node.state.authors


@dataclass
class Victim:
    """A node that gossips, and a member that it knows."""

    host: Host
    gossip: GossipService
    friend: Host
    friends_messenger: Messenger
    friends_key: Ed25519PrivateKey

    async def hears_friend(self, tick_ahead: int) -> None:
        """Let the friend publish an entry, and wait until it arrives."""
        entry = signed(self.friends_key, Kind.MEMBER, Member(device="friend"), tick_ahead)
        self.friends_messenger.send_nowait(self.host.author, PUSH_PROTOCOL, push(entry))
        while entry not in {known.signed for known in self.gossip.state.entries_of(entry.author)}:
            await self.gossip.changed.park()


def signed(key: Ed25519PrivateKey, kind: Kind, payload: Payload, ahead: int = 0, run_id: bytes = RUN_ID) -> Signed:
    body = encode_body(kind, 0, int(time.time() // RULES[kind].quantum) + ahead, payload)
    return Signed(public_bytes(key), body, sign(key, DOMAIN, run_id, body))


def push(*entries: Signed, proofs: tuple[Proof, ...] = ()) -> bytes:
    return encode(Batch(False, Delta(entries, proofs)))


@asynccontextmanager
async def open_victim() -> AsyncIterator[Victim]:
    keys = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    with trio.fail_after(PATIENCE):
        async with (
            open_host(keys[0], LOOPBACK) as host,
            open_host(keys[1], LOOPBACK) as friend,
            open_messenger(host) as messenger,
            open_messenger(friend) as friends_messenger,
            trio.open_nursery() as nursery,
        ):
            writer = Writer(keys[0], RUN_ID)
            state, store = RunState(RUN_ID, CREATOR), MemoryStore()
            gossip = GossipService(state, writer, host, messenger, cast("Any", store), random.Random(1))
            await nursery.start(gossip.run)
            await friend.connect(host.author, host.addresses)
            victim = Victim(host, gossip, friend, friends_messenger, keys[1])
            await victim.hears_friend(0)
            yield victim
            nursery.cancel_scope.cancel()


def empty_batches() -> Iterable[bytes]:
    return [push()] * 20_000


def fresh_authors() -> Iterable[bytes]:
    keys = (Ed25519PrivateKey.generate() for _ in range(20_000))
    return (push(signed(key, Kind.MEMBER, Member(device="invented"))) for key in keys)


@pytest.mark.parametrize("make", [empty_batches, fresh_authors])
async def test_who_floods_with_valid_messages_is_kept_out_and_named(make: Callable[[], Iterable[bytes]]) -> None:
    async with open_victim() as victim, host_at_loopback() as attacker:
        deeds: list[tuple[bytes, str]] = []
        victim.gossip.on_deed = lambda peer, deed: deeds.append((peer, deed))
        await attacker.connect(victim.host.author, victim.host.addresses)
        stream = await attacker.open_stream(victim.host.author, PUSH_PROTOCOL)
        num_sent = 0
        with pytest.raises(trio.BrokenResourceError):
            for payload in make():
                await stream.send_all(frame(payload, MAX_PUSH_BYTES))
                num_sent += 1
        assert num_sent > INBOUND_LIMITS["messages"][0]
        while attacker.author in victim.host.connected:
            await victim.host.connections.changed.park()
        assert deeds == [(attacker.author, "flooded")]
        with pytest.raises((PeerUnreachableError, trio.BrokenResourceError)):
            again = await attacker.open_stream(victim.host.author, PUSH_PROTOCOL)
            while True:
                await again.send_all(frame(push(), MAX_PUSH_BYTES))
        with pytest.raises(PeerUnreachableError, match="kept out"):
            await victim.host.connect(attacker.author, attacker.addresses)
        assert len(victim.gossip.state.authors) < num_sent
        assert victim.friend.author in victim.host.connected
        await victim.hears_friend(1)


async def flood_from(attacker: Host, victim: Host) -> None:
    """Send until the attacker is disconnected, or not even admitted."""
    with pytest.raises((PeerUnreachableError, trio.BrokenResourceError)):
        await attacker.connect(victim.author, victim.addresses)
        stream = await attacker.open_stream(victim.author, PUSH_PROTOCOL)
        while True:
            await stream.send_all(frame(push(), MAX_PUSH_BYTES))


async def test_new_keys_do_not_let_a_flooder_in_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flooder has an address on the internet, which tests have to simulate."""
    monkeypatch.setattr(links, "site_of", lambda host: Site("1.1.1.0/24", "1.1.1.1/32"))
    async with open_victim() as victim:
        victim.host.connections.protect(lambda peer: peer == victim.friend.author)
        deeds: list[str] = []
        victim.gossip.on_deed = lambda peer, deed: deeds.append(deed)
        began_at = trio.current_time()
        for _ in range(8):
            async with host_at_loopback() as attacker:
                await flood_from(attacker, victim.host)
        most = 1 + (trio.current_time() - began_at) / STRANGER_SECONDS
        assert 1 <= len(deeds) <= most
        assert victim.friend.author in victim.host.connected
        await victim.hears_friend(1)
        await victim.friend.connections.disconnect(victim.host.author)
        while victim.friend.author in victim.host.connected:
            await victim.host.connections.changed.park()
        await victim.friend.connect(victim.host.author, victim.host.addresses)
        await victim.hears_friend(2)

"""Floods of valid gossip between real hosts: the sender is kept out, and others still get through."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.mesh import links
from farandole.node.mesh.connections import STRANGER_SECONDS
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.links import Site
from farandole.node.state.gossip import GossipService
from farandole.node.state.messenger import Messenger, open_messenger
from farandole.protocol.state.entries import DOMAIN, RULES, Delta, Kind, Member, Payload, Proof, Signed, encode_body
from farandole.protocol.state.gossip import INBOUND_LIMITS
from farandole.protocol.state.push import MAX_PUSH_BYTES, Batch
from farandole.protocol.state.push import PROTOCOL as PUSH_PROTOCOL
from farandole.protocol.state.state import RunState
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.identity import public_bytes, sign
from farandole.protocol.wire.messagepack import encode

from ...patience import PATIENCE
from ..hosts import LOOPBACK, host_at_loopback
from .test_gossip import MemoryStore

RUN_ID, CREATOR = b"r" * 32, bytes(32)


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
            await self.gossip.changed()


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
            await victim.host.connections.wait_for_change()
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
            await victim.host.connections.wait_for_change()
        await victim.friend.connect(victim.host.author, victim.host.addresses)
        await victim.hears_friend(2)

"""The DHT of eight hosts that know each other only through one bootstrap peer."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from farandole.node.p2p import dht as dht_module
from farandole.node.p2p.host import Host
from farandole.node.p2p.libp2p_names import id_of
from farandole.protocol.identity import public_bytes

from ..hosts import host_at_loopback


@asynccontextmanager
async def open_mesh(number: int) -> AsyncIterator[list[Host]]:
    """Hosts of which each but the first has connected to the first."""
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(host_at_loopback()) for _ in range(number)]
        for host in hosts[1:]:
            await host.connect(hosts[0].author, hosts[0].addresses)
        yield hosts


async def test_a_provider_is_found_through_one_bootstrap_peer_and_can_be_dialled() -> None:
    with trio.fail_after(30):
        async with open_mesh(8) as hosts:
            key, provider, seeker = os.urandom(32), hosts[3], hosts[6]
            await provider.provide(key)
            for host in hosts:
                found = await host.find_providers(key, timeout=5)
                assert [peer for peer, _ in found] == ([] if host is provider else [provider.author])
            await seeker.connect(provider.author)
            assert seeker.is_connected(provider.author)


async def test_every_provider_of_a_key_is_found_by_another_provider_too() -> None:
    with trio.fail_after(30):
        async with open_mesh(5) as hosts:
            key = os.urandom(32)
            for host in hosts[1:4]:
                await host.provide(key)
            for host in hosts[1:4]:
                found = {peer for peer, _ in await host.find_providers(key, timeout=5)}
                assert found == {other.author for other in hosts[1:4]} - {host.author}


async def test_a_key_that_nobody_provides_is_not_found_and_takes_no_longer_than_asked() -> None:
    with trio.fail_after(30):
        async with open_mesh(3) as hosts:
            assert await hosts[1].find_providers(os.urandom(32), timeout=5) == []
            assert await hosts[1].find_providers(os.urandom(32), timeout=0) == []


async def test_addresses_that_are_none_are_passed_over() -> None:
    with trio.fail_after(30):
        async with open_mesh(2) as (liar, seeker):
            key, provider = os.urandom(32), public_bytes(Ed25519PrivateKey.generate())
            addresses = [Multiaddr(b"\xff\xff\xff"), Multiaddr("/ip4/192.0.2.1/tcp/1"), Multiaddr(b"\x06")]
            liar._dht._dht.provider_store.add_provider(
                dht_module.multihash_of(key), PeerInfo(id_of(provider), addresses)
            )
            assert await seeker.find_providers(key, timeout=5) == [(provider, ["/ip4/192.0.2.1/tcp/1"])]


async def test_what_was_announced_to_nobody_is_announced_to_the_first_who_comes() -> None:
    with trio.fail_after(30):
        async with open_mesh(1) as (alone,), open_mesh(1) as (newcomer,):
            key = os.urandom(32)
            await alone.provide(key)
            await alone.connect(newcomer.author, newcomer.addresses)
            while await newcomer.find_providers(key, timeout=5) != [(alone.author, alone.addresses)]:
                pass


async def test_announcements_never_exceed_what_receivers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 10 * dht_module.ANNOUNCEMENT_INTERVAL > 10
    monkeypatch.setattr(dht_module, "ANNOUNCEMENT_INTERVAL", 0.05)
    async with open_mesh(2) as (first, second):
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(first.provide, bytes([number]) * 32)
        assert trio.current_time() - started >= 5 * 0.05
        for number in range(6):
            assert await second.find_providers(bytes([number]) * 32, timeout=5)


async def test_a_key_has_32_bytes() -> None:
    async with open_mesh(1) as (host,):
        with pytest.raises(ValueError, match="32"):
            await host.provide(b"short")
        with pytest.raises(ValueError, match="32"):
            await host.find_providers(b"short", timeout=1)


async def test_what_is_kept_for_others_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_module, "MAX_STORED_KEYS", 3)
    monkeypatch.setattr(dht_module, "ANNOUNCEMENT_INTERVAL", 0.0)
    async with open_mesh(2) as (first, second):
        for number in range(6):
            await first.provide(bytes([number]) * 32)
        with trio.fail_after(5):
            while not await second.find_providers(b"\5" * 32, timeout=5):
                pass
        assert len(second._dht._dht.provider_store.providers) <= 3 + 1


async def test_a_key_that_was_withdrawn_is_not_announced_again() -> None:
    with trio.fail_after(30):
        async with open_mesh(1) as (alone,), open_mesh(1) as (newcomer,):
            left, held = os.urandom(32), os.urandom(32)
            await alone.provide(left)
            alone.withdraw(left)
            alone.withdraw(os.urandom(32))  # was never provided
            await alone.provide(held)
            await alone.connect(newcomer.author, newcomer.addresses)
            while await newcomer.find_providers(held, timeout=5) != [(alone.author, alone.addresses)]:
                pass
            assert await newcomer.find_providers(left, timeout=5) == []

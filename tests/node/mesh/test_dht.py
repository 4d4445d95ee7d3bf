"""The DHT of eight hosts that know each other only through one bootstrap peer."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.common import BUCKET_SIZE, PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.envelope import Envelope, seal_record
from libp2p.peer.id import ID
from libp2p.peer.peer_record import PeerRecord
from libp2p.peer.peerinfo import PeerInfo
from libp2p.records.record import make_put_record
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr

from farandole.node.mesh import dht as dht_module
from farandole.node.mesh.host import Host
from farandole.node.mesh.libp2p_names import id_of
from farandole.node.mesh.workarounds import dht as mended
from farandole.node.mesh.workarounds.peers import MAX_ADDRESSES, MAX_STORED_PEERS, BoundedPeers
from farandole.protocol.identity import public_bytes

from ...patience import PATIENCE
from ..hosts import host_at_loopback


@asynccontextmanager
async def open_mesh(number: int) -> AsyncIterator[list[Host]]:
    """Hosts of which each but the first has connected to the first."""
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(host_at_loopback()) for _ in range(number)]
        for host in hosts[1:]:
            await host.connect(hosts[0].author, hosts[0].addresses)
        yield hosts


@pytest.fixture
def no_laggards(monkeypatch: pytest.MonkeyPatch) -> None:
    """All who are asked are waited for."""
    monkeypatch.setattr(dht_module, "LAGGARDS_TIMEOUT", PATIENCE)


@pytest.mark.usefixtures("no_laggards")
async def test_a_provider_is_found_through_one_bootstrap_peer_and_can_be_dialled() -> None:
    with trio.fail_after(PATIENCE):
        async with open_mesh(8) as hosts:
            key, provider, seeker = os.urandom(32), hosts[3], hosts[6]
            await provider.provide(key)
            for host in hosts:
                found = await host.find_providers(key, timeout=PATIENCE)
                assert [peer for peer, _ in found] == ([] if host is provider else [provider.author])
            await seeker.connect(provider.author)
            assert seeker.is_connected(provider.author)


@pytest.mark.usefixtures("no_laggards")
async def test_every_provider_of_a_key_is_found_by_another_provider_too() -> None:
    with trio.fail_after(PATIENCE):
        async with open_mesh(5) as hosts:
            key = os.urandom(32)
            for host in hosts[1:4]:
                await host.provide(key)
            for host in hosts[1:4]:
                found = {peer for peer, _ in await host.find_providers(key, timeout=PATIENCE)}
                assert found == {other.author for other in hosts[1:4]} - {host.author}


async def test_a_key_that_nobody_provides_is_not_found_and_takes_no_longer_than_asked() -> None:
    with trio.fail_after(PATIENCE):
        async with open_mesh(3) as hosts:
            assert await hosts[1].find_providers(os.urandom(32), timeout=PATIENCE) == []
            assert await hosts[1].find_providers(os.urandom(32), timeout=0) == []


async def test_addresses_that_are_none_are_passed_over() -> None:
    with trio.fail_after(PATIENCE):
        async with open_mesh(2) as (liar, seeker):
            key, provider = os.urandom(32), public_bytes(Ed25519PrivateKey.generate())
            addresses = [Multiaddr(b"\xff\xff\xff"), Multiaddr("/ip4/192.0.2.1/tcp/1"), Multiaddr(b"\x06")]
            liar._dht._dht.provider_store.add_provider(
                dht_module.multihash_of(key), PeerInfo(id_of(provider), addresses)
            )
            assert await seeker.find_providers(key, timeout=PATIENCE) == [(provider, ["/ip4/192.0.2.1/tcp/1"])]


async def test_what_was_announced_to_nobody_is_announced_to_the_first_who_comes() -> None:
    with trio.fail_after(PATIENCE):
        async with open_mesh(1) as (alone,), open_mesh(1) as (newcomer,):
            key = os.urandom(32)
            await alone.provide(key)
            await alone.connect(newcomer.author, newcomer.addresses)
            while await newcomer.find_providers(key, timeout=PATIENCE) != [(alone.author, alone.addresses)]:
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
            assert await second.find_providers(bytes([number]) * 32, timeout=PATIENCE)


async def test_a_key_has_32_bytes() -> None:
    async with open_mesh(1) as (host,):
        with pytest.raises(ValueError, match="32"):
            await host.provide(b"short")
        with pytest.raises(ValueError, match="32"):
            await host.find_providers(b"short", timeout=1)


async def test_what_is_kept_for_others_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mended, "MAX_RECORDS", 3)
    monkeypatch.setattr(dht_module, "ANNOUNCEMENT_INTERVAL", 0.0)
    async with open_mesh(2) as (first, second):
        for number in range(6):
            await first.provide(bytes([number]) * 32)
        with trio.fail_after(PATIENCE):
            while not await second.find_providers(b"\5" * 32, timeout=PATIENCE):
                pass
        assert len(second._dht._dht.provider_store.providers) <= 3


async def test_a_key_that_was_withdrawn_is_not_announced_again() -> None:
    with trio.fail_after(PATIENCE):
        async with open_mesh(1) as (alone,), open_mesh(1) as (newcomer,):
            left, held = os.urandom(32), os.urandom(32)
            await alone.provide(left)
            alone.withdraw(left)
            alone.withdraw(os.urandom(32))  # was never provided
            await alone.provide(held)
            await alone.connect(newcomer.author, newcomer.addresses)
            while await newcomer.find_providers(held, timeout=PATIENCE) != [(alone.author, alone.addresses)]:
                pass
            assert await newcomer.find_providers(left, timeout=PATIENCE) == []


async def has_answered(asker: Host, asked: Host, question: Message) -> bool:
    """Whether it does, before it ends the stream."""
    data = question.SerializeToString()
    with trio.fail_after(PATIENCE):
        stream = await asker.open_stream(asked.author, PROTOCOL_ID)
        try:
            await stream.send_all(encode_varint_prefixed(data))
            return bool(await stream.receive_some())
        except trio.BrokenResourceError:
            return False
        finally:
            await stream.aclose()


def announcement(provider: Host, key: bytes, addresses: Sequence[bytes]) -> Message:
    peer = Message.Peer(id=id_of(provider.author).to_bytes(), addrs=addresses)
    return Message(type=Message.MessageType.ADD_PROVIDER, key=dht_module.multihash_of(key), providerPeers=[peer])


async def test_a_provider_has_as_many_addresses_kept_as_anybody_dials_and_none_too_long() -> None:
    async with open_mesh(2) as (kept, provider):
        key, good = os.urandom(32), [Multiaddr(f"/ip4/192.0.2.1/tcp/{port}") for port in range(1, 101)]
        addresses = [bytes(1_000), *(address.to_bytes() for address in good)]
        assert await has_answered(provider, kept, announcement(provider, key, addresses))
        (found,) = kept._dht._dht.provider_store.get_providers(dht_module.multihash_of(key))
        assert found.addrs == good[:MAX_ADDRESSES]


async def test_a_question_longer_than_any_is_not_even_read() -> None:
    async with open_mesh(2) as (kept, provider):
        key, address = os.urandom(32), Multiaddr("/ip4/192.0.2.1/tcp/1").to_bytes()
        too_many = [address] * mended.MAX_QUESTION_BYTES
        assert not await has_answered(provider, kept, announcement(provider, key, too_many))
        assert kept._dht._dht.provider_store.get_providers(dht_module.multihash_of(key)) == []


async def test_a_provider_that_announces_again_is_kept_before_older_ones_and_else_no_longer_than_three_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mended, "MAX_RECORDS", 2)
    async with open_mesh(2) as (kept, provider):
        store = kept._dht._dht.provider_store
        info = PeerInfo(id_of(provider.author), [Multiaddr("/ip4/192.0.2.1/tcp/1")])
        for key in (b"old", b"faithful", b"old", b"faithful", b"new"):
            store.add_provider(key, info)
        assert [*store.providers] == [b"faithful", b"new"]

        store.providers[b"faithful"][str(info.peer_id)].timestamp -= mended.RECORD_SECONDS + 1
        store.providers[b"new"][str(info.peer_id)].timestamp -= mended.RECORD_SECONDS - 60
        kept._dht._dht.forget()
        assert [*store.providers] == [b"new"]


async def test_values_are_not_kept_for_anybody() -> None:
    async with open_mesh(1) as (kept,):
        store = kept._dht._dht.value_store
        store.put_record(b"key", make_put_record(b"key", b"value"))
        assert store.size() == 0


def record_of(peer: Host, addresses: Sequence[Multiaddr]) -> Envelope:
    libp2p = peer._libp2p
    return seal_record(PeerRecord(libp2p.get_id(), list(addresses)), libp2p.get_private_key())


async def test_of_a_flood_of_addresses_no_more_is_kept_than_anybody_dials() -> None:
    async with open_mesh(3) as (kept, stranger, other):
        flood = [Multiaddr(f"/tcp/{port}") for port in range(1, 4_001)]
        store, peer_id = kept._libp2p.get_peerstore(), id_of(stranger.author)
        for message in (
            Message(
                type=Message.MessageType.FIND_NODE,
                key=id_of(other.author).to_bytes(),
                senderRecord=record_of(stranger, flood).marshal_envelope(),
            ),
            announcement(stranger, os.urandom(32), [address.to_bytes() for address in flood]),
        ):
            assert await has_answered(stranger, kept, message)
            assert len(store.peer_info(peer_id).addrs) <= MAX_ADDRESSES
        store.add_addrs(peer_id, flood, 60)
        assert not store.consume_peer_record(record_of(stranger, flood), 60)
        assert len(store.peer_info(peer_id).addrs) == MAX_ADDRESSES
        newest = Multiaddr("/ip4/192.0.2.1/tcp/1")
        store.add_addr(peer_id, newest, 60)
        assert store.peer_info(peer_id).addrs == [*flood[1:MAX_ADDRESSES], newest]
        assert store.consume_peer_record(record_of(stranger, [newest]), 60)


async def test_strangers_with_long_records_do_not_make_answers_too_long() -> None:
    with trio.fail_after(PATIENCE):
        async with open_mesh(6) as (kept, provider, seeker, *strangers):
            key, name = os.urandom(32), ".".join(["x" * 60] * 4)
            long = [Multiaddr(f"/dns4/{number:03}.{name}/tcp/1") for number in range(110)]
            for stranger in strangers:
                question = Message(
                    type=Message.MessageType.FIND_NODE,
                    key=id_of(stranger.author).to_bytes(),
                    senderRecord=record_of(stranger, long).marshal_envelope(),
                )
                assert await has_answered(stranger, kept, question)
            await provider.provide(key)
            found, _ = await seeker._dht._dht.provider_store._get_providers_from_peer_with_closers(
                id_of(kept.author), dht_module.multihash_of(key)
            )
            assert [each.peer_id for each in found] == [id_of(provider.author)]


def test_a_host_never_forgets_its_own_keys() -> None:
    own = create_new_key_pair()
    peers = BoundedPeers(own_id := ID.from_pubkey(own.public_key))
    peers.add_key_pair(own_id, own)
    for number in range(2 * MAX_STORED_PEERS):
        peers.add_addrs(ID(number.to_bytes(32, "big")), [Multiaddr("/ip4/192.0.2.1/tcp/1")], 60)
    assert len(peers.peer_ids()) <= MAX_STORED_PEERS
    assert peers.privkey(own_id) == own.private_key


async def test_the_newest_provider_of_a_key_takes_the_place_of_the_oldest() -> None:
    async with open_mesh(1) as (kept,):
        store = kept._dht._dht.provider_store
        providers = [PeerInfo(ID(bytes([number]) * 32), [Multiaddr("/ip4/192.0.2.1/tcp/1")]) for number in range(30)]
        for provider in (*providers, providers[-BUCKET_SIZE], *providers[:3]):  # one of them announces again
            store.add_provider(b"key", provider)
        newest = {each.peer_id for each in (*providers[-BUCKET_SIZE + 4 :], providers[-BUCKET_SIZE], *providers[:3])}
        assert {each.peer_id for each in store.get_providers(b"key")} == newest


def test_no_answer_keeps_the_others_providers_out() -> None:
    def providers(letter: str, number: int) -> list[PeerInfo]:
        keys = [Ed25519PrivateKey.from_private_bytes(f"{letter}{index:031}".encode()) for index in range(number)]
        return [PeerInfo(id_of(public_bytes(key)), [Multiaddr(f"/dns4/{letter}/tcp/1")]) for key in keys]

    liars, honest = providers("l", 20), providers("h", 3)
    found = dht_module._by_turns([liars, honest, honest])
    assert len(found) == dht_module.MAX_PROVIDERS
    assert sum(addresses == ["/dns4/h/tcp/1"] for _, addresses in found) == 3

"""The DHT of eight hosts that know each other only through one bootstrap peer."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record
from multiaddr import Multiaddr

from farandole.node.mesh import dht as dht_module
from farandole.node.mesh.addresses import MAX_ADDRESSES
from farandole.node.mesh.dht import MAX_ANSWER_BYTES, MAX_QUESTION_BYTES
from farandole.node.mesh.host import Host
from farandole.node.mesh.libp2p_parts import encode_delimited, next_message
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.mesh.kademlia import KAD_PROTOCOL, PeerAddresses
from farandole.protocol.wire.identity import peer_id_bytes, public_bytes

from ...patience import PATIENCE
from ..hosts import host_at_loopback


@asynccontextmanager
async def open_mesh(number: int) -> AsyncIterator[list[Host]]:
    """Open hosts of which all but the first have connected to the first."""
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(host_at_loopback()) for _ in range(number)]
        for host in hosts[1:]:
            await host.connect(hosts[0].author, hosts[0].addresses)
        yield hosts


async def test_a_provider_is_found_through_one_bootstrap_peer_and_can_be_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dht_module, "LAGGARDS_TIMEOUT", PATIENCE)  # it waits for all asked peers
    async with open_mesh(8) as hosts:
        key, provider, seeker = os.urandom(32), hosts[3], hosts[6]
        await provider.dht.provide(key)
        for host in hosts:
            found = await host.dht.find_providers(key, timeout=PATIENCE)
            assert [peer for peer, _ in found] == ([] if host is provider else [provider.author])
        await seeker.connect(provider.author)
        assert provider.author in seeker.connected
        await seeker.dht.provide(key)
        for one, other in ((provider, seeker), (seeker, provider)):  # every node of a run provides its key
            assert [peer for peer, _ in await one.dht.find_providers(key, timeout=PATIENCE)] == [other.author]


async def test_announcements_never_exceed_what_receivers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_module, "ANNOUNCEMENT_INTERVAL", 0.05)
    async with open_mesh(2) as (first, second):
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(first.dht.provide, bytes([number]) * 32)
        assert trio.current_time() - started >= 5 * 0.05
        for number in range(6):
            assert await second.dht.find_providers(bytes([number]) * 32, timeout=PATIENCE)


async def test_a_key_that_nobody_provides_is_not_found_and_takes_no_longer_than_asked() -> None:
    async with open_mesh(3) as hosts:
        assert await hosts[1].dht.find_providers(os.urandom(32), timeout=PATIENCE) == []
        assert await hosts[1].dht.find_providers(os.urandom(32), timeout=0) == []


async def test_addresses_that_are_none_are_passed_over() -> None:
    async with open_mesh(2) as (liar, seeker):
        provider = public_bytes(Ed25519PrivateKey.generate())
        addresses = [b"\xff\xff\xff", Multiaddr("/ip4/192.0.2.1/tcp/1").to_bytes(), b"\x06"]
        named = Message.Peer(id=peer_id_bytes(provider), addrs=addresses)

        async def lie(stream: Libp2pStream) -> None:
            await stream.receive_some()
            await stream.send_all(
                encode_delimited(Message(type=Message.MessageType.GET_PROVIDERS, providerPeers=[named]))
            )

        liar.set_handler(KAD_PROTOCOL, lie)
        found = await seeker.dht.find_providers(os.urandom(32), timeout=PATIENCE)
        assert found == [(provider, ["/ip4/192.0.2.1/tcp/1"])]


async def test_what_reached_nobody_is_announced_to_the_first_who_comes_unless_it_was_withdrawn() -> None:
    async with open_mesh(1) as (alone,), open_mesh(1) as (newcomer,):
        left, held = os.urandom(32), os.urandom(32)
        await alone.dht.provide(left)
        alone.dht.withdraw(left)
        alone.dht.withdraw(os.urandom(32))  # it was never provided
        await alone.dht.provide(held)
        await alone.connect(newcomer.author, newcomer.addresses)
        while await newcomer.dht.find_providers(held, timeout=PATIENCE) != [(alone.author, alone.addresses)]:
            pass
        assert await newcomer.dht.find_providers(left, timeout=PATIENCE) == []


async def answer_to(asker: Host, asked: Host, question: Message, protocol: str = KAD_PROTOCOL) -> Message | None:
    """Return the host's answer, if it gives one before it ends the stream."""
    with trio.fail_after(PATIENCE):
        stream = await asker.open_stream(asked.author, protocol)
        try:
            await stream.send_all(encode_delimited(question))
            await stream.send_eof()
            return await next_message(stream, Message, MAX_ANSWER_BYTES)
        except trio.BrokenResourceError:
            return None
        finally:
            await stream.aclose()


def announcement(provider: Host, key: bytes, addresses: Sequence[bytes]) -> Message:
    peer = Message.Peer(id=peer_id_bytes(provider.author), addrs=addresses)
    return Message(type=Message.MessageType.ADD_PROVIDER, key=dht_module.multihash_of(key), providerPeers=[peer])


async def addresses_found(seeker: Host, asked: Host, key: bytes) -> list[Multiaddr]:
    question = Message(type=Message.MessageType.GET_PROVIDERS, key=dht_module.multihash_of(key))
    answer = await answer_to(seeker, asked, question)
    assert answer is not None
    return [Multiaddr(address) for peer in answer.providerPeers for address in peer.addrs]


async def test_a_provider_has_as_many_addresses_kept_as_anybody_dials_and_none_too_long() -> None:
    async with open_mesh(3) as (kept, provider, seeker):
        key, good = os.urandom(32), [Multiaddr(f"/ip4/192.0.2.1/tcp/{port}") for port in range(1, 101)]
        addresses = [bytes(1_000), *(address.to_bytes() for address in good)]
        assert await answer_to(provider, kept, announcement(provider, key, addresses))
        assert await addresses_found(seeker, kept, key) == good[:MAX_ADDRESSES]
        key, too_many = os.urandom(32), [good[0].to_bytes()] * MAX_QUESTION_BYTES
        assert not await answer_to(provider, kept, announcement(provider, key, too_many)), "it is not even read"
        assert await addresses_found(seeker, kept, key) == []


async def test_nobody_announces_for_another() -> None:
    async with open_mesh(3) as (kept, provider, liar):
        key = os.urandom(32)
        lie = announcement(provider, key, [Multiaddr("/ip4/192.0.2.1/tcp/1").to_bytes()])
        assert await answer_to(liar, kept, lie)
        assert await addresses_found(provider, kept, key) == []


async def test_values_are_not_kept_for_anybody() -> None:
    async with open_mesh(2) as (kept, stranger):
        record = Record(key=b"key", value=b"value")
        for question in (
            Message(type=Message.MessageType.PUT_VALUE, key=b"key", record=record),
            Message(type=Message.MessageType.GET_VALUE, key=b"key"),
        ):
            assert await answer_to(stranger, kept, question) is None


async def test_of_a_flood_of_addresses_no_more_is_kept_than_anybody_dials() -> None:
    async with open_mesh(3) as (kept, stranger, other):
        flood = [Multiaddr(f"/tcp/{port}") for port in range(1, 4_001)]
        question = Message(
            type=Message.MessageType.FIND_NODE, key=peer_id_bytes(other.author), senderRecord=bytes(9_000)
        )
        for message in (question, announcement(stranger, os.urandom(32), [address.to_bytes() for address in flood])):
            assert await answer_to(stranger, kept, message)
            assert len(kept.dialler.known.of(stranger.author)) <= 2 * MAX_ADDRESSES
        kept.dialler.add_addresses(stranger.author, map(str, flood), is_hearsay=True)
        assert len(kept.dialler.known.of(stranger.author)) <= 2 * MAX_ADDRESSES
        newest = "/ip4/192.0.2.1/tcp/1"
        kept.dialler.add_addresses(stranger.author, [newest], is_hearsay=True)
        assert newest in kept.dialler.known.of(stranger.author)


async def test_strangers_with_long_addresses_do_not_make_answers_too_long() -> None:
    async with open_mesh(6) as (kept, provider, seeker, *strangers):
        key, name = os.urandom(32), ".".join(["x" * 60] * 4)
        long = [f"/dns4/{number:03}.{name}/tcp/1" for number in range(110)]
        for stranger in strangers:
            kept.dialler.add_addresses(stranger.author, long, is_hearsay=True)
            question = Message(type=Message.MessageType.FIND_NODE, key=peer_id_bytes(stranger.author))
            assert await answer_to(stranger, kept, question)
        await provider.dht.provide(key)
        found = await seeker.dht.find_providers(key, timeout=PATIENCE)
        assert [peer for peer, _ in found] == [provider.author]


def test_no_answer_keeps_the_others_providers_out() -> None:
    def providers(letter: str, number: int) -> list[PeerAddresses]:
        return [(f"{letter}{index:031}".encode(), [f"/dns4/{letter}/tcp/1"]) for index in range(number)]

    liars, honest = providers("l", 20), providers("h", 3)
    found = dht_module.by_turns([liars, honest, honest])
    assert len(found) == dht_module.MAX_PROVIDERS
    assert sum(addresses == ["/dns4/h/tcp/1"] for _, addresses in found) == 3

"""Frames between peers over loopback TCP: order, bounds, failures, and senders that break the rules."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from trio.testing import wait_all_tasks_blocked

from farandole.node.mesh.host import Host
from farandole.node.state import messenger as messenger_module
from farandole.node.state.messenger import MAX_QUEUED_BYTES, MAX_QUEUED_FRAMES, Messenger, open_messenger
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.identity import public_bytes

from ...patience import PATIENCE
from ..hosts import hang, host_at_loopback

TALK = "/talk/1"
MAX_BYTES = 1000


class Inbox:
    """Received frames, and a way to wait for a number of them."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self._came = trio.Event()

    def receive(self, peer: bytes, payload: bytes) -> None:
        if payload == b"bad":
            raise RemoteProtocolError("bad")
        self.frames.append((peer, payload))
        self._came.set()

    async def wait_for(self, number: int) -> list[bytes]:
        while len(self.frames) < number:
            self._came = trio.Event()
            await self._came.wait()
        return [payload for _, payload in self.frames]


@dataclass
class Talk:
    """A connection from Alice to Bob, who keeps the frames that he receives."""

    alice: Host
    bob: Host
    from_alice: Messenger
    inbox: Inbox

    def say(self, payload: bytes) -> None:
        self.from_alice.send_nowait(self.bob.author, TALK, payload)


@asynccontextmanager
async def open_talk() -> AsyncIterator[Talk]:
    with trio.fail_after(PATIENCE):
        async with (
            host_at_loopback() as alice,
            host_at_loopback() as bob,
            open_messenger(alice) as from_alice,
            open_messenger(bob) as at_bob,
        ):
            inbox = Inbox()
            at_bob.set_receiver(TALK, MAX_BYTES, inbox.receive)
            alice.dialler.add_addresses(bob.author, bob.addresses)
            yield Talk(alice, bob, from_alice, inbox)


async def test_frames_arrive_in_order_on_one_stream_and_say_from_whom() -> None:
    async with open_talk() as talk:
        sent = [str(number).encode() for number in range(200)]
        for payload in sent:
            talk.say(payload)
        assert await talk.inbox.wait_for(200) == sent
        talk.say(b"")
        assert (await talk.inbox.wait_for(201))[-1] == b""
        assert {peer for peer, _ in talk.inbox.frames} == {talk.alice.author}
        assert len(_streams(talk.alice, talk.bob)) == 1


async def test_an_unreachable_peer_is_reported() -> None:
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as alice, open_messenger(alice) as messenger:
            nobody = public_bytes(Ed25519PrivateKey.generate())
            failed: list[bytes] = []
            is_reported = trio.Event()

            def on_failed(peer: bytes) -> None:
                failed.append(peer)
                is_reported.set()

            messenger.set_receiver(TALK, MAX_BYTES, Inbox().receive, on_failed)
            messenger.send_nowait(nobody, TALK, b"one")
            messenger.send_nowait(nobody, TALK, b"two")
            await is_reported.wait()
            assert failed == [nobody]


async def test_a_full_queue_loses_its_oldest_frames() -> None:
    async with open_talk() as talk:
        for number in range(MAX_QUEUED_FRAMES + 10):
            talk.say(str(number).encode())
        received = await talk.inbox.wait_for(MAX_QUEUED_FRAMES)
        assert received == [str(number).encode() for number in range(10, MAX_QUEUED_FRAMES + 10)]
        large = bytes(messenger_module.DEFAULT_MAX_BYTES)
        for _ in range(2 * MAX_QUEUED_BYTES // len(large)):
            talk.from_alice.send_nowait(talk.bob.author, "/large/1", large)
        assert talk.from_alice.outgoing[talk.bob.author, "/large/1"].num_bytes <= MAX_QUEUED_BYTES


async def test_a_receiver_that_objects_costs_that_stream_and_the_next_message_opens_another() -> None:
    async with open_talk() as talk:
        talk.say(b"good")
        await talk.inbox.wait_for(1)
        talk.say(b"bad")
        while (talk.bob.author, TALK) in talk.from_alice.outgoing:
            await wait_all_tasks_blocked(0.01)
        talk.say(b"again")
        assert await talk.inbox.wait_for(2) == [b"good", b"again"]
        assert talk.alice.author in talk.bob.connected


async def test_a_frame_too_large_for_the_protocol_is_the_senders_fault() -> None:
    async with open_talk() as talk:
        talk.from_alice.set_receiver(TALK, MAX_BYTES, Inbox().receive)
        with pytest.raises(LocalProtocolError):
            talk.say(bytes(MAX_BYTES + 1))


async def test_an_idle_stream_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messenger_module, "IDLE_TIMEOUT", 0.5)
    async with open_talk() as talk:
        talk.say(b"one")
        await talk.inbox.wait_for(1)
        while talk.from_alice.outgoing or _streams(talk.alice, talk.bob):
            await wait_all_tasks_blocked(0.01)
        talk.say(b"two")
        assert await talk.inbox.wait_for(2) == [b"one", b"two"]


async def test_a_peer_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messenger_module, "SEND_TIMEOUT", 0.2)
    async with open_talk() as talk:
        is_reported = trio.Event()
        talk.bob.set_handler(TALK, hang)
        talk.from_alice.set_receiver(TALK, 1024 * 1024, Inbox().receive, lambda *_: is_reported.set())
        for _ in range(4):
            talk.say(bytes(1024 * 1024))
        await is_reported.wait()


@pytest.mark.parametrize("seed", range(5))
async def test_garbage_costs_the_stream_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    async with open_talk() as talk:
        alice, bob, inbox = talk.alice, talk.bob, talk.inbox
        await alice.connect(bob.author, bob.addresses)
        for _ in range(40):
            good = b"".join(frame(rng.randbytes(rng.randrange(20)), MAX_BYTES) for _ in range(rng.randrange(3)))
            lie = rng.choice([2**31, 2**32 - 1, MAX_BYTES + 1, 5]).to_bytes(4, "big") + rng.randbytes(3)
            stream = await alice.open_stream(bob.author, TALK)
            try:
                for piece in (good, lie):
                    cut = rng.randrange(len(piece) + 1)
                    await stream.send_all(piece[:cut])
                    await stream.send_all(piece[cut:])
                await stream.send_eof()
                assert await stream.receive_some() == b""
            except trio.BrokenResourceError:
                pass
            finally:
                stream.reset()
        async with await alice.open_stream(bob.author, TALK) as stream:
            await stream.send_all(frame(b"still here", MAX_BYTES))
            await inbox.wait_for(len(inbox.frames) + 1)
        assert inbox.frames[-1] == (alice.author, b"still here")


def _streams(host: Host, peer: Host) -> list[object]:
    live = host.connections.of(peer.author)
    return [stream for conn in live for stream in conn.muxed.streams if stream.protocol == TALK]

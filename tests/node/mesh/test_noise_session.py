"""Encrypted messages: their order after the handshake, their framing, and false seals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from noise.connection import NoiseConnection
from noise.exceptions import NoiseInvalidMessage

from farandole.node.mesh.links import NoiseSession
from farandole.protocol.mesh.yamux import MAX_MESSAGE_BYTES


class Wire:
    """One direction of a link: what one end writes, the other reads."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write_now(self, data: bytes) -> None:
        self.data += data

    async def read(self, size: int) -> bytes:
        await trio.lowlevel.checkpoint()
        piece = bytes(self.data[:size])
        del self.data[:size]
        return piece


def session_of(state: NoiseConnection, wire: Wire, left: bytes = b"") -> NoiseSession:
    """Return a session; ``left``: what libp2p has decrypted during the negotiation, and not handed over."""

    async def read() -> bytes:
        await trio.lowlevel.checkpoint()
        return left

    handshake = SimpleNamespace(
        conn=SimpleNamespace(noise_state=state), read=read, low_watermark=0, high_watermark=len(left)
    )
    return NoiseSession(cast("Any", handshake), cast("Any", wire))


def both_ends() -> tuple[NoiseConnection, NoiseConnection]:
    alice, bob = (NoiseConnection.from_name(b"Noise_NN_25519_ChaChaPoly_SHA256") for _ in range(2))
    alice.set_as_initiator()
    bob.set_as_responder()
    for end in (alice, bob):
        end.start_handshake()
    bob.read_message(alice.write_message())
    alice.read_message(bob.write_message())
    return alice, bob


async def test_messages_arrive_whole_and_in_order_after_what_is_left_of_the_negotiation() -> None:
    alice, bob = both_ends()
    wire = Wire()
    sender, receiver = session_of(alice, wire), session_of(bob, wire, left=b"came with the negotiation")
    messages = [b"one", bytes(MAX_MESSAGE_BYTES), b"3"]
    for message in messages:
        sender.write_now(message)
    assert len(wire.data) == sum(2 + len(message) + 16 for message in messages)
    assert await receiver.read() == b"came with the negotiation"
    assert [await receiver.read() for _ in messages] == messages
    assert sender.handshake_hash == receiver.handshake_hash
    assert len(sender.handshake_hash) == 32


async def test_a_changed_byte_is_no_message() -> None:
    alice, bob = both_ends()
    wire = Wire()
    session_of(alice, wire).write_now(b"a message")
    wire.data[5] ^= 1
    with pytest.raises(NoiseInvalidMessage):
        await session_of(bob, wire).read()

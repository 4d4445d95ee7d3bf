"""Hosts of a private run: with each other, with hosts that have another key, and with hosts without one."""

from __future__ import annotations

import pytest
import trio

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.mesh import dialler as dialler_module
from farandole.node.mesh import yamux
from farandole.protocol.run.invite import NETWORK_KEY_BYTES, NONCE_BYTES

from ..hosts import host_at_loopback

KEY, OTHER_KEY = b"k" * NETWORK_KEY_BYTES, b"o" * NETWORK_KEY_BYTES


@pytest.mark.parametrize("key", [b"", OTHER_KEY])
async def test_without_the_key_nobody_connects_in_either_direction(key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "HANDSHAKE_TIMEOUT", 0.5)
    monkeypatch.setattr(dialler_module, "REDIAL_PAUSES", (0.1,))
    async with host_at_loopback(network_key=KEY) as alice, host_at_loopback(network_key=key) as mallory:
        for dialler, dialled in ((mallory, alice), (alice, mallory)):
            with pytest.raises(PeerUnreachableError):
                await dialler.connect(dialled.author, dialled.addresses)
        assert alice.connected == mallory.connected == frozenset()


async def test_a_stranger_that_reflects_what_it_gets_is_cut_off_after_the_nonce() -> None:
    async with host_at_loopback(network_key=KEY) as alice:
        async with await trio.open_tcp_stream("127.0.0.1", alice.own.listening[0][1]) as stream:
            num_received = 0
            try:
                while data := await stream.receive_some():
                    num_received += len(data)
                    await stream.send_all(data)
            except trio.BrokenResourceError:
                pass
        assert num_received == NONCE_BYTES


async def test_a_stranger_gets_random_bytes_and_no_word_of_a_protocol() -> None:
    async def answer_to(port: int) -> bytes:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            await stream.send_all(b"\x13/multistream/1.0.0\n\x07/noise\n".ljust(NONCE_BYTES + 100, b"x"))
            answer = b""
            while data := await stream.receive_some():
                answer += data
            return answer

    async with host_at_loopback(network_key=KEY) as alice:
        answers = {await answer_to(alice.own.listening[0][1]) for _ in range(3)}
        assert len(answers) == 3
        assert all(b"multistream" not in answer and len(answer) >= NONCE_BYTES for answer in answers)

"""A router's datagrams come from a stranger: a socket on loopback plays it. tests/testnet/natlab has a real one."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import trio

from farandole.node.base.nurseries import open_service_nursery
from farandole.node.mesh.reach.gateway import Gateway, MappingError, NatPmpRouter, Opened

from ....patience import PATIENCE

HOME = Gateway("127.0.0.1", "127.0.0.1")
T = TypeVar("T")


def address(epoch: int = 1_000, ip: bytes = bytes([5, 1, 1, 1])) -> bytes:
    return struct.pack(">BBHI", 0, 128, 0, epoch) + ip


def mapping(inner: int, outer: int, seconds: int, result: int = 0) -> bytes:
    return struct.pack(">BBHIHHI", 0, 130, result, 1_000, inner, outer, seconds)


async def play(answer: Callable[[bytes], list[bytes]], ask: Callable[[NatPmpRouter], Awaitable[T]]) -> T:
    """Return the result of asking a router that answers questions this way."""
    with trio.socket.socket(type=trio.socket.SOCK_DGRAM) as sock, trio.fail_after(PATIENCE):
        await sock.bind(("127.0.0.1", 0))

        async def serve() -> None:
            while True:
                question, asker = await sock.recvfrom(64)
                for datagram in answer(question):
                    await sock.sendto(datagram, asker)

        async with open_service_nursery() as nursery:
            nursery.start_soon(serve)
            return await ask(NatPmpRouter(HOME, sock.getsockname()[1]))


async def open_port(router: NatPmpRouter) -> Opened:
    return await router.open_port(4_001, 600)


async def test_a_port_is_opened_where_the_router_has_room() -> None:
    def answer(question: bytes) -> list[bytes]:
        return [address()] if len(question) == 2 else [mapping(4_001, 5_002, 300)]

    assert await play(answer, open_port) == Opened(4_001, ("5.1.1.1", 5_002), 300)


async def test_late_answers_and_nonsense_are_passed_over() -> None:
    def answer(question: bytes) -> list[bytes]:
        late = [b"", b"\0", address(), address() + b"x", mapping(1, 2, 3) + b"x"]
        return [*late[:2], address()] if len(question) == 2 else [*late, mapping(4_001, 4_001, 999)]

    assert await play(answer, open_port) == Opened(4_001, ("5.1.1.1", 4_001), 600)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (mapping(4_001, 4_001, 600, result=2), "its owner does not want that"),
        (mapping(4_001, 4_001, 600, result=99), "result 99"),
        (b"\2\x82\0\0" + bytes(12), "refuses"),
        (mapping(4_002, 4_001, 600), "another port"),
        (mapping(4_001, 0, 600), "another port"),
        (mapping(4_001, 4_001, 0), "another port"),
        (b"", "does not answer"),
    ],
)
async def test_whatever_a_router_says_is_an_answer_or_an_error(reply: bytes, why: str) -> None:
    def answer(question: bytes) -> list[bytes]:
        return [address()] if len(question) == 2 else [reply]

    with pytest.raises(MappingError, match=why):
        await play(answer, open_port)


async def test_who_has_begun_anew_or_has_moved_has_forgotten() -> None:
    replies = [address(1_000), address(1_001), address(2), address(3), address(4, bytes([5, 1, 2, 1]))]

    def answer(question: bytes) -> list[bytes]:
        return [replies.pop(0)]

    async def ask(router: NatPmpRouter) -> list[bool]:
        opened = Opened(4_001, (await router.external_ip(), 4_001), 600)
        return [await router.has_forgotten(opened) for _ in range(4)]

    assert await play(answer, ask) == [False, True, False, True]


async def test_where_nobody_listens_is_told_at_once() -> None:
    with trio.socket.socket(type=trio.socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with pytest.raises(MappingError, match="speaks no NAT-PMP"):
        await NatPmpRouter(HOME, port).external_ip()

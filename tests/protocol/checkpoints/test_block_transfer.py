"""Allowed messages about blocks, and messages of an attacker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from farandole.protocol.checkpoints import block_transfer as transfer
from farandole.protocol.checkpoints.blocks import MAX_BLOCKS, max_index_bytes
from farandole.protocol.wire.errors import RemoteProtocolError

Decode = Callable[[bytes], Any]
DECODERS: list[Decode] = [
    transfer.decode_question,
    transfer.decode_answered,
    transfer.decode_asked,
    transfer.decode_given,
]
LAST = MAX_BLOCKS - 1


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (transfer.decode_question, transfer.BlockQuestion(b"r" * 32, 511, b"i" * 32, True)),
        (transfer.decode_question, transfer.BlockQuestion(b"r" * 32, 0)),
        (transfer.decode_answered, transfer.Here(MAX_BLOCKS, b"index")),
        (transfer.decode_answered, transfer.Busy(1.5)),
        (transfer.decode_answered, transfer.Absent()),
        (transfer.decode_asked, transfer.Want(LAST, transfer.MAX_WANTED)),
        (transfer.decode_asked, transfer.Forget(LAST)),
        (transfer.decode_given, transfer.Give(LAST)),
        (transfer.decode_given, transfer.Busy(60.0)),
    ],
)
def test_what_is_said_is_heard(decode: Decode, message: Any) -> None:
    raw = transfer.encode(message)
    assert decode(raw) == message
    assert len(raw) <= transfer.MAX_MESSAGE_BYTES
    for other in DECODERS:
        if other is not decode and type(message) is not transfer.Busy:
            with pytest.raises(RemoteProtocolError):
                other(raw)


def test_an_answer_with_the_largest_index_fits() -> None:
    size = 1 << 30
    assert len(transfer.encode(transfer.Here(MAX_BLOCKS, bytes(max_index_bytes(size))))) <= transfer.max_answer_bytes(
        size
    )


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "message",
    [
        ["Want", 0, 0],
        ["Want", 0, transfer.MAX_WANTED + 1],
        ["Want", MAX_BLOCKS, 1],
        ["Want", 2**63, 1],
        ["Want", -1, 1],
        ["Want", 0, 1, 2],
        ["Give", 2**63],
        ["Give", "0"],
        ["Forget", MAX_BLOCKS],
        ["Here", 0, b""],
        ["Here", MAX_BLOCKS + 1, b""],
        ["Busy", -1.0],
        ["Busy", float("nan")],
        ["Busy", 61.0],
        ["Question", b"r" * 31, 0],
        ["Question", b"r" * 32, 512],
        ["Question", b"r" * 32, 0, b"i"],
        ["Other"],
        [],
        {},
        None,
    ],
)
def test_what_no_honest_peer_says_is_refused(decode: Decode, message: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(msgspec.msgpack.encode(message))


def test_blocks_are_given_in_the_order_in_which_they_are_wanted() -> None:
    wanted = transfer.Wanted(100)
    wanted.add(transfer.Want(50, 3))
    wanted.add(transfer.Want(7, 1))
    wanted.add(transfer.Want(51, 1))
    wanted.forget(50)
    wanted.forget(99)
    given = []
    while wanted:
        given.append(wanted.pop())
    assert given == [51, 52, 7]


def test_nobody_wants_more_than_there_is_nor_very_much_at_once() -> None:
    wanted = transfer.Wanted(2 * transfer.MAX_WANTED)
    with pytest.raises(RemoteProtocolError, match="up to"):
        wanted.add(transfer.Want(2 * transfer.MAX_WANTED, 1))
    with pytest.raises(RemoteProtocolError, match="up to"):
        wanted.add(transfer.Want(2 * transfer.MAX_WANTED - 1, 2))
    wanted.add(transfer.Want(0, transfer.MAX_WANTED))
    wanted.add(transfer.Want(0, transfer.MAX_WANTED))
    with pytest.raises(RemoteProtocolError, match="at once"):
        wanted.add(transfer.Want(transfer.MAX_WANTED, 1))

"""Allowed messages about blocks, and messages of an attacker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from farandole.protocol.checkpoints.block_transfer import (
    MAX_MESSAGE_BYTES,
    MAX_WANTED,
    Absent,
    BlockQuestion,
    Busy,
    Forget,
    Give,
    Here,
    Want,
    Wanted,
    decode_answered,
    decode_asked,
    decode_given,
    decode_question,
    encode,
    max_answer_bytes,
)
from farandole.protocol.checkpoints.blocks import MAX_BLOCKS, max_index_bytes
from farandole.protocol.wire.errors import RemoteProtocolError

Decode = Callable[[bytes], Any]
DECODERS: list[Decode] = [decode_question, decode_answered, decode_asked, decode_given]
LAST = MAX_BLOCKS - 1


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (decode_question, BlockQuestion(b"r" * 32, 511, b"i" * 32, True)),
        (decode_question, BlockQuestion(b"r" * 32, 0)),
        (decode_answered, Here(MAX_BLOCKS, b"index")),
        (decode_answered, Busy(1.5)),
        (decode_answered, Absent()),
        (decode_asked, Want(LAST, MAX_WANTED)),
        (decode_asked, Forget(LAST)),
        (decode_given, Give(LAST)),
        (decode_given, Busy(60.0)),
    ],
)
def test_what_is_said_is_heard(decode: Decode, message: Any) -> None:
    raw = encode(message)
    assert decode(raw) == message
    assert len(raw) <= MAX_MESSAGE_BYTES
    for other in DECODERS:
        if other is not decode and type(message) is not Busy:
            with pytest.raises(RemoteProtocolError):
                other(raw)


def test_an_answer_with_the_largest_index_fits() -> None:
    size = 1 << 30
    assert len(encode(Here(MAX_BLOCKS, bytes(max_index_bytes(size))))) <= max_answer_bytes(size)


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "message",
    [
        ["Want", 0, 0],
        ["Want", 0, MAX_WANTED + 1],
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
    wanted = Wanted(100)
    wanted.add(Want(50, 3))
    wanted.add(Want(7, 1))
    wanted.add(Want(51, 1))
    wanted.forget(50)
    wanted.forget(99)
    given = []
    while wanted:
        given.append(wanted.pop())
    assert given == [51, 52, 7]


def test_nobody_wants_more_than_there_is_nor_very_much_at_once() -> None:
    wanted = Wanted(2 * MAX_WANTED)
    with pytest.raises(RemoteProtocolError, match="up to"):
        wanted.add(Want(2 * MAX_WANTED, 1))
    with pytest.raises(RemoteProtocolError, match="up to"):
        wanted.add(Want(2 * MAX_WANTED - 1, 2))
    wanted.add(Want(0, MAX_WANTED))
    wanted.add(Want(0, MAX_WANTED))
    with pytest.raises(RemoteProtocolError, match="at once"):
        wanted.add(Want(MAX_WANTED, 1))

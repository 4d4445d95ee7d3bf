"""Alice signs her checkpoint's index; contents that she, or an impostor, may try; and messages about blocks."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from farandole.protocol.checkpoints import block_transfer as transfer
from farandole.protocol.checkpoints.blocks import (
    BLOCK_BYTES,
    HASH_BYTES,
    MAX_BLOCKS,
    Index,
    SignedIndex,
    block_range,
    blocks_between,
    decode_signed_index,
    encode_signed_index,
    max_index_bytes,
    num_blocks,
    select,
    sign_index,
)
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import public_bytes
from farandole.protocol.wire.safetensors import MAX_HEADER_BYTES, MAX_NAME_CHARS, header_size, parse_header

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
RUN = b"r" * 32
SIZE = 2 * BLOCK_BYTES + 17
CONTENT = random.Random(1).randbytes(SIZE)
HASHES = b"".join(
    hashlib.sha256(CONTENT[start : start + BLOCK_BYTES]).digest() for start in range(0, SIZE, BLOCK_BYTES)
)


def index_of(**changes: Any) -> Index:
    usual: dict[str, Any] = {
        "run_id": RUN,
        "author": public_bytes(KEY),
        "stage": 1,
        "num_stages": 2,
        "round": 7,
        "inner_steps": 350,
        "tokens": 10_000,
        "size": SIZE,
        "layout": b"l" * 32,
        "hashes": HASHES,
    }
    return Index(**(usual | changes))


def decode(raw: bytes, run_id: bytes = RUN, max_size: int = SIZE) -> tuple[SignedIndex, Index]:
    return decode_signed_index(raw, run_id, max_size)


def test_an_index_proves_itself_and_names_its_checkpoint() -> None:
    signed = sign_index(KEY, index_of())
    raw = encode_signed_index(signed)
    assert len(raw) <= max_index_bytes(SIZE)
    assert decode(raw) == (signed, index_of())
    assert decode(raw)[0].id == signed.id
    assert signed.id != sign_index(KEY, index_of(round=8)).id


def test_the_largest_index_is_taken_for_the_largest_file_alone() -> None:
    size = MAX_BLOCKS * BLOCK_BYTES
    raw = encode_signed_index(sign_index(KEY, index_of(size=size, hashes=bytes(MAX_BLOCKS * HASH_BYTES))))
    assert num_blocks(decode(raw, max_size=size)[1].size) == MAX_BLOCKS
    assert num_blocks(decode(raw, max_size=2**63)[1].size) == MAX_BLOCKS
    with pytest.raises(RemoteProtocolError, match="shorter"):
        decode(raw)


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_blocks_between_two_bytes_hold_them_and_no_more(start: int, size: int) -> None:
    blocks = blocks_between(start, start + size)
    if size:
        assert blocks[0] * BLOCK_BYTES <= start < (blocks[0] + 1) * BLOCK_BYTES
        assert blocks[-1] * BLOCK_BYTES < start + size <= (blocks[-1] + 1) * BLOCK_BYTES
    else:
        assert not blocks
    assert num_blocks(size) == len(blocks_between(0, size))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "index"),
        ({"run_id": b"x" * 32}, "another run"),
        ({"run_id": b"x"}, "index"),
        ({"author": bytes(32)}, "signature"),
        ({"author": b"k" * 31}, "index"),
        ({"stage": 2}, "stage 2 of 2"),
        ({"stage": 512, "num_stages": 512}, "index"),
        ({"num_stages": 0}, "index"),
        ({"size": 0, "hashes": b""}, "index"),
        ({"size": -1}, "index"),
        ({"size": SIZE + 1}, "at most"),
        ({"size": 2**63}, "index"),
        ({"size": 2**64 - 1}, "index"),
        ({"size": 2 * BLOCK_BYTES}, "hashes"),
        ({"hashes": HASHES[:-1]}, "hashes"),
        ({"hashes": HASHES[:-HASH_BYTES]}, "hashes"),
        ({"hashes": HASHES + bytes(HASH_BYTES)}, "hashes"),
        ({"round": 2**63}, "index"),
        ({"tokens": -1}, "index"),
        ({"layout": b""}, "index"),
    ],
)
def test_an_index_that_lies_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode(encode_signed_index(sign_index(KEY, index_of(**changes))))


def test_nobody_but_its_author_makes_an_index() -> None:
    signed = sign_index(Ed25519PrivateKey.from_private_bytes(b"m" * 32), index_of())
    with pytest.raises(RemoteProtocolError, match="signature"):
        decode(encode_signed_index(signed))
    honest = sign_index(KEY, index_of())
    moved = SignedIndex(sign_index(KEY, index_of(round=8)).body, honest.signature)
    with pytest.raises(RemoteProtocolError, match="signature"):
        decode(encode_signed_index(moved))


@given(st.data())
def test_a_flipped_bit_is_noticed(data: st.DataObject) -> None:
    raw = bytearray(encode_signed_index(sign_index(KEY, index_of())))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RemoteProtocolError):
        decode(bytes(raw))


def test_deep_nesting_and_two_hundred_thousand_tensors_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="index"):
        decode(b"\x91" * 500)
    with pytest.raises(RemoteProtocolError, match="header"):
        parse(b'{"a":' * 100_000)
    many = b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % number for number in range(200_000))
    with pytest.raises(RemoteProtocolError, match="200000 tensors"):
        parse(b"{" + many + b"}")


# The file's header

NAMES = ("slow/a", "slow/b", "momentum/a", "momentum/b", "mean/a", "mean/b")


def a_file() -> tuple[bytes, dict[str, np.ndarray[Any, Any]]]:
    """Return a file with two parameters and three vectors, in the order of `farandole.training.engine.checkpoint`."""
    tensors = {
        name: np.full(shape, index, np.float32)
        for index, (name, shape) in enumerate(zip(NAMES, 3 * [(300, 700), (5,)], strict=True))
    }
    entries: dict[str, object] = {"__metadata__": {"format": "farandole/checkpoint/1"}}
    offset = 0
    for name, tensor in tensors.items():
        entries[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    raw = json.dumps(entries).encode()
    return with_length(raw) + b"".join(tensor.tobytes() for tensor in tensors.values()), tensors


def with_length(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def parse(header: bytes, num_data_bytes: int = 0) -> object:
    raw = with_length(header)
    return parse_header(raw, len(raw) + num_data_bytes)


@pytest.mark.parametrize(
    "chosen", [NAMES, NAMES[:4], NAMES[:1], ("slow/b", "mean/a"), ("mean/b",), ("slow/a", "momentum/a", "momentum/b")]
)
def test_a_selection_is_a_file_of_just_these_tensors(chosen: tuple[str, ...]) -> None:
    raw, tensors = a_file()
    assert header_size(raw[:8], len(raw)) == len(raw) - sum(tensor.nbytes for tensor in tensors.values())
    selection = select(parse_header(raw, len(raw)), chosen.__contains__)
    have = bytearray(len(raw))  # the original file's blocks that are reported as needed, and no others
    for block in selection.blocks:
        start, end = block_range(len(raw), block)
        have[start:end] = raw[start:end]
    made = selection.header + b"".join(have[start:end] for start, end in selection.pieces)
    assert len(made) == selection.size
    loaded = load(made)
    assert set(loaded) == set(chosen)
    for name in chosen:
        assert np.array_equal(loaded[name], tensors[name])
    assert parse_header(made, len(made)).metadata == {"format": "farandole/checkpoint/1"}
    if chosen == NAMES:
        assert made == raw


def test_only_blocks_with_wanted_tensors_are_needed() -> None:
    raw, _ = a_file()
    header = parse_header(raw, len(raw))
    assert select(header, "slow/a".__eq__).blocks == (0,)
    assert select(header, "mean/b".__eq__).blocks == (2,)
    assert select(header, NAMES.__contains__).blocks == (0, 1, 2)
    with pytest.raises(RemoteProtocolError, match="no tensor"):
        select(header, "square/a".__eq__)


def entry(start: int = 0, end: int = 8, **changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [start, end]} | changes


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(dtype="F64")},
        {"a": entry(shape=[3])},
        {"a": entry(shape=[2**62, 2**62])},
        {"a": entry(shape=[-2])},
        {"a": entry(shape=[2.0])},
        {"a": entry(shape=[1] * 9 + [2])},
        {"a": entry(0, 2**63)},
        {"a": entry(-8, 0)},
        {"a": entry(8, 0)},
        {"a": entry(1, 9)},
        {"a": entry(0, 8), "b": entry(0, 8)},
        {"a": entry(0, 8), "b": entry(8, 16)},
        {"a": entry(0, 4, shape=[1])},
        {"a": entry(other=1)},
        {"a" * (MAX_NAME_CHARS + 1): entry()},
        {"a": entry(), "__metadata__": {"x": 1}},
        {"a": entry(), "__metadata__": []},
        {"a": []},
        {},
        [],
    ],
)
def test_a_header_that_lies_is_refused(header: object) -> None:
    with pytest.raises(RemoteProtocolError):
        parse(json.dumps(header).encode(), 8)
    assert parse(json.dumps({"a": entry()}).encode(), 8)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, MAX_HEADER_BYTES + 1, 101])
def test_a_headers_length_is_judged_before_anything_is_read(length: int) -> None:
    with pytest.raises(RemoteProtocolError):
        header_size(length.to_bytes(8, "little"), 108)
    with pytest.raises(RemoteProtocolError):
        parse_header(length.to_bytes(8, "little") + bytes(100), 108)
    with pytest.raises(RemoteProtocolError):
        header_size(b"\0" * 7, 7)


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

"""Pieces of a channel's bytes over several strands."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.exchange.strands import (
    LEAST_MEAN_BYTES,
    MAX_AHEAD,
    MAX_STRANDS,
    PIECE_BYTES,
    Pieces,
    strand_session,
)
from farandole.protocol.wire.errors import RemoteProtocolError

START = 1_000_000


@given(st.lists(st.integers(1, PIECE_BYTES), min_size=1, max_size=30), st.integers(1, MAX_STRANDS), st.randoms())
def test_pieces_may_arrive_in_any_order(sizes: list[int], num_strands: int, chance: random.Random) -> None:
    total = sum(sizes)
    offsets = [START + sum(sizes[:index]) for index in range(len(sizes))]
    queues: list[list[tuple[int, int]]] = [[] for _ in range(num_strands)]
    for offset, size in zip(offsets, sizes, strict=True):
        chance.choice(queues).append((offset, size))
    pieces, begun, advanced = Pieces(START, total), list[int](), 0
    here = set[int]()
    while any(queues) or begun:
        if begun and (chance.random() < 0.5 or not any(queues)):
            offset = begun.pop(chance.randrange(len(begun)))
            here.add(offset)
            advanced += pieces.arrived(offset)
            expected = next((each for each in offsets if each not in here), START + total)
            assert pieces.position == expected == START + advanced
        else:
            offset, size = chance.choice([queue for queue in queues if queue]).pop(0)
            pieces.claim(offset, size)
            begun.append(offset)
    assert pieces.position == pieces.end


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (START - 1, 1),
        (START + 5, 10),
        (START + 19, 2),
        (START + 995, 10),
        (START + 2_000, 1),
        (START + 500, 0),
        (0, 1),
    ],
)
def test_a_piece_without_a_place_is_refused(offset: int, size: int) -> None:
    pieces = Pieces(START, 1_000)
    pieces.claim(START, 10)
    pieces.claim(START + 20, 10)
    with pytest.raises(RemoteProtocolError):
        pieces.claim(offset, size)


def test_a_piece_that_is_too_long_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        Pieces(0, 2 * PIECE_BYTES).claim(0, PIECE_BYTES + 1)


def test_a_peer_cannot_have_any_number_of_pieces_remembered() -> None:
    pieces = Pieces(0, LEAST_MEAN_BYTES)
    with pytest.raises(RemoteProtocolError):
        for index in range(MAX_AHEAD + 2):
            pieces.claim(2 * index, 1)
    assert index == MAX_AHEAD + 1


def test_a_fast_line_may_be_ahead_by_a_whole_contribution() -> None:
    size = 4 * MAX_AHEAD * PIECE_BYTES
    pieces = Pieces(0, size)
    for offset in range(PIECE_BYTES, size, PIECE_BYTES):
        pieces.claim(offset, PIECE_BYTES)


def test_each_strand_has_a_name_of_its_own() -> None:
    names = {strand_session(session, index) for session in (b"a" * 16, b"b" * 16) for index in range(MAX_STRANDS)}
    assert len(names) == 2 * MAX_STRANDS
    assert {len(name) for name in names} == {16}

"""Pieces of a channel's bytes over several strands."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.strands import MAX_AHEAD, MAX_STRANDS, PIECE_BYTES, Pieces, strand_session

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
            assert pieces.claim(offset, size)
            begun.append(offset)
    pieces.check_whole()
    assert not any(pieces.claim(START + total, 0) for _ in range(num_strands))


def test_ends_of_earlier_calls_are_no_end() -> None:
    """A pipe sends a transfer in several calls, and a slow strand tells of the first ones late."""
    pieces = Pieces(START, 100)
    assert pieces.claim(START, 100)
    pieces.arrived(START)
    assert pieces.claim(START + 50, 0)
    assert not pieces.claim(START + 100, 0)


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (START - 1, 1),
        (START + 5, 10),
        (START + 19, 2),
        (START + 995, 10),
        (START + 2_000, 1),
        (START + 1_001, 0),
        (START - 1, 0),
        (0, 1),
    ],
)
def test_a_piece_or_an_end_without_a_place_is_refused(offset: int, size: int) -> None:
    pieces = Pieces(START, 1_000)
    pieces.claim(START, 10)
    pieces.claim(START + 20, 10)
    with pytest.raises(RemoteProtocolError):
        pieces.claim(offset, size)


def test_a_piece_that_is_too_long_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        Pieces(0, 2 * PIECE_BYTES).claim(0, PIECE_BYTES + 1)


def test_a_peer_cannot_have_any_number_of_pieces_remembered() -> None:
    pieces = Pieces(0, 10 * MAX_AHEAD)
    with pytest.raises(RemoteProtocolError):
        for index in range(MAX_AHEAD + 1):
            pieces.claim(2 * index, 1)
    assert index == MAX_AHEAD


def test_strands_that_end_without_all_bytes_are_noticed() -> None:
    pieces = Pieces(0, 10)
    pieces.claim(0, 5)
    pieces.arrived(0)
    assert not pieces.claim(10, 0)
    with pytest.raises(RemoteProtocolError, match="5 of 10"):
        pieces.check_whole()


def test_each_strand_has_a_name_of_its_own() -> None:
    names = {strand_session(session, index) for session in (b"a" * 16, b"b" * 16) for index in range(MAX_STRANDS)}
    assert len(names) == 2 * MAX_STRANDS
    assert {len(name) for name in names} == {16}

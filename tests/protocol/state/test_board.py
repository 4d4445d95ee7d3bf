"""The board of a run: every count is signed, and they add up."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.state.board import MAX_FILE_BYTES, Board, BoardError
from farandole.protocol.state.entries import Beat, Entry, Kind, Progress
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.identity import peer_id_of, public_bytes

RUN = b"r" * 32
NOW = 1_750_000_000.0


def key_of(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes((number,)) * 32)


def progress(number: int, tokens: int, at: float = NOW, run: bytes = RUN) -> Entry:
    writer = Writer(key_of(number), run)
    writer.marked(((0, int(at) + 100),))
    return writer.write(Kind.PROGRESS, 0, Progress(tokens // 10, tokens // 100, tokens, 5, 6), at)


def filled() -> Board:
    board = Board(RUN)
    board.note([progress(1, 1_000), progress(2, 3_000), progress(3, 2_000)])
    return board


def test_it_reads_what_it_wrote_with_most_tokens_first() -> None:
    board = Board.decode(filled().encode())
    assert [(row.peer_id, row.tokens) for row in board.rows] == [
        (peer_id_of(public_bytes(key_of(number))), tokens) for number, tokens in ((2, 3_000), (3, 2_000), (1, 1_000))
    ]
    assert board.tokens == 6_000
    assert board.rows[0].rounds == 30
    assert board.rows[0].signed_at == NOW // 60 * 60
    assert Board.decode(Board(RUN).encode()).rows == []


def test_the_newest_count_of_a_member_stays_when_the_run_forgets_it() -> None:
    board = filled()
    board.note([progress(1, 500, NOW - 3_600), progress(2, 4_000, NOW + 3_600)])
    assert [row.tokens for row in board.rows] == [4_000, 2_000, 1_000]
    writer = Writer(key_of(1), RUN)
    writer.marked(((0, int(NOW) + 9_000),))
    board.note([writer.write(Kind.BEAT, 0, Beat(9, 9, None, 9), NOW + 7_200)])
    assert board.tokens == 7_000


def alter_tokens(file: dict[str, Any]) -> None:
    file["members"][0]["tokens"] += 1
    file["tokens"] += 1


def alter_sum(file: dict[str, Any]) -> None:
    file["tokens"] += 1


def swap_signatures(file: dict[str, Any]) -> None:
    one, other = file["members"][:2]
    one["signature"], other["signature"] = other["signature"], one["signature"]


def take_anothers_count(file: dict[str, Any]) -> None:
    one, other = file["members"][:2]
    other.update(body=one["body"], signature=one["signature"], tokens=one["tokens"])
    file["tokens"] = sum(member["tokens"] for member in file["members"])


def count_twice(file: dict[str, Any]) -> None:
    file["members"].append(file["members"][0])
    file["tokens"] += file["members"][0]["tokens"]


def name_another_run(file: dict[str, Any]) -> None:
    file["run_id"] = "00" * 32


def damage_body(file: dict[str, Any]) -> None:
    file["members"][0]["body"] = "!"


def damage_peer_id(file: dict[str, Any]) -> None:
    file["members"][0]["peer_id"] = "nobody"


def take_another_kind(file: dict[str, Any]) -> None:
    writer = Writer(key_of(2), RUN)
    writer.marked(((0, int(NOW) + 100),))
    beat = writer.write(Kind.BEAT, 0, Beat(9, 9, None, 9), NOW).signed
    body, signature = (base64.b64encode(data).decode() for data in (beat.body, beat.signature))
    file["members"][0].update(body=body, signature=signature)


def name_another_format(file: dict[str, Any]) -> None:
    file["format"] = "farandole board 9"


@pytest.mark.parametrize(
    "alter",
    [
        alter_tokens,
        alter_sum,
        swap_signatures,
        take_anothers_count,
        count_twice,
        name_another_run,
        damage_body,
        damage_peer_id,
        take_another_kind,
        name_another_format,
    ],
)
def test_whatever_was_not_signed_is_refused(alter: Callable[[dict[str, Any]], None]) -> None:
    """A volunteer gains nothing by writing itself more tokens, or another's."""
    file = json.loads(filled().encode())
    alter(file)
    with pytest.raises(BoardError):
        Board.decode(json.dumps(file).encode())


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b"\xff", b"x" * (MAX_FILE_BYTES + 1)], ids=lambda raw: str(len(raw))
)
def test_what_is_no_board_is_refused(raw: bytes) -> None:
    with pytest.raises(BoardError):
        Board.decode(raw)

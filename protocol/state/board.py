"""A board: the tokens that each member of a run has trained on, with the signatures of their authors.

It keeps the newest signed `Progress` of each author, also of members that the run state forgets a week after they left.
Whoever has the file can check that each count was signed by its author, and add them up. Nobody else has confirmed the
counts: a member can sign any number.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from ..wire.errors import FarandoleError, RemoteProtocolError
from ..wire.identity import peer_id_of, public_key_of
from .entries import Checker, Entry, Kind, Progress, Signed

FORMAT: Final = "farandole board 1"
# Ten times as many as the run state has authors at once.
MAX_ROWS: Final = 40_960
# A row has some 500 bytes as JSON.
MAX_FILE_BYTES: Final = 32 * 1024 * 1024


class BoardError(FarandoleError):
    """A file is no board, or what it says was not signed."""


class BoardRow(msgspec.Struct, frozen=True):
    """The counters of one member, as it has signed them."""

    peer_id: str
    tokens: int
    inner_steps: int
    rounds: int
    signed_at: int
    """Unix seconds, by the member's clock."""


class _Line(msgspec.Struct, frozen=True):
    """A row as it is stored."""

    peer_id: Annotated[str, msgspec.Meta(max_length=64)]
    body: Annotated[str, msgspec.Meta(max_length=1_024)]
    """Base64 of `Signed.body`."""
    signature: Annotated[str, msgspec.Meta(max_length=128)]
    tokens: int
    """As in ``body``, for people and for programs that do not check."""


class _File(msgspec.Struct, frozen=True):
    format: str
    run_id: str
    """In hexadecimal."""
    tokens: int
    """The sum over all members."""
    members: Annotated[list[_Line], msgspec.Meta(max_length=MAX_ROWS)]


class Board:
    """The newest progress of each author of a run, at most `MAX_ROWS` of them."""

    def __init__(self, run_id: bytes) -> None:
        self.run_id = run_id
        self._checker = Checker(run_id, b"")  # nothing here is the creator's
        self._newest: dict[bytes, Entry] = {}

    def note(self, entries: Iterable[Entry]) -> None:
        """Take in entries of the run state, which has checked them; kinds other than `Progress` are left out."""
        for entry in entries:
            known = self._newest.get(entry.author)
            is_newer = known is None or (entry.tick, entry.id) > (known.tick, known.id)
            if entry.kind is Kind.PROGRESS and isinstance(entry.payload, Progress) and is_newer:
                self._newest[entry.author] = entry
        if len(self._newest) > MAX_ROWS:
            self._newest = {entry.author: entry for entry in self._sorted()[:MAX_ROWS]}

    @property
    def counts(self) -> list[tuple[bytes, Progress]]:
        """Return each member's key with its counters, the ones with most tokens first."""
        return [(entry.author, entry.payload) for entry in self._sorted()]

    @property
    def rows(self) -> list[BoardRow]:
        """Return a row for each member, in the same order."""
        return [
            BoardRow(
                peer_id_of(entry.author),
                entry.payload.tokens,
                entry.payload.inner_steps,
                entry.payload.rounds,
                entry.written_at,
            )
            for entry in self._sorted()
        ]

    def _sorted(self) -> list[Entry]:
        return sorted(self._newest.values(), key=lambda entry: (-entry.payload.tokens, entry.author))

    @property
    def tokens(self) -> int:
        """Return the sum over all members."""
        return sum(entry.payload.tokens for entry in self._newest.values())

    def encode(self) -> bytes:
        """Return the board's file: JSON, one member a line."""
        lines = [
            _Line(
                peer_id_of(entry.author),
                base64.b64encode(entry.signed.body).decode(),
                base64.b64encode(entry.signed.signature).decode(),
                entry.payload.tokens,
            )
            for entry in self._sorted()
        ]
        head = msgspec.json.encode(_File(FORMAT, self.run_id.hex(), self.tokens, []))
        members = b",\n".join(msgspec.json.encode(line) for line in lines)
        return head.removesuffix(b"]}") + b"\n" + members + b"\n]}\n"

    @classmethod
    def decode(cls, raw: bytes) -> Board:
        """Read a board's file, and check every signature and the sums.

        Raises `BoardError` if it is no board, or if a member has not signed its count.
        """
        if len(raw) > MAX_FILE_BYTES:
            raise BoardError(f"a board has at most {MAX_FILE_BYTES:,} bytes")
        try:
            file = msgspec.json.decode(raw, type=_File)
            run_id = bytes.fromhex(file.run_id)
        except (msgspec.MsgspecError, ValueError) as error:
            raise BoardError(f"this is not a board: {error}") from error
        if file.format != FORMAT or len(run_id) != 32:
            raise BoardError(f"this is not a board: its format is {file.format!r}, not {FORMAT!r}")
        board = cls(run_id)
        for line in file.members:
            board.note([board._check(line)])
        if board.tokens != file.tokens or len(board._newest) != len(file.members):
            raise BoardError(f"the board does not add up: it says {file.tokens:,}, its members {board.tokens:,}")
        return board

    def _check(self, line: _Line) -> Entry:
        try:
            author = public_key_of(line.peer_id)
            body, signature = (base64.b64decode(text, validate=True) for text in (line.body, line.signature))
            entry = self._checker.parse(msgspec.convert([author, body, signature], Signed))
        except (RemoteProtocolError, msgspec.MsgspecError, binascii.Error, ValueError) as error:
            raise BoardError(f"the row of {line.peer_id} is damaged: {error}") from error
        is_progress = entry.kind is Kind.PROGRESS and isinstance(entry.payload, Progress)
        if not is_progress or not self._checker.is_genuine(entry):
            raise BoardError(f"{line.peer_id} has not signed its row for run {self.run_id.hex()[:16]}")
        if entry.payload.tokens != line.tokens:
            raise BoardError(f"the row of {line.peer_id} says {line.tokens:,} tokens, and it signed another number")
        return entry

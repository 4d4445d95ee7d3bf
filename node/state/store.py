"""The files that a node keeps on its disk: the run state, a few facts, an address book, and its writer's mark.

SQLite in WAL mode holds all but the mark. Every call runs in a thread, one at a time, and is one transaction, so a kill
in the middle leaves all of it or nothing. Data that are read back are trusted no more than a peer's: run state is
merged again entry by entry. A damaged database is put aside and created again, since peers have all of its content. The
mark cannot be recovered, and it must be stored even on a full disk: it is a file of its own, a few bytes that are
overwritten in place and synced (see `farandole.protocol.state.writer`).

A store keeps its layout's number. Tables that a later release adds are no other layout: older ones leave them alone. A
layout that this release cannot use, the mark's included, has a higher number, and is refused untouched.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from farandole.protocol.run.roster import Place
from farandole.protocol.state.writer import MAX_SPANS, Mark
from farandole.protocol.wire.errors import FarandoleError
from farandole.training.base.durable import sync_file, sync_folder

from ..base.system.files import open_private
from ..status.journal import Journal

logger = logging.getLogger(__name__)

LAYOUT = 1
"""The layout's number, SQLite's ``user_version``. Stores of the first releases have 0, and this layout."""
MAX_FACT_BYTES = 1024 * 1024
MANIFEST_FACT = "manifest"
"""The signed manifest of the run that a node was in last."""
# As wide as any number of seconds, and the maximum number of lines of a mark: 336 bytes, less than a disk's sector.
_MARK_DIGITS = 20
_MARK_LINE = b"%020d %020d\n"
_NO_SPAN = (0, 0)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS authors (author BLOB PRIMARY KEY, entries BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS seats
    (issuer BLOB, seat INTEGER, admission BLOB NOT NULL, PRIMARY KEY (issuer, seat)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS peers (peer BLOB PRIMARY KEY, addresses BLOB NOT NULL, seen_at REAL NOT NULL) WITHOUT ROWID;
"""
_Result = TypeVar("_Result")
PeerRow = tuple[bytes, bytes, float]
"""A peer's public key, its multiaddrs in JSON, and when it was reached last, in Unix time."""


class StoreError(FarandoleError):
    """The disk did not take it (full, broken, read-only); nothing was changed, and a later try may succeed."""


def _check_layout(connection: sqlite3.Connection, path: Path) -> None:
    """Raise `StoreError` if a later release wrote the store in a layout that this one does not know."""
    layout: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if layout > LAYOUT:
        raise StoreError(
            f"{path} was written by a newer farandole (layout {layout}; this one knows {LAYOUT}): upgrade this node "
            "(docs/volunteer.md#upgrade); the file is left as it is"
        )


class Store:
    """A node's store; made by `open_store`. Every method raises `StoreError` when the disk fails."""

    def __init__(self, connection: sqlite3.Connection, mark_path: Path) -> None:
        self._connection = connection
        self._mark_path = mark_path
        self._lock = trio.Lock()

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        """Run work in a thread, alone; a cancelled caller waits for its end, which is milliseconds away."""
        async with self._lock:
            try:
                return await trio.to_thread.run_sync(work)
            except (sqlite3.Error, OSError) as error:
                raise StoreError(f"{self._mark_path.parent} did not take what this node keeps: {error}") from error

    async def _read(self, sql: str, *values: str) -> list[Any]:
        """Return the rows of a query."""
        return await self._in_thread(lambda: self._connection.execute(sql, values).fetchall())

    async def _write(self, *statements: tuple[str, Iterable[tuple[object, ...]]]) -> None:
        """Execute each statement for each of its rows, in one transaction."""

        def work() -> None:
            with self._connection:  # commits, or rolls back
                self._connection.execute("BEGIN IMMEDIATE")
                for sql, rows in statements:
                    self._connection.executemany(sql, rows)

        await self._in_thread(work)

    # run state

    async def load_authors(self) -> dict[bytes, bytes]:
        """Return what `RunState.export` gave, by author. The caller verifies it."""
        return dict(await self._read("SELECT author, entries FROM authors"))

    async def save_authors(self, rows: Mapping[bytes, bytes | None]) -> None:
        """Replace these authors' rows, all or none; None deletes one."""
        gone = [(author,) for author, entries in rows.items() if entries is None]
        kept = [(author, entries) for author, entries in rows.items() if entries is not None]
        await self._write(
            ("DELETE FROM authors WHERE author = ?", gone), ("INSERT OR REPLACE INTO authors VALUES (?, ?)", kept)
        )

    async def load_seats(self) -> list[bytes]:
        """Return the admissions of the holders of seats. The caller verifies them."""
        return [row[0] for row in await self._read("SELECT admission FROM seats")]

    async def save_seats(self, changed: Mapping[Place, bytes | None]) -> None:
        """Replace the holders of these seats, all or none; None deletes one."""
        gone = [place for place, admission in changed.items() if admission is None]
        held = [(*place, admission) for place, admission in changed.items() if admission is not None]
        await self._write(
            ("DELETE FROM seats WHERE issuer = ? AND seat = ?", gone),
            ("INSERT OR REPLACE INTO seats VALUES (?, ?, ?)", held),
        )

    # the writer's mark

    async def load_mark(self) -> Mark:
        """Return the mark stored last, empty if there is none."""

        def work() -> Mark:
            try:
                lines = self._mark_path.read_bytes().split(b"\n")[:MAX_SPANS]
            except FileNotFoundError:
                return ()
            spans = []
            for numbers in map(bytes.split, lines):
                is_sound = all(number.isdigit() and len(number) <= _MARK_DIGITS for number in numbers)
                if is_sound and len(numbers) in (1, 2):  # one, in older files: up to it all may have been used
                    spans.append((int(numbers[0]) if len(numbers) == 2 else 0, int(numbers[-1])))
            return tuple(span for span in spans if span != _NO_SPAN)

        return await self._in_thread(work)

    async def save_mark(self, mark: Mark) -> None:
        """Store the mark; it is on disk on return. It takes no new space; a sector is written whole or not at all."""
        lines = [_MARK_LINE % span for span in (*mark, *[_NO_SPAN] * (MAX_SPANS - len(mark)))]

        def work() -> None:
            data, is_new = b"".join(lines), not self._mark_path.exists()
            descriptor = open_private(self._mark_path, os.O_WRONLY | os.O_CREAT)
            try:
                if os.pwrite(descriptor, data, 0) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                sync_file(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                sync_folder(self._mark_path.parent)

        await self._in_thread(work)

    # facts

    async def get_fact(self, name: str) -> bytes | None:
        """Return the value under this name, None if there is none."""
        rows = await self._read("SELECT value FROM facts WHERE name = ?", name)
        return rows[0][0] if rows else None

    async def put_fact(self, name: str, value: bytes) -> None:
        """Store a value of at most 1 MB, such as the manifest's bytes."""
        if len(value) > MAX_FACT_BYTES:
            raise ValueError(f"a fact has at most {MAX_FACT_BYTES} bytes, not {len(value)}")
        await self._write(("INSERT OR REPLACE INTO facts VALUES (?, ?)", [(name, value)]))

    async def remember(self, name: str, value: bytes, journal: Journal, loss: str) -> None:
        """`put_fact`, but if that fails warn the owner; ``loss``: what a restart then costs."""
        try:
            await self.put_fact(name, value)
        except StoreError as error:
            journal.warn(f"{error}; {loss}")

    # the address book

    async def load_peers(self) -> list[PeerRow]:
        """Return every peer that was saved. The caller verifies them."""
        return await self._read("SELECT peer, addresses, seen_at FROM peers")

    async def save_peers(self, rows: Iterable[PeerRow], gone: Iterable[bytes]) -> None:
        """Replace the rows of these peers and delete the rows of ``gone``, all or none."""
        await self._write(
            ("DELETE FROM peers WHERE peer = ?", [(peer,) for peer in gone]),
            ("INSERT OR REPLACE INTO peers VALUES (?, ?, ?)", rows),
        )


def _connect(path: Path) -> sqlite3.Connection:
    # One thread at a time uses it, never two (`Store._in_thread`); which one varies.
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=5.0)
    try:
        _check_layout(connection, path)  # before anything is written
        connection.execute("PRAGMA journal_mode=WAL")
        # A power cut may lose the last seconds, which peers still have, but not damage the file (sqlite.org/wal.html).
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA fullfsync=ON")  # has an effect only on macOS: see `sync_file`
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA user_version={LAYOUT}")
        if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("quick_check found damage")
    except BaseException:  # for any exception: no other code has the connection yet
        connection.close()
        raise
    return connection


def _connect_or_begin_anew(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _connect(path)
    except sqlite3.OperationalError as error:
        raise StoreError(f"cannot open {path}: {error}") from error
    except sqlite3.DatabaseError as error:
        logger.warning("%s is damaged (%s): it is put aside, and what it held comes from peers again", path, error)
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{path}{suffix}.damaged")
        return _connect(path)


@asynccontextmanager
async def open_store(path: Path) -> AsyncIterator[Store]:
    """Open the store in this file, created if needed; `StoreError` if it cannot be opened, or is newer."""
    connection = await trio.to_thread.run_sync(_connect_or_begin_anew, path)
    try:
        yield Store(connection, path.with_name(path.name + ".mark"))
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(connection.close)


def read_fact(path: Path, name: str) -> bytes | None:
    """Return a fact of a store in this file, which a daemon may be using; None if there is no such fact, or no store.

    The file is only read: a damaged one is the daemon's to replace. It blocks for milliseconds. Raises `StoreError`.
    """
    if not path.exists():
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)) as store:
            _check_layout(store, path)
            row = store.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    except sqlite3.Error as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    return None if row is None else bytes(row[0])

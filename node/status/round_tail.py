"""Finished rounds as they are written to their file, for a program that follows it.

The file is rotated when it is full (`farandole.node.base.logs`). It is not kept open: on some systems an open file
cannot be renamed, and whoever follows the rounds must not disturb the node.
"""

from __future__ import annotations

import os
from pathlib import Path

from .round_log import RoundRecord, decode_round


class RoundTail:
    """Reads a file of rounds from its beginning, and then what is new in it."""

    def __init__(self, path: Path) -> None:
        """``path``: the file; it need not exist yet."""
        self._path = path
        self._older = path.with_name(f"{path.name}.1")
        self._inode: int | None = None
        """Of the file that has been read up to `_position`."""
        self._position = 0

    def new(self) -> list[RoundRecord]:
        """Return the rounds that have been written since the last call; at the first call all, oldest first.

        A line without its end is left for a later call. Raises `OSError`.
        """
        if self._inode is None:
            self._inode = _inode(self._older) or _inode(self._path)
        found = []
        newest = _inode(self._path)
        if self._inode != newest:  # it was rotated: the rest of it is in the older file
            found += self._read(self._older)
            if newest is None:
                return found
            self._inode, self._position = newest, 0
        return found + self._read(self._path)

    def _read(self, path: Path) -> list[RoundRecord]:
        """Return the rounds after the position, which moves, if this is the file that it belongs to."""
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode:
                return []
            if found.st_size < self._position:  # someone has cut it
                self._position = 0
            file.seek(self._position)
            *lines, _ = file.read().split(b"\n")
        self._position += sum(len(line) + 1 for line in lines)
        return [record for record in map(decode_round, lines) if record is not None]


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None

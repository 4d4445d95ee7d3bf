"""Sources of statuses: the node of this machine, asked every second, or lines that another node writes.

A line is the output of ``farandole status --json --watch``: a status, or ``{"error": ...}`` if there was none.
"""

from __future__ import annotations

import abc
import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from farandole.protocol.wire.errors import FarandoleError

from ...base.control import MAX_RESPONSE_BYTES, NoNodeError, call
from ...base.interrupts import Ending
from ...status.status import NodeStatus
from .view import Lost, News, NodeSeen

INTERVAL: Final = 1.0
# A screen has no room for more members, and `farandole peers` shows all: a status of a thousand members has a megabyte.
MAX_MEMBERS: Final = 64
STANDARD_INPUT: Final = Path("-")


class Feed(abc.ABC):
    """A source of news of one node."""

    @abc.abstractmethod
    def news(self, is_over: Ending) -> Iterator[News]:
        """Yield news until ``is_over`` is set, or no more can come. It blocks, so it runs in a thread of its own."""

    @abc.abstractmethod
    def ask(self, deed: str) -> str:
        """Make the node ``pause`` or ``resume``; return its answer. Raises `FarandoleError`."""


class HomeFeed(Feed):
    """The node that runs in a home folder."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def news(self, is_over: Ending) -> Iterator[News]:
        """Yield one status a second."""
        while not is_over.is_set():
            try:
                yield NodeSeen(msgspec.convert(call(self._home, "status", max_members=MAX_MEMBERS), NodeStatus))
            except (FarandoleError, msgspec.MsgspecError) as error:
                yield Lost(str(error))
            is_over.wait(INTERVAL)

    def ask(self, deed: str) -> str:
        """Ask over the control socket."""
        return str(call(self._home, deed))


class LinesFeed(Feed):
    """Lines of a stream, or of a file that may still grow, from its last line on."""

    def __init__(self, source: Path) -> None:
        """``source``: a file, or `STANDARD_INPUT`. Raises `FarandoleError` if it cannot be read."""
        self._source = source
        if source == STANDARD_INPUT and sys.stdin.isatty():
            raise FarandoleError("nothing comes in: `ssh HOST farandole status --json --watch | ...` goes before this")
        try:
            # A descriptor of its own: keys may be read from standard input's (farandole.node.ui.watch.terminal).
            self._file: BinaryIO = os.fdopen(os.dup(0), "rb") if source == STANDARD_INPUT else source.open("rb")
        except OSError as error:
            raise FarandoleError(f"cannot read {source}: {error.strerror}") from error

    def news(self, is_over: Ending) -> Iterator[News]:
        """Yield the statuses in the source's lines as they come."""
        with self._file:
            if self._source == STANDARD_INPUT:
                yield from map(read_line, self._lines())
                yield Lost("its statuses have come to an end: was the connection lost?")
                return
            yield from map(read_line, deque(self._lines(), maxlen=1))
            while not is_over.is_set():
                yield from map(read_line, self._lines())
                is_over.wait(INTERVAL)

    def ask(self, deed: str) -> str:
        """Raise an error, because a stream has one direction."""
        raise FarandoleError(f"this is another machine's node: there, `farandole {deed}`")

    def _lines(self) -> Iterator[bytes]:
        """Yield complete lines; an incomplete one is kept for the next call."""
        while line := self._file.readline(MAX_RESPONSE_BYTES):
            if not line.endswith(b"\n") and self._file.seekable():
                self._file.seek(-len(line), 1)
                return
            yield line


def read_line(line: bytes) -> News:
    """Decode a line of ``farandole status --json --watch``."""
    try:
        said = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Lost(f"this is no line of `farandole status --json --watch`: {error}")
    if said.error is not None:
        return Lost(said.error.message)
    try:
        return NodeSeen(msgspec.json.decode(line, type=NodeStatus))
    except msgspec.MsgspecError as error:
        return Lost(f"this is no status of farandole, or one of another version: {error}")


def error_line(error: FarandoleError) -> str:
    """Return the line to print when the node did not answer."""
    code = "no_node" if isinstance(error, NoNodeError) else getattr(error, "code", "internal")
    return msgspec.json.encode(_Line(_Problem(code, str(error)))).decode()


class _Problem(msgspec.Struct):
    code: str
    message: str


class _Line(msgspec.Struct):
    error: _Problem | None = None

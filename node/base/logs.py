"""The daemon's log file: its own loggers from the level asked for, libraries' from warnings on; and its terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final

import msgspec

from farandole.protocol.wire.bounds import Latest

from .identity import IdentityError, make_home
from .settings import NodeSettings
from .system.terminal import without_controls

# Two files of 8 MB: some weeks of an ordinary node's lines, and never a full disk.
MAX_LOG_BYTES: Final = 8 * 1024 * 1024
# Lines a minute that differ in their arguments only, and the number of kinds that are distinguished: more than exist.
MAX_ALIKE_PER_MINUTE: Final = 10
MAX_KINDS: Final = 1_024
CONSOLE: Final = "farandole.console"
# Of `farandole.node.status.round_log`: two files of some 40,000 rounds each.
ROUNDS: Final = "farandole.rounds"
MAX_ROUNDS_BYTES: Final = 16 * 1024 * 1024
_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class TextFormatter(logging.Formatter):
    """One line an event, and after it the traceback, if any, with each line indented.

    Characters that are not printable are escaped: text of a peer, which an exception may quote, must neither begin a
    line that looks like another event nor reach the terminal that shows the file as a control sequence.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line and the traceback."""
        record.exc_text = None  # a cache that another handler may have filled with unescaped text
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without the traceback."""
        return _escaped(super().formatMessage(record))

    def formatException(self, exc_info: _ExceptionInfo) -> str:
        """Return the lines of the traceback."""
        return "\n".join(f"  {_escaped(line)}" for line in super().formatException(exc_info).split("\n"))


def _escaped(line: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


class Throttle(logging.Filter):
    """Lets the same message through a few times a minute, whatever its arguments; then logs how many it dropped.

    Strangers can cause any number of messages of a few kinds. Messages for the terminal are never
    dropped, nor messages below the level info, which the user asked for.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # When each minute began, and how many lines since.
        self._minutes: Latest[tuple[str, str], tuple[float, int]] = Latest(MAX_KINDS)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to let it through, perhaps with the number of lines dropped before it."""
        if record.name == CONSOLE or record.levelno < logging.INFO:
            return True
        key = record.name, str(record.msg)
        now = self._clock()
        began_at, count = self._minutes.get(key, (now, 0))
        num_kept_back = 0
        if now - began_at >= 60:
            num_kept_back = max(0, count - MAX_ALIKE_PER_MINUTE)
            began_at, count = now, 0
        self._minutes[key] = began_at, count + 1
        if count >= MAX_ALIKE_PER_MINUTE:
            return False
        if num_kept_back:
            record.msg = f"{record.msg} (and {num_kept_back} more like this)"
        return True


class _LogFile(logging.handlers.RotatingFileHandler):
    """A log file that a full disk silences: it neither stops the node nor fills the terminal with tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line on an `OSError` of the disk; report any other error."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file; buffered lines are lost if the disk refuses them."""
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def logging_to_file(settings: NodeSettings) -> Iterator[None]:
    """Log to ``settings.log`` until the context ends. Raises `IdentityError` if the node's folder cannot be used."""
    make_home(settings.home)
    root, ours = logging.getLogger(), logging.getLogger("farandole")
    rounds = logging.getLogger(ROUNDS)
    try:
        handler = _LogFile(settings.log, maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8")
    except OSError as error:
        raise IdentityError(f"cannot write {settings.log}: {error.strerror}; name a folder with --home") from error
    kept = _LogFile(settings.rounds, maxBytes=MAX_ROUNDS_BYTES, backupCount=1, encoding="utf-8", delay=True)
    handler.setFormatter(TextFormatter())
    previous = root.level, ours.level
    root.setLevel(logging.WARNING)
    ours.setLevel(settings.log_level.upper())
    rounds.setLevel(logging.INFO)
    rounds.propagate = False
    handler.addFilter(Throttle())
    root.addHandler(handler)
    rounds.addHandler(kept)
    try:
        yield
    finally:
        root.removeHandler(handler)
        rounds.removeHandler(kept)
        handler.close()
        kept.close()
        root.setLevel(previous[0])
        ours.setLevel(previous[1])


# Output to the terminal and to the log: one line an event.


def say(text: str) -> None:
    """Print and log one event."""
    logging.getLogger(CONSOLE).info("%s", text)
    show(without_controls(text))


def show(text: str) -> None:
    """Print one event and log nothing: it may be an invite. A terminal that went away stops nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def keep_round(record: msgspec.Struct) -> None:
    """Append a finished round, a `farandole.node.status.round_log.RoundRecord`, to the file of rounds."""
    logging.getLogger(ROUNDS).info("%s", json.dumps(msgspec.structs.asdict(record)))


def complain(text: str) -> None:
    """Print and log why the node ends, as an error."""
    logging.getLogger(CONSOLE).error("%s", text)
    with contextlib.suppress(OSError, ValueError):
        print(without_controls(text), file=sys.stderr, flush=True)

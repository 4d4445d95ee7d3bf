"""The daemon's log file: its own loggers from the level asked for, libraries' from warnings on.

The terminal is for people and belongs to `farandole.node.console`.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

import msgspec

from .identity import IdentityError, make_home
from .settings import NodeSettings

# Two files of 8 MB: some weeks of an ordinary node's lines, and never a full disk.
MAX_LOG_BYTES: Final = 8 * 1024 * 1024
LEVELS: Final = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


class _LogFile(logging.handlers.RotatingFileHandler):
    """A log file that a full disk silences: it neither stops the node nor fills the terminal with tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line if it was the disk, and tell anything else."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        """What is still buffered is lost if the disk does not take it."""
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def logging_to_file(settings: NodeSettings) -> Iterator[None]:
    """Log to ``settings.log`` until the context ends. Raises `IdentityError` if the node's folder cannot be used."""
    make_home(settings.home)
    root, ours = logging.getLogger(), logging.getLogger("farandole")
    try:
        handler = _LogFile(settings.log, maxBytes=MAX_LOG_BYTES, backupCount=1)
    except OSError as error:
        raise IdentityError(
            f"cannot write {settings.log}: {error.strerror}; name another folder with --home"
        ) from error
    if settings.json_log:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    previous = root.level, ours.level
    root.setLevel(logging.WARNING)
    ours.setLevel(settings.log_level.upper())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
        root.setLevel(previous[0])
        ours.setLevel(previous[1])

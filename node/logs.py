"""The daemon's log file: its own loggers from the level asked for, libraries' from warnings on.

The terminal is for people and belongs to `farandole.node.console`.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

import msgspec

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


@contextlib.contextmanager
def logging_to_file(settings: NodeSettings) -> Iterator[None]:
    """Log to ``settings.log`` until the context ends."""
    settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    root, ours = logging.getLogger(), logging.getLogger("farandole")
    handler = logging.handlers.RotatingFileHandler(settings.log, maxBytes=MAX_LOG_BYTES, backupCount=1)
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

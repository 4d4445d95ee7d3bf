"""A daemon's output to the terminal and to its log: one line an event, as text or as a JSON object."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

import msgspec

from ..base.logs import ROUNDS, JsonFormatter
from ..base.system.terminal import without_controls
from ..status.round_log import RoundRecord

logger = logging.getLogger(__name__)
rounds = logging.getLogger(ROUNDS)


class Console:
    """Writes lines to standard output; a terminal that went away silences it and stops nothing."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._formatter = JsonFormatter()

    def say(self, text: str, figures: Mapping[str, object] | None = None) -> None:
        """Print one event; its ``figures`` are only for the JSON output."""
        self._tell(logging.INFO, text, sys.stdout, figures)

    def tell_round(self, record: RoundRecord) -> None:
        """Print a finished round, and append it to the file of rounds."""
        figures: dict[str, object] = msgspec.structs.asdict(record)
        self.say(record.line, figures)
        rounds.info("%s", json.dumps(figures))

    def complain(self, text: str) -> None:
        """Print why the node ends, as an error."""
        self._tell(logging.ERROR, text, sys.stderr)

    def _tell(self, level: int, text: str, stream: TextIO, figures: Mapping[str, object] | None = None) -> None:
        extra = {"figures": figures} if figures else {}
        record = logger.makeRecord(logger.name, level, "", 0, "%s", (text,), None, extra=extra)
        if logger.isEnabledFor(level):
            logger.handle(record)
        line = text if level == logging.ERROR else f"{time.strftime('%H:%M:%S')}  {text}"
        line = without_controls(self._formatter.format(record) if self._as_json else line)
        with contextlib.suppress(OSError, ValueError):
            print(line, file=stream, flush=True)

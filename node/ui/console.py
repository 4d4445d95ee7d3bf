"""A daemon's output to the terminal and to its log: one line an event."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from typing import TextIO

import msgspec

from ..base.logs import ROUNDS
from ..base.system.terminal import without_controls
from ..status.round_log import RoundRecord

logger = logging.getLogger(__name__)
rounds = logging.getLogger(ROUNDS)


class Console:
    """Writes lines to standard output; a terminal that went away silences it and stops nothing."""

    def say(self, text: str) -> None:
        """Print one event."""
        self._tell(logging.INFO, text, sys.stdout)

    def tell_round(self, record: RoundRecord) -> None:
        """Print a finished round, and append it to the file of rounds."""
        self.say(record.line)
        rounds.info("%s", json.dumps(msgspec.structs.asdict(record)))

    def complain(self, text: str) -> None:
        """Print why the node ends, as an error."""
        self._tell(logging.ERROR, text, sys.stderr)

    def _tell(self, level: int, text: str, stream: TextIO) -> None:
        logger.log(level, "%s", text)
        line = text if level == logging.ERROR else f"{time.strftime('%H:%M:%S')}  {text}"
        line = without_controls(line)
        with contextlib.suppress(OSError, ValueError):
            print(line, file=stream, flush=True)

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


def say(text: str) -> None:
    """Print one event."""
    _tell(logging.INFO, text, sys.stdout)


def show(text: str) -> None:
    """Print one event that no log may hold, such as an invite."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def keep_round(record: RoundRecord) -> None:
    """Append a finished round to the file of rounds."""
    rounds.info("%s", json.dumps(msgspec.structs.asdict(record)))


def complain(text: str) -> None:
    """Print why the node ends, as an error."""
    _tell(logging.ERROR, text, sys.stderr)


def _tell(level: int, text: str, stream: TextIO) -> None:
    """Log and print a line; a terminal that went away silences the node and stops nothing."""
    logger.log(level, "%s", text)
    line = text if level == logging.ERROR else f"{time.strftime('%H:%M:%S')}  {text}"
    with contextlib.suppress(OSError, ValueError):
        print(without_controls(line), file=stream, flush=True)

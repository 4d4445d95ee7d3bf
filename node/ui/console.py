"""A daemon's output to the terminal and to its log: one line an event."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time

import msgspec

from ..base.logs import ROUNDS
from ..base.system.terminal import without_controls
from ..status.round_log import RoundRecord

logger = logging.getLogger(__name__)
rounds = logging.getLogger(ROUNDS)


def say(text: str) -> None:
    """Print and log one event."""
    logger.info("%s", text)
    show(without_controls(text))


def show(text: str) -> None:
    """Print one event and log nothing: it may be an invite. A terminal that went away stops nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def keep_round(record: RoundRecord) -> None:
    """Append a finished round to the file of rounds."""
    rounds.info("%s", json.dumps(msgspec.structs.asdict(record)))


def complain(text: str) -> None:
    """Print and log why the node ends, as an error."""
    logger.error("%s", text)
    with contextlib.suppress(OSError, ValueError):
        print(without_controls(text), file=sys.stderr, flush=True)

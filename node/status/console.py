"""What a daemon says at the terminal, and in its log: one line an event, for people, or JSON objects for machines."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Mapping

import msgspec

from ..logs import ROUNDS
from ..metrics.rounds import RoundRecord

logger = logging.getLogger(__name__)
rounds = logging.getLogger(ROUNDS)


class Console:
    """Writes lines to standard output; a terminal that went away silences it and stops nothing."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, text: str, figures: Mapping[str, object] | None = None) -> None:
        """One event; its ``figures`` are for machines alone."""
        told = {"figures": figures} if figures else {}
        logger.info("%s", text, extra=told)
        if self._as_json:
            line = json.dumps({"at": round(time.time(), 3), "text": text, **told})
        else:
            line = f"{time.strftime('%H:%M:%S')}  {text}"
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stdout, flush=True)

    def tell_round(self, record: RoundRecord) -> None:
        """A round is over; it goes into the file of rounds, too."""
        figures: dict[str, object] = msgspec.structs.asdict(record)
        self.say(record.line, figures)
        rounds.info("%s", json.dumps(figures))

    def complain(self, text: str) -> None:
        """Why the node ends."""
        logger.error("%s", text)
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)

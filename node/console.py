"""What a daemon says at the terminal, and in its log: one line an event, for people, or JSON objects for machines."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time

logger = logging.getLogger(__name__)


class Console:
    """Writes lines to standard output; a terminal that went away silences it and stops nothing."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, text: str) -> None:
        """One event."""
        logger.info("%s", text)
        if self._as_json:
            line = json.dumps({"at": round(time.time(), 3), "text": text})
        else:
            line = f"{time.strftime('%H:%M:%S')}  {text}"
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stdout, flush=True)

    def complain(self, text: str) -> None:
        """Why the node ends."""
        logger.error("%s", text)
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)

"""What a daemon says at the terminal: one line an event, for people, or as JSON objects for machines."""

from __future__ import annotations

import contextlib
import json
import sys
import time


class Console:
    """Writes lines to standard output; a terminal that went away silences it and stops nothing."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, text: str) -> None:
        """One event."""
        if self._as_json:
            line = json.dumps({"at": round(time.time(), 3), "text": text})
        else:
            line = f"{time.strftime('%H:%M:%S')}  {text}"
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stdout, flush=True)

    def complain(self, text: str) -> None:
        """Why the node ends."""
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)

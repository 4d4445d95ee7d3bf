"""The terminal to draw on and to read keys from, if there is one."""

from __future__ import annotations

import os
import sys
from typing import Final

_TERMINAL: Final = "/dev/tty"
_STANDARD_INPUT: Final = 0


def has_screen() -> bool:
    """Return whether output goes to a terminal, and keys can be read from one."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):  # Textual draws on the latter
        return False
    try:
        os.close(os.open(_TERMINAL, os.O_RDWR))
    except OSError:
        return False
    return True


def keys_from_terminal() -> None:
    """Read keys from the terminal although standard input is other data: Textual reads descriptor 0.

    The reader of that data must have a descriptor of its own by then.
    """
    if sys.stdin.isatty():
        return
    terminal = os.open(_TERMINAL, os.O_RDWR)
    os.dup2(terminal, _STANDARD_INPUT)
    os.close(terminal)

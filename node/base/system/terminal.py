"""Characters that a terminal lacks, or would obey."""

from __future__ import annotations

import io
import sys
import unicodedata
from typing import Final

_KEPT: Final = "\n\t"
# Control characters (among them those of 0x80 to 0x9f, which begin escape sequences too); halves of characters.
_REPLACED: Final = ("Cc", "Cs")
# Of Unicode: they turn the order of the characters that follow.
_TURNING: Final = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def show_all_characters() -> None:
    """Print characters that a terminal lacks as ? instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def without_controls(text: str) -> str:
    """Replace every character that a terminal obeys instead of showing it, except newline and tab.

    For text from strangers: escape sequences move the cursor, set a window's title, and write to the clipboard.
    """
    shown = []
    for letter in text:
        is_obeyed = unicodedata.category(letter) in _REPLACED or unicodedata.bidirectional(letter) in _TURNING
        shown.append("\ufffd" if is_obeyed and letter not in _KEPT else letter)
    return "".join(shown)

"""Where what is printed goes, and terminals that know fewer characters than farandole uses."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def show_all_characters() -> None:
    """From now on a character that a terminal has not (Windows' old code pages) is shown as ?, and ends no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def is_journal(stream: TextIO) -> bool:
    """Whether it is read by systemd's journal, which has told so by device and inode (systemd.exec(5))."""
    try:
        told = os.fstat(stream.fileno())
    except OSError:  # of a stream that is no file, too
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{told.st_dev}:{told.st_ino}"

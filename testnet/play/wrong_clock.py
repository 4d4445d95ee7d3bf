"""Wrong clocks, by libfaketime: a library that is loaded before libc and replaces its clock functions.

The time of day comes from a file in the node's folder, read once a second at most, so a clock can be set while its node
runs. Monotonic clocks are unchanged: on a real machine, too, setting the clock moves no timeout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from farandole.protocol.wire.errors import FarandoleError

_NAMES: Final = ("libfaketimeMT.so.1", "libfaketime.so.1")
_FOLDERS: Final = ("/usr/lib", "/usr/local/lib", "/usr/lib64")
_FILE: Final = "clock"


class NoFaketimeError(FarandoleError):
    """libfaketime is not there."""


def library() -> Path:
    """Return the path of libfaketime; `NoFaketimeError` says how to install it."""
    for folder in _FOLDERS:
        for name in _NAMES:
            for found in (*Path(folder).glob(f"faketime/{name}"), *Path(folder).glob(f"*/faketime/{name}")):
                return found
    raise NoFaketimeError("wrong clocks need libfaketime; on Debian or Ubuntu: apt install faketime")


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a node whose clock can be set, and is right at first. Raises `NoFaketimeError`."""
    set_clock(home)
    return {
        "LD_PRELOAD": str(library()),
        "FAKETIME_TIMESTAMP_FILE": str(home / _FILE),
        "FAKETIME_CACHE_DURATION": "1",  # else the file is opened at each call, a fifth of a small node's CPU time
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }


def set_clock(home: Path, offset: float = 0.0, drift: float = 0.0) -> None:
    """Set a node's clock wrong by ``offset`` seconds, running ``drift`` too fast from its start on (0.01: 1 %)."""
    speed = f" x{1 + drift:g}" if drift else ""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = home / f"{_FILE}.new"
    new.write_text(f"{offset:+f}{speed}\n")
    new.replace(home / _FILE)  # atomic: the node may be reading it

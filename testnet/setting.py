"""The setting of a measurement: command, date and machine. No figure is published without it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from datetime import UTC, datetime


def setting() -> dict[str, str | int | float]:
    """Return the present setting; call it before measuring, so that the load is only from other processes."""
    return {
        "command": shlex.join(["farandole", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count() or 1,
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB",
        "load at the start": round(os.getloadavg()[0], 1),
        "system": platform.platform(terse=True),
        "Python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }

"""By which command, when and on what something was measured: nothing is published without it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from datetime import UTC, datetime


def setting() -> dict[str, str | int | float]:
    """As of now; taken before measuring, as the load is what others make of the machine."""
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

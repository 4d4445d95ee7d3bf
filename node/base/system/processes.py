"""Other processes of this machine."""

from __future__ import annotations

import os
import sys


def may_exist(pid: int) -> bool:
    """Return whether a process with this id may exist. True on Windows, where the check would end the process."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True

"""Other processes of this machine."""

from __future__ import annotations

import os
import sys


def may_exist(pid: int) -> bool:
    """Whether there is one of this number, as far as it can be asked. On Windows to ask is to end it: always."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True

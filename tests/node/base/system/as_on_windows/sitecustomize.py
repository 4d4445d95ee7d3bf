"""Makes a process treat files as Windows does: an open file is not removed, renamed, or replaced by another.

Python runs this at its start if this folder is in PYTHONPATH. A file counts as open if this process, its parent or its
children have it open; some of these are the node's other process. Denied calls are written to the file that DENIED_LOG
names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_LOG = os.environ.get("DENIED_LOG", os.devnull)


def _kin() -> Iterator[int]:
    yield os.getpid()
    yield os.getppid()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (task / "children").read_text().split())


def _is_open(path: str) -> bool:
    try:
        sought = os.stat(path)
    except OSError:
        return False
    for pid in _kin():
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.path.samestat(descriptor.stat(), sought):
                        return True
    return False


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    count = {"os.remove": 1, "os.rename": 2}.get(event, 0)
    for path in arguments[:count]:
        if isinstance(path, str | os.PathLike) and _is_open(os.fspath(path)):
            with open(_LOG, "a", encoding="utf-8") as log:
                log.write(f"{event} {path}\n")
            raise PermissionError(
                errno.EACCES, "The process cannot access the file because it is being used", str(path)
            )


if os.environ.get("DENIED_LOG"):
    sys.addaudithook(_refuse)

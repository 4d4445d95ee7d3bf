"""Atomic and durable files: complete or absent, whenever the machine stops."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Buffer

TEMPORARY_SUFFIX: Final = ".tmp"


class WholeFile(FileIO):
    """An unbuffered file whose `write` writes all of its argument."""

    def write(self, data: Buffer) -> int:
        """Write all of ``data`` and return its size in bytes. A nearly full disk writes a part and refuses the rest."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            rest = rest[super().write(rest) :]
        return size


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[WholeFile]:
    """Yield a new file that replaces ``path`` when the block ends, once it is durable.

    Until then it has a unique temporary name. If fsync fails, the file is discarded: a second fsync may succeed though
    the unwritten data is lost (Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020).
    Raises `OSError`. The old file is then still at ``path``; the new file is there if only the folder's fsync failed.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX, dir=path.parent)
    temporary = Path(name)
    try:
        with WholeFile(descriptor, "w") as file:
            yield file
            sync_file(descriptor)
        temporary.replace(path)
    except BaseException:  # for any exception: half a file is useless
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(descriptor: int) -> None:
    """Make what was written to a file durable; raises `OSError`, after which it must not be called again for this file.

    On macOS fsync returns when the drive has the data, and the drive loses unwritten data with its power (fsync(2)
    there). `F_FULLFSYNC` makes the drive write it, where the file system supports that.
    """
    if sys.platform == "darwin":
        import fcntl

        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOTTY, errno.EINVAL):
                raise
        else:
            return
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Make creations, renames and removals in a folder durable; raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)

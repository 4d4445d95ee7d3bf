"""Files that are whole or not there, whenever the machine stops."""

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
    """Without a buffer, and writes all that it is given."""

    def write(self, data: Buffer) -> int:
        """Returns its size in bytes. A disk that is almost full takes some of it first, and then refuses the rest."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            rest = rest[super().write(rest) :]
        return size


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[WholeFile]:
    """A new file, which takes its place at ``path`` when the block ends, once it is on the disk for good.

    Until then it has a name that no other ever had. Where making it durable fails, it is given up: asked again, the
    system may say that all is well, though what it could not write is lost (Rebello et al., "Can Applications Recover
    from fsync Failures?", USENIX ATC 2020). Raises `OSError`. Then what was at ``path`` is there still; or the new
    file, if the folder alone could not be made durable.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX, dir=path.parent)
    temporary = Path(name)
    try:
        with WholeFile(descriptor, "w") as file:
            yield file
            sync_file(descriptor)
        temporary.replace(path)
    except BaseException:  # whatever it is: half a file is of use to nobody
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(descriptor: int) -> None:
    """Make what was written to it durable; raises `OSError`, after which it is not to be asked again.

    On macOS fsync is done when the drive has the data, which loses with its power what it has not written itself
    (fsync(2) there); where the file system can tell it to, it is told.
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
    """Make what was created, renamed and removed in it durable; raises `OSError`.

    Windows lets nobody do so, and NTFS keeps a journal of it.
    """
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)

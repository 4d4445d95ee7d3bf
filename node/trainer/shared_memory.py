"""Memory that the mesh process and the trainer process share: an unlinked file, inherited as a descriptor.

An unlinked file cannot be left behind: the kernel frees it with its last user, kill -9 included, which named shared
memory does not promise. On Linux it is a memfd and never touches a disk.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def open_shared_memory(name: str) -> Iterator[int]:
    """An empty shared file as a descriptor; `map_shared_memory` gives it its size."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(f"farandole-{name}")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def map_shared_memory(descriptor: int, size: int) -> mmap.mmap:
    """Map ``size`` bytes, growing the file if it is smaller; at least one page is mapped."""
    size = max(size, mmap.PAGESIZE)
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size)

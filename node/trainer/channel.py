"""What carries commands and data between a node and its trainer process: a socket pair, and memory that both share.

The memory is a file without a name, mapped by both. Nothing can be left behind: the kernel frees it with its last user,
kill -9 included. On Linux it is a memfd, and never touches a disk.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

from farandole.protocol.trainer.trainer_messages import MAX_MESSAGE_BYTES, Command, Report, decode_command
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.messagepack import encode as encode_body

# More than any command but one with the hashes of a checkpoint.
READ_BYTES = 65_536
COUNTER_BYTES: Final = 8
_COUNT_BITS: Final = 48  # a contribution has less than 2**44 bytes
MAX_EPOCHS: Final = 1 << (64 - _COUNT_BITS)
_MEMFD_NAME: Final = "farandole-"


def encode(message: Command | Report) -> bytes:
    """Encode a message, with its length in front."""
    return frame(encode_body(message), MAX_MESSAGE_BYTES)


class TrainerSocket:
    """The trainer's end of the socket pair: blocking, with a look ahead between inner steps."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._parser = FrameParser(MAX_MESSAGE_BYTES)
        self._sending = threading.Lock()  # on a GPU, a thread encodes and reports it

    def send(self, report: Report) -> None:
        """Send a report. Raises `BrokenPipeError` when the mesh process is gone."""
        with self._sending:
            self._connection.sendall(encode(report))

    def receive(self) -> Command:
        """Return the next command. Raises `EOFError` when the mesh process is gone."""
        while (payload := self._next_frame()) is None:
            part = self._connection.recv(READ_BYTES)
            if not part:
                raise EOFError("the mesh process is gone")
            self._parser.receive_data(part)
        return decode_command(payload)

    def poll(self, wait_seconds: float | None) -> Command | None:
        """Return a command that comes within ``wait_seconds`` (None: no limit)."""
        if (payload := self._next_frame()) is not None:
            return decode_command(payload)
        return self.receive() if select.select([self._connection], [], [], wait_seconds)[0] else None

    def _next_frame(self) -> bytes | None:
        try:
            return self._parser.next_frame()
        except RemoteProtocolError as error:
            raise EOFError("the mesh process sent a message that is too long") from error


# Shared memory


@contextlib.contextmanager
def open_shared_memory(name: str) -> Iterator[int]:
    """Open an empty shared file, which a child process may inherit; yields its descriptor.

    `map_shared_memory` gives it its size. Raises `OSError`.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create(f"{_MEMFD_NAME}{name}")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def place_for_others(descriptor: int) -> str:
    """Return the path at which another process of this user can open a descriptor of this one. Only Linux has it."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class Count(NamedTuple):
    """The content of a `SharedCounter`."""

    epoch: int
    value: int


class SharedCounter:
    """A number in the last eight bytes of shared memory: how many of the first ones are ready. One process stores it.

    It is aligned and stored in one piece: a reader sees the old number or the new one, not a mixture. An *epoch* (of 16
    bits) is stored with it: it names what is counted, so that an old number is not taken for a new one.
    The bytes that it counts are written before it, and read after it, on every processor: ARM may reorder the two
    accesses, so both ends pass a barrier between them.
    """

    def __init__(self, memory: mmap.mmap | bytearray | memoryview) -> None:
        """``memory``: writable, of `counted_size` bytes."""
        self._word = memoryview(memory)[-COUNTER_BYTES:].cast("Q")
        self._lock = threading.Lock()

    def store(self, epoch: int, count: int) -> None:
        """Publish a count of an epoch."""
        self._pass_barrier()
        self._word[0] = (epoch % MAX_EPOCHS) << _COUNT_BITS | count

    def read(self) -> Count:
        """Return the count that was published last, and its epoch."""
        word = self._word[0]
        self._pass_barrier()
        return Count(word >> _COUNT_BITS, word & ((1 << _COUNT_BITS) - 1))

    def _pass_barrier(self) -> None:
        """Order the accesses before and after: a lock is released (C11 release), then taken (C11 acquire)."""
        for _ in range(2):
            with self._lock:
                pass

    def count_of(self, epoch: int) -> int:
        """Return the count of this epoch; 0 if another epoch's count is stored."""
        stored, count = self.read()
        return count if stored == epoch % MAX_EPOCHS else 0


def counted_size(size: int) -> int:
    """Return the size of memory with ``size`` bytes and a `SharedCounter`."""
    return -(-size // COUNTER_BYTES) * COUNTER_BYTES + COUNTER_BYTES


def map_shared_memory(place: int | str, size: int) -> mmap.mmap:
    """Map ``size`` bytes of a descriptor or a `place_for_others`, growing it if it is smaller; at least one page.

    Raises `OSError`.
    """
    with contextlib.ExitStack() as held:
        if isinstance(place, str):
            if not os.readlink(place).startswith(f"/memfd:{_MEMFD_NAME}"):
                raise FileNotFoundError(f"{place} is no shared memory: the node is in another PID namespace")
            place = os.open(place, os.O_RDWR)
            held.callback(os.close, place)
        size = max(size, mmap.PAGESIZE)
        if os.fstat(place).st_size < size:
            os.ftruncate(place, size)
        return mmap.mmap(place, size)

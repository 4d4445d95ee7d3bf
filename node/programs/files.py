"""Files that a program shares, and how another one fetches them (`farandole.protocol.programs.shared_files`)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from farandole.protocol.programs.shared_files import (
    BLOCK_BYTES,
    BLOCK_NUMBER,
    INDEX_QUESTION,
    MAX_BLOCKS,
    MAX_REQUESTED,
    FileIndex,
    decode_index,
    stream_name,
)
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.messagepack import encode

from .stream import MeshError, MeshStream

# A program that fetches asks for a block at least this often, or is gone.
IDLE_SECONDS: Final = 120.0

Progress = Callable[[int, int], None]
"""Called with the bytes so far, and all of them."""


class OfferedFile:
    """A file that this program shares. It must not change meanwhile: whoever fetches notices, and stops."""

    def __init__(self, path: Path, progress: Progress) -> None:
        """Read the whole file once. Raises `OSError`, and `ValueError` if it is too large."""
        self._path = path
        hashes, size, total = [], 0, path.stat().st_size
        if total > MAX_BLOCKS * BLOCK_BYTES:
            raise ValueError(f"{path} has {total} bytes; the most is {MAX_BLOCKS * BLOCK_BYTES}")
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                hashes.append(hashlib.sha256(block).digest())
                size += len(block)
                progress(size, total)
        self._index = FileIndex(size, tuple(hashes))
        self.id = self._index.id
        self.name = stream_name(self.id)

    def serve(self, streams: Iterable[MeshStream]) -> None:
        """Serve all peers that come, each in a thread of its own."""
        for stream in streams:
            threading.Thread(target=self._serve, args=(stream,), name="farandole-file", daemon=True).start()

    def _serve(self, stream: MeshStream) -> None:
        # A peer that is gone, or asks for what there is not, or a file that has: the stream breaks off.
        with contextlib.suppress(MeshError, TimeoutError, OSError), stream, self._path.open("rb") as file:
            while (question := stream.receive(IDLE_SECONDS)) is not None:
                if question == INDEX_QUESTION:
                    stream.send(encode(self._index), IDLE_SECONDS)
                    continue
                number = _block_number(question, self._index)
                file.seek(number * BLOCK_BYTES)
                stream.send(file.read(self._index.block_bytes(number)), IDLE_SECONDS)


def _block_number(question: bytes, index: FileIndex) -> int:
    if len(question) != BLOCK_NUMBER.size or (number := BLOCK_NUMBER.unpack(question)[0]) >= len(index.hashes):
        raise MeshError("this is no number of a block")
    return int(number)


def fetch(
    file_id: str,
    path: Path,
    providers: Sequence[str],
    open_stream: Callable[[str, str], MeshStream],
    progress: Progress,
    timeout: float,
) -> None:
    """Fetch a file from one provider after the other. Raises `MeshError` if all fail; each one's reason is in it."""
    part = path.with_name(path.name + ".part")
    reasons = []
    for peer in providers:
        try:
            with open_stream(peer, stream_name(file_id)) as stream:
                _fetch(file_id, part, stream, progress, timeout)
        except (MeshError, RemoteProtocolError, TimeoutError) as error:
            reasons.append(f"{peer}: {error or 'it is silent'}")
        else:
            os.replace(part, path)
            return
    raise MeshError("; ".join(reasons) or f"no member that can be reached shares {file_id}")


def _fetch(file_id: str, part: Path, stream: MeshStream, progress: Progress, timeout: float) -> None:
    """Fetch what is missing in the partial file."""
    stream.send(INDEX_QUESTION, timeout)
    index = decode_index(_answer(stream, timeout), file_id)
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    with open(descriptor, "r+b") as file:
        missing = deque(
            number for number in range(len(index.hashes)) if not _is_block(file.read(BLOCK_BYTES), index, number)
        )
        file.truncate(index.size)
        requested: deque[int] = deque()
        done = index.size - sum(map(index.block_bytes, missing))
        progress(done, index.size)
        while missing or requested:
            while missing and len(requested) < MAX_REQUESTED:
                stream.send(BLOCK_NUMBER.pack(missing[0]), timeout)
                requested.append(missing.popleft())
            number = requested.popleft()
            block = _answer(stream, timeout)
            if not index.is_block(number, block):
                raise RemoteProtocolError(f"its block {number} is not the file's")
            file.seek(number * BLOCK_BYTES)
            file.write(block)
            done += len(block)
            progress(done, index.size)
        file.flush()
        os.fsync(file.fileno())


def _is_block(data: bytes, index: FileIndex, number: int) -> bool:
    return len(data) == index.block_bytes(number) and index.is_block(number, data)


def _answer(stream: MeshStream, timeout: float) -> bytes:
    if (answer := stream.receive(timeout)) is None:
        raise MeshError("it ends before the file does")
    return answer

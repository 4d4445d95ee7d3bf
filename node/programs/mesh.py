"""`Mesh`: a node's mesh, for programs of its owner with protocols of their own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol, Self

import msgspec

from farandole.protocol.programs import (
    BLOCK_BYTES,
    BLOCK_NUMBER,
    INDEX_QUESTION,
    MAX_BLOCKS,
    MAX_REQUESTED,
    MAX_WAIT_SECONDS,
    Answer,
    FileIndex,
    FindNotes,
    FindProviders,
    HoldNote,
    Listen,
    Open,
    Provide,
    Request,
    Take,
    decode_index,
    stream_name,
)
from farandole.protocol.state.entries import MAX_NOTE_BYTES, NoteName
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.messagepack import encode

from ..base.control import NoNodeError, call
from ..base.settings import NodeSettings, default_home
from ..base.system.sockets import connect
from .stream import MeshError, MeshStream, ask

# Files that a program shares, and how another one fetches them (`farandole.protocol.programs`).

# A program that fetches asks for a block at least this often, or is gone.
IDLE_SECONDS: Final = 120.0

Progress = Callable[[int, int], None]
"""Called with the bytes so far, and all of them."""


def index_of(path: Path, progress: Progress) -> FileIndex:
    """Read a whole file once. Raises `OSError`, and `ValueError` if it is too large."""
    hashes, size, total = [], 0, path.stat().st_size
    if total > MAX_BLOCKS * BLOCK_BYTES:
        raise ValueError(f"{path} has {total} bytes; the most is {MAX_BLOCKS * BLOCK_BYTES}")
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            hashes.append(hashlib.sha256(block).digest())
            size += len(block)
            progress(size, total)
    return FileIndex(size, tuple(hashes))


def _serve_file(path: Path, index: FileIndex, streams: Iterable[MeshStream]) -> None:
    """Serve a file to all peers that come, each in a thread of its own; it must not change meanwhile."""

    def serve(stream: MeshStream) -> None:
        # A peer that is gone, or asks for what there is not, or a file that has: the stream breaks off.
        with contextlib.suppress(MeshError, TimeoutError, OSError), stream, path.open("rb") as file:
            while (question := stream.receive(IDLE_SECONDS)) is not None:
                if question == INDEX_QUESTION:
                    stream.send(encode(index), IDLE_SECONDS)
                    continue
                if len(question) != BLOCK_NUMBER.size or (number := int(BLOCK_NUMBER.unpack(question)[0])) >= len(
                    index.hashes
                ):
                    raise MeshError("this is no number of a block")
                file.seek(number * BLOCK_BYTES)
                stream.send(file.read(index.block_bytes(number)), IDLE_SECONDS)

    for stream in streams:
        threading.Thread(target=serve, args=(stream,), name="farandole-file", daemon=True).start()


def _fetch(file_id: str, part: Path, stream: MeshStream, progress: Progress, timeout: float) -> None:
    """Fetch what is missing in the partial file."""

    def answer() -> bytes:
        if (answered := stream.receive(timeout)) is None:
            raise MeshError("it ends before the file does")
        return answered

    stream.send(INDEX_QUESTION, timeout)
    index = decode_index(answer(), file_id)
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
    with open(descriptor, "r+b") as file:
        missing = deque(
            number for number in range(len(index.hashes)) if not index.is_block(number, file.read(BLOCK_BYTES))
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
            block = answer()
            if not index.is_block(number, block):
                raise RemoteProtocolError(f"its block {number} is not the file's")
            file.seek(number * BLOCK_BYTES)
            file.write(block)
            done += len(block)
            progress(done, index.size)
        file.flush()
        os.fsync(file.fileno())


# The node answers at once, unless it dials or searches; then it has its own limit.
LOCAL_SECONDS: Final = 30.0
OPEN_SECONDS: Final = 30.0
# A message must arrive within this time after its stream was opened.
MESSAGE_SECONDS: Final = 60.0
# Messages that have arrived and not been taken: further senders wait.
MAX_UNTAKEN: Final = 64
# Of such a message: all streams of a node together, each with one, hold 64 MiB.
MAX_SENT_BYTES: Final = 256 * 1024


def _checked(name: str) -> str:
    try:
        return msgspec.convert(name, NoteName)
    except msgspec.ValidationError:
        raise MeshError(f"a name has 1 to 48 letters, digits and . _ / -, and {name!r} has others") from None


class Run(Protocol):
    """A run that this process has joined, such as a `NoLoCo`."""

    home: Path


class MeshListener:
    """Accepts streams under one name while it is open: ``for stream in listener``; made by `Mesh.listen`."""

    def __init__(self, node: MeshStream, take: Callable[[float | None], MeshStream]) -> None:
        """``node``: the connection that holds the name; ``take``: waits for a stream, for so many seconds."""
        self._node = node
        self._take = take

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def accept(self, timeout: float | None = None) -> MeshStream:
        """Wait for a peer's stream; raise `MeshError` if the listener is closed, and `TimeoutError`."""
        if self._node.is_closed:  # another program may listen to the name by now
            raise MeshError("this listener is closed")
        return self._take(timeout)

    def __iter__(self) -> Iterator[MeshStream]:
        """Yield streams until `close`."""
        with contextlib.suppress(MeshError):
            while True:
                yield self.accept()

    def close(self) -> None:
        """Accept no more, from any thread."""
        self._node.close()


class Mesh:
    """The mesh of a running node, for programs with protocols of their own: messages, streams, files and notes.

        with farandole.Mesh() as mesh:
            for peer in mesh.members():
                mesh.send(peer, "chat", b"hello")

    Names of protocols and notes are the programs' own: letters, digits and ``. _ / -``, 48 characters at most. Peers
    are named by their peer ids, and are who they say they are. In a run of invited members they are members; in an open
    run they are whoever finds it. What they say is their own word.

    ``run``: the `NoLoCo` of this process. Without it, ``home`` is the node's data directory, by default the usual one.
    Bytes count towards the node's bandwidth caps. Raises `MeshError` if no node runs there.
    """

    def __init__(self, run: Run | None = None, *, home: str | Path | None = None) -> None:
        self.home = run.home if run is not None else Path(home) if home is not None else default_home()
        self._notes: dict[str, MeshStream] = {}
        self._held: list[MeshStream] = []
        status = self.status(0)
        self.peer_id: str = status["peer_id"]
        """This node's peer id."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close listeners and shared files, and withdraw notes; streams stay open."""
        for node in (*self._held, *self._notes.values()):
            node.close()
        self._held.clear()
        self._notes.clear()

    def status(self, max_members: int | None = None) -> dict[str, Any]:
        """Return the JSON of ``farandole status``, with at most ``max_members`` members."""
        try:
            answer: dict[str, Any] = call(
                self.home, "status", **({} if max_members is None else {"max_members": max_members})
            )
        except NoNodeError as error:
            raise MeshError(str(error)) from error
        return answer

    def members(self) -> list[str]:
        """Return the peer ids of the other present members."""
        members = self.status()["members"]
        return [member["peer_id"] for member in members if not (member["has_left"] or member["is_self"])]

    # Streams and messages

    def open(self, peer: str, name: str, timeout: float = OPEN_SECONDS) -> MeshStream:
        """Open a stream to a peer whose program listens to ``name``. Raises `MeshError`."""
        return self._stream(Open(peer, _checked(name), min(timeout, MAX_WAIT_SECONDS)), timeout + LOCAL_SECONDS)

    def listen(self, name: str) -> MeshListener:
        """Accept streams that peers open under ``name``. Raises `MeshError` if another program here listens to it."""
        held = self._hold(Listen(_checked(name)))
        return MeshListener(held, lambda timeout: self._stream(Take(name), timeout))

    def send(self, peer: str, name: str, message: bytes, timeout: float = OPEN_SECONDS) -> None:
        """Send one message of at most 256 KiB; return when the peer's program has taken it from `messages`.

        ``timeout`` in seconds for each step. Raises `MeshError`, and `TimeoutError`.
        """
        if len(message) > MAX_SENT_BYTES:
            raise ValueError(f"a message of {len(message)} bytes: the most is {MAX_SENT_BYTES}; open a stream instead")
        with self.open(peer, name, timeout) as stream:
            stream.send(message, timeout)
            stream.end()
            if stream.receive(timeout) is not None:
                raise MeshError(f"{peer} answers under the name {name}: its program expects a stream, not messages")

    def messages(self, name: str) -> Iterator[tuple[str, bytes]]:
        """Return the messages that peers `send` under ``name`` from now on, each with its sender's peer id.

        They end with `close`. Raises `MeshError` if another program here listens to ``name``.
        """
        arrived: queue.Queue[tuple[MeshStream, bytes] | None] = queue.Queue(MAX_UNTAKEN)
        listener = self.listen(name)

        def read(stream: MeshStream) -> None:
            with contextlib.suppress(MeshError, TimeoutError):
                if (message := stream.receive(MESSAGE_SECONDS, MAX_SENT_BYTES)) is not None:
                    arrived.put((stream, message))
                    return
            stream.close()

        def accept() -> None:  # a peer that is slow to send holds up no other's message
            for stream in listener:
                threading.Thread(target=read, args=(stream,), name="farandole-message", daemon=True).start()
            arrived.put(None)

        def take() -> Iterator[tuple[str, bytes]]:
            try:
                while (found := arrived.get()) is not None:
                    stream, message = found
                    with contextlib.suppress(MeshError, TimeoutError):
                        stream.end()  # says that the message was taken
                    stream.close()
                    yield stream.peer, message
            finally:
                listener.close()

        threading.Thread(target=accept, name="farandole-messages", daemon=True).start()
        return take()

    # Notes in the run state

    def note(self, name: str, value: bytes) -> None:
        """Publish a note in the run state, or replace it.

        It reaches all members within seconds, and is withdrawn when the mesh is closed or this process ends. A note has
        at most 448 bytes; a node has at most 8 notes, with some 500 bytes in all, names included. Raises `MeshError` if
        there is no room.
        """
        if not isinstance(value, bytes):
            raise TypeError(f"a note is bytes, not {type(value).__name__}")
        if len(value) > MAX_NOTE_BYTES:
            raise MeshError(f"a note has at most {MAX_NOTE_BYTES} bytes, and {name} would have {len(value)}")
        request = HoldNote(_checked(name), value)
        if (held := self._notes.get(name)) is not None:
            ask(held, request, LOCAL_SECONDS)
        else:
            self._notes[name], _ = self._ask(request, LOCAL_SECONDS)

    def notes(self, name: str) -> dict[str, bytes]:
        """Return the notes of this name of all present members, this node's included, by peer id."""
        node, found = self._ask(FindNotes(_checked(name)), LOCAL_SECONDS)
        node.close()
        return found.notes

    # Files

    def share(self, path: str | Path, progress: Progress = lambda done, total: None) -> str:
        """Offer a file to everybody in the run until the mesh is closed; return its id, with which others `fetch` it.

        ``progress`` is called with the bytes read so far, and the file's. Raises `OSError`.
        """
        path = Path(path)
        index = index_of(path, progress)
        listener = self.listen(stream_name(index.id))
        arguments = path, index, listener
        threading.Thread(target=_serve_file, args=arguments, name="farandole-file", daemon=True).start()
        self._hold(Provide(bytes.fromhex(index.id)))
        return index.id

    def fetch(
        self,
        file_id: str,
        path: str | Path,
        progress: Progress = lambda done, total: None,
        timeout: float = OPEN_SECONDS,
    ) -> None:
        """Fetch the file of this id to ``path``, from any member that shares it.

        Each block is checked. A fetch that is interrupted, also by an exception of ``progress``, keeps its blocks in
        ``path`` with ``.part`` behind its name, and goes on from there. ``progress`` is called with the bytes that are
        there, and the file's. ``timeout``: seconds that a peer may take to answer, or for a mebibyte.

        Raises `MeshError` if no peer gives the file, and `OSError`.
        """
        if not re.fullmatch("[0-9a-f]{64}", file_id):
            raise MeshError(f"{file_id!r} is no file id: give the 64 hexadecimal digits that `share` has returned")
        path, seconds = Path(path), min(timeout, MAX_WAIT_SECONDS)
        node, found = self._ask(FindProviders(bytes.fromhex(file_id), seconds), timeout + LOCAL_SECONDS)
        node.close()
        part, reasons = path.with_name(path.name + ".part"), []
        for peer in found.peers:
            try:
                with self.open(peer, stream_name(file_id), timeout) as stream:
                    _fetch(file_id, part, stream, progress, timeout)
            except (MeshError, RemoteProtocolError, TimeoutError) as error:
                reasons.append(f"{peer}: {error or 'it is silent'}")
            else:
                os.replace(part, path)
                return
        raise MeshError("; ".join(reasons) or f"no member that can be reached shares {file_id}")

    # Requests

    def _stream(self, request: Request, timeout: float | None) -> MeshStream:
        stream, answer = self._ask(request, timeout)
        stream.peer, stream.path = answer.peer, answer.path
        return stream

    def _hold(self, request: Request) -> MeshStream:
        node, _ = self._ask(request, LOCAL_SECONDS)
        self._held.append(node)
        return node

    def _ask(self, request: Request, timeout: float | None) -> tuple[MeshStream, Answer]:
        """Make a request over a connection of its own; return both."""
        try:
            node = MeshStream(connect(NodeSettings(home=self.home).programs, LOCAL_SECONDS))
        except OSError as error:
            why = "it is in no run yet, has ended, or is a relay: see farandole status"
            raise MeshError(f"the node in {self.home} serves no programs: {why}") from error
        try:
            return node, ask(node, request, timeout)
        except BaseException:  # Ctrl-C too: nobody else has the connection
            node.close()
            raise

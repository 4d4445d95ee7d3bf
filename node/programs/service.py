"""The node's side of farandole.Mesh: streams, notes and providers for programs of this node's owner.

A program's connection carries one stream to a peer, or one thing that holds while it is open
(`farandole.protocol.programs`). So a program that dies leaves nothing behind. The node reads nothing
of what programs say to each other; it applies the caps: their bytes wait for the owner's limits, and for the run's own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from farandole.protocol.mesh.kademlia import file_key
from farandole.protocol.programs import (
    LENGTH,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    PROGRAMS_PROTOCOL,
    Answer,
    FindNotes,
    FindProviders,
    HoldNote,
    Listen,
    Open,
    Provide,
    Request,
    Take,
    decode_request,
)
from farandole.protocol.state.entries import MAX_NOTES, RULES, Kind, Payload, ProgramNotes, payload_size
from farandole.protocol.wire.errors import FarandoleError, RemoteProtocolError
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.identity import peer_id_of, public_key_of, short_name
from farandole.protocol.wire.messagepack import encode

from ..base.bandwidth import Shaper, Shaping
from ..base.nurseries import open_service_nursery
from ..base.streams import counted, read_exactly
from ..base.system.sockets import bound_socket, serve_door
from ..mesh.host import Host
from ..mesh.yamux import Libp2pStream

# Each is a socket, and two pumps while it carries a stream; programs have a handful.
MAX_CONNECTIONS: Final = 256
# Streams that one peer has open at once, taken or not: a peer cannot use up all connections.
MAX_STREAMS_OF_PEER: Final = 16
# Unread bytes of a stream: at 100 ms there and back this still allows 80 Mbit/s, and a peer's streams hold 16 MiB.
MAX_UNREAD_BYTES: Final = 1024 * 1024
# Streams under one name that no connection has taken, and how long each may wait: a program takes the next one as soon
# as it has handed the last one on.
MAX_UNTAKEN: Final = 64
TAKE_SECONDS: Final = 10.0
# A program's answer, and a request after a connection, are at most a few kilobytes between two processes.
LOCAL_SECONDS: Final = 10.0
# Files that the programs of one node provide: each is announced in the DHT again and again.
MAX_PROVIDED: Final = 64
# A note is renewed before its entry expires.
RENEW_SECONDS: Final = RULES[Kind.NOTES].ttl / 2


_Call = tuple[Libp2pStream, trio.Event]
"""A stream that a peer has opened, and what is set when it is over."""


@dataclass(eq=False)
class ProgramService:
    """Serves the programs of one node; made by `open_programs`.

    ``publish``: publishes an entry of this node in the run state; ``find_notes``: returns the notes of present members,
    by their public keys.
    """

    _host: Host
    _run_id: bytes
    _shaping: Shaping
    _publish: Callable[[Kind, int, Payload], Awaitable[None]]
    _find_notes: Callable[[], Mapping[bytes, Mapping[str, bytes]]]
    _notes: dict[str, bytes] = field(default_factory=dict)
    _has_new_notes: trio.Event = field(default_factory=trio.Event)
    _provided: set[bytes] = field(default_factory=set)
    _calls: dict[str, trio.MemoryReceiveChannel[_Call]] = field(default_factory=dict)
    """The names under which programs listen, and the streams of peers that no connection has taken."""
    _num_streams: Counter[bytes] = field(default_factory=Counter)

    async def serve(self, connection: trio.SocketStream) -> None:
        """Serve a program's connection, to its end. Raises `trio.BrokenResourceError` if the program is gone."""
        try:
            with trio.fail_after(LOCAL_SECONDS):
                request = await _receive(connection)
            match request:
                case Open():
                    await self._open(connection, request)
                case Listen():
                    await self._listen(connection, request.name)
                case Take(name):
                    await self._take(connection, name)
                case HoldNote():
                    await self._hold_note(connection, request)
                case FindNotes(name):
                    found = self._find_notes().items()
                    notes = {peer_id_of(author): all_of[name] for author, all_of in found if name in all_of}
                    await _say(connection, Answer(notes=notes))
                case Provide(file):
                    await self._provide(connection, file)
                case FindProviders(file, seconds):
                    providers = await self._host.dht.find_providers(file_key(self._run_id, file), seconds)
                    await _say(connection, Answer(peers=[peer_id_of(peer) for peer, _ in providers]))
        except FarandoleError as error:
            await _say(connection, Answer(str(error)))

    # Streams

    async def _open(self, connection: trio.SocketStream, request: Open) -> None:
        peer = public_key_of(request.peer)
        if peer == self._host.author:
            raise FarandoleError("this is the node's own peer id: programs on one machine need no mesh between them")
        self._require_budget()
        stream = await self._host.open_stream(peer, PROGRAMS_PROTOCOL + request.name, request.seconds)
        try:
            await _say(connection, Answer(peer=request.peer, path=self._host.connections.path(peer)))
            await self._splice(connection, stream)
            await stream.aclose()
        finally:
            stream.reset()

    async def _listen(self, connection: trio.SocketStream, name: str) -> None:
        if name in self._calls:
            raise FarandoleError(f"another program of this node listens to {name}")

        async def hand_on(stream: Libp2pStream) -> None:
            """Hold a peer's stream until a connection of the program has carried it."""
            if self._num_streams[stream.peer] >= MAX_STREAMS_OF_PEER:
                raise RemoteProtocolError(
                    f"{short_name(stream.peer)} has {MAX_STREAMS_OF_PEER} streams to programs already"
                )
            if calling.statistics().tasks_waiting_send >= MAX_UNTAKEN:
                raise trio.TooSlowError("the listening program takes no streams")
            over = trio.Event()
            with counted(self._num_streams, stream.peer):
                with trio.fail_after(TAKE_SECONDS):
                    await calling.send((stream, over))
                await over.wait()

        calling, self._calls[name] = trio.open_memory_channel[_Call](0)
        self._host.set_handler(PROGRAMS_PROTOCOL + name, hand_on)
        try:
            await _say(connection, Answer())
            await _await_end(connection)
        finally:
            self._host.handlers.remove(PROGRAMS_PROTOCOL + name)
            self._calls.pop(name).close()

    async def _take(self, connection: trio.SocketStream, name: str) -> None:
        """Wait for a peer's stream, for as long as the program does, and carry it."""
        call: _Call | None = None
        try:
            if (calls := self._calls.get(name)) is not None:
                async with open_service_nursery() as nursery:
                    nursery.start_soon(_await_end, connection, nursery.cancel_scope)
                    with contextlib.suppress(trio.ClosedResourceError):
                        call = await calls.receive()
            if call is None:
                raise FarandoleError(f"this program does not listen to {name} any more")
            stream, _ = call
            path = self._host.connections.path(stream.peer)
            await _say(connection, Answer(peer=peer_id_of(stream.peer), path=path))
            await self._splice(connection, stream)
        finally:
            if call is not None:
                call[1].set()

    async def _splice(self, connection: trio.SocketStream, stream: Libp2pStream) -> None:
        """Carry bytes both ways until either end closes; reset the stream if either breaks off."""
        stream.is_bulk = True
        stream.state.max_window = MAX_UNREAD_BYTES

        async def carry(source: trio.abc.ReceiveStream, sink: trio.abc.SendStream, shaper: Shaper) -> None:
            while data := await source.receive_some(shaper.quantum):
                self._require_budget()
                await shaper.wait(len(data))
                await sink.send_all(data)
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(carry, connection, stream, self._shaping.up)
                nursery.start_soon(carry, stream, connection, self._shaping.down)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, FarandoleError):
            stream.reset()

    def _require_budget(self) -> None:
        if not self._shaping.may_spend(self._shaping.up.quantum):
            raise FarandoleError("this node has spent its month's traffic for now (--monthly-traffic)")

    # Notes and providers

    async def _hold_note(self, connection: trio.SocketStream, request: HoldNote) -> None:
        name = request.name
        if name in self._notes:
            raise FarandoleError(f"another program of this node has a note of the name {name}")
        try:
            while True:
                notes, limit = {**self._notes, name: request.value}, RULES[Kind.NOTES].max_bytes
                if len(notes) <= MAX_NOTES and payload_size(ProgramNotes(tuple(notes.items()))) <= limit:
                    self._notes = notes
                    self._has_new_notes.set()
                    await _say(connection, Answer())
                else:
                    why = f"a node's notes are at most {MAX_NOTES}, of {limit} bytes in all, names included"
                    await _say(connection, Answer(why))  # the note that this connection holds stays
                following = await _receive(connection)
                if not isinstance(following, HoldNote) or following.name != name:
                    raise FarandoleError("this connection holds one note")
                request = following
        finally:
            if self._notes.pop(name, None) is not None:
                self._has_new_notes.set()

    async def keep_notes(self) -> None:
        """Publish the notes when they change, and before they expire, until cancelled."""
        published: dict[str, bytes] = {}
        while True:
            with trio.move_on_after(RENEW_SECONDS):
                await self._has_new_notes.wait()
            self._has_new_notes = trio.Event()
            if self._notes or published:
                published = dict(self._notes)
                await self._publish(Kind.NOTES, 0, ProgramNotes(tuple(published.items())))

    async def _provide(self, connection: trio.SocketStream, file: bytes) -> None:
        if file in self._provided:
            raise FarandoleError("another program of this node provides this file")
        if len(self._provided) >= MAX_PROVIDED:
            raise FarandoleError(f"a node provides at most {MAX_PROVIDED} files")
        key = file_key(self._run_id, file)
        self._provided.add(file)
        try:
            await self._host.dht.provide(key)
            await _say(connection, Answer())
            await _await_end(connection)
        finally:
            self._host.dht.withdraw(key)
            self._provided.remove(file)


async def _receive(connection: trio.SocketStream) -> Request:
    """Return a program's next request; raise `RemoteProtocolError` at the end, or for anything else."""
    (length,) = LENGTH.unpack(await read_exactly(connection.receive_some, LENGTH.size))
    if length > MAX_REQUEST_BYTES:
        raise FarandoleError(f"a request of {length} bytes; the most is {MAX_REQUEST_BYTES}")
    return decode_request(await read_exactly(connection.receive_some, length))


async def _say(connection: trio.SocketStream, answer: Answer) -> None:
    with trio.fail_after(LOCAL_SECONDS):
        await connection.send_all(frame(encode(answer), MAX_ANSWER_BYTES))


async def _await_end(connection: trio.SocketStream, scope: trio.CancelScope | None = None) -> None:
    """Wait until the program closes its connection; what it still says is no request."""
    with contextlib.suppress(trio.BrokenResourceError):
        while await connection.receive_some(MAX_REQUEST_BYTES):
            pass
    if scope is not None:
        scope.cancel()


@contextlib.asynccontextmanager
async def open_programs(path: Path, service: ProgramService) -> AsyncIterator[None]:
    """Listen at ``path`` for programs of this node's owner within the block; the caller holds the home's lock."""
    with bound_socket(path) as listener:
        async with open_service_nursery() as nursery:
            nursery.start_soon(service.keep_notes)
            await nursery.start(serve_door, listener, service.serve, MAX_CONNECTIONS)
            yield

"""Programs of two nodes' owners use the mesh: real hosts and sockets, with clients in threads as programs are."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.control import serve_control
from farandole.node.base.errors import PeerUnreachableError
from farandole.node.base.settings import NodeSettings
from farandole.node.mesh.host import Host
from farandole.node.mesh.yamux import Libp2pStream
from farandole.node.programs import service as service_module
from farandole.node.programs.mesh import Mesh, MeshListener, index_of
from farandole.node.programs.service import MAX_STREAMS_OF_PEER, ProgramService, open_programs
from farandole.node.programs.stream import MeshError
from farandole.protocol.programs import BLOCK_BYTES, LENGTH, MAX_MESSAGE_BYTES, PROGRAMS_PROTOCOL, Provide, stream_name
from farandole.protocol.state.entries import Kind, Payload, ProgramNotes
from farandole.protocol.wire.messagepack import encode

from ...patience import PATIENCE
from ..hosts import host_at_loopback

T = TypeVar("T")
RUN_ID = b"r" * 32


Nodes = tuple[Host, Host]
Work = tuple[Mesh, MeshListener]
Notes = dict[bytes, dict[str, bytes]]
"""What the nodes of a test have published, by author: the run state that they share."""


@asynccontextmanager
async def node(home: Path, notes: Notes, up: float = 0.0) -> AsyncIterator[Host]:
    """Run a host whose owner's programs find it in ``home``, as a daemon's do."""
    home.mkdir()
    async with host_at_loopback() as host, trio.open_nursery() as nursery:

        async def status(params: dict[str, Any]) -> object:
            members = [{"peer_id": host.peer_id, "has_left": False, "is_self": True}]
            return {"peer_id": host.peer_id, "members": members}

        await nursery.start(serve_control, home / "control.sock", {"status": status})

        async def publish(kind: Kind, index: int, payload: Payload) -> None:
            assert isinstance(payload, ProgramNotes)
            assert (kind, index) == (Kind.NOTES, 0)
            notes[host.author] = dict(payload.notes)

        programs = ProgramService(host, RUN_ID, Shaping.of_mbit(up, 0), publish, lambda: notes)
        async with open_programs(NodeSettings(home=home).programs, programs):
            yield host
        nursery.cancel_scope.cancel()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[tuple[Host, Host]]:
    notes: Notes = {}
    async with node(tmp_path / "a", notes) as a, node(tmp_path / "b", notes) as b:
        await connect(a, b)
        yield a, b


async def connect(a: Host, b: Host) -> None:
    a.dialler.add_addresses(b.author, b.addresses)
    await a.connect(b.author)


async def program(function: Callable[[], T]) -> T:
    """Run a program in a thread, which is left alone when another one has failed."""
    with trio.fail_after(PATIENCE):
        # `abandon_on_cancel` is newer than the stubs of trio that libp2p brings.
        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)  # type: ignore[call-arg]


async def mesh_at(home: Path) -> Mesh:
    return await program(lambda: Mesh(home=home))


async def meet(
    home: Path, begin: Callable[[Mesh], T], serve: Callable[[T], None], call: Callable[[Mesh], None]
) -> None:
    """Run a program at the node b, which begins to listen and then serves, and one at the node a that calls it."""
    listening = threading.Event()

    def serve_at_b() -> None:
        with Mesh(home=home / "b") as mesh:
            begun = begin(mesh)
            listening.set()
            serve(begun)

    def call_from_a() -> None:
        assert listening.wait(PATIENCE)
        with Mesh(home=home / "a") as mesh:
            call(mesh)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(program, serve_at_b)
        nursery.start_soon(program, call_from_a)


@pytest.fixture
async def work(tmp_path: Path, nodes: Nodes) -> AsyncIterator[tuple[Mesh, MeshListener]]:
    """Return a program at the node b that listens to "work"."""
    mesh = await mesh_at(tmp_path / "b")
    yield mesh, await program(lambda: mesh.listen("work"))
    mesh.close()


async def open_work(nodes: Nodes, said: bytes = b"") -> Libp2pStream:
    stream = await nodes[0].open_stream(nodes[1].author, PROGRAMS_PROTOCOL + "work")
    await stream.send_all(said)
    return stream


async def assert_no_room(nodes: Nodes) -> None:
    """Assert that another stream is reset."""
    with trio.fail_after(PATIENCE), pytest.raises((PeerUnreachableError, trio.BrokenResourceError)):
        await (await open_work(nodes)).receive_some()


async def test_streams_carry_messages_both_ways_until_each_side_ends(tmp_path: Path, nodes: Nodes) -> None:
    large = os.urandom(3_000_000)
    heard: list[bytes] = []

    def serve(listener: MeshListener) -> None:
        with listener.accept(PATIENCE) as stream:
            assert stream.peer == nodes[0].peer_id
            for message in stream:
                heard.append(message)
                stream.send(message[::-1])

    def call(mesh: Mesh) -> None:
        with mesh.open(nodes[1].peer_id, "echo/1") as stream:
            assert (stream.peer, stream.path) == (nodes[1].peer_id, "direct")
            for message in (b"", b"hello", large):
                stream.send(message)
                assert stream.receive(PATIENCE) == message[::-1]
            stream.end()
            assert stream.receive(PATIENCE) is None
            assert stream.receive(PATIENCE) is None

    await meet(tmp_path, lambda mesh: mesh.listen("echo/1"), serve, call)
    assert heard == [b"", b"hello", large]


async def test_a_sender_waits_while_the_other_program_does_not_read(tmp_path: Path, nodes: Nodes) -> None:
    """Backpressure: what waits is in bounded buffers, so the sender stops after some megabytes, not at 100."""
    stuck = threading.Event()

    def serve(listener: MeshListener) -> None:
        with listener.accept(PATIENCE) as stream:
            assert stuck.wait(PATIENCE)
            assert stream.receive(PATIENCE) == b"first"
            with pytest.raises(MeshError, match="gone"):
                list(stream)

    def call(mesh: Mesh) -> None:
        stream, num_sent = mesh.open(nodes[1].peer_id, "slow"), 0
        stream.send(b"first")
        with pytest.raises(TimeoutError):
            while num_sent < 100:
                stream.send(bytes(1_000_000), timeout=0.5)
                num_sent += 1
        assert num_sent < 40
        stuck.set()
        with pytest.raises(MeshError, match="gone"):  # nothing can follow half a message
            stream.send(b"more")

    await meet(tmp_path, lambda mesh: mesh.listen("slow"), serve, call)


async def test_a_program_that_dies_breaks_its_streams_off(tmp_path: Path, nodes: Nodes) -> None:
    asked = threading.Event()

    def serve(listener: MeshListener) -> None:
        stream = listener.accept(PATIENCE)
        assert stream.receive(PATIENCE) == b"hello"
        with pytest.raises(TimeoutError):
            stream.receive(0.01)
        asked.set()
        with pytest.raises(MeshError, match="gone"):
            stream.receive(PATIENCE)
        stream.close()

    def call(mesh: Mesh) -> None:
        stream = mesh.open(nodes[1].peer_id, "echo")
        stream.send(b"hello")
        assert asked.wait(PATIENCE)
        stream.close()  # as the kernel closes the sockets of a process that is killed

    await meet(tmp_path, lambda mesh: mesh.listen("echo"), serve, call)
    with pytest.raises(MeshError):  # its listener is closed, too
        await program(lambda: Mesh(home=tmp_path / "a").open(nodes[1].peer_id, "echo"))


async def test_messages_are_acknowledged_when_they_are_taken(tmp_path: Path, nodes: Nodes) -> None:
    taken: list[tuple[str, bytes]] = []

    def serve(messages: Iterator[tuple[str, bytes]]) -> None:
        for sender, message in messages:
            taken.append((sender, message))
            if message == b"bye":
                return

    def call(mesh: Mesh) -> None:
        idle = mesh.open(nodes[1].peer_id, "chat")  # a member that says nothing holds up no message
        with pytest.raises(ValueError, match="open a stream"):
            mesh.send(nodes[1].peer_id, "chat", bytes(300_000))
        with mesh.open(nodes[1].peer_id, "chat") as too_long, pytest.raises(MeshError, match="gone"):
            too_long.send(bytes(300_000))
            too_long.receive(PATIENCE)
        mesh.send(nodes[1].peer_id, "chat", b"hello")
        mesh.send(nodes[1].peer_id, "chat", b"bye")
        idle.close()

    await meet(tmp_path, lambda mesh: mesh.messages("chat"), serve, call)
    assert taken == [(nodes[0].peer_id, b"hello"), (nodes[0].peer_id, b"bye")]


async def test_notes_are_seen_by_others_while_their_program_runs(tmp_path: Path, nodes: Nodes) -> None:
    a, b = [await mesh_at(tmp_path / name) for name in "ab"]

    async def shows(expected: dict[str, bytes]) -> None:
        with trio.fail_after(PATIENCE):
            while await program(partial(b.notes, "offer")) != expected:  # noqa: ASYNC110 (programs poll, too)
                await trio.sleep(0.01)

    await program(lambda: a.note("offer", b"3 rollouts"))
    await shows({nodes[0].peer_id: b"3 rollouts"})
    await program(lambda: a.note("offer", b"4 rollouts"))
    await shows({nodes[0].peer_id: b"4 rollouts"})
    with pytest.raises(MeshError, match="another program"):
        await program(lambda: Mesh(home=tmp_path / "a").note("offer", b"mine"))
    with pytest.raises(MeshError, match="512 bytes"):
        for name in ("more", "again"):
            await program(partial(a.note, name, bytes(440)))
    with pytest.raises(MeshError, match="512 bytes"):  # and the note that is there stays
        await program(lambda: a.note("offer", bytes(448)))
    with pytest.raises(MeshError, match="at most 448 bytes, and offer would have 449"):
        await program(lambda: a.note("offer", bytes(449)))
    await program(lambda: a.note("offer", b"4 rollouts"))
    with pytest.raises(MeshError, match="letters, digits"):
        await program(lambda: a.note("a name with spaces", b""))
    with pytest.raises(TypeError, match="bytes, not str"):
        await program(lambda: a.note("offer", "4 rollouts"))  # type: ignore[arg-type]  # the mistake itself
    await shows({nodes[0].peer_id: b"4 rollouts"})
    await program(a.close)
    await shows({})


async def test_a_name_has_one_listener_and_a_peer_few_streams(nodes: Nodes, work: Work) -> None:
    """The attack: a member opens streams that nobody needs, to keep others from a program."""
    mesh, listener = work
    with pytest.raises(MeshError, match="another program"):
        await program(lambda: mesh.listen("work"))
    with pytest.raises(TimeoutError):
        await program(lambda: listener.accept(0.01))
    streams = [await open_work(nodes) for _ in range(MAX_STREAMS_OF_PEER)]
    await assert_no_room(nodes)
    await streams[0].send_all(LENGTH.pack(2) + b"hi")
    taken = await program(lambda: listener.accept(PATIENCE))
    assert await program(lambda: taken.receive(PATIENCE)) == b"hi"
    await program(taken.close)
    with trio.fail_after(PATIENCE):
        assert await streams[0].receive_some() == b""
    # One of its streams is over: the peer may open another.
    await open_work(nodes, b"?")
    mesh.close()
    with pytest.raises(MeshError, match="closed"):
        await program(listener.accept)


async def test_a_listener_that_is_closed_wakes_those_that_wait_for_streams(work: Work) -> None:
    mesh, listener = work

    def wait() -> None:
        with pytest.raises(MeshError, match="does not listen to work any more"):
            listener.accept()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(program, wait)
        await trio.sleep(0.1)
        mesh.close()


async def test_a_stream_that_no_program_takes_is_reset(
    nodes: Nodes, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "TAKE_SECONDS", 0.1)
    await assert_no_room(nodes)
    with pytest.raises(TimeoutError):  # it passes over the stream that is gone
        await program(lambda: work[1].accept(0.1))


async def test_few_streams_wait_for_a_program_that_takes_none(
    nodes: Nodes, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: many members open streams to a program that is busy."""
    monkeypatch.setattr(service_module, "MAX_UNTAKEN", 1)
    await open_work(nodes, LENGTH.pack(2) + b"hi")
    await assert_no_room(nodes)
    with await program(lambda: work[1].accept(PATIENCE)) as taken:
        assert await program(lambda: taken.receive(PATIENCE)) == b"hi"


async def test_an_announced_length_costs_nothing_and_too_long_a_one_the_stream(nodes: Nodes, work: Work) -> None:
    for length, error in ((MAX_MESSAGE_BYTES + 1, "longer"), (MAX_MESSAGE_BYTES, "gone")):
        liar = await open_work(nodes, LENGTH.pack(length) + b"x")
        stream = await program(partial(work[1].accept, PATIENCE))
        if length == MAX_MESSAGE_BYTES:
            with pytest.raises(TimeoutError):
                await program(partial(stream.receive, 0.1))
            liar.reset()
        with pytest.raises(MeshError, match=error):
            await program(partial(stream.receive, PATIENCE))
        stream.close()


async def test_what_programs_send_keeps_to_the_caps(tmp_path: Path) -> None:
    notes: Notes = {}
    size = 400_000
    async with node(tmp_path / "a", notes, up=4) as a, node(tmp_path / "b", notes) as b:
        await connect(a, b)

        def serve(listener: MeshListener) -> None:
            with listener.accept(PATIENCE) as stream:
                assert stream.receive(PATIENCE) == bytes(size)

        def call(mesh: Mesh) -> None:
            with mesh.open(b.peer_id, "work") as stream:
                stream.send(bytes(size))
                stream.end()
                assert stream.receive(PATIENCE) is None

        began_at = trio.current_time()
        await meet(tmp_path, lambda mesh: mesh.listen("work"), serve, call)
        assert trio.current_time() - began_at > size / 500_000 - 0.1, "4 Mbit/s, after a burst of 50 ms"


async def test_a_file_is_fetched_and_resumed_and_a_liar_is_passed_over(tmp_path: Path) -> None:
    notes: Notes = {}
    contents = os.urandom(3 * BLOCK_BYTES + 17)
    (tmp_path / "weights").write_bytes(contents)
    async with (
        node(tmp_path / "a", notes) as a,
        node(tmp_path / "b", notes) as b,
        node(tmp_path / "liar", notes) as liar,
    ):
        for one, other in ((a, b), (a, liar), (b, liar)):
            await connect(one, other)
        honest, fetching, lying = [await mesh_at(tmp_path / name) for name in ("a", "b", "liar")]
        seen: list[tuple[int, int]] = []
        file_id = await program(lambda: honest.share(tmp_path / "weights"))
        # The liar is a provider too, with the right index and one wrong block.
        (tmp_path / "lie").write_bytes(contents[:BLOCK_BYTES] + bytes(len(contents) - BLOCK_BYTES))
        await program(lambda: _share_falsely(lying, tmp_path / "weights", tmp_path / "lie"))

        def stop(done: int, total: int) -> None:
            if done >= BLOCK_BYTES:
                raise KeyboardInterrupt

        target = tmp_path / "fetched"
        with pytest.raises(KeyboardInterrupt):
            await program(lambda: fetching.fetch(file_id, target, stop))
        assert not target.exists()
        await program(lambda: fetching.fetch(file_id, target, lambda done, total: seen.append((done, total))))
        assert target.read_bytes() == contents
        assert seen[0][0] >= BLOCK_BYTES, "what was there is kept"
        assert seen[-1] == (len(contents), len(contents))
        assert not list(tmp_path.glob("*.part"))
        await program(honest.close)
        with pytest.raises(MeshError, match="is not the file's"):  # only the liar is left
            await program(lambda: fetching.fetch(file_id, tmp_path / "again"))
        with pytest.raises(MeshError, match="no member that can be reached shares"):
            await program(lambda: fetching.fetch("00" * 32, tmp_path / "other"))
        with pytest.raises(MeshError, match="'zz' is no file id"):
            await program(lambda: fetching.fetch("zz", tmp_path / "other"))
        for mesh in (fetching, lying):
            await program(mesh.close)


def _share_falsely(mesh: Mesh, true: Path, false: Path) -> None:
    index = index_of(true, lambda done, total: None)
    served = mesh.listen(stream_name(index.id))
    mesh._hold(Provide(bytes.fromhex(index.id)))

    def serve() -> None:
        for stream in served:
            with suppress(MeshError), stream:
                stream.receive(PATIENCE)
                stream.send(encode(index))
                while (number := stream.receive(PATIENCE)) is not None:
                    stream.send(false.read_bytes()[int.from_bytes(number, "big") * BLOCK_BYTES :][:BLOCK_BYTES])

    threading.Thread(target=serve, daemon=True).start()


async def test_without_a_node_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="no node runs in"):
        await program(lambda: Mesh(home=tmp_path))

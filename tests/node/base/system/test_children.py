"""A child process and its connection, with Unix features and without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from farandole.node.base.system import children, features, parent
from farandole.node.base.system.children import Child, ask_where, start_child

from ....patience import PATIENCE

ECHO = """
import socket, sys
from farandole.node.base.system.parent import PORT, SECRET_BYTES, connect_to_parent
from farandole.node.base.system.signals import tell_where
if sys.argv[1].startswith(PORT):  # a stranger is first
    with socket.create_connection(("127.0.0.1", int(sys.argv[1].removeprefix(PORT)))) as stranger:
        stranger.sendall(bytes(SECRET_BYTES))
        assert not stranger.recv(1), "a stranger was let in"
with connect_to_parent(sys.argv[1]) as connection:
    tell_where(2)  # from now on the standard input is its own
    while data := connection.recv(100):
        connection.sendall(sys.argv[2].encode() + data)
"""


@pytest.fixture(params=[True, False], ids=["inherited", "loopback"])
def is_inherited(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(children, "INHERITS_DESCRIPTORS", request.param)
    monkeypatch.setattr(children, "HAS_TRACEBACK_SIGNAL", request.param)
    monkeypatch.setenv(features.WITHOUT_VARIABLE, "" if request.param else "all")
    return bool(request.param)


async def start(folder: Path, code: str, *arguments: str) -> Child:
    (folder / "the_child.py").write_text(code, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with (folder / "output").open("wb") as output:
        return await start_child("the_child", arguments, (), output, {**os.environ, "PYTHONPATH": path})


async def test_it_connects_and_strangers_do_not(tmp_path: Path, is_inherited: bool) -> None:
    with trio.fail_after(PATIENCE):
        child = await start(tmp_path, ECHO, "echo ")
        async with child.stream as stream:
            await stream.send_all(b"hello")
            assert await stream.receive_some() == b"echo hello"
            await ask_where(child.process)
            await stream.send_all(b"again")
            assert await stream.receive_some() == b"echo again"
        assert await child.process.wait() == 0


async def test_one_that_ends_before_it_connects_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "INHERITS_DESCRIPTORS", False)
    with trio.fail_after(PATIENCE), pytest.raises(OSError, match="exit code 3"):
        await start(tmp_path, "raise SystemExit(3)")


async def test_one_that_shows_no_secret_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "INHERITS_DESCRIPTORS", False)
    monkeypatch.setattr(children, "CONNECT_SECONDS", 1.0)
    with trio.fail_after(PATIENCE), pytest.raises(OSError, match="did not connect"):
        await start(tmp_path, "import time; time.sleep(1000)")


def test_a_port_that_is_another_process_s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket
    import threading

    reading, writing = os.pipe()
    monkeypatch.setattr("os.read", lambda descriptor, size, read=os.read: read(reading, size))
    os.write(writing, b"a" * parent.SECRET_BYTES + b"b" * parent.SECRET_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as thief:

        def answer() -> None:
            connection, _ = thief.accept()
            with connection:
                connection.sendall(connection.recv(parent.SECRET_BYTES))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionRefusedError, match="another process"):
            parent.connect_to_parent(f"{parent.PORT}{thief.getsockname()[1]}")
        thread.join()
    os.close(reading)
    os.close(writing)

"""A child process and its connection."""

from __future__ import annotations

import os
from pathlib import Path

import trio

from farandole.node.base.system.processes import ask_where, start_child

from ....patience import PATIENCE

ECHO = """
import socket, sys
from farandole.node.base.system.processes import tell_where
with socket.socket(fileno=int(sys.argv[1])) as connection:
    tell_where(2)
    connection.sendall(b"ready")
    while data := connection.recv(100):
        connection.sendall(sys.argv[2].encode() + data)
"""


async def test_a_child_is_connected_and_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "the_child.py").write_text(ECHO, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with trio.fail_after(PATIENCE):
        with (tmp_path / "output").open("wb") as output:
            process, stream = await start_child("the_child", ["echo "], (), output, {**os.environ, "PYTHONPATH": path})
        async with stream:
            assert await stream.receive_some() == b"ready"
            ask_where(process)
            await stream.send_all(b"hello")
            assert await stream.receive_some() == b"echo hello"
        assert await process.wait() == 0
    assert "the_child.py" in (tmp_path / "output").read_text(encoding="utf-8")

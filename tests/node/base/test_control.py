from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from farandole.node.base import control
from farandole.node.base.control import ControlError, NoNodeError, call, serve_control
from farandole.node.base.system import sockets
from farandole.node.base.system.sockets import MAX_SOCKET_PATH_BYTES, bound_socket, connect, socket_path

from ...patience import PATIENCE


async def echo(params: dict[str, Any]) -> object:
    return params


async def refuse(params: dict[str, Any]) -> object:
    raise ControlError("not_ready", "the node still joins")


async def fail(params: dict[str, Any]) -> object:
    raise RuntimeError("a defect")


HANDLERS = {"echo": echo, "refuse": refuse, "fail": fail}


@pytest.fixture
async def home(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Path]:
    await nursery.start(serve_control, tmp_path / "control.sock", HANDLERS)
    yield tmp_path
    nursery.cancel_scope.cancel()


async def ask(home: Path, method: str, **params: Any) -> Any:
    with trio.fail_after(PATIENCE):
        return await trio.to_thread.run_sync(partial(call, home, method, **params))


async def raw(home: Path, sent: bytes) -> list[dict[str, Any]]:
    """Return the server's answers to these bytes, until it or their end closes the connection."""
    with trio.fail_after(PATIENCE):
        connection = await trio.to_thread.run_sync(connect, home / "control.sock", 5.0)
        async with trio.SocketStream(trio.socket.from_stdlib_socket(connection)) as stream:
            await stream.send_all(sent)
            stream.socket.shutdown(trio.socket.SHUT_WR)
            received = b"".join([data async for data in stream])
    return [json.loads(line) for line in received.splitlines()]


async def test_a_moment_without_descriptors_ends_neither_the_node_nor_its_control(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_refused, accept = 0, trio.SocketListener.accept

    async def starved(listener: trio.SocketListener) -> trio.SocketStream:
        """Accept as a system does whose descriptors are free in a moment."""
        nonlocal num_refused
        if num_refused < 3:
            num_refused += 1
            await trio.lowlevel.checkpoint()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await accept(listener)

    monkeypatch.setattr(trio.SocketListener, "accept", starved)
    await nursery.start(serve_control, tmp_path / "control.sock", HANDLERS)
    assert await ask(tmp_path, "echo", tokens=3) == {"tokens": 3}
    assert num_refused == 3
    nursery.cancel_scope.cancel()


async def test_what_leads_to_it_is_for_its_owner_alone(home: Path) -> None:
    place = home / "control.sock"
    assert list(home.iterdir()) == [place]
    assert stat.S_IMODE(place.stat().st_mode) == 0o600


async def test_another_programs_answer_is_told_from_a_node(tmp_path: Path, nursery: trio.Nursery) -> None:
    async def babble(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with bound_socket(tmp_path / "control.sock") as listener:
        await nursery.start(sockets.serve_door, listener, babble, 1)
        with pytest.raises(NoNodeError, match="is no node"):
            await ask(tmp_path, "echo")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("method", "code", "words"),
    [
        ("reboot", "unknown_method", "echo, fail, refuse"),
        ("refuse", "not_ready", "still joins"),
        ("fail", "internal", "a defect"),
    ],
)
async def test_a_refusal_has_a_code_and_costs_its_request_only(
    home: Path, method: str, code: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ControlError, match=words) as caught:
        await ask(home, method)
    assert caught.value.code == code
    assert ("the control method fail failed" in caplog.text) == (method == "fail")
    assert await ask(home, "echo", still="there") == {"still": "there"}


async def test_several_requests_on_one_connection(home: Path) -> None:
    sent = b'{"method": "echo"}\nnot json\n{"method": "echo", "params": {"a": 1}}\n{"method": 7}\n'
    answers = await raw(home, sent)
    assert [answer.get("ok", answer.get("error", {}).get("code")) for answer in answers] == [
        {},
        "bad_request",
        {"a": 1},
        "bad_request",
    ]


async def test_an_endless_request_is_cut_off(home: Path) -> None:
    assert await raw(home, b"x" * (control.MAX_REQUEST_BYTES - 1)) == []
    with pytest.raises(trio.BrokenResourceError):
        await raw(home, b"x" * 8 * control.MAX_REQUEST_BYTES)
    assert await ask(home, "echo") == {}


async def wait(params: dict[str, Any]) -> object:
    await trio.sleep_forever()


async def test_a_slow_handler_times_out(autojump_clock: trio.abc.Clock) -> None:
    answer = json.loads(await control.answer(b'{"method": "wait"}', {"wait": wait}))
    assert answer["error"]["code"] == "timeout"


async def test_a_dead_nodes_socket_is_told_from_a_node_and_replaced(tmp_path: Path, nursery: trio.Nursery) -> None:
    path = tmp_path / "control.sock"
    with trio.socket.socket(trio.socket.AF_UNIX) as dead:
        await dead.bind(str(path))
    with pytest.raises(NoNodeError, match="no node runs"):
        await ask(tmp_path, "echo")
    await nursery.start(serve_control, path, HANDLERS)
    assert await ask(tmp_path, "echo") == {}
    nursery.cancel_scope.cancel()


async def test_a_node_that_does_not_answer(tmp_path: Path) -> None:
    with trio.socket.socket(trio.socket.AF_UNIX) as frozen:
        await frozen.bind(str(tmp_path / "control.sock"))
        frozen.listen(1)
        with pytest.raises(NoNodeError, match="does not answer"):
            await ask(tmp_path, "echo", timeout=0.05)


async def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 30)
    path = home / "control.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, HANDLERS)
        real = socket_path(path)
        assert len(os.fsencode(real)) <= MAX_SOCKET_PATH_BYTES
        assert await ask(home, "echo") == {}
        nursery.cancel_scope.cancel()
    assert not real.exists()
    assert list(home.iterdir()) == []
    with pytest.raises(NoNodeError):
        await ask(home, "echo")

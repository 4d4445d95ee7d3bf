"""``farandole serve``: what OpenAI's own client gets from it, and what nobody gets."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from farandole.node.app import serving
from farandole.node.base.settings import NodeSettings
from farandole.node.base.system.sockets import LOOPBACK
from farandole.node.inspect.loaded_model import LoadedModel, load_newest
from farandole.node.ui.dashboard.app import serve_at
from farandole.training.base.errors import TrainingError

from ...patience import PATIENCE
from ..daemons import joined, running
from ..small_runs import TINY, small_manifest, write_run
from ..store.consolidated.runs import manifest_for, pulled, trained
from .commands.test_talk import argmax_text, node_of

if TYPE_CHECKING:
    import openai

MODEL = {"preset": "tiny", "context": 64}
GREEDY: dict[str, Any] = {"model": "whatever", "temperature": 0}
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
# What a model without a template of its own reads for it.
HELLO_TEXT = "Be brief.\nUser: Hello\nAssistant:"
_in_thread = trio.to_thread.run_sync


async def talk(port: int, say: Callable[[openai.OpenAI], object]) -> None:
    """Call a function with a client, in a thread."""
    import openai  # takes a second, also of testers that do not run this

    place = f"http://{LOOPBACK}:{port}/v1"

    def run() -> None:
        with openai.OpenAI(base_url=place, api_key="none", max_retries=0, timeout=PATIENCE) as client:
            say(client)

    await trio.to_thread.run_sync(run)


@asynccontextmanager
async def served(model: LoadedModel) -> AsyncIterator[int]:
    with socket.create_server((LOOPBACK, 0)) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_at, listener, serving.application(model))
            yield listener.getsockname()[1]
            nursery.cancel_scope.cancel()


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    signed = manifest_for(MODEL)
    folder = pulled(signed, tmp_path / "model", trained(signed, b"a" * 32, steps=2, rounds=1)).path
    return load_newest(NodeSettings(home=tmp_path), folder, "cpu")


class Gate:
    """Tokens without end that a test lets through, one by one or all, in place of a model's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.begun = threading.Event(), threading.Event()
        monkeypatch.setattr("farandole.training.model.generation.generate", self.generate)

    def generate(self, *_: object, **__: object) -> Iterator[int]:
        while True:
            yield ord("a")
            self.begun.set()
            assert self.is_open.wait(PATIENCE)


def ask(port: int, body: bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=PATIENCE)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


async def post(port: int, body: bytes) -> trio.SocketStream:
    """Return a connection on which an answer in a chat is asked for, and not read."""
    stream = await trio.open_tcp_stream(LOOPBACK, port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    await stream.send_all(head.encode() + body)
    return stream


async def test_openais_client_gets_the_models_text_whole_and_in_pieces(tmp_path: Path) -> None:
    import openai

    signed = manifest_for(MODEL)
    learner = await node_of(tmp_path / "home", signed, rounds=1)
    model = load_newest(NodeSettings(home=tmp_path / "home"), None, "cpu")
    expected = {prompt: argmax_text(learner, prompt, 8, 64) for prompt in ("def f(", HELLO_TEXT)}

    def say(client: openai.OpenAI) -> None:
        assert [each.id for each in client.models.list()] == ["a"]
        limits = {**GREEDY, "max_tokens": 8}
        done = client.completions.create(prompt="def f(", **limits)
        assert (done.choices[0].text, done.choices[0].finish_reason) == (expected["def f("], "length")
        assert done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (6, 8, 14)
        said = client.chat.completions.create(messages=HELLO, **limits)
        assert (said.choices[0].message.role, said.choices[0].message.content) == ("assistant", expected[HELLO_TEXT])

        parts = list(client.completions.create(prompt="def f(", stream=True, **limits))
        assert "".join(part.choices[0].text for part in parts) == expected["def f("]
        options: Any = {"include_usage": True}
        *chunks, last = client.chat.completions.create(messages=HELLO, stream=True, stream_options=options, **limits)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected[HELLO_TEXT]
        assert (chunks[0].choices[0].delta.role, chunks[-1].choices[0].finish_reason) == ("assistant", "length")
        assert last.usage is not None
        assert last.usage.completion_tokens == 8

        stop = expected["def f("][3]
        cut = client.completions.create(prompt="def f(", stop=stop, **limits)
        assert (cut.choices[0].text, cut.choices[0].finish_reason) == (expected["def f("].partition(stop)[0], "stop")
        warm = [client.completions.create(model="a", prompt="x", seed=seed).choices[0].text for seed in (1, 1, 2)]
        assert warm[0] == warm[1] != warm[2]
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(prompt="x" * 64, model="a")
        assert refused.value.code == "context_length_exceeded"
        assert "the prompt has 64 tokens, and the model sees 64 at most" in str(refused.value)

    async with served(model) as port:
        await talk(port, say)
        # The node trains on, and the next answer is by its new weights.
        await node_of(tmp_path / "home", signed, rounds=3, learner=learner)
        newer = argmax_text(learner, "def f(", 8, 64)
        told = await _in_thread(partial(ask, port, b'{"prompt": "def f(", "temperature": 0, "max_tokens": 8}'))
        assert told[1]["choices"][0]["text"] == newer != expected["def f("]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"", 400, "truncated"),
        (b"\xff", 400, ""),
        (b'{"x": ' + b"[" * 100_000, 400, ""),
        (b"{}", 400, "prompt is missing"),
        (b'{"prompt": 5}', 400, "$.prompt"),
        (b'{"prompt": "\\ud800"}', 400, ""),
        (b'{"prompt": "", "max_tokens": 0}', 400, "$.max_tokens"),
        (b'{"prompt": "", "temperature": -1}', 400, "$.temperature"),
        (b'{"prompt": "", "stop": ["a", "b", "c", "d", "e"]}', 400, "$.stop"),
        (b'{"prompt": "", "n": 2}', 400, "$.n"),
        (b'{"prompt": "", "tools": [{}]}', 400, "$.tools"),
        (b'{"prompt": "' + b"x" * serving.MAX_BODY_BYTES + b'"}', 413, "at most"),
    ],
)
async def test_what_is_no_request_is_explained(model: LoadedModel, body: bytes, code: int, words: str) -> None:
    async with served(model) as port:
        told = await _in_thread(partial(ask, port, body))
        assert told[0] == code, told
        assert words in told[1]["error"]["message"]
        assert told[1]["error"]["type"] == "invalid_request_error"
        assert (await _in_thread(partial(ask, port, b'{"prompt": "", "max_tokens": 1}')))[0] == 200


@pytest.mark.parametrize(
    "header", ["Host: evil.example", "Host: 127.0.0.1.evil.example", "Origin: http://a.b", "Origin: null"]
)
async def test_pages_of_others_cannot_use_it(model: LoadedModel, header: str) -> None:
    name, _, value = header.partition(": ")
    async with served(model) as port:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/elsewhere"):
            code, told = await _in_thread(partial(ask, port, b'{"prompt": ""}', path, **{name: value}))
            assert (code, told["error"]["type"]) == (403, "invalid_request_error")


async def test_who_hangs_up_ends_the_answer(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer would be endless, and others wait for their turn."""
    gate, model.context = Gate(monkeypatch), 10**12
    for stream in (b"true", b"false"):
        gate.begun.clear()
        gate.is_open.clear()
        async with served(model) as port:
            hostile = await post(port, b'{"messages": [{"role": "user", "content": "x"}], "stream": ' + stream + b"}")
            await _in_thread(gate.begun.wait, PATIENCE)
            await hostile.aclose()
            gate.is_open.set()
            told = await _in_thread(partial(ask, port, b'{"prompt": "", "max_tokens": 3}'))
            assert told[1]["choices"][0]["text"] == "aaa"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no connection ends by itself")
async def test_who_reads_nothing_is_cut_off(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then others are answered, and the server ends."""
    monkeypatch.setattr("farandole.node.ui.dashboard.app.STALL_MILLISECONDS", 100)
    Gate(monkeypatch).is_open.set()
    model.context, model.name = 300, "x" * 100_000  # which is in each piece: more than the system keeps
    async with served(model) as port:
        hostile = await post(port, b'{"messages": [{"role": "user", "content": "x"}], "stream": true}')
        assert (await _in_thread(partial(ask, port, b'{"prompt": "", "max_tokens": 1}')))[0] == 200
    await hostile.aclose()


async def test_the_queue_is_bounded(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_WAITING", 1)
    gate, answers = Gate(monkeypatch), list[tuple[int, dict[str, Any]]]()
    is_one_refused = trio.Event()

    async def ask_again(port: int) -> None:
        answers.append(await _in_thread(partial(ask, port, b'{"prompt": "", "max_tokens": 2}')))
        is_one_refused.set()

    async with served(model) as port, trio.open_nursery() as nursery:
        nursery.start_soon(ask_again, port)
        await _in_thread(gate.begun.wait, PATIENCE)
        for _ in range(2):
            nursery.start_soon(ask_again, port)
        await is_one_refused.wait()  # while one is answered, and another waits
        gate.is_open.set()
    assert [code for code, _ in answers] == [429, 200, 200]
    assert answers[0][1]["error"]["message"] == "1 requests wait already: try again"


async def test_a_model_that_diverges_in_a_stream_is_an_error_for_the_client(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    def generate(*_: object, **__: object) -> Iterator[int]:
        yield ord("a")
        raise TrainingError("the weights have diverged")

    monkeypatch.setattr("farandole.training.model.generation.generate", generate)

    def say(client: openai.OpenAI) -> None:
        with pytest.raises(openai.APIError, match="diverged"):
            list(client.chat.completions.create(messages=HELLO, stream=True, **GREEDY))
        with pytest.raises(openai.InternalServerError, match="diverged"):
            client.chat.completions.create(messages=HELLO, **GREEDY)

    async with served(model) as port:
        await talk(port, say)


async def test_a_node_that_trains_answers_and_ends_by_ctrl_c(tmp_path: Path, texts: Path) -> None:
    write_run(tmp_path, small_manifest(model={**TINY, "context": 64}))
    home = tmp_path / "alice"
    more = ("--data", str(texts), "--checkpoint-seconds", "0.2")
    async with joined(home, str(tmp_path / "run.manifest"), *more) as alice:
        await alice.says("listening on")
        await alice.until(lambda status: status.round >= 1 and any((home / "checkpoints").glob("*.safetensors")))
        command = [sys.executable, "-m", "farandole.node", "serve", "--home", str(home), "--port", "0"]
        async with running(home, command, {}) as server:
            port = int((await server.says("small is at http://127.0.0.1:")).removesuffix("/v1").rpartition(":")[2])

            def say(client: openai.OpenAI) -> None:
                assert client.chat.completions.create(messages=HELLO, max_tokens=5, **GREEDY).choices[0].message.content

            await talk(port, say)
            reached = (await alice.status()).round
            await alice.until(lambda status: status.round > reached)
            await talk(port, say)
            assert await server.end(signal.SIGINT) == 0

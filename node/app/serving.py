"""A model behind OpenAI's API, for programs of this machine: ``farandole serve``.

It is what programs of others expect of ``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``, streamed or
not (https://platform.openai.com/docs/api-reference). Fields that are not known are ignored.

Each token is computed in a thread, so a client that hangs up costs no more than one. Requests wait for their turn.
"""

from __future__ import annotations

import math
import secrets
import socket
import time
import traceback
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from farandole.protocol.wire.errors import FarandoleError
from farandole.training.model.sampling import USUAL_TEMPERATURE, USUAL_TOP_K, Sampling

from ..base.nurseries import open_service_nursery
from ..base.system.sockets import LOOPBACK, listen_alone
from ..inspect.loaded_model import Generation, LoadedModel
from ..ui.dashboard.app import MAX_BACKLOG, body_of, same_origin, serve_at

# A prompt that fills a context of 128 k tokens has half a megabyte; JSON may take six bytes for one.
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
# Requests that wait while one is answered. More would wait for minutes.
MAX_WAITING: Final = 16
# Of a completion without a limit, as OpenAI's; an answer in a chat may fill the context.
USUAL_TOKENS: Final = 16

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_in_thread = trio.to_thread.run_sync


class _Said(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[Literal["type", "text"], str]]
    """A text, or parts ``{"type": "text", "text": ...}``."""


class _Asked(msgspec.Struct):
    """A request. Null is the same as leaving a field out."""

    prompt: str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)] | None = None
    messages: Annotated[list[_Said], msgspec.Meta(min_length=1)] | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stop | Annotated[list[_Stop], msgspec.Meta(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    # What would change the answer's form is refused.
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = None
    tools: Annotated[list[object], msgspec.Meta(max_length=0)] | None = None


class _TooLongError(HTTPException):
    """The prompt does not fit; clients know the code of this error."""


@dataclass
class Answers:
    """The answers of one endpoint, an ASGI application. The turn is of all that use the model."""

    model: LoadedModel
    turn: trio.Lock
    is_chat: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, unless the client hangs up."""
        asked = self._read(await body_of(Request(scope, receive), MAX_BODY_BYTES))
        if self.turn.statistics().tasks_waiting >= MAX_WAITING:
            raise HTTPException(429, f"{MAX_WAITING} requests wait already: try again")
        async with open_service_nursery() as nursery:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            if asked.stream:
                return await self._stream(asked, send, nursery)
            async with self.turn:
                text = await _in_thread(self._begin, asked)
                pieces, made = text.pieces(), ""
                while (piece := await _in_thread(next, pieces, None)) is not None:
                    made += piece
            said = {"message": {"role": "assistant", "content": made}} if self.is_chat else {"text": made}
            answer = {**self._frame(), "choices": [_choice(said, text)], "usage": _usage(text)}
            await JSONResponse(answer)(scope, receive, send)

    def _read(self, body: bytes | None) -> _Asked:
        """Read a request's body; None stands for one that is too large. Raises `HTTPException`."""
        if body is None:
            raise HTTPException(413, f"a request has at most {MAX_BODY_BYTES} bytes")
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise HTTPException(400, f"this is no request: {error}") from None
        if (asked.messages if self.is_chat else asked.prompt) is None:
            raise HTTPException(400, f"{'messages' if self.is_chat else 'prompt'} is missing")
        return asked

    def _begin(self, asked: _Asked) -> Generation:
        """Begin a text with the newest weights. Blocks. Raises `HTTPException` if the prompt is too long."""
        model = self.model
        model.refresh()
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        limit = asked.max_completion_tokens or asked.max_tokens or (model.context if self.is_chat else USUAL_TOKENS)
        if self.is_chat:
            start, ends = model.tokens_of_chat([_message(said) for said in asked.messages or ()])
            stops = [*stops, *ends]
        else:
            start = model.tokens_of("".join(asked.prompt or ""))
        if (room := model.context - len(start)) < 1:
            raise _TooLongError(400, f"the prompt has {len(start)} tokens, and the model sees {model.context} at most")
        sampling = Sampling(
            USUAL_TEMPERATURE if asked.temperature is None else asked.temperature,
            USUAL_TOP_K if asked.top_k is None else asked.top_k,
            secrets.randbits(63) if asked.seed is None else asked.seed,
            asked.top_p or 1.0,
        )
        return model.generate(start, min(limit, room), sampling, stops)

    async def _stream(self, asked: _Asked, send: Send, nursery: trio.Nursery) -> None:
        # There is room for a piece a token, whether the client reads or not: nobody's turn waits for another's client.
        sender, receiver = trio.open_memory_channel[bytes](math.inf)
        is_sent, frame = trio.Event(), self._frame(".chunk")

        def tell(**fields: object) -> None:
            sender.send_nowait(b"data: " + msgspec.json.encode({**frame, **fields}) + b"\n\n")

        def tell_piece(text: str, end: Generation | None = None, **role: str) -> None:
            said = {"delta": {**role, "content": text}} if self.is_chat else {"text": text}
            tell(choices=[_choice(said, end)])

        async def pass_on() -> None:
            await StreamingResponse(receiver, media_type="text/event-stream").stream_response(send)
            is_sent.set()

        async with self.turn:
            made = await _in_thread(self._begin, asked)
            pieces = made.pieces()
            piece = await _in_thread(next, pieces, None)  # an error until here has a response of its own
            nursery.start_soon(pass_on)
            tell_piece("", role="assistant")
            try:
                while piece is not None:
                    tell_piece(piece)
                    piece = await _in_thread(next, pieces, None)
                tell_piece("", made)
                if (asked.stream_options or {}).get("include_usage"):
                    tell(choices=[], usage=_usage(made))
            except FarandoleError as error:
                tell(error={"message": str(error), "type": "server_error"})
        sender.send_nowait(b"data: [DONE]\n\n")
        sender.close()
        await is_sent.wait()

    def _frame(self, part: str = "") -> dict[str, object]:
        """Return what an answer and all of its parts have."""
        kind, name = ("chat.completion" + part, "chatcmpl") if self.is_chat else ("text_completion", "cmpl")
        of_all = {"object": kind, "created": int(time.time()), "model": self.model.name}
        return {"id": f"{name}-{secrets.token_hex(12)}", **of_all}


def _message(said: _Said) -> dict[str, str]:
    """Return a message as chat templates take it."""
    parts = [said.content] if isinstance(said.content, str) else [part.get("text", "") for part in said.content]
    return {"role": said.role.replace("developer", "system"), "content": "".join(parts)}


def _choice(said: dict[str, Any], end: Generation | None) -> dict[str, object]:
    """Return the only choice of an answer, or of its part; ``end`` with the last one."""
    reason = None if end is None else "stop" if end.is_ended else "length"
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


def _usage(text: Generation) -> dict[str, int]:
    given, made = len(text.start), len(text.tokens)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


# The server


def _problem(code: int, text: str, known: str | None = None) -> JSONResponse:
    """Return an error in OpenAI's form."""
    kind = "server_error" if code >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": text, "type": kind, "param": None, "code": known}}, status_code=code)


async def _explain(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        known = "context_length_exceeded" if isinstance(error, _TooLongError) else None
        return _problem(error.status_code, error.detail, known)
    if not isinstance(error, FarandoleError):  # a defect
        traceback.print_exception(error)
    return _problem(503, str(error))


def application(model: LoadedModel) -> Starlette:
    """Return the ASGI application that answers with a model."""
    about = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "farandole"}

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [about]})

    turn = trio.Lock()
    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", Answers(model, turn, is_chat=False), methods=["POST"]),
            Route("/v1/chat/completions", Answers(model, turn, is_chat=True), methods=["POST"]),
        ],
        middleware=[Middleware(same_origin, problem=_problem)],
        exception_handlers=dict.fromkeys((HTTPException, FarandoleError, Exception), _explain),
    )


async def serve(model: LoadedModel, port: int) -> None:
    """Serve on loopback, and print where, until cancelled. Raises `FarandoleError` if the port is not free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listen_alone(listener)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            raise FarandoleError(f"port {port} is not free ({error.strerror}): name another with --port") from error
        listener.listen(MAX_BACKLOG)
        print(f"{model.name} is at http://{LOOPBACK}:{listener.getsockname()[1]}/v1", flush=True)
        await serve_at(listener, application(model))

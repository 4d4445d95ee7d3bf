"""The dashboard's web application: a page, what it reads every second, and the few things that a person may do.

It listens on loopback, but that is not enough: any web page in the same browser can send requests there. So a request
must name a loopback host (an attacker's name that resolves to 127.0.0.1 is refused: DNS rebinding), have the page
itself as its origin if the browser sends one, and carry the node's token: other users of the machine reach loopback
too, and must not read the members' addresses. The token is not in a cookie, which a browser would also send to their
servers on other ports. Only the empty page and ``/metrics``, which has no addresses, need no token. The page runs no
script but its own files (Content-Security-Policy).
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import trio
from hypercorn.config import Config, Sockets
from hypercorn.trio.run import worker_serve
from hypercorn.utils import wrap_app
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farandole.protocol.wire.errors import FarandoleError

from ...base.nurseries import open_service_nursery
from ...base.system.sockets import LOOPBACK, listen_alone
from ...status.status import NodeStatus
from ..exposition import CONTENT_TYPE, metrics_text
from .views import RunHistory, members_view, overview

LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
# A look at the members of a large run takes a hundred times as long as one at the rest.
HISTORY_INTERVAL, LONGER_INTERVAL = 1.0, 5.0
SMALL_RUN: Final = 64
# Parameters of an action: a few numbers.
MAX_BODY_BYTES: Final = 1_024

_PORT: Final = re.compile(r":\d+\Z")
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PAGE: Final = Path(__file__).parent / "page"
"""The page's files. In ``vendor`` are other projects', with their licences: uPlot draws lines, qrcode-generator the
invite's code."""

Action = Callable[[dict[str, Any]], Awaitable[object]]


@dataclass
class Dashboard:
    """The web application of one node. ``actions``: what its pages may do, by name; ``clock`` gives Unix seconds."""

    status: Callable[[], NodeStatus]
    actions: Mapping[str, Action]
    token: str
    clock: Callable[[], float]
    history: RunHistory = field(default_factory=RunHistory)

    async def run(self) -> None:
        """Record the run's history, until cancelled."""
        while True:
            status = self.status()
            self.history.observe(status.run, status.members, status.validation, self.clock())
            await trio.sleep(HISTORY_INTERVAL if len(status.members) <= SMALL_RUN else LONGER_INTERVAL)

    def application(self) -> Starlette:
        """Return the ASGI application."""

        async def show_overview(request: Request) -> Response:
            return _json(overview(self.status(), self.history, self.clock()))

        async def show_members(request: Request) -> Response:
            status = self.status()
            return _json(members_view(status.members, self.history, status.remarks))

        async def show_metrics(request: Request) -> Response:
            return Response(metrics_text(self.status()), media_type=CONTENT_TYPE)

        return Starlette(
            routes=[
                Route("/api/overview", self._with_token(show_overview)),
                Route("/api/members", self._with_token(show_members)),
                Route("/metrics", show_metrics),
                Route("/api/{action}", self._with_token(self._do), methods=["POST"]),
                Mount("/", StaticFiles(directory=PAGE, html=True)),
            ],
            middleware=[Middleware(same_origin, problem=_problem)],
        )

    def _with_token(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Answer requests that carry the token as a bearer's."""

        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.token.encode()):
                return _problem(401, "open the page by the address that `farandole dashboard` prints: it has the token")
            return await answer(request)

        return guarded

    async def _do(self, request: Request) -> Response:
        action = self.actions.get(request.path_params["action"])
        if action is None:
            return _problem(404, f"there are: {', '.join(sorted(self.actions))}")
        body = await body_of(request, MAX_BODY_BYTES)
        if body is None:
            return _problem(413, "an action takes a few numbers")
        try:
            params = msgspec.json.decode(body or b"{}", type=dict[str, Any])
            return JSONResponse({"ok": msgspec.to_builtins(await action(params))})
        except msgspec.MsgspecError as error:
            return _problem(400, f"not the parameters of an action: {error}")
        except FarandoleError as error:
            return _problem(409, str(error))


def same_origin(app: ASGIApp, problem: Callable[[int, str], Response]) -> ASGIApp:
    """Refuse requests of other servers' pages, and for other hosts' names, first of all; add `_HEADERS` to answers."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        chosen: ASGIApp = app
        if scope["type"] == "http":
            request = Request(scope)
            host, origin = request.headers.get("host", ""), request.headers.get("origin")
            is_elsewhere = origin is not None and urlsplit(origin).netloc != host
            if _PORT.sub("", host) not in LOOPBACK_NAMES:
                chosen = problem(403, "this is for programs of the node's own machine")
            elif is_elsewhere or request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
                chosen = problem(403, "requests of other pages are refused")
        await chosen(scope, receive, send_guarded)

    return guard


async def body_of(request: Request, max_bytes: int) -> bytes | None:
    """Read a request's body; None if it has more bytes."""
    body = bytearray()
    async with aclosing(request.stream()) as parts:
        async for part in parts:
            body += part
            if len(body) > max_bytes:
                return None
    return bytes(body)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _problem(code: int, text: str) -> Response:
    return JSONResponse({"error": text}, status_code=code)


# The server: the control socket gives its address and token to the command line.

# A page that vanished without closing is detected by then; a page asks every second.
KEEP_ALIVE_SECONDS: Final = 10.0
# Requests have no bodies, and headers of a browser's size.
MAX_HEADER_BYTES: Final = 16 * 1024
MAX_BACKLOG: Final = 32
# A client that reads nothing for so long is cut off.
STALL_MILLISECONDS: Final = 20_000
_MAX_WSGI_BODY_BYTES: Final = 0  # of applications of another kind


class PageAddress(msgspec.Struct, frozen=True):
    """URL and token of a node's page, for its owner."""

    url: str
    token: str


@asynccontextmanager
async def open_dashboard(
    port: int, status: Callable[[], NodeStatus], actions: Mapping[str, Action], clock: Callable[[], float]
) -> AsyncIterator[PageAddress]:
    """Serve within the block; at another port if ``port`` is not free."""
    dashboard = Dashboard(status, actions, secrets.token_urlsafe(24), clock)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listen_alone(listener)
        try:
            listener.bind((LOOPBACK, port))
        except (OSError, OverflowError):  # taken, not ours to take, or no port at all
            listener.bind((LOOPBACK, 0))
        listener.listen(MAX_BACKLOG)
        async with open_service_nursery() as nursery:
            nursery.start_soon(dashboard.run)
            nursery.start_soon(serve_at, listener, dashboard.application())
            yield PageAddress(f"http://{LOOPBACK}:{listener.getsockname()[1]}/", dashboard.token)


async def serve_at(listener: socket.socket, application: Any) -> None:
    """Serve an ASGI application, which is two things by Starlette's and Hypercorn's types, at a socket that listens."""
    config = Config()
    config.errorlog = None
    config.accesslog = None
    config.keep_alive_timeout = KEEP_ALIVE_SECONDS
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.graceful_timeout = 0.0
    if sys.platform == "linux":  # Hypercorn shields what it sends: a client that reads nothing would keep it for ever
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_MILLISECONDS)
    await worker_serve(
        wrap_app(application, _MAX_WSGI_BODY_BYTES, "asgi"),
        config,
        sockets=Sockets([], [listener], []),
        shutdown_trigger=trio.sleep_forever,
    )

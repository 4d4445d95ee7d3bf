"""The links of a node that holds a stage: it opens some, neighbours open others, and all end with the trainer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import msgspec
import trio

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.stages.activations import Event, Hello, Link, Welcome, shape_hash
from farandole.protocol.stages.pipeline_events import LinkClosed, LinkFailed, LinkOpened, Received
from farandole.protocol.wire.errors import RemoteProtocolError

from ...base.bandwidth import Shaping
from ...base.errors import PeerUnreachableError
from ...base.streams import Stream, StreamHost, close_stream
from ...bulk.transport import Channels
from .activation_link import ActivationLink
from .worker import Worker

ACTIVATIONS_PROTOCOL: Final = "/farandole/activations/1"
# This includes the dial.
GREETING_TIMEOUT: Final = 10.0


Handle = Callable[[LinkOpened | LinkFailed | LinkClosed | Received], None]
"""Handles the events of links, and what arrives over them."""


class Links:
    """The links of one node.

    ``is_neighbour(peer, stage)`` returns whether a peer is a live member of that stage. Without ``channels`` everything
    goes over the streams.
    """

    def __init__(
        self,
        host: StreamHost,
        manifest: Manifest,
        run_id: bytes,
        shaping: Shaping,
        *,
        is_neighbour: Callable[[bytes, int], bool],
        channels: Channels[Any] | None = None,
    ) -> None:
        self.by_number: dict[int, ActivationLink] = {}
        self._host = host
        self._channels = channels
        self._hello = Hello(run_id, 0, shape_hash(manifest))
        self._num_stages = manifest.model.num_stages
        self._shaping = shaping
        self._is_neighbour = is_neighbour
        self._handle: Handle = lambda event: None
        self._worker: Worker | None = None
        self._numbers = itertools.count()
        self._bytes_sent = self._bytes_received = 0  # over links that have ended
        host.set_handler(ACTIVATIONS_PROTOCOL, self._serve)

    def begin(self, worker: Worker, handle: Handle) -> None:
        """Open and serve links from now on."""
        self._worker, self._handle = worker, handle

    def end(self) -> None:
        """Close all links."""
        self._worker = None
        for link in self.by_number.values():
            link.close()

    def flush(self) -> None:
        """Send what was queued on links."""
        for link in self.by_number.values():
            link.flush()

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent over all links since the node began."""
        return self._bytes_sent + sum(link.bytes_sent for link in self.by_number.values())

    @property
    def bytes_received(self) -> int:
        """Return the bytes received over all links since the node began."""
        return self._bytes_received + sum(link.bytes_received for link in self.by_number.values())

    async def open(self, peer: bytes, is_return: bool) -> None:
        """Open a link to a node of the next stage, or (``is_return``) to an origin, and run it to its end."""
        worker = self._worker
        if worker is None:
            return
        hello = msgspec.structs.replace(self._hello, stage=0 if is_return else worker.stage + 1)
        try:
            with trio.fail_after(GREETING_TIMEOUT):
                stream = await self._host.open_stream(peer, ACTIVATIONS_PROTOCOL, GREETING_TIMEOUT)
                link = self._link(stream, Link(True, hello, worker.size))
                link.send(hello)
                await link.greet(lambda event: None)
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError):
            if self._worker is worker:
                self._handle(LinkFailed(peer, is_return))
            return
        await self._run(link, LinkOpened(link.number, peer, is_upstream=True, is_return=is_return), worker)

    async def _serve(self, stream: Stream) -> None:
        """Serve a link from the stage before, or from the last stage, which returns what was drawn here."""
        worker = self._worker
        if worker is None or not self._is_neighbour(stream.peer, (worker.stage - 1) % self._num_stages):
            await close_stream(stream)
            return
        hello = msgspec.structs.replace(self._hello, stage=worker.stage)
        link = self._link(stream, Link(False, hello, worker.size))

        def welcome(event: Event) -> None:
            if isinstance(event, Hello):
                link.send(Welcome(0))

        try:
            with trio.fail_after(GREETING_TIMEOUT):
                await link.greet(welcome)
        except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError):
            return
        is_return = worker.stage == 0
        await self._run(link, LinkOpened(link.number, stream.peer, is_upstream=False, is_return=is_return), worker)

    def _link(self, stream: Stream, link: Link) -> ActivationLink:
        return ActivationLink(next(self._numbers), link, stream, self._shaping, self._channels)

    async def _run(self, link: ActivationLink, opened: LinkOpened, worker: Worker) -> None:
        if self._worker is not worker:  # it has been replaced in the meantime
            link.close()
        else:
            self.by_number[link.number] = link
            if opened.is_upstream:
                self._handle(opened)

        def on_routed() -> None:
            # A channel takes seconds to open, or to fail. Until then the downstream node gives the link no credits, so
            # that microbatches take other links.
            if not opened.is_upstream and self._worker is worker:
                self._handle(opened)

        try:
            await link.run(self._hear, on_routed)
        finally:
            self.by_number.pop(link.number, None)
            self._bytes_sent += link.bytes_sent
            self._bytes_received += link.bytes_received
            self._handle(LinkClosed(link.number))

    def _hear(self, link: ActivationLink, event: Event) -> None:
        self._handle(Received(link.number, event))
        if link.link.awaits_place:  # the data are not needed
            link.link.place(None)

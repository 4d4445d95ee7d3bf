"""The bulk channel of one pipe, taken from the node's channels and given back to them."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol, TypeVar

import trio

from farandole.protocol.wire.incoming import Incoming


class Channel(Protocol):
    """The part of `farandole.node.bulk.channel.BulkChannel` that is used here."""

    @property
    def session(self) -> bytes:
        """Its name at both ends."""

    @property
    def num_sent(self) -> int:
        """Bytes sent over it up to now, whether they have arrived or not."""

    @property
    def num_received(self) -> int:
        """Bytes received over it up to now, whether they prove to be the peer's or not."""

    @property
    def seconds_held_up(self) -> float:
        """Seconds that this node's own cap has delayed incoming data."""

    def limit_unsent(self, max_bytes: int) -> None:
        """Limit the unsent bytes in the kernel, if the system supports it."""

    async def send(self, data: memoryview) -> None:
        """Send all, or raise `ChannelError`."""

    async def receive(self, incoming: Incoming) -> None:
        """Fill ``incoming`` to its end, or raise `ChannelError`. Its memory is not touched after the call."""


C = TypeVar("C", bound=Channel)


class Channels(Protocol[C]):
    """The part of `farandole.node.bulk.negotiation.BulkService` that is used here."""

    def expecting(self, peer: bytes) -> contextlib.AbstractContextManager[None]:
        """Let the peer open channels while the block runs."""

    async def acquire(self, peer: bytes) -> C | None:
        """Return a channel with the peer, or None if there is no way."""

    def take(self, peer: bytes, session: bytes) -> C | None:
        """Return the channel that the peer has acquired, if it is here."""

    def release(self, channel: C) -> None:
        """Keep it for the next exchange."""

    def discard(self, channel: C) -> None:
        """Close it."""


class Transport:
    """The bulk channel of one pipe, if one opens; another one when that breaks."""

    def __init__(self, peer: bytes, channels: Channels[Any] | None) -> None:
        self.channel: Channel | None = None
        self._peer = peer
        self._channels = channels

    def expecting(self) -> contextlib.AbstractContextManager[None]:
        """Let the peer open channels while the block runs."""
        return self._channels.expecting(self._peer) if self._channels else contextlib.nullcontext()

    async def open(self, until: float) -> bytes | None:
        """Open a channel, for at most until the time ``until``; return its name, or None if there is none."""
        if self._channels is not None:
            with trio.move_on_at(until):
                self.channel = await self._channels.acquire(self._peer)
        return self._name

    def take(self, proposed: bytes | None) -> bytes | None:
        """Take the channel that the peer has opened; return its name, or None if it is not here."""
        if self._channels is not None and proposed is not None:
            self.channel = self._channels.take(self._peer, proposed)
        return self._name

    def keep(self) -> None:
        """Give the channel back for the next pipe; nothing more may come over it for this one."""
        channel, self.channel = self.channel, None
        if channel is not None and self._channels is not None:
            self._channels.release(channel)

    def discard(self) -> None:
        """Close a channel over which data may still come."""
        channel, self.channel = self.channel, None
        if channel is not None and self._channels is not None:
            self._channels.discard(channel)

    @property
    def _name(self) -> bytes | None:
        return None if self.channel is None else self.channel.session

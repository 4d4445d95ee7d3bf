"""Commands of the benchmark's mesh process to its trainer in a round, as in `farandole.node.loop.trainer_session`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Final

import trio

from farandole.node.base.system.memory import SharedCounter
from farandole.node.bulk.exchange_session import Outgoing
from farandole.node.trainer.trainer import TrainerStream
from farandole.protocol.trainer import trainer_messages as messages

# Commands of one round: the screening, the outer step.
MAX_COMMANDS: Final = 8


class TrainerLink:
    """A link to a trainer over a socket, for many rounds; the trainer judges the partner's contributions."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = TrainerStream(trio.SocketStream(trio.socket.from_stdlib_socket(connection)))

    @contextlib.asynccontextmanager
    async def round(self, memory: memoryview) -> AsyncIterator[Outgoing]:
        """Yield the contribution that the trainer encodes into the memory; the round ends when the mean is taken."""
        contributed = await self._stream.receive()
        if not isinstance(contributed, messages.Contributed):
            raise ConnectionError(f"the trainer said {type(contributed).__name__} before it had contributed")
        encoded = SharedCounter(memory)
        outgoing = Outgoing(memory[: contributed.size], lambda: encoded.count_of(contributed.round))
        self._commands, queued = trio.open_memory_channel[messages.Command](MAX_COMMANDS)
        self._verdict, self._judged = trio.open_memory_channel[str](1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, queued)
            nursery.start_soon(self._follow, outgoing, nursery.cancel_scope)
            yield outgoing
            self._commands.send_nowait(messages.TakeOuterStep(0, partner_size=contributed.size))
            await trio.sleep_forever()

    async def refusal(self, size: int, tokens: int) -> str | None:
        """Return the trainer's reason to refuse, or None."""
        self._commands.send_nowait(messages.Screen(size))
        return await self._judged.receive() or None

    async def _send(self, queued: trio.MemoryReceiveChannel[messages.Command]) -> None:
        async for command in queued:
            await self._stream.send(command)

    async def _follow(self, outgoing: Outgoing, until_taken: trio.CancelScope) -> None:
        while True:
            match await self._stream.receive():
                case messages.Encoded(_, digest):
                    outgoing.seal(digest)
                case messages.Screened(reason):
                    self._verdict.send_nowait(reason)
                case messages.OuterStepTaken():
                    until_taken.cancel()

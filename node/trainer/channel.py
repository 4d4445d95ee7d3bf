"""The trainer's end of the socket pair that carries its commands."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque

from farandole.protocol.trainer.trainer_messages import MAX_MESSAGE_BYTES, Command, Report, decode_command, encode
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser

# More than any command but one with the hashes of a checkpoint.
READ_BYTES = 65_536


class TrainerSocket:
    """The trainer's end of the socket pair: blocking, with a look ahead between inner steps."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._parser = FrameParser(MAX_MESSAGE_BYTES)
        self._sending = threading.Lock()  # on a GPU, a thread encodes and reports it
        self.postponed: deque[Command] = deque()
        """Commands that `receive` returns again before new ones."""

    def send(self, report: Report) -> None:
        """Send a report. Raises `BrokenPipeError` when the mesh process is gone."""
        with self._sending:
            self._connection.sendall(encode(report))

    def receive(self) -> Command:
        """Return the next command. Raises `EOFError` when the mesh process is gone."""
        return self.postponed.popleft() if self.postponed else self._read()

    def poll(self, wait_seconds: float | None) -> Command | None:
        """Return a new command that comes within ``wait_seconds`` (None: no limit); postponed ones are skipped."""
        if (payload := self._next_frame()) is not None:
            return decode_command(payload)
        return self._read() if select.select([self._connection], [], [], wait_seconds)[0] else None

    def _read(self) -> Command:
        while (payload := self._next_frame()) is None:
            part = self._connection.recv(READ_BYTES)
            if not part:
                raise EOFError("the mesh process is gone")
            self._parser.receive_data(part)
        return decode_command(payload)

    def _next_frame(self) -> bytes | None:
        try:
            return self._parser.next_frame()
        except RemoteProtocolError as error:
            raise EOFError("the mesh process sent a message that is too long") from error

"""A trainer process whose commands are carried out by the test's own process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from farandole.node.trainer.channel import (
    SharedCounter,
    TrainerSocket,
    counted_size,
    encode,
    map_shared_memory,
    open_shared_memory,
)
from farandole.node.trainer_process.process import TrainerProcess, make_engine
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.wire.framing import LENGTH_BYTES
from farandole.training.engine.engine import Engine
from farandole.training.engine.learner import Learner

from ...patience import PATIENCE
from ..trainer_commands import prepare_for

ReportType = TypeVar("ReportType")


class Trainer:
    """A trainer process, and the mesh process's end of its connection and memory."""

    def __init__(self, prepare: messages.Prepare, manifest: Manifest, engine: Engine | None) -> None:
        self.prepare = prepare
        self._mesh, self._far = socket.socketpair()
        self._mesh.settimeout(PATIENCE)
        channel = TrainerSocket(self._far)
        self.engine = engine or make_engine(channel, prepare, manifest)
        self.process = TrainerProcess(channel, prepare, manifest, self.engine)
        self.size = self.engine.round_end.contribution_bytes
        self.outgoing, self.incoming = (
            map_shared_memory(place, counted_size(self.size)) for place in (prepare.outgoing, prepare.incoming)
        )
        self._stream = self._mesh.makefile("rb")
        self.reports = self._read()

    def close(self) -> None:
        self.process.close()
        for each in (self._stream, self._mesh, self._far):
            each.close()

    def _read(self) -> Iterator[messages.Report]:
        while True:
            length = int.from_bytes(self._stream.read(LENGTH_BYTES), "big")
            yield messages.decode_report(self._stream.read(length))

    @property
    def learner(self) -> Learner:
        assert isinstance(self.engine, Learner)
        return self.engine

    def handle(self, *commands: messages.Command) -> None:
        """Carry out commands."""
        for command in commands:
            self.process.handle(command)

    def send(self, *commands: messages.Command) -> None:
        """Send commands, which the process finds when it looks for some."""
        for command in commands:
            self._mesh.sendall(encode(command))

    def obey(self) -> None:
        """Let the process carry out the next command that was sent."""
        self.process.handle(self.process.next_command())

    def receive(self, kind: type[ReportType]) -> ReportType:
        """Return the next report, which must be of this kind."""
        report = next(self.reports)
        assert isinstance(report, kind), report
        return report

    def tell(self, command: messages.Command, kind: type[ReportType]) -> ReportType:
        """Send a command, let the process carry it out, and return its report."""
        self.send(command)
        self.obey()
        return self.receive(kind)

    def report(self, kind: type[ReportType]) -> ReportType:
        """Return the next report of a kind; skip the others."""
        return next(report for report in self.reports if isinstance(report, kind))

    def arrive(self, epoch: int, contribution: bytes | bytearray) -> None:
        """Let all of a partner's contribution have arrived, in the exchange with this number."""
        self.incoming[: len(contribution)] = contribution
        SharedCounter(self.incoming).store(epoch, len(contribution))


class Start(Protocol):
    """Starts an author's trainer, by default with the engine that a node makes."""

    def __call__(
        self, manifest: Manifest, engine: Engine | None = None, *, author: bytes = b"a" * 32, **changes: object
    ) -> Trainer: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts trainers; each author has a folder of its own."""
    with contextlib.ExitStack() as held:

        def begin(
            manifest: Manifest, engine: Engine | None = None, *, author: bytes = b"a" * 32, **changes: object
        ) -> Trainer:
            folder = tmp_path / author[:1].decode()
            folder.mkdir(exist_ok=True)
            memory = [held.enter_context(open_shared_memory(name)) for name in ("outgoing", "incoming")]
            prepare = prepare_for(manifest, folder, author=author, outgoing=memory[0], incoming=memory[1], **changes)
            return held.enter_context(contextlib.closing(Trainer(prepare, manifest, engine)))

        yield begin

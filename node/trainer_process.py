"""The trainer: a process of its own, which owns torch and the replica and knows nothing of the network.

It obeys the commands of `farandole.node.trainer_messages`, one at a time. While it takes inner steps it looks at the
socket between two of them, so that the end of a round's box is seen within one step. When the mesh process goes away,
however it ends, the socket's end of file ends this one.

A contribution is sent while it is encoded, and the partner's is decoded while it arrives, as the messages tell.

The next round may begin while the exchange of the last one runs: `Train` may come before the `TakeOuterStep` of the
round before. The contribution stays as it is in the shared memory, what comes of the partner's is decoded between two
inner steps, where the outer step is taken too, and their progress is kept. A round that is over before then waits for
it, so an outer step is at most one round late.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farandole.protocol.manifest import Manifest
from farandole.training.errors import CheckpointError, DataError

from .conversion import training_configs
from .shared_memory import map_shared_memory
from .trainer_messages import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    Command,
    Contributed,
    Encoded,
    Failed,
    FinishRound,
    OuterStepTaken,
    Prepare,
    Prepared,
    Progress,
    Report,
    Save,
    Saved,
    Screen,
    Screened,
    Steps,
    Stop,
    TakeIn,
    TakeOuterStep,
    Train,
    UseFragment,
    Validate,
    Validated,
    decode_command,
    encode,
)

if TYPE_CHECKING:
    from torch import Tensor

    from farandole.training.learner import Learner

PROGRESS_INTERVAL = 0.5
# Below everybody's interactive programs, and below the mesh process, whose answers others wait for.
NICENESS = 5


class UnfitWeightsError(Exception):
    """A peer gave a checkpoint that cannot be used; another's may do."""


class Channel:
    """The trainer's end of the socket pair: blocking, with a look ahead between inner steps."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending: deque[Command] = deque()

    def send(self, report: Report) -> None:
        """Raises `BrokenPipeError` when the mesh process is gone."""
        self._connection.sendall(encode(report))

    def receive(self) -> Command:
        """The next command; `EOFError` when the mesh process is gone."""
        return self._pending.popleft() if self._pending else self._read()

    def poll(self, wait_seconds: float | None) -> Command | None:
        """A command that comes within ``wait_seconds`` (None: whenever it comes), past those that were put off."""
        return self._read() if select.select([self._connection], [], [], wait_seconds)[0] else None

    def put_off(self, command: Command) -> None:
        """Receive it again, after those put off before."""
        self._pending.append(command)

    def _read(self) -> Command:
        (length,) = LENGTH.unpack(self._read_exactly(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise EOFError("the mesh process sent a message that is too long")
        return decode_command(self._read_exactly(length))

    def _read_exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._connection.recv(size - len(parts))
            if not part:
                raise EOFError("the mesh process is gone")
            parts += part
        return bytes(parts)


class TrainerProcess:
    """Carries out commands on one replica."""

    def __init__(self, channel: Channel, prepare: Prepare) -> None:
        self._channel = channel
        self._author = prepare.author
        self._slow = prepare.slow
        self._checkpoint = Path(prepare.checkpoint)
        self._fragment = 0
        self._size = 0  # of the newest contribution, and of the partner's for it
        self._began_at: float | None = None
        self._inner_seconds = 0.0  # spent in inner steps
        self._replica = replica = _build_learner(prepare)
        resumed = self._resume(Path(prepare.fetched) if prepare.fetched else None)
        size = replica.contribution_bytes
        self._outgoing: mmap.mmap = map_shared_memory(prepare.outgoing, size)
        self._incoming: mmap.mmap = map_shared_memory(prepare.incoming, size)
        for memory in (self._outgoing, self._incoming):
            replica.pin(memoryview(memory))
        channel.send(
            Prepared(
                device=replica.device.description,
                num_parameters=replica.layout.num_elements,
                contribution_bytes=size,
                layout=replica.layout.hash,
                round=replica.round,
                inner_steps=replica.steps,
                tokens=replica.tokens,
                resumed=resumed,
            )
        )

    def _resume(self, fetched: Path | None) -> bool:
        """Whether there was a checkpoint. A peer's replaces this node's own only once it is proved to be fit."""
        if fetched is not None and fetched.exists():
            try:
                self._replica.load(fetched)
            except CheckpointError as error:
                fetched.unlink()
                raise UnfitWeightsError(f"a peer's weights are unfit: {error}") from error
            fetched.replace(self._checkpoint)
        elif self._checkpoint.exists():
            self._replica.load(self._checkpoint)
        else:
            return False
        return True

    def handle(self, command: Command) -> None:
        """Do what one command says and report it."""
        match command:
            case Train():
                self._train(command)
            case TakeIn(round_index, num_received):
                if round_index == self._replica.round:
                    self._replica.take_in(memoryview(self._incoming)[: self._size], num_received)
            case Screen(size):
                self._channel.send(Screened(self._replica.refusal(memoryview(self._incoming)[:size])))
            case TakeOuterStep():
                self._take_outer_step(command)
            case Save():
                self._channel.send(self._save())
            case Validate(num_batches):
                self._channel.send(self._validate(num_batches))
            case FinishRound() | UseFragment():
                pass  # it crossed our contribution: the round was over by its steps already
            case Prepare() | Stop():
                raise EOFError("asked to stop")

    def _train(self, command: Train) -> None:
        replica = self._replica
        if not replica.awaits_outer_step:
            replica.round = command.round
        tokens_before = replica.tokens
        started_at = reported_at = time.monotonic()
        if self._began_at is None:
            self._began_at = started_at
        steps = 0
        losses: Tensor | float = 0.0  # their sum stays on the device: reading it would wait for the step
        is_over = False
        while not is_over and (command.max_steps == 0 or steps < command.max_steps):
            step_started_at = time.monotonic()
            losses = replica.learn() + losses
            steps += 1
            now = time.monotonic()
            if now - reported_at >= PROGRESS_INTERVAL:
                reported_at = now
                self._channel.send(
                    Progress(
                        round=command.round,
                        inner_steps=replica.steps,
                        inner_steps_this_round=steps,
                        tokens=replica.tokens,
                        loss=float(losses) / steps,
                        tokens_per_second=(replica.tokens - tokens_before) / (now - started_at),
                    )
                )
            pause = (self._slow - 1.0) * (now - step_started_at)
            self._inner_seconds += now - step_started_at + pause
            is_over = self._is_round_over(command.round, now + pause)
        loss, seconds = float(losses) / steps, time.monotonic() - started_at
        while replica.awaits_outer_step and (late := self._channel.poll(None)) is not None:
            self._obey(late, command.round)
        replica.round = command.round
        self._size = replica.contribution_size(self._fragment)
        self._channel.send(
            Contributed(
                round=command.round,
                size=self._size,
                tokens_this_round=replica.tokens_contributed,
                inner_steps_this_round=steps,
                inner_steps=replica.steps,
                tokens=replica.tokens,
                loss=loss,
                seconds=seconds,
                fragment=self._fragment,
                utilisation=self._inner_seconds / (time.monotonic() - self._began_at),
            )
        )
        self._encode(command.round)

    def _encode(self, round_index: int) -> None:
        """The mesh process sends what is encoded while the rest is."""
        steps = Steps(self._size)

        def tell(num_ready: int) -> None:
            if steps.is_due(num_ready):
                self._channel.send(Encoded(round_index, num_ready))

        size, digest = self._replica.contribution(memoryview(self._outgoing), self._fragment, tell)
        self._channel.send(Encoded(round_index, size, digest))

    def _is_round_over(self, round_index: int, pause_until: float) -> bool:
        """Between two inner steps: obey what has come and what comes during the pause; whether the round ends."""
        while (command := self._channel.poll(max(0.0, pause_until - time.monotonic()))) is not None:
            if self._obey(command, round_index):
                return True
        return False

    def _obey(self, command: Command, round_index: int) -> bool:
        """Do what cannot wait for the round's end, and put off the rest; whether the round ends."""
        match command:
            case FinishRound():
                return command.round == round_index
            case UseFragment():
                if command.round == round_index:
                    self._fragment = command.fragment
            case TakeIn():
                self.handle(command)
            case Screen() | TakeOuterStep() if self._replica.awaits_outer_step:  # of the round before
                self.handle(command)
            case Save():  # of the last outer step: the inner steps do not touch the slow weights
                self.handle(command)
            case Stop():
                raise EOFError("asked to stop")
            case _:
                self._channel.put_off(command)
        return False

    def _take_outer_step(self, command: TakeOuterStep) -> None:
        partner = memoryview(self._incoming)[: command.partner_size] if command.partner_size else None
        # Both partners must add in one order, so that they round alike: the lesser key comes first.
        replica, is_first = self._replica, self._author < command.partner
        late = replica.outer_step(partner, replica.tokens_contributed, command.partner_tokens, is_first)
        self._channel.send(OuterStepTaken(command.round, late))

    def _validate(self, num_batches: int) -> Validated:
        """Too little text held out costs a warning, never the training."""
        try:
            return Validated(self._replica.round, self._replica.validation_loss(num_batches))
        except DataError as error:
            return Validated(self._replica.round, 0.0, f"no validation: {error}")

    def _save(self) -> Saved:
        """A full disk or a failed fsync costs a warning, never the training."""
        replica = self._replica
        sha256, size, problem = b"", 0, ""
        try:
            digest, size = replica.save(self._checkpoint)
            sha256 = bytes.fromhex(digest)
        except OSError as error:
            problem = f"checkpoint not written: {error}; the last good one is kept"
        return Saved(replica.round, replica.steps, replica.tokens, sha256, size, problem)


def _build_learner(prepare: Prepare) -> Learner:
    """Torch is imported here, where Prepare has said with how many threads."""
    import torch

    from farandole.training.learner import build_learner

    torch.set_num_threads(prepare.threads)
    manifest = msgspec.msgpack.decode(prepare.manifest, type=Manifest)
    return build_learner(
        *training_configs(manifest),
        seed=manifest.seed,
        run_id=prepare.run_id,
        author=prepare.author,
        device=prepare.device,
        text_paths=[Path(path) for path in prepare.data],
        tokenizer_path=Path(prepare.tokenizer) if prepare.tokenizer else None,
    )


def main() -> None:
    """Entry point: ``python -m farandole.node.trainer_process DESCRIPTOR``."""
    # Ctrl-C, and a service manager's SIGTERM to the whole group, are for the daemon, which stops us in its own time.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        channel = Channel(connection)
        try:
            _serve(channel)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _serve(channel: Channel) -> None:
    prepare = channel.receive()
    if not isinstance(prepare, Prepare):
        raise EOFError("the first command must be Prepare")
    try:
        trainer = TrainerProcess(channel, prepare)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        channel.send(Failed(f"{error}", is_setup=True))
        return
    except UnfitWeightsError as error:
        channel.send(Failed(f"{error}", is_setup=False))
        return
    while True:
        command = channel.receive()
        try:
            trainer.handle(command)
        except (RuntimeError, ValueError, OSError) as error:  # torch raises RuntimeError for CUDA faults and memory
            channel.send(Failed(f"{type(error).__name__}: {error}", is_setup=False))
            raise


if __name__ == "__main__":
    main()

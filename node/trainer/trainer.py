"""The mesh process's handle on a trainer: start it or wait for it, talk to it, end it.

`open_trainer` starts a process of this node's own, and leaves no zombie. A loop of the node's owner, which attaches by
itself, is `farandole.node.trainer.script`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import trio

from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.wire.errors import FarandoleError, RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser

from ..base.settings import NodeSettings
from ..base.system.processes import ask_where, count_oom_kills, signal_name, start_child
from .channel import counted_size, encode, map_shared_memory, open_shared_memory

logger = logging.getLogger(__name__)

# Longest silence of a starting trainer: importing torch and CUDA, making the model, loading gigabytes from a slow disk.
PREPARE_TIMEOUT = 600.0
# A trainer sees `Stop` between two inner steps; one that does not within this time is killed (nothing is lost: it saves
# by rename).
STOP_TIMEOUT = 5.0
STOP = messages.Stop()
# These also start a thread per core: OpenMP (torch), MKL, OpenBLAS and Accelerate (numpy), Rayon (tokenizers).
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
# A trainer that hangs has this time to write its tracebacks.
TRACEBACK_SECONDS = 1.0
# Some hundred frames for each of its threads.
MAX_TRACEBACK_BYTES = 64 * 1_024


def settings_of(settings: NodeSettings, **changed: object) -> messages.TrainerSettings:
    """Return what a node's owner has set of its trainer, with what is changed."""
    taken = {name: getattr(settings, name, None) for name in messages.TrainerSettings.__struct_fields__} | changed
    return msgspec.convert(msgspec.to_builtins(taken, enc_hook=str), messages.TrainerSettings)  # paths as text


class TrainerError(FarandoleError):
    """The trainer died or cannot go on."""

    def __init__(self, message: str, cause: messages.Cause = "fault") -> None:
        super().__init__(message)
        self.cause = cause


# The memory that is shared with a trainer, in the order of its places.
SHARED = ("outgoing", "incoming", "activations")


class Trainer:
    """A trainer at the other end of ``stream``; `prepare` makes it ready.

    The node has started a `ChildTrainer`; another one is a loop of its owner's, which has attached by itself.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.outgoing: mmap.mmap
        """The contribution that this node sends, and a counter of its encoded bytes."""
        self.incoming: mmap.mmap
        """The partner's contribution, and a counter of its arrived bytes."""
        self.prepared: messages.Prepared
        self._stream = stream
        self._send_lock = trio.Lock()
        self._parser = FrameParser(messages.MAX_MESSAGE_BYTES)
        self._activations: int | str
        self._mapped: list[mmap.mmap] = []

    async def _epitaph(self) -> TrainerError:
        """Return an error that says how it ended; of a loop the node learns no more."""
        return TrainerError("the loop is gone", "detached")

    async def condemn(self, reason: str) -> None:
        """End a trainer that hangs: `receive` raises `TrainerError`. A loop's process is its owner's."""
        logger.warning("%s", reason)
        await self._stream.aclose()

    async def stop(self, command: messages.Stop | messages.Dismiss = STOP) -> None:
        """Ask it to stop; a loop sees that after its present step, and no later than when the connection is closed."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + STOP_TIMEOUT):
            with contextlib.suppress(TrainerError):
                await self.send(command)
            await self._stream.aclose()

    async def prepare(
        self,
        command: messages.Prepare,
        shared: Sequence[int | str],
        on_preparing: Callable[[messages.Preparing], None] = lambda preparing: None,
    ) -> None:
        """Make it ready; ``shared``: descriptors of `SHARED`, or paths for a program that this node has not started.

        Raises `TrainerError` with the trainer's own message if it fails.
        """
        outgoing, incoming, self._activations = shared
        with trio.move_on_after(PREPARE_TIMEOUT) as patience:
            await self.send(msgspec.structs.replace(command, **dict(zip(SHARED, shared, strict=True))))
            while isinstance(report := await self.receive(), messages.Preparing):
                patience.deadline = trio.current_time() + PREPARE_TIMEOUT
                on_preparing(report)
            if not isinstance(report, messages.Prepared):
                raise TrainerError(f"the trainer said {type(report).__name__} before it was ready")
            self.prepared = report
            size = counted_size(report.contribution_bytes)
            self.outgoing, self.incoming = self._map(outgoing, size), self._map(incoming, size)
            return
        raise TrainerError(f"the trainer was not ready after {PREPARE_TIMEOUT:.0f} s")

    def map_activations(self, num_slots: int) -> memoryview:
        """Map the memory of microbatches' activations: for each slot, the incoming and the outgoing ones."""
        size = 2 * num_slots * self.prepared.activation_bytes
        return memoryview(self._map(self._activations, size))[:size]

    def _map(self, place: int | str, size: int) -> mmap.mmap:
        self._mapped.append(map_shared_memory(place, size))
        return self._mapped[-1]

    async def send(self, *commands: messages.Command) -> None:
        """Send commands in one write; several tasks may call it. Raises `TrainerError` when the trainer is gone."""
        try:
            async with self._send_lock:
                await self._stream.send_all(b"".join(map(encode, commands)))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self._epitaph() from error

    async def receive(self) -> messages.Report:
        """Return the next report; for one task. Raises `TrainerError` when the trainer is gone, or has failed."""
        try:
            while (payload := self._parser.next_frame()) is None:
                part = await self._stream.receive_some()
                if not part:
                    raise await self._epitaph()
                self._parser.receive_data(part)
        except RemoteProtocolError as error:
            raise TrainerError("the trainer sent a message that is too long") from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self._epitaph() from error
        report = messages.decode_report(payload)
        if isinstance(report, messages.Failed):
            raise TrainerError(report.message, report.cause)
        return report

    def close(self) -> None:
        """Close the shared memory, except for maps that have exported views."""
        for memory in self._mapped:
            with contextlib.suppress(BufferError):
                memory.close()


class ChildTrainer(Trainer):
    """A trainer process that this node has started. If it hangs, it writes its stacks to ``tracebacks``."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream, tracebacks: int) -> None:
        super().__init__(stream)
        self.pid = process.pid
        self._process = process
        self._tracebacks = tracebacks
        self._condemned_for = ""
        self._oom_kills_before = count_oom_kills()

    async def _epitaph(self) -> TrainerError:
        """Return an error that says how the process ended."""
        code = None
        with trio.move_on_after(STOP_TIMEOUT):
            code = await self._process.wait()
        if traceback := os.pread(self._tracebacks, MAX_TRACEBACK_BYTES, 0):
            logger.error("the trainer's last words:\n%s", traceback.decode(errors="replace"))
            os.ftruncate(self._tracebacks, 0)  # it may be asked again
        if self._condemned_for:
            return TrainerError(self._condemned_for)
        if code is None:
            return TrainerError("the trainer process closed its socket")
        if code < 0:
            name = signal_name(-code)
            words = f"the trainer process was killed by signal {-code} ({name})"
            if name == "SIGKILL" and count_oom_kills() != self._oom_kills_before:
                return TrainerError(f"{words}, probably by the kernel for want of memory", "memory")
            return TrainerError(words)
        return TrainerError(f"the trainer exited with {code}")

    async def condemn(self, reason: str) -> None:
        """Kill a trainer that hangs, and log where it hung."""
        self._condemned_for = reason
        ask_where(self._process)
        await trio.sleep(TRACEBACK_SECONDS)
        self._process.kill()

    async def stop(self, command: messages.Stop | messages.Dismiss = STOP) -> None:
        """Ask it to stop, and kill it when it does not, or at once where this is cancelled."""
        grace = 0.0 if trio.current_effective_deadline() == -math.inf else STOP_TIMEOUT
        with trio.CancelScope(shield=True, deadline=trio.current_time() + grace):
            with contextlib.suppress(TrainerError):
                await self.send(command)
            await self._stream.aclose()
            await self._process.wait()
        with trio.CancelScope(shield=True):
            await self._stream.aclose()  # the time may have been up before
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


@contextlib.asynccontextmanager
async def open_trainer(
    command: messages.Prepare,
    on_preparing: Callable[[messages.Preparing], None] = lambda preparing: None,
    on_started: Callable[[int], None] = lambda pid: None,
) -> AsyncIterator[ChildTrainer]:
    """Start a trainer process, make it ready, and end it on the way out.

    ``on_preparing`` gets the progress with its text, ``on_started`` the process id, long before it is ready. Raises
    `TrainerError`.
    """
    with contextlib.ExitStack() as held:
        try:
            shared = [held.enter_context(open_shared_memory(name)) for name in SHARED]
            tracebacks = held.enter_context(open_shared_memory("tracebacks"))
            process, ours = await start_child(
                "farandole.node.trainer_process.main",
                [str(tracebacks)],
                [*shared, tracebacks],
                {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(command.settings.threads))},
            )
        except OSError as error:  # no memory, or no process more, just now
            raise TrainerError(f"no trainer process can be started: {error}") from error
        trainer = ChildTrainer(process, ours, tracebacks)
        try:
            on_started(trainer.pid)
            await trainer.prepare(command, shared, on_preparing)
            yield trainer
        finally:
            await trainer.stop()
            trainer.close()

"""Processes of a benchmark: each answers requests, JSON and a line each, on a socket that it inherits."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from farandole.node.base.system.memory import map_shared_memory, open_shared_memory
from farandole.protocol.errors import FarandoleError

MB: Final = 1_000_000
# The slowest of what is asked is to move a gigabyte over a busy machine, or to install nothing but import torch.
ANSWER_TIMEOUT: Final = 180.0
STOP_TIMEOUT: Final = 10.0
# Random bytes that a payload repeats: nothing on the way compresses.
_PATTERN_BYTES: Final = 16 * MB
# Where a payload is checked for having arrived: this many bytes at its start, middle and end.
_CHECKED_BYTES: Final = 4_096


class BenchError(FarandoleError):
    """Something could not be measured; the message says what and why."""


class BenchWorker:
    """One process; made by `open_worker`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], control: socket.socket, log: Path) -> None:
        self._name = name
        self._process = process
        self._control = control
        self._lines = control.makefile("rw")
        self._log = log

    def put(self, do: str, **request: Any) -> None:
        """Ask; the answer is for `get`."""
        try:
            self._lines.write(json.dumps({"do": do, **request}) + "\n")
            self._lines.flush()
        except OSError as error:
            raise BenchError(f"{self._name} is gone: {error}; see {self._log}") from error

    def get(self) -> dict[str, Any]:
        """The answer. Raises `BenchError` if it is an error, or does not come."""
        if not select.select([self._control], [], [], ANSWER_TIMEOUT)[0]:
            raise BenchError(f"{self._name} does not answer; see {self._log}")
        line = self._lines.readline()
        if not line:
            raise BenchError(f"{self._name} has ended; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self._name}: {answer['error']}; see {self._log}")
        return answer

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """`put` and `get`."""
        self.put(do, **request)
        return self.get()

    def has_answered(self, timeout: float) -> bool:
        """Whether an answer comes in so many seconds."""
        return bool(select.select([self._control], [], [], timeout)[0])

    def stop(self) -> None:
        """Ends by itself when its socket closes; is killed if it does not."""
        self._lines.close()
        self._control.close()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """At once, whatever it is doing."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def open_worker(
    name: str, command: Sequence[str], log: Path, descriptors: Sequence[int] = (), side: int | None = None
) -> Iterator[BenchWorker]:
    """Run a command for as long as the block does; the last of its arguments are the socket and the descriptors.

    It is killed if the block fails or is interrupted: it may be waiting for another that is gone.

    With a ``side``, 0 or 1, it has but that half of the cores.
    """
    near, far = socket.socketpair()
    with far, log.open("ab") as output, _half_of_the_cores(side):
        inherited = [far.fileno(), *descriptors]
        process = subprocess.Popen(
            [*command, *map(str, inherited)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    worker = BenchWorker(name, process, near, log)
    try:
        yield worker
    except BaseException:  # Ctrl-C too: it may be in the middle of a long request
        worker.kill()
        raise
    finally:
        worker.stop()


@contextlib.contextmanager
def _half_of_the_cores(side: int | None) -> Iterator[None]:
    """What is started meanwhile runs on one half of the cores, where the system can say so."""
    if side is None or not hasattr(os, "sched_setaffinity") or len(own := sorted(os.sched_getaffinity(0))) < 2:
        yield
        return
    half = len(own) // 2
    os.sched_setaffinity(0, own[:half] if side == 0 else own[half:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def worker_command(kind: str) -> list[str]:
    """A process of `farandole.testnet.bench.worker`."""
    return [sys.executable, "-m", "farandole.testnet.bench.worker", kind]


class SharedPayload:
    """Memory that a benchmark and its workers share."""

    def __init__(self, descriptor: int, memory: memoryview) -> None:
        self.descriptor = descriptor
        self.memory = memory

    def fill(self) -> None:
        """With random bytes."""
        pattern = np.random.default_rng(0).bytes(min(_PATTERN_BYTES, self.memory.nbytes))
        for start in range(0, self.memory.nbytes, len(pattern)):
            piece = self.memory[start : start + len(pattern)]
            piece[:] = pattern[: piece.nbytes]

    def spoil(self, size: int) -> None:
        """Forget what a payload of this size brought, where `equals` looks."""
        for place in _checked(size):
            self.memory[place] = bytes(len(range(*place.indices(size))))

    def equals(self, other: SharedPayload, size: int) -> bool:
        """Whether a payload of this size is the other's, at its start, middle and end."""
        return all(self.memory[place] == other.memory[place] for place in _checked(size))


def _checked(size: int) -> list[slice]:
    starts = (0, size // 2, max(0, size - _CHECKED_BYTES))
    return [slice(start, min(size, start + _CHECKED_BYTES)) for start in starts]


@contextlib.contextmanager
def open_payload(name: str, size: int) -> Iterator[SharedPayload]:
    """So many bytes of shared memory."""
    with (
        open_shared_memory(name, Path(tempfile.gettempdir())) as shared,
        map_shared_memory(shared.place, size) as mapped,
        memoryview(mapped) as whole,
        whole[:size] as memory,
    ):
        yield SharedPayload(shared.descriptor, memory)


def ask_both(pair: Sequence[BenchWorker], do: str, **request: Any) -> list[dict[str, Any]]:
    """Both at once."""
    for worker in pair:
        worker.put(do, **request)
    return [worker.get() for worker in pair]


def elapsed(answers: Sequence[dict[str, Any]]) -> float:
    """From the first start to the last end, in seconds."""
    ended_at = max(float(answer["ended_at"]) for answer in answers)
    return ended_at - min(float(answer["started_at"]) for answer in answers)


def median_of(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def greatest_of(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    return max((value for value in values if value is not None), default=None)


Say = Callable[[str], None]
"""Called with what is being done."""

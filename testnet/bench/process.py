"""Processes of a benchmark: each answers requests on a pipe that it inherits."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

from farandole.protocol.wire.errors import FarandoleError

from ..natlab.groups import OF_ITS_OWN, kill_group

MB: Final = 1_000_000
# The slowest request waits until two homes connect, then directly, with processes to start on a busy machine.
ANSWER_TIMEOUT: Final = 240.0
STOP_TIMEOUT: Final = 10.0

# Most of it is for torch.
INSTALL_TIMEOUT: Final = 1_200.0
MAX_REASON_CHARS: Final = 500
REQUIREMENTS: Final = {
    # Its 8-bit averaging changes nothing with later numpy. Without a pinned torch, pip fetches gigabytes of CUDA.
    "hivemind": ("hivemind==1.1.12", "numpy==2.2.6", "torch==2.13.0"),
    "lattica": ("lattica==1.0.21", "numpy==2.2.6"),
}
"""What is installed for each project that farandole is compared with."""


Say = Callable[[str], None]
"""Called with what is being done."""
_T = TypeVar("_T")


class BenchError(FarandoleError):
    """Something could not be measured; the message says what and why."""


class BenchWorker:
    """A process that answers requests; made by `open_worker`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], control: Connection, log: Path) -> None:
        self._name = name
        self._process = process
        self._control = control
        self._log = log

    def put(self, do: str, **request: Any) -> None:
        """Send a request; `get` returns the answer."""
        try:
            self._control.send({"do": do, **request})
        except OSError as error:
            raise BenchError(f"{self._name} is gone: {error}; see {self._log}") from error

    def get(self, timeout: float = ANSWER_TIMEOUT) -> dict[str, Any]:
        """Return the answer. Raises `BenchError` if it is an error, or does not come."""
        if not self.has_answered(timeout):
            raise BenchError(f"{self._name} does not answer; see {self._log}")
        try:
            answer: dict[str, Any] = self._control.recv()
        except (EOFError, ConnectionError) as error:  # perhaps before it had read the request
            raise BenchError(f"{self._name} has ended; see {self._log}") from error
        if "error" in answer:
            raise BenchError(f"{self._name}: {answer['error']}; see {self._log}")
        return answer

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer: `put`, then `get`."""
        self.put(do, **request)
        return self.get()

    def has_answered(self, timeout: float) -> bool:
        """Return whether an answer comes within ``timeout`` seconds."""
        return self._control.poll(timeout)

    def stop(self) -> None:
        """Close the pipe, at which the process ends; kill it if it does not."""
        self._control.close()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process and its children at once."""
        kill_group(self._process.pid)
        self._process.wait()


@contextlib.contextmanager
def open_worker(name: str, command: Sequence[str], log: Path) -> Iterator[BenchWorker]:
    """Run a command until the block ends; the pipe's descriptor is the last of its arguments.

    The process is killed if the block fails or is interrupted, as it may be waiting for another that is gone.
    """
    near, far = Pipe()
    with far, log.open("ab") as output:
        process = subprocess.Popen(
            [*command, str(far.fileno())],
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            **OF_ITS_OWN,
        )
    worker = BenchWorker(name, process, near, log)
    try:
        yield worker
    except BaseException:  # Ctrl-C too: it may be in the middle of a long request
        worker.kill()
        raise
    finally:
        worker.stop()


def worker_command(part: str) -> list[str]:
    """Return the command of a process that plays one of the parts of `farandole.testnet.bench.worker`."""
    return [sys.executable, "-m", f"{__package__}.worker", part]


def peer_command(python: Path, name: str) -> list[str]:
    """Return the command of a process that plays another project's peer, in the environment of ``python``."""
    # ``-P`` hides the script's own folder from its imports.
    return [str(python), "-P", str(Path(__file__).with_name("peers") / "peer.py"), name]


@contextlib.contextmanager
def open_workers(part: str, names: Iterable[str], log: Path) -> Iterator[list[BenchWorker]]:
    """Open one process for each name, which all play this part."""
    command = worker_command(part)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(open_worker(name, command, log)) for name in names]


@contextlib.contextmanager
def open_peers(
    name: str, command: Sequence[str], each: Sequence[Mapping[str, Any]], log: Path
) -> Iterator[list[BenchWorker]]:
    """Open two peers, of which the second knows the first; ``each``: what the two begin with."""
    with open_worker(f"{name} 0", command, log) as first, open_worker(f"{name} 1", command, log) as second:
        addresses = first.ask("open", peers=[], **each[0])["addresses"]
        second.ask("open", peers=addresses, **each[1])
        yield [first, second]


def vectors(num_elements: int) -> list[dict[str, int]]:
    """Return what two peers begin with that hold a vector each."""
    return [{"index": index, "num_elements": num_elements} for index in range(2)]


def obtain_python(name: str, cache: Path, say: Say) -> Path:
    """Return the interpreter of a project's environment; install it if needed. `BenchError` if that fails."""
    folder = cache.absolute() / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    requirements = REQUIREMENTS[name]
    if stamp.exists() and stamp.read_text() == "\n".join(requirements):
        return python
    say(f"installing {requirements[0]} into {folder}, once")
    folder.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], [*pip, *requirements]):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT)
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip()[-MAX_REASON_CHARS:]
            raise BenchError(f"{name} could not be installed: {reason}; --no-peers leaves it out") from error
    stamp.write_text("\n".join(requirements))
    return python


def ask_all(
    workers: Sequence[BenchWorker], do: str, each: Sequence[dict[str, Any]] = (), **request: Any
) -> list[dict[str, Any]]:
    """Send a request to all workers; ``each`` has one worker's own arguments. Raises `BenchError` with all errors."""
    for worker, own in zip(workers, each or [{}] * len(workers), strict=True):
        worker.put(do, **own, **request)
    return get_all(workers)


def get_all(workers: Sequence[BenchWorker], timeout: float = ANSWER_TIMEOUT) -> list[dict[str, Any]]:
    """Return all answers. Raises `BenchError` with all errors among them."""
    answers, problems = [], []
    for worker in workers:
        try:
            answers.append(worker.get(timeout))
        except BenchError as error:
            problems.append(str(error))
    if problems:
        raise BenchError("; ".join(problems))
    return answers


def take_turns(
    what: str, contenders: Mapping[str, Callable[[], _T]], repeats: int, warm_ups: int, say: Say
) -> dict[str, list[_T]]:
    """Run all contenders in turn, and return the results of each by repeat. Raises their `BenchError`."""
    done: dict[str, list[_T]] = {label: [] for label in contenders}
    for index in range(-warm_ups, repeats):
        for label, measure in contenders.items():
            say(f"{what}: {'warm-up' if index < 0 else f'{index + 1} of {repeats}'}, {label}")
            result = measure()
            if index >= 0:
                done[label].append(result)
    return done


def elapsed(answers: Sequence[dict[str, Any]]) -> float:
    """Return the seconds from the first start to the last end."""
    ended_at = max(float(answer["ended_at"]) for answer in answers)
    return ended_at - min(float(answer["started_at"]) for answer in answers)


def median_of(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median over some turns of each of their figures, and the greatest of figures named ``most_...``."""
    return {
        name: (max if name.startswith("most_") else statistics.median)([turn[name] for turn in turns])
        for name in turns[0]
    }

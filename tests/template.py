"""Start Python processes as forks of one that has imported everything already.

Tests start a thousand nodes, trainers and commands, and importing takes longer than what most of them do: torch alone
takes two seconds of a core. So a process of the tests has a *template*: a child that has imported farandole and torch,
and does nothing else. `install` has `subprocess` send it the commands that run a file, or a module of `_PACKAGES`. The
template forks, and the fork runs that. All other commands are started as always, and so are those whose
environment differs in what is read when libraries are loaded (`_READ_EARLY`); `is_enabled` turns it all off, for tests
that measure processes. A fork has the folders of its PYTHONPATH, and runs their ``sitecustomize``, after the imports; a
test whose folders change what is imported says so with OTHER_SOURCE, and its processes are started.

Nothing else differs from a started process: it is a child of who started it (clone(2) with CLONE_PARENT makes it a
sibling of the template), in its session, group, folder and environment, with its descriptors. It has a template of its
own, which ends with it. That one is forked at the start, so a limit (prlimit(2)) that is set on a process afterwards
does not bind the processes that it starts: a test that needs this is marked `started`. The fork of a command behind
nsenter(1), as in the NAT lab, enters that network.

Linux with glibc alone; elsewhere `install` does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import marshal
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

IMPORTED: Final = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run", "numpy.random"),
    *("typer._adapters", "rich._emoji_codes", "netaddr", "filelock", "farandole.node.own_loop.attachment"),
    *("farandole.node.cli", "farandole.node.daemon", "farandole.node.relay_node"),
    *("farandole.node.trainer_process.main", "farandole.node.trainer_process.process"),
    *("farandole.training.base.device", "farandole.training.base.determinism"),
    *("farandole.testnet.cli", "farandole.testnet.play.launch"),
)
_PACKAGES: Final = ("farandole", "tests", "torch.distributed.run")
"""Modules, and packages of modules, that are run by forks."""
# Beginnings of names of variables that Python, the C library, torch, or modules of farandole read when they are loaded.
_READ_EARLY: Final = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "MKL_CBWR", "CUDA", "CUBLAS", "TORCH_LOGS", "KMP_", "GOMP_", "LANG", "LC_"),
    *("TZ", "TERM", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "LIBP2P_", "_FARANDOLE_KEEP_PRIORITY"),
    "OTHER_SOURCE",
)
# Changes of these need no other process: output streams are made anew, and folders are added.
_UNBUFFERED: Final = "PYTHONUNBUFFERED"
_FOLDERS: Final = "PYTHONPATH"
# A request is an environment and a few words, with the descriptors that a trainer inherits. Larger ones are started.
_MAX_REQUEST_BYTES: Final = 1 << 17
_MAX_DESCRIPTORS: Final = 64
_PID_BYTES: Final = 8
# Of clone(2); its number by architecture.
_CLONE_PARENT: Final = 0x8000
_CLONE: Final = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
# The C library's record of a thread holds the thread's number, within this many bytes.
_THREAD_RECORD_BYTES: Final = 1_024
# Descriptors of a request are kept from here on until the wanted numbers are free; so is a fork's own template.
_FREE_FROM: Final = 500
# Higher numbers are not in use: few descriptors are open at a time.
_END_OF_DESCRIPTORS: Final = 4_096

is_enabled = True
"""Whether processes are forked."""


class Job(NamedTuple):
    """What a fork runs, and as what."""

    options: list[str]
    """Of Python."""
    program: str
    """A module, or the path of a file."""
    arguments: list[str]
    folder: str
    environment: dict[bytes, bytes]
    descriptors: list[int]
    """The numbers that the descriptors of the request shall have."""
    error_pipe: int
    """One of them. `Popen` returns once it is closed: then signals to the new process's group reach it."""
    starts_session: bool
    group: int
    mask: int
    ignores_interrupts: bool
    network: str
    """The file of a namespace to enter; empty: none."""


class Template:
    """A connection with a template, which ends once this process has, and its forks go on."""

    def __init__(self, connection: socket.socket, environment: Mapping[bytes, bytes]) -> None:
        """``environment``: that in which it imported."""
        self._connection = connection
        self._environment = _read_early(environment)
        self._lock = threading.Lock()  # `trio` starts processes in threads

    def fork(self, job: Job, descriptors: list[int]) -> int | None:
        """Return the id of the process, or None if the template cannot make it."""
        if _read_early(job.environment) != self._environment or len(descriptors) > _MAX_DESCRIPTORS:
            return None
        request = marshal.dumps(tuple(job))
        if len(request) > _MAX_REQUEST_BYTES:
            return None
        try:
            with self._lock:
                socket.send_fds(self._connection, [request], descriptors)
                answer = self._connection.recv(_PID_BYTES)
        except OSError:
            return None
        return int.from_bytes(answer, "big") or None


_template: Template | None = None
_template_environment: dict[bytes, bytes] = {}
_start_process: Any = getattr(subprocess, "_fork_exec", None)


def install() -> None:
    """Have `subprocess` fork where it can. The first process starts the template, in the environment of now."""
    _template_environment.update(os.environb)
    if sys.platform == "linux" and _CLONE is not None and _start_process is not None:
        subprocess._fork_exec = _fork_or_start  # type: ignore[attr-defined]  # what `Popen` calls has no public name


def _fork_or_start(
    command: list[str | bytes],
    executables: tuple[bytes, ...],
    close_descriptors: bool,
    kept: tuple[int, ...],
    folder: str | bytes | None,
    environment: list[bytes] | None,
    *rest: Any,
) -> int:
    """Take the place of `subprocess._fork_exec`, which returns the id of the process."""
    streams, (error_pipe, _, starts_session, group, *identity) = (rest[0], rest[3], rest[5]), rest[7:]
    *_, mask, prepare, _ = identity
    words = [os.fsdecode(word) for word in command]
    network, words = (words[1], words[2:]) if words[0] == "nsenter" else ("", words)
    options, program, arguments = _parts_of(words)
    if is_enabled and program and close_descriptors and prepare is None and identity[:3] == [None, None, None]:
        targets = {number: given if given >= 0 else number for number, given in enumerate(streams)}
        targets |= {number: number for number in kept}
        entries = os.environb.items() if environment is None else (each.split(b"=", 1) for each in environment)
        job = Job(
            options,
            program,
            arguments,
            os.fsdecode(folder or os.getcwd()),
            dict(entries),
            list(targets),
            error_pipe,
            starts_session,
            group,
            mask if mask >= 0 else _mask(),
            signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            network.removeprefix("--net="),
        )
        if (pid := _the_template().fork(job, list(targets.values()))) is not None:
            return pid
    pid = _start_process(command, executables, close_descriptors, kept, folder, environment, *rest)
    return int(pid)


def _parts_of(words: list[str]) -> tuple[list[str], str, list[str]]:
    """Return Python's options, the program and its arguments; no program if it is not for a fork."""
    nothing: tuple[list[str], str, list[str]] = ([], "", [])
    if words[:1] != [sys.executable]:
        return nothing
    options, rest = [], words[1:]
    while rest[:1] in (["-P"], ["-u"]) or rest[:2] == ["-W", "always"]:
        options.append(rest.pop(0))
        if options[-1] == "-W":
            options.append(rest.pop(0))
    match rest:
        case ["-m", module, *arguments] if module in _PACKAGES or module.startswith(tuple(f"{p}." for p in _PACKAGES)):
            return options, module, arguments
        case [path, *arguments] if path.endswith(".py") and path != __file__:
            return options, path, arguments
    return nothing


def _read_early(environment: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    beginnings = tuple(os.fsencode(name) for name in _READ_EARLY)
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(beginnings) and name not in (os.fsencode(_UNBUFFERED), os.fsencode(_FOLDERS))
    }


def _mask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _the_template() -> Template:
    """Return this process's template; start it if there is none."""
    global _template
    if _template is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", str(Path(__file__)), str(theirs.fileno())]
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_template_environment
            )
        atexit.register(ours.close)
        process.returncode = 0  # nobody waits for it
        _template = Template(ours, _template_environment)
    return _template


def main() -> None:
    """Run as a template, and then, in each fork, as what it is asked for."""
    global _template
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its parent
    began_with = dict(os.environb)
    for name in IMPORTED:
        __import__(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("an import has started a thread, which forks would lack")  # processes are started as always
    gc.collect()
    gc.freeze()  # a fork shares the memory of what stays unchanged
    job = _serve(connection)
    while "trainer_process" not in job.program:  # it may start others
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            high = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, _FREE_FROM))
            ours.close()
            _template = Template(high, began_with)
            install()
            break
        ours.detach()
        _keep_open([theirs.fileno()], "/dev/null")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        job = _serve(theirs)
    sys.argv = [job.program, *job.arguments]
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)  # it is there, and is run again
    try:
        if job.program.endswith(".py"):
            runpy.run_path(job.program, run_name="__main__")
        else:
            runpy.run_module(job.program, run_name="__main__", alter_sys=True)
    except SystemExit as exit_asked:
        _end(exit_asked.code)
    _end(None)


def _end(code: object) -> NoReturn:
    """End as `sys.exit` does, without taking apart all that is imported, which takes longer than most commands."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of Python does
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def _serve(connection: socket.socket) -> Job:
    """Fork for each request until the parent has ended; return, in each fork, what it is to run."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
        if not request:
            os._exit(0)
        pid = _fork_for_parent()
        if pid == 0:
            job = Job(*marshal.loads(request))
            connection.detach()  # `_become` closes it
            _become(job, descriptors)
            return job
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(max(pid, 0).to_bytes(_PID_BYTES, "big"))


def _fork_for_parent() -> int:
    """Fork; the new process is a child of this one's parent. Return as `os.fork` does, or -1."""
    number, record = threading.get_native_id(), threading.get_ident()
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(python.syscall(_CLONE, ctypes.c_long(_CLONE_PARENT | signal.SIGCHLD), *[ctypes.c_long(0)] * 4))
    if pid == 0:
        # The C library's fork does this, too. It believes in the number when it sends signals to the own thread.
        fields = (ctypes.c_int * (_THREAD_RECORD_BYTES // 4)).from_address(record)
        for place, field in enumerate(fields):
            if field == number:
                fields[place] = os.getpid()
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _become(job: Job, descriptors: list[int]) -> None:
    """Make this process what it would be if it had been started."""
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FREE_FROM) for each in descriptors]
    for descriptor, number in zip(moved, job.descriptors, strict=True):
        os.dup2(descriptor, number)
    _keep_open([number for number in job.descriptors if number > 2])
    if job.starts_session:
        os.setsid()
    if job.group >= 0:
        os.setpgid(0, job.group)
    if job.network:
        with open(job.network) as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0, f"cannot enter {job.network}"
    os.chdir(job.folder)
    os.umask(job.mask)
    had = os.environ.get(_FOLDERS, "")
    for name in [name for name in os.environb if name not in job.environment]:
        del os.environb[name]
    os.environb.update(job.environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN if job.ignores_interrupts else signal.default_int_handler)
    if (folders := os.environ.get(_FOLDERS, "")) != had:
        sys.path[:0] = [folder for folder in folders.split(os.pathsep) if folder]
        sys.modules.pop("sitecustomize", None)
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")
    if "-P" not in job.options:
        sys.path.insert(0, str(Path(job.program).resolve().parent) if job.program.endswith(".py") else job.folder)
    if "-W" in job.options:
        sys.warnoptions.append("always")
        warnings.simplefilter("always")
    is_unbuffered = "-u" in job.options or os.environ.get(_UNBUFFERED, "") != ""
    # The types say that the originals never change; here they belong to the template.
    sys.stdin = sys.__stdin__ = _text(0, "r", is_unbuffered=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text(1, "w", is_unbuffered=is_unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "w", is_unbuffered=is_unbuffered)  # type: ignore[misc]
    os.close(job.error_pipe)


def _text(number: int, mode: str, *, is_unbuffered: bool) -> io.TextIOWrapper:
    """Open a standard stream as Python does when it starts."""
    raw = open(number, f"{mode}b", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115  # open until the end
    errors = "backslashreplace" if number == 2 else "strict"
    is_by_line = number == 2 or os.isatty(number)
    return io.TextIOWrapper(raw, "utf-8", errors, line_buffering=is_by_line, write_through=is_unbuffered)


def _keep_open(kept: list[int], streams: str = "") -> None:
    """Close all descriptors but the standard streams, or open these anew, and those to keep."""
    first = 3
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, _END_OF_DESCRIPTORS)
    if streams:
        with open(streams, "r+b", buffering=0) as nothing:
            for number in range(3):
                os.dup2(nothing.fileno(), number)


if __name__ == "__main__":
    main()

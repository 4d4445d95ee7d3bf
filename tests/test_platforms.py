"""Features of only some systems are used only in `farandole.node.base.system`, which has a substitute for each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
PACKAGES: Final = ("node", "protocol", "training", "testnet")
MODULES: Final = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
NAMES: Final = {
    "os": {
        *("WNOHANG", "chown", "chroot", "eventfd", "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid"),
        *("getgid", "getloadavg", "getpgid", "getpgrp", "getpriority", "getsid", "getuid", "initgroups", "kill"),
        *("killpg", "lchown", "memfd_create", "mkfifo", "mknod", "nice", "openpty", "pidfd_open", "pipe2"),
        *("posix_fadvise", "posix_fallocate", "posix_spawn", "pread", "preadv", "pwrite", "pwritev", "sendfile"),
        *("sched_getaffinity", "sched_setaffinity", "sched_yield", "setegid", "seteuid", "setgid", "setgroups"),
        *("setpgid", "setpriority", "setsid", "setuid", "splice", "statvfs", "sync", "sysconf", "ttyname", "uname"),
        *("wait", "wait3", "wait4", "waitid", "waitpid"),
    },
    "signal": {
        *("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP", "SIGUSR1"),
        *("SIGUSR2", "SIGWINCH", "alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "sigwait"),
    },
    "socket": {
        *("AF_NETLINK", "AF_PACKET", "AF_UNIX", "MSG_DONTWAIT", "MSG_NOSIGNAL", "SO_BINDTODEVICE", "SO_PEERCRED"),
        *("SO_REUSEADDR", "SO_REUSEPORT", "TCP_CONGESTION", "TCP_INFO", "TCP_USER_TIMEOUT", "recv_fds", "send_fds"),
    },
    "select": {"epoll", "kqueue", "poll"},
    "trio": {"open_unix_socket"},
    "faulthandler": {"register"},
}
ARGUMENTS: Final = {"group", "pass_fds", "preexec_fn", "start_new_session", "umask", "user"}  # of process calls
CALLS: Final = {"Popen", "call", "check_call", "check_output", "open_process", "run", "run_process"}
FOLDERS: Final = ("/bin", "/dev", "/etc", "/proc", "/sbin", "/sys", "/tmp", "/usr", "/var")

# Where else such features are allowed, and why no substitute is needed.
EXEMPT: Final = {
    "node/base/system": "the one place of a node",
    "testnet/groups.py": "the one place of a testnet",
    "testnet/namespace.py": "networks of Linux's kernel",
    "testnet/natlab": "networks of Linux's kernel",
    "testnet/bench": "figures are made on Linux",
    "testnet/setting.py": "figures are made on Linux",
    "testnet/zoo": "hostile members are limited where there are limits",
}
ALLOWED: Final = {
    "node/mesh/mapping/gateway.py: /sbin/route": "asked on macOS and the BSDs alone",
    "node/mesh/reuse.py: socket.SO_REUSEADDR": "asked for where ports are shared alone",
    "node/loop/pause/idle_service.py: /proc": "where there is none, nothing is known",
    "node/loop/pause/idle_service.py: /sys": "where there is none, nothing is known",
    "node/loop/pause/idle_probe.py: /proc": "where there is none, nothing is known",
    "node/loop/pause/idle_probe.py: /sys": "asked on Linux alone",
    "node/app/service/systemd.py: /var/lib/systemd/linger": "asked on Linux alone",
    "node/ui/watch/terminal.py: /dev/tty": "asked on other systems than Windows",
    "testnet/link_forwarder.py: select.poll": "forwards between networks of Linux's kernel",
    "testnet/wrong_clock.py: /usr/lib": "where libfaketime may be; a clock is put wrong on Linux alone",
    "testnet/wrong_clock.py: /usr/lib64": "as before",
    "testnet/wrong_clock.py: /usr/local/lib": "as before",
    "training/base/determinism.py: /proc/cpuinfo": "where there is none, other words name the processor",
    "training/cluster/vector_memory.py: /proc/": "opened on Linux alone",
    "training/cluster/shared_vectors.py: os.kill": "asked whether a rank is there, but not on Windows",
    "training/cluster/vector_memory.py: os.memfd_create": "on Linux; elsewhere a file",
    "training/base/durable.py: fcntl": "what only macOS has in it, asked for there alone",
}


def _uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name in MODULES)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                if module in MODULES:
                    yield module
                yield from (f"{module}.{name.name}" for name in names if name.name in NAMES.get(module, ()))
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in NAMES.get(module, ()):
                yield f"{module}.{name}"
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="trio"), attr=module), attr=name):
                if name in NAMES.get(module, ()):
                    yield f"{module}.{name}"
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called), keywords=keywords) if called in CALLS:
                yield from (f"{word.arg}=" for word in keywords if word.arg in ARGUMENTS)
            case ast.Constant(value=str(text)) if text.startswith(FOLDERS):
                if text.startswith(tuple(f"{folder}/" for folder in FOLDERS)) or text in FOLDERS:
                    yield text.split()[0]


def uses_of(path: Path) -> set[str]:
    """Return the features of a file that only some systems have."""
    return set(_uses(ast.parse(path.read_text(encoding="utf-8"))))


def _files() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(tuple(EXEMPT)):
                yield name, path


def test_what_only_some_systems_have_is_used_in_one_place() -> None:
    found = {f"{name}: {use}" for name, path in _files() for use in uses_of(path)}
    assert sorted(found - set(ALLOWED)) == []
    assert sorted(set(ALLOWED) - found) == [], "no longer used: take it off the list"


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("import fcntl", "fcntl"),
        ("from resource import getrusage", "resource"),
        ("from os import fork", "os.fork"),
        ("import os\nos.geteuid()", "os.geteuid"),
        ("import signal\nsignal.SIGUSR1", "signal.SIGUSR1"),
        ("import trio\ntrio.socket.AF_UNIX", "socket.AF_UNIX"),
        ("subprocess.Popen(command, pass_fds=[3])", "pass_fds="),
        ("Path('/proc/meminfo')", "/proc/meminfo"),
    ],
)
def test_every_kind_of_use_is_seen(text: str, use: str, tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(text, encoding="utf-8")
    assert uses_of(file) == {use}

"""The node's key on disk: made once, readable by its owner alone, and locked while a daemon uses it.

Two processes that sign with one key would fork themselves in the run state and be barred for it, so the lock is not a
courtesy: it guards the identity.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.wire.errors import FarandoleError
from farandole.training.base.durable import sync_file

from .system.files import OWNER_ALONE, OWNER_ALONE_FOLDER, open_private, others_may

KEY_BYTES = 32
# Of the process id in a lock.
MAX_HOLDER_BYTES = 32
# A node's private files, which may already exist with a wider mode.
_PRIVATE = ("store.sqlite*", "log*", "rounds.jsonl*")


class IdentityError(FarandoleError):
    """The key file cannot be used; the message says what to do."""


class IdentityInUseError(IdentityError):
    """Another process runs with this key."""


def make_home(path: Path) -> None:
    """Make a node's folder, private to its owner; raise `IdentityError` if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise IdentityError(
            f"cannot use the folder {path}: {error.strerror}; name another with --home or FARANDOLE_HOME"
        ) from error


def keep_private(home: Path) -> None:
    """Make new files of this process and its children, and the node's existing private files, private to their owner.

    The folder itself becomes private, too, if it is this user's and holds a node's store or nothing. Any other folder
    may serve another purpose too, and stays as it is. Raises `IdentityError` if it cannot be used.
    """
    os.umask(0o777 & ~OWNER_ALONE_FOLDER)
    make_home(home)
    with contextlib.suppress(OSError):
        is_nodes = (home / "store.sqlite").exists() or not any(home.iterdir())
        if is_nodes and others_may(home) and home.stat().st_uid == os.getuid():
            home.chmod(OWNER_ALONE_FOLDER)
    for name in _PRIVATE:
        for path in home.glob(name):
            with contextlib.suppress(OSError):  # another's file, which this user may only read
                if path.is_file() and others_may(path):
                    path.chmod(OWNER_ALONE)


def load_or_create_key(path: Path) -> Ed25519PrivateKey:
    """Return the node's key; made on first use with mode 0600.

    Raises `IdentityError` if the file is not a key, can be read by others, or cannot be made.
    """
    try:
        make_home(path.parent)
        if not path.exists():  # one that is there is enough, also on a full disk
            # Written under another name and linked into place, so that a crash leaves a whole key or none.
            partial = path.with_name(f"{path.name}.{os.getpid()}.new")
            with contextlib.suppress(FileExistsError), contextlib.ExitStack() as cleaning:
                cleaning.callback(partial.unlink, missing_ok=True)
                with os.fdopen(open_private(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                    file.write(Ed25519PrivateKey.generate().private_bytes_raw())
                    file.flush()
                    sync_file(file.fileno())
                os.link(partial, path)
        raw = path.read_bytes()
    except OSError as error:
        raise IdentityError(f"cannot make or read the key {path}: {error.strerror}") from error
    if len(raw) != KEY_BYTES:
        raise IdentityError(
            f"{path} is not a farandole key ({len(raw)} bytes instead of {KEY_BYTES}): restore or remove it"
        )
    if mode := others_may(path):
        raise IdentityError(f"{path} can be read by others (mode {mode:o}): chmod 600 {path}")
    return Ed25519PrivateKey.from_private_bytes(raw)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at ``path`` for as long as the context lasts; the kernel frees it when the process dies.

    Raises `IdentityInUseError` if another process holds it, `IdentityError` if the folder cannot be written to.
    """
    import filelock  # which takes a tenth of a second, and most commands lock nothing

    make_home(path.parent)
    lock = filelock.FileLock(path, mode=OWNER_ALONE, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        with path.open("rb") as file:
            holder = file.read(MAX_HOLDER_BYTES).decode("ascii", "replace").strip()
        raise IdentityInUseError(
            f"another farandole process{f' (pid {holder})' if holder else ''} runs in {path.parent}: "
            "stop it with `farandole leave`, or give this one a folder of its own with --home"
        ) from None
    except OSError as error:
        raise IdentityError(f"cannot write {path}: {error.strerror}; name another folder with --home") from error
    try:
        with contextlib.suppress(OSError):  # the number is for people: a full disk keeps no node from starting
            path.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock file at ``path``, as a node does from its start to its end."""
    try:
        if path.exists():
            with locked(path):
                return False
    except IdentityInUseError:
        return True
    except (OSError, ValueError):
        return False
    return False

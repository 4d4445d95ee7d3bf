"""Signals that ask a process to stop cleanly, or to print where it hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from typing import Final

from .features import HAS_TRACEBACK_SIGNAL

STOP_SIGNALS: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C; what service managers send; and on Windows Ctrl-Break, which one process can send another."""
if sys.platform == "win32":
    STOP_SIGNALS += (signal.SIGBREAK,)
# Where there is no signal for it, these bytes come over the process's standard input.
ASK: Final = b"?"


def tell_where(descriptor: int) -> None:
    """Write all threads' stacks to ``descriptor`` on a crash, or when the parent asks (`children.ask_where`)."""
    faulthandler.enable(descriptor)
    if sys.platform != "win32" and HAS_TRACEBACK_SIGNAL:
        faulthandler.register(signal.SIGUSR1, descriptor)
    else:
        threading.Thread(target=_tell_when_asked, args=(descriptor,), name="tracebacks", daemon=True).start()


def _tell_when_asked(descriptor: int) -> None:
    """Print tracebacks on request until the input ends. Reading the buffered object would block interpreter exit."""
    while os.read(0, len(ASK)):
        faulthandler.dump_traceback(descriptor)


def ignore_stop_signals() -> None:
    """Ignore signals to the whole process group: they are for the parent, which ends this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def signal_name(number: int) -> str:
    """Return a signal's usual name."""
    return next((known.name for known in signal.Signals if known == number), "one without a name")

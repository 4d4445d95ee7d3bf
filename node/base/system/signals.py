"""What asks a process to end in good order, and what makes it tell where it hangs."""

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
# Where there is no signal for it, this much comes over the process's standard input.
ASK: Final = b"?"


def tell_where(descriptor: int) -> None:
    """Write there the stacks of all threads when this process crashes, or its parent asks (`children.ask_where`)."""
    faulthandler.enable(descriptor)
    if sys.platform != "win32" and HAS_TRACEBACK_SIGNAL:
        faulthandler.register(signal.SIGUSR1, descriptor)
    else:
        threading.Thread(target=_tell_when_asked, args=(descriptor,), name="tracebacks", daemon=True).start()


def _tell_when_asked(descriptor: int) -> None:
    """Until the input ends. By its descriptor: who reads the buffered object keeps the interpreter from ending."""
    while os.read(0, len(ASK)):
        faulthandler.dump_traceback(descriptor)


def ignore_stop_signals() -> None:
    """Of a process that another one ends: what is sent to the whole group is for that one."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def signal_name(number: int) -> str:
    """As people know it."""
    return next((known.name for known in signal.Signals if known == number), "one without a name")

"""This node's use of its machine, so that a leak is seen before it matters."""

from __future__ import annotations

import os
import time

import trio

from ..base.system.processes import count_descriptors, resident_bytes
from .status import Resources


def measure_resources(trainer_pid: int | None) -> Resources | None:
    """Measure this process, in which trio runs, and its trainer; None where the system keeps that secret."""
    memory = resident_bytes(os.getpid())
    if memory is None:
        return None
    return Resources(
        memory=memory,
        trainer_memory=None if trainer_pid is None else resident_bytes(trainer_pid),
        descriptors=count_descriptors(),
        tasks=trio.lowlevel.current_statistics().tasks_living,
        processor_seconds=time.process_time(),
    )

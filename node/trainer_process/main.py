"""Entry point of the trainer process: ``python -m farandole.node.trainer_process.main PARENT TRACEBACKS``."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.protocol.run.manifest import decode_body
from farandole.protocol.trainer.trainer_messages import Failed, Prepare
from farandole.training.base.errors import UnfitWeightsError

from ..base.system.processes import ignore_stop_signals, tell_where
from ..base.system.tuning import (
    TRAINING_NICENESS,
    give_free_memory_back,
    importing_for_good,
    keep_memory,
    lower_priority,
)
from ..trainer.channel import TrainerSocket

if TYPE_CHECKING:
    from .process import TrainerProcess

# When memory is used up, the kernel kills this process and neither the mesh process nor a user's editor: halfway to a
# process that is always killed first. Linux alone.
OOM_SCORE_ADJUSTMENT = 500
# Length of the quoted part of torch's message about memory: allocator, requested size, and available memory.
MAX_QUOTED_CHARS = 200


def main() -> None:
    """Serve the mesh process until it is gone."""
    parent, tracebacks = sys.argv[1:]
    # Ctrl-C, and a service manager's SIGTERM to the whole group, are for the daemon, which stops us in its own time.
    ignore_stop_signals()
    with socket.socket(fileno=int(parent)) as connection:
        tell_where(int(tracebacks))
        lower_priority(TRAINING_NICENESS)
        keep_memory()
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJUSTMENT), encoding="ascii")
        channel = TrainerSocket(connection)
        try:
            _serve(channel)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _make_trainer(channel: TrainerSocket, prepare: Prepare) -> TrainerProcess:
    """Make the trainer; torch is imported here, because `Prepare` sets its number of threads."""
    with importing_for_good():
        import torch

        from farandole.training.base.determinism import make_deterministic
        from farandole.training.base.device import choose_device, limit_memory

        from .process import TrainerProcess, make_engine

    # Threads within an operation, and operations at a time: one operation at a time has all threads.
    torch.set_num_threads(prepare.settings.threads)
    torch.set_num_interop_threads(1)
    manifest = decode_body(prepare.manifest)
    if manifest.inner.deterministic:
        make_deterministic()
    if prepare.settings.gpu_memory:
        limit_memory(choose_device(prepare.settings.device), round(prepare.settings.gpu_memory * 1e9))
    engine = make_engine(channel, prepare, manifest)
    give_free_memory_back()  # a model's parameters, as they were before they were put into one vector
    return TrainerProcess(channel, prepare, manifest, engine)


def _serve(channel: TrainerSocket) -> None:
    prepare = channel.receive()
    if not isinstance(prepare, Prepare):
        raise EOFError("the first command must be Prepare")
    try:
        trainer = _make_trainer(channel, prepare)
    except UnfitWeightsError as error:
        channel.send(Failed(str(error), "weights"))
        return
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        words = str(error)
        if _is_out_of_memory(error):
            words = (
                f"the model, and what training takes beside it, has no room in this machine's memory "
                f"({_first_line(error)}): close other programs, or choose a --device with more memory, or a run of a "
                "smaller model"
            )
        channel.send(Failed(words, "setup"))
        return
    try:
        while True:
            trainer.handle(trainer.next_command())
    except EOFError:
        raise
    except Exception as error:  # torch's RuntimeError: CUDA faults, memory; and any error of a user's own module
        if _is_out_of_memory(error):
            channel.send(Failed(f"the trainer is out of memory ({_first_line(error)})", "memory"))
            return
        channel.send(Failed(f"{type(error).__name__}: {error}", "fault"))
        raise
    finally:
        trainer.close()


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out; import torch, whose import may have failed, only if Python cannot decide."""
    if isinstance(error, ImportError | MemoryError):
        return isinstance(error, MemoryError)
    from farandole.training.base.device import is_out_of_memory

    return is_out_of_memory(error)


def _first_line(error: Exception) -> str:
    """Return the message without torch's advice to its programmers."""
    lines = str(error).splitlines()
    return lines[0][:MAX_QUOTED_CHARS] if lines else type(error).__name__


if __name__ == "__main__":
    main()

"""Entry point of the trainer process: ``python -m farandole.node.trainer_main DESCRIPTOR``."""

from __future__ import annotations

import os
import signal
import socket
import sys

import msgspec

from farandole.protocol.manifest import Manifest

from .trainer_channel import Channel
from .trainer_messages import Failed, Prepare
from .trainer_process import TrainerProcess, UnfitWeightsError

# Below everybody's interactive programs, and below the mesh process, whose answers others wait for.
NICENESS = 5


def main() -> None:
    """Serve the mesh process until it is gone."""
    # Ctrl-C, and a service manager's SIGTERM to the whole group, are for the daemon, which stops us in its own time.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        channel = Channel(connection)
        try:
            _serve(channel)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _make_trainer(channel: Channel, prepare: Prepare) -> TrainerProcess:
    """Torch is imported here, where Prepare has said with how many threads."""
    import torch

    from .learner_process import LearnerProcess
    from .stage_process import StageProcess

    torch.set_num_threads(prepare.threads)
    manifest = msgspec.msgpack.decode(prepare.manifest, type=Manifest)
    kind = LearnerProcess if manifest.model.num_stages == 1 else StageProcess
    return kind(channel, prepare, manifest)


def _serve(channel: Channel) -> None:
    prepare = channel.receive()
    if not isinstance(prepare, Prepare):
        raise EOFError("the first command must be Prepare")
    try:
        trainer = _make_trainer(channel, prepare)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        channel.send(Failed(f"{error}", is_setup=True))
        return
    except UnfitWeightsError as error:
        channel.send(Failed(f"{error}", is_setup=False))
        return
    while True:
        command = channel.receive()
        try:
            trainer.handle(command)
        except (RuntimeError, ValueError, OSError) as error:  # torch raises RuntimeError for CUDA faults and memory
            channel.send(Failed(f"{type(error).__name__}: {error}", is_setup=False))
            raise


if __name__ == "__main__":
    main()

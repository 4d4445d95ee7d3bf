"""Prints PyTorch's version and device as a line of JSON: ``python -m farandole.node.app.doctor.torch_probe DEVICE``."""

from __future__ import annotations

import sys

import msgspec
import torch

from farandole.training.base.device import choose_device
from farandole.training.base.errors import TrainingError

from .machine import TorchReport


def main(name: str) -> None:
    """Print a `TorchReport`; a device that cannot compute is an error too."""
    try:
        device = choose_device(name)
        torch.ones(8, device=device.torch_device).sum().item()
        report = TorchReport(str(torch.__version__), device.description)
    except (TrainingError, RuntimeError) as error:
        report = TorchReport(str(torch.__version__), error=str(error).splitlines()[0])
    print(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    main(sys.argv[1])

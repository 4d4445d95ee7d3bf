"""Prints PyTorch's version and device as a line of JSON: ``python -m farandole.node.inspect.torch_probe DEVICE``."""

from __future__ import annotations

import json
import sys

import torch

from farandole.training.base.device import choose_device
from farandole.training.base.errors import TrainingError


def main(name: str) -> None:
    """Print ``version``, and ``device`` or ``error``; a device that cannot compute is an error too."""
    report = {"version": str(torch.__version__)}
    try:
        device = choose_device(name)
        torch.ones(8, device=device.torch_device).sum().item()
        report["device"] = device.description
    except (TrainingError, RuntimeError) as error:
        report["error"] = str(error).splitlines()[0]
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])

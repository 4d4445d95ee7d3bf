"""The run's setting ``inner.deterministic``: the same calls give the same bits on all machines of one class.

A class is one release of PyTorch on one kind of processor, with the same vector instructions, or on one kind of GPU.
What else results depend on is fixed here:

- *Threads.* Threads share a product's sum, and each rounds its part. So there is one.
- *MKL*, which computes products on x86-64. It chooses how to divide them by the sizes of the processor's caches and by
  the memory's alignment; its mode for reproducible results (conditional numerical reproducibility, ``MKL_CBWR``) does
  not. ``AUTO`` keeps the fastest instructions of the machine. ``COMPATIBLE`` would make all of x86-64 one class, and a
  step of the preset 3M three times as long.
- *Kernels.* PyTorch takes reproducible ones, and raises `RuntimeError` where an operation has none.
- *CUDA.* cuBLAS gets a fixed workspace, and no product is rounded to TF32.

Across classes the last bits differ. So do the initial weights, where a processor has other vector instructions.
"""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch

# Read when MKL or cuBLAS is first called, which is later than `import torch`.
ENVIRONMENT: Final = {"MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def build() -> str:
    """The releases on which bits depend, at most 48 characters."""
    return f"farandole {version('farandole')} torch {torch.__version__}"[:48]


def device_class(device: torch.device) -> str:
    """Return the processor's class, at most 48 characters: processors of one class and `build` compute the same bits.

    It consists of the vendor's family and model, by which libraries choose their code, and PyTorch's vector
    instructions. GPUs were not measured: `farandole.protocol.rounds.audits` compares none.
    """
    if device.type != "cpu":
        return f"{device.type} {torch.cuda.get_device_name(device)}"[:48]
    names = {"vendor_id", "cpu family", "model", "CPU implementer", "CPU part"}
    found = []
    with contextlib.suppress(OSError):  # Linux alone
        first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
        lines = (line.partition(":") for line in first.splitlines())
        found = [value.strip() for name, _, value in lines if name.strip() in names]
    kind = " ".join(found) or platform.processor()
    return f"{platform.machine()} {kind} {torch.backends.cpu.get_cpu_capability()}"[:48]


def make_deterministic() -> None:
    """Fix what this process computes with, until it ends. Call it before the first product of matrices."""
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")

"""Where a replica computes: CUDA, Apple's MPS, or the CPU."""

from __future__ import annotations

import contextlib
import errno
import json
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from .errors import TrainingError

# GPU memory that CUDA takes for each process in addition to torch's allocations: its context and its kernels. It is 0.3
# to 0.6 GB, depending on the GPU and the driver, and is not known in advance.
CONTEXT_BYTES = 500_000_000
DEVICE_KINDS = ("cuda", "mps", "cpu")


@dataclass(frozen=True, slots=True)
class Device:
    """A device, its name for people, and the precision of its forward and backward passes."""

    torch_device: torch.device
    description: str
    autocast: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """A context for forward passes: bf16 where the hardware multiplies it fast. Weights are fp32 always."""

    def memory(self) -> tuple[int, int] | None:
        """Bytes that PyTorch has taken of a GPU's memory here, and that the GPU has; None for the CPU."""
        match self.torch_device.type:
            case "cuda":
                total = torch.cuda.get_device_properties(self.torch_device).total_memory
                return torch.cuda.memory_reserved(self.torch_device), total
            case "mps":
                return torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
            case _:
                return None


def choose_device(name: str = "auto") -> Device:
    """The device called ``name``: ``cuda``, ``cuda:1``, ``mps``, ``cpu``, or ``auto`` for the best there is.

    Raises `TrainingError` if it is not there.
    """
    if name == "auto":
        name = next(kind for kind in DEVICE_KINDS if _is_available(kind))
    kind = name.partition(":")[0]
    if kind not in DEVICE_KINDS:
        raise TrainingError(f"no device is called {name!r}: say auto, {', '.join(DEVICE_KINDS)}, or cuda:1 and so on")
    if not _is_available(kind):
        raise TrainingError(f"PyTorch finds no {kind} device here; 'auto' or 'cpu' always work")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainingError(f"{name!r} names no device") from error
    if kind != "cuda":
        description = "Apple GPU (mps)" if kind == "mps" else f"CPU ({platform.machine()})"
        return Device(device, description)
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise TrainingError(f"there is no cuda:{index}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    properties = torch.cuda.get_device_properties(index)
    has_fast_bf16 = properties.major >= 8  # Ampere and later
    precision = partial(torch.autocast, kind, dtype=torch.bfloat16) if has_fast_bf16 else contextlib.nullcontext
    description = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
    return Device(torch.device("cuda", index), description, precision)


def limit_memory(device: Device, max_bytes: int) -> None:
    """Limit this process to ``max_bytes`` of a GPU's memory; beyond it is out of memory, as on a smaller GPU.

    Call it before any allocation there. Raises `TrainingError` if there is no GPU, or ``max_bytes`` is too small.
    """
    kind, index = device.torch_device.type, device.torch_device.index or 0
    if kind not in ("cuda", "mps"):
        raise TrainingError(
            f"--gpu-memory limits the memory of a GPU, and training runs on the {device.description} here: leave it "
            "out; if this machine has an NVIDIA GPU, `farandole doctor` says why it is not used"
        )
    allocated = max_bytes - (CONTEXT_BYTES if kind == "cuda" else 0)
    if allocated <= 0:
        raise TrainingError(f"of {max_bytes / 1e9:g} GB of GPU memory the driver takes {CONTEXT_BYTES / 1e9:g} GB")
    if kind == "cuda":
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(allocated / total, 1.0), index)
    else:
        torch.mps.set_per_process_memory_fraction(min(allocated / torch.mps.recommended_max_memory(), 1.0))


def _is_available(kind: str) -> bool:
    if kind == "cuda":
        return torch.cuda.is_available()
    return kind == "cpu" or torch.backends.mps.is_available()


# Running out of memory, in the ways in which torch and Python say so.

# What torch's allocators and the libraries below it say in a plain RuntimeError, on Linux, macOS and Windows.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "ALLOC_FAILED",  # cuBLAS and its like
    "could not create a memory",  # oneDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an operation failed for lack of memory: smaller tensors might fit."""
    match error:
        case MemoryError() | torch.cuda.OutOfMemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError():
            return any(words in str(error) for words in _WORDS)
        case _:
            return False


def print_report(name: str) -> None:
    """Print PyTorch's ``version``, and ``device`` or ``error``, as JSON; a device that cannot compute is an error."""
    report = {"version": str(torch.__version__)}
    try:
        device = choose_device(name)
        torch.ones(8, device=device.torch_device).sum().item()
        report["device"] = device.description
    except (TrainingError, RuntimeError) as error:
        report["error"] = str(error).splitlines()[0]
    print(json.dumps(report))


if __name__ == "__main__":  # `farandole doctor` needs no torch in its own process
    print_report(sys.argv[1])

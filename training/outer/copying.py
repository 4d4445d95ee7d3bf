"""Copies between the training device and host memory that is shared with the mesh process.

On a CPU the shared memory is the device's: codecs read and write it directly, without copies. On other devices codecs
run on the device, and the encoded bytes are copied. On CUDA both run on a side stream, behind the inner steps that are
queued on the default stream. The shared memory is page-locked, so that copies need no CPU time, and an event after each
copy signals that its bytes are final.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .codec import Buffer

_log = logging.getLogger(__name__)

Wait = Callable[[], None]


class Copier:
    """A copier for the CPU, where the host's memory is the device's. Tensors of shape (bytes,) are uint8."""

    is_host = True
    """Whether codecs read and write the host's memory, so that several threads may encode."""
    depth = 0
    """Number of slices that may be in flight to the host while the next one is encoded."""
    is_aside = False
    """Whether another thread may take inner steps while a contribution is encoded."""

    def pin(self, memory: Buffer) -> None:
        """Prepare memory that is used repeatedly for copies."""

    def fork(self) -> None:
        """Order later work inside `aside` after the work that is queued now."""

    def aside(self) -> AbstractContextManager[object]:
        """Return a context whose work waits for work queued before `fork`, and delays no other work."""
        return contextlib.nullcontext()

    def join(self) -> None:
        """Order later work after the work that was queued inside `aside`."""

    def to_fill(self, host: Tensor) -> Tensor:
        """Return device memory (bytes,) to fill with the bytes for ``host`` (bytes,)."""
        return host

    def send(self, filled: Tensor, host: Tensor) -> Wait:
        """Begin to copy filled memory from `to_fill`; the result, when called, waits until ``host`` has it."""
        return lambda: None

    def fetch(self, host: Tensor) -> Tensor:
        """Return the bytes of ``host`` (bytes,) on the device."""
        return host

    def keep(self, source: Tensor, host: Tensor) -> Wait:
        """Begin to copy the current ``source`` (n,) to ``host`` (n,); the result waits until ``host`` has it."""
        host.copy_(source)
        return lambda: None


class DeviceCopier(Copier):
    """A copier for any device, with synchronous copies."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_fill(self, host: Tensor) -> Tensor:
        """Return new memory."""
        return torch.empty(len(host), dtype=torch.uint8, device=self._device)

    def send(self, filled: Tensor, host: Tensor) -> Wait:
        """Copy synchronously."""
        host.copy_(filled)
        return lambda: None

    def fetch(self, host: Tensor) -> Tensor:
        """Return a copy."""
        return host.to(self._device, copy=True)


class CudaCopier(DeviceCopier):
    """A copier for CUDA that works on a side stream."""

    depth = 2  # one is being copied while one is encoded and one is hashed
    is_aside = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def pin(self, memory: Buffer) -> None:
        """Page-lock the memory until this copier is gone; if CUDA refuses, copies go through pinned staging memory.

        Memory that is given back while it is page-locked would be a trap: what gets its addresses next could not be
        page-locked, and the GPU would write to the old place. So it is kept until then.
        """
        array, cudart = np.frombuffer(memory, dtype=np.uint8), torch.cuda.cudart()
        result = cudart.cudaHostRegister(array.ctypes.data, array.nbytes, 0)
        if int(result) == 0:
            weakref.finalize(self, _unpin, array).atexit = False
            return
        _log.debug("cudaHostRegister of %d bytes failed with %s: copies take a detour", array.nbytes, result)
        with contextlib.suppress(RuntimeError):  # otherwise the next CUDA call would raise this error
            torch.zeros(1, device=self._device)

    def fork(self) -> None:
        """Make the side stream wait for the work that is on the current stream now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def aside(self) -> AbstractContextManager[object]:
        """Return a context on the side stream."""
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def send(self, filled: Tensor, host: Tensor) -> Wait:
        """Queue the copy; the result waits for its event."""
        target = host if host.is_pinned() else torch.empty(len(host), dtype=torch.uint8, pin_memory=True)
        target.copy_(filled, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> None:
            copied.synchronize()
            if target is not host:
                host.copy_(target)

        return wait

    def fetch(self, host: Tensor) -> Tensor:
        """Queue the copy; ``host`` must not change until later work on this stream has been waited for."""
        source = host if host.is_pinned() else host.pin_memory()
        return source.to(self._device, non_blocking=True)

    def keep(self, source: Tensor, host: Tensor) -> Wait:
        """Queue the copy; work that is queued later may change ``source``."""
        return self.send(source.view(torch.uint8), host.view(torch.uint8))


def _unpin(array: npt.NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)


def copier_for(device: torch.device) -> Copier:
    """Return the copier for a device."""
    if device.type == "cpu":
        return Copier()
    return CudaCopier(device) if device.type == "cuda" else DeviceCopier(device)

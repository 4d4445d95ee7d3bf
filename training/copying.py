"""Between the device that trains and memory of the host that the mesh process shares: what moves, and what waits.

On a CPU the shared memory is the device's: codecs write to it and read from it, nothing moves. Elsewhere codecs work on
the device and bytes are copied, at the codec's size. On CUDA that goes on aside, on a stream of its own, behind the
inner steps that are queued on the default one; the shared memory is page-locked, so that copies need no processor, and
an event after each copy says when its bytes are final.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from .codec import Buffer

_log = logging.getLogger(__name__)

Wait = Callable[[], None]


class Copier:
    """For the CPU: the host's memory is the device's. What is (bytes,) is uint8."""

    depth = 0
    """How many slices may be on their way to the host while the next is encoded."""
    is_aside = False
    """Whether inner steps may be taken, by another thread, while a contribution is encoded."""

    def pin(self, memory: Buffer) -> None:
        """Make ready for copies what is used again and again."""

    def fork(self) -> None:
        """What is queued aside from now on follows what was queued before."""

    def aside(self) -> AbstractContextManager[object]:
        """What is queued in this context waits for what was queued before `fork`, and holds up nothing."""
        return contextlib.nullcontext()

    def join(self) -> None:
        """What is queued from now on follows what was queued aside."""

    def to_fill(self, host: Tensor) -> Tensor:
        """Memory of the device (bytes,) for what will be in ``host`` (bytes,)."""
        return host

    def send(self, filled: Tensor, host: Tensor) -> Wait:
        """Begin to copy what `to_fill` gave and was filled; the result, when called, waits until ``host`` has it."""
        return lambda: None

    def fetch(self, host: Tensor) -> Tensor:
        """The bytes of ``host`` (bytes,) on the device."""
        return host

    def keep(self, source: Tensor, host: Tensor) -> Wait:
        """Begin to copy ``source`` (n,) to ``host`` (n,) as it is now; the result waits until ``host`` has it."""
        host.copy_(source)
        return lambda: None


class DeviceCopier(Copier):
    """For any device, with copies that are waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_fill(self, host: Tensor) -> Tensor:
        """New memory."""
        return torch.empty(len(host), dtype=torch.uint8, device=self._device)

    def send(self, filled: Tensor, host: Tensor) -> Wait:
        """Copied at once."""
        host.copy_(filled)
        return lambda: None

    def fetch(self, host: Tensor) -> Tensor:
        """A copy."""
        return host.to(self._device, copy=True)


class CudaCopier(DeviceCopier):
    """For CUDA: on a side stream."""

    depth = 2  # one is being copied while one is encoded and one is hashed
    is_aside = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def pin(self, memory: Buffer) -> None:
        """Page-lock it, until this process ends, as long as it is mapped; if CUDA will not, copies take a detour."""
        array = np.frombuffer(memory, dtype=np.uint8)
        result = torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0)
        if int(result) != 0:
            _log.debug("cudaHostRegister of %d bytes failed with %s: copies take a detour", array.nbytes, result)

    def fork(self) -> None:
        """The side stream waits for what the current one has now, and for nothing that it gets later."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def aside(self) -> AbstractContextManager[object]:
        """The side stream."""
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """The current stream waits for the side stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def send(self, filled: Tensor, host: Tensor) -> Wait:
        """Queued; the wait is for its event."""
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
        """Queued; ``host`` must stay as it is until what follows on this stream has been waited for."""
        source = host if host.is_pinned() else host.pin_memory()
        return source.to(self._device, non_blocking=True)

    def keep(self, source: Tensor, host: Tensor) -> Wait:
        """Queued: what is queued after it may change ``source``."""
        return self.send(source.view(torch.uint8), host.view(torch.uint8))


def copier_for(device: torch.device) -> Copier:
    """The one that suits a device."""
    if device.type == "cpu":
        return Copier()
    return CudaCopier(device) if device.type == "cuda" else DeviceCopier(device)

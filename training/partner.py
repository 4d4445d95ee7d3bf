"""A partner's contribution while it arrives: decoded slice by slice, with the sums by which it is screened.

So the work is done when the last byte comes, but for the last slice's. What was taken in is used once: whoever asks
for a second opinion, or offers bytes that lie elsewhere, has everything taken in anew.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .codec import Buffer, Form, bytes_of, bytes_to_read, check_length, slices
from .copying import Copier
from .errors import CodecError, ScreeningError
from .screening import screen, sums
from .topk import TopK


class PartnerContribution:
    """Beside one's own contribution as it was sent, ``own`` (n,); ``values`` (n,) is the memory to decode into."""

    def __init__(self, form: Form, own: Tensor, values: Tensor, copier: Copier) -> None:
        self._form = form
        self._copier = copier
        self._own = own
        self._values = values
        self.forget()

    def forget(self) -> None:
        """Begin anew: what comes next is another contribution."""
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._num_taken = 0
        self._address = 0
        self._available = 0
        self._problem: CodecError | None = None
        self._screened_size: int | None = None

    def take_in(self, data: Buffer, available: int) -> None:
        """Decode what is whole of the first ``available`` bytes of ``data``; see `Replica.take_in`."""
        source = np.frombuffer(data, dtype=np.uint8)
        address = source.ctypes.data
        if address != self._address or available < self._available or self._screened_size is not None:
            self.forget()
        self._address, self._available = address, available
        with self._copier.aside():
            for part in slices(len(self._own)):
                where = bytes_of(self._form, part)
                if where.stop > available or self._problem is not None:
                    return
                if part.start >= self._num_taken:
                    self._decode(part, bytes_to_read(source[where]))
                    self._num_taken = part.stop

    def _decode(self, part: slice, data: Tensor) -> None:
        own, values = self._own[part], self._values[part]
        if isinstance(self._form, TopK):
            values.copy_(own)
        try:
            self._form.decode(self._copier.fetch(data), values)
        except CodecError as error:
            self._problem = error
            return
        self._sums += sums(own, values).cpu()

    def screen(self, data: Buffer) -> None:
        """Take in the rest and judge the whole; raises `ScreeningError` if it is unfit."""
        size = np.frombuffer(data, dtype=np.uint8).size
        try:
            check_length(self._form, len(self._own), size)
            self.take_in(data, size)
            if self._problem is not None:
                raise self._problem
        except CodecError as error:
            self.forget()
            raise ScreeningError(f"the contribution cannot be used: {error}") from error
        try:
            screen(self._sums)
        except ScreeningError:
            self.forget()
            raise
        self._screened_size = size

    def values(self, data: Buffer) -> Tensor:
        """All of it (n,), screened just before or now; raises `ScreeningError` if it is unfit."""
        source = np.frombuffer(data, dtype=np.uint8)
        if (self._address, self._screened_size) != (source.ctypes.data, source.size):
            self.screen(data)
        self._copier.join()
        return self._values

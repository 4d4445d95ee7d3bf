"""Receive buffer for a contribution, or anything else of a known size."""

from __future__ import annotations

from collections.abc import Callable

from blake3 import blake3


class Incoming:
    """Memory that is filled from the front, over any route, and hashed as it fills if ``is_hashed``."""

    def __init__(
        self, memory: memoryview, on_advance: Callable[[int], None] | None = None, *, is_hashed: bool = True
    ) -> None:
        """``on_advance`` is called with the number of bytes received, in the thread that fills the memory."""
        self.memory = memory
        self._on_advance = on_advance
        self.position = 0
        """Bytes received."""
        self._hash = blake3() if is_hashed else None
        self._num_hashed = 0

    @property
    def rest(self) -> memoryview:
        """The unfilled memory, where the next bytes go."""
        return self.memory[self.position :]

    def write(self, data: memoryview) -> None:
        """Copy in the next bytes, and hash them."""
        self.memory[self.position : self.position + len(data)] = data
        self.advance(len(data))

    def advance(self, num_bytes: int) -> None:
        """Note that the next ``num_bytes`` are in the memory."""
        self.position += num_bytes
        self.hash_up()
        if self._on_advance is not None:
            self._on_advance(self.position)

    def hash_up(self) -> None:
        """Hash the bytes received, best while they are still in the processor's cache."""
        if self._hash is not None:
            self._hash.update(self.memory[self._num_hashed : self.position])
            self._num_hashed = self.position

    def digest(self) -> bytes:
        """Return the BLAKE3 hash of the bytes received. Requires ``is_hashed``."""
        assert self._hash is not None, "it was to be hashed"
        self.hash_up()
        return self._hash.digest()

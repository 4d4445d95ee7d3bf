"""A contribution, or anything else of a known size, on its way in."""

from __future__ import annotations

from collections.abc import Callable

from blake3 import blake3


class Incoming:
    """Memory that is filled from the front, over whatever routes, and hashed meanwhile if ``is_hashed``."""

    def __init__(
        self, memory: memoryview, on_advance: Callable[[int], None] | None = None, *, is_hashed: bool = True
    ) -> None:
        """``on_advance`` gets how many bytes are in, by whichever thread fills the memory."""
        self.memory = memory
        self._on_advance = on_advance
        self.position = 0
        """Bytes that are in."""
        self._hash = blake3() if is_hashed else None
        self._num_hashed = 0

    @property
    def rest(self) -> memoryview:
        """Where the next bytes go."""
        return self.memory[self.position :]

    def write(self, data: memoryview) -> None:
        """The next bytes, hashed too."""
        self.memory[self.position : self.position + len(data)] = data
        self.advance(len(data))

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are in."""
        self.position += num_bytes
        self.hash_up()
        if self._on_advance is not None:
            self._on_advance(self.position)

    def hash_up(self) -> None:
        """Hash what is in; worth doing while it is still in the processor's cache."""
        if self._hash is not None:
            self._hash.update(self.memory[self._num_hashed : self.position])
            self._num_hashed = self.position

    def digest(self) -> bytes:
        """The BLAKE3 of what is in; of hashed memory alone."""
        assert self._hash is not None, "it was to be hashed"
        self.hash_up()
        return self._hash.digest()

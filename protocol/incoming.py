"""A contribution, or anything else of a known size, on its way in."""

from __future__ import annotations

from blake3 import blake3


class Incoming:
    """Memory that is filled from the front, over whatever routes, and hashed meanwhile if ``is_hashed``."""

    def __init__(self, memory: memoryview, *, is_hashed: bool = True) -> None:
        self.memory = memory
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
        self.position += len(data)
        self.hash_up()

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

"""A dict that keeps its latest items only, for what is remembered of peers: any number of keys may come."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Latest(dict[Key, Value]):
    """A dict of at most ``most`` items, the one that was set last at the end; the oldest makes room."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        """Set an item, and forget the oldest if there are too many. `setdefault` and `update` do not come here."""
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self._most:
            del self[next(iter(self))]
